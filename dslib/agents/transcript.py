"""Everything that was said, in order, kept for good: an append-only transcript, saved after every step.

What a model sees is a view over it (:func:`dslib.agents.view`); the transcript itself forgets nothing. Beside the
messages it holds context events, which say what has left the context and when, and notes of whoever runs the
agent: a rule broken, a summary refused, the reason for the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from pydantic import BaseModel, ConfigDict, Field

from dslib.agents.messages import Message, to_openai


class TranscriptError(ValueError):
    """A transcript that cannot be continued so."""


class OrphanResult(TranscriptError):
    """A tool message that answers no open call: there is no such call, or it has its answer already."""


class UnansweredCalls(TranscriptError):
    """Another message while calls are waiting for their results."""


class DamagedTranscript(TranscriptError):
    """A file with a line that cannot be read, before its last one."""


class ContextEvent(BaseModel):
    """Something left the context, once and for good.

    ``kind``: ``"discard"``, ``"reset"`` (all of the history at once) or ``"summary"``. ``at``: how many messages
    stood in the transcript. ``dropped``: half-open ranges of message indices, in rising order. ``text``: what
    stands in their place, at the end of the last range. ``merged``: the text also replaces earlier summaries.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    at: int = Field(ge=0)
    dropped: tuple[tuple[int, int], ...]
    text: str | None = None
    merged: bool = False


class Note(BaseModel):
    """A remark on a run that no model sees, such as ``kind="violation"``."""

    model_config = ConfigDict(frozen=True)

    kind: str
    at: int = Field(ge=0)
    data: dict[str, Any] = {}


Entry = Message | ContextEvent | Note
_KINDS: dict[str, type[BaseModel]] = {"message": Message, "event": ContextEvent, "note": Note}


class Transcript(Sequence[Message]):
    """The messages of one run, with the events between them; a sequence of messages to whoever reads it.

    ``Transcript()`` lives in memory. ``Transcript(path)`` also writes each entry to a file, a line of JSON, before
    it counts as said, and continues the file if there is one: what a crash tore off at its end is cut away, and
    calls that it left without a result are :attr:`open_calls`.

    Raises DamagedTranscript for a file with an unreadable line before the last, and what :meth:`append` raises for
    messages that do not fit together. OSError of the file system is passed on, and the entry is then not there.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._entries: list[Entry] = []
        self._messages: list[Message] = []
        self._open: dict[str, None] = {}
        self._path: Path | None = None
        self._size = 0
        if path is not None:
            path = Path(path)
            if path.exists():
                self._size = self._read(path)
                os.truncate(path, self._size)
                self._end_the_line(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            self._path = path

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        """The transcript in a file, which stays as it is. Raises FileNotFoundError, and as the constructor does."""
        transcript = cls()
        transcript._read(Path(path))
        return transcript

    @classmethod
    def of(cls, messages: Iterable[Message], path: str | Path | None = None) -> Transcript:
        """A new transcript of these messages. Raises what :meth:`append` raises."""
        transcript = cls(path)
        transcript.extend(messages)
        return transcript

    @classmethod
    def from_openai(cls, messages: Iterable[Mapping[str, Any]], path: str | Path | None = None) -> Transcript:
        """A new transcript of a plain OpenAI list. Raises what :class:`Message` and :meth:`append` raise."""
        return cls.of(map(Message.model_validate, messages), path)

    def to_openai(self) -> list[dict[str, Any]]:
        """All messages as a plain OpenAI list; events and notes are not part of it."""
        return to_openai(self._messages)

    def append(self, message: Message | Mapping[str, Any]) -> Message:
        """Record a message, and return it.

        Raises ValueError for what is no message; OrphanResult for a result without an open call of its id; and
        UnansweredCalls for any other message while calls are open. Results may come in any order. An id may be
        used again by a later message: many servers number the calls of each answer anew.
        """
        if not isinstance(message, Message):
            message = Message.model_validate(message)
        self._check(message)
        self._write("message", message)
        self._add(message)
        return message

    def extend(self, messages: Iterable[Message | Mapping[str, Any]]) -> None:
        """Record several messages, one after the other."""
        for message in messages:
            self.append(message)

    def record(self, event: ContextEvent) -> ContextEvent:
        """Record that something has left the context. Raises ValueError for an event that does not belong at this
        place: ``at`` is the number of messages, and what is dropped lies before it."""
        if event.at != len(self._messages) or any(not 0 <= a < b <= event.at for a, b in event.dropped):
            raise ValueError(
                f"the event stands at={event.at} and drops {event.dropped}; there are {len(self._messages)} messages"
            )
        self._write("event", event)
        self._add(event)
        return event

    def note(self, kind: str, **data: Any) -> Note:
        """Record a remark; ``data`` must be what JSON can hold."""
        note = Note(kind=kind, at=len(self._messages), data=data)
        self._write("note", note)
        self._add(note)
        return note

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Messages, events and notes in the order in which they were recorded."""
        return tuple(self._entries)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages alone: what a run without any reset would have seen."""
        return tuple(self._messages)

    @property
    def events(self) -> tuple[ContextEvent, ...]:
        """The context events in order."""
        return tuple(e for e in self._entries if isinstance(e, ContextEvent))

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes in order."""
        return tuple(e for e in self._entries if isinstance(e, Note))

    @property
    def open_calls(self) -> tuple[str, ...]:
        """The ids of calls that have no result yet, in the order of the calls."""
        return tuple(self._open)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index):
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._messages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transcript) and self._entries == other._entries

    __hash__ = None

    def __repr__(self) -> str:
        return f"Transcript({len(self)} messages, {len(self.events)} context events)"

    def _check(self, message: Message) -> None:
        if message.role == "tool":
            if message.tool_call_id not in self._open:
                waiting = f"those waiting are {list(self._open)}" if self._open else "no call is waiting"
                raise OrphanResult(
                    f"message {len(self)} answers the call {message.tool_call_id!r}, but {waiting}"
                )
        elif self._open:
            raise UnansweredCalls(
                f"message {len(self)} is of the role {message.role!r}, but the calls {list(self._open)} have no "
                "result yet; append one tool message for each first"
            )

    def _add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if isinstance(entry, Message):
            self._messages.append(entry)
            if entry.role == "tool":
                del self._open[entry.tool_call_id]
            elif entry.tool_calls:
                self._open = dict.fromkeys(call.id for call in entry.tool_calls)

    def _write(self, kind: str, entry: BaseModel) -> None:
        if self._path is None:
            return
        line = json.dumps({kind: entry.model_dump(mode="json", exclude_unset=True)}, ensure_ascii=False)
        data = line.encode() + b"\n"
        with self._path.open("r+b") as file:
            if file.seek(0, os.SEEK_END) != self._size:
                raise TranscriptError(f"{self._path} has been written by someone else; load it again")
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self._size)
                raise
        self._size += len(data)

    def _read(self, path: Path) -> int:
        """Take in a file's entries; the number of bytes that they fill."""
        data, start = path.read_bytes(), 0
        while start < len(data):
            end = data.find(b"\n", start)
            last = end in (-1, len(data) - 1)
            line = data[start:] if end == -1 else data[start:end]
            try:
                ((kind, fields),) = json.loads(line.decode()).items()
                entry = _KINDS[kind].model_validate(fields)
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                if last:
                    break
                number = data.count(b"\n", 0, start) + 1
                raise DamagedTranscript(f"line {number} of {path} cannot be read: {error}") from error
            if isinstance(entry, Message):
                self._check(entry)
            self._add(entry)
            start = len(data) if end == -1 else end + 1
        return start

    def _end_the_line(self, path: Path) -> None:
        """Editors leave the last line break out at times; the next entry would run into the last one."""
        with path.open("r+b") as file:
            if self._size and file.seek(self._size - 1) and file.read(1) != b"\n":
                file.write(b"\n")
                self._size += 1
