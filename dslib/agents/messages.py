"""Chat messages in OpenAI's schema: what agents, models and transcripts exchange.

A message is one of five roles. An assistant speaks (``content``), thinks (``reasoning_content``, as DeepSeek's
API and most servers of open models call it) and calls tools, several at once if it likes; the arguments of a call
are a JSON *string*, as the model wrote it, valid or not. Each call is answered by one message of the role ``tool``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Role = Literal["system", "developer", "user", "assistant", "tool"]

#: The name of user messages that the program around a model has written, not a person.
HARNESS = "harness"
#: How the observation of a call that failed begins; it survives every export, and so does the knowledge of it.
ERROR = "Error: "


class Function(BaseModel):
    """What is called: ``arguments`` is a JSON string; a mapping is accepted and written as one."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(min_length=1)
    arguments: str

    @model_validator(mode="before")
    @classmethod
    def _as_string(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("arguments"), Mapping):
            return {**data, "arguments": json.dumps(data["arguments"], ensure_ascii=False)}
        return data


class ToolCall(BaseModel):
    """One call, known by its id within the message that makes it."""

    model_config = ConfigDict(frozen=True, extra="allow")

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: Function


class Usage(BaseModel):
    """What an endpoint says it has read and written, in tokens."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class Message(BaseModel):
    """One message of a conversation; it never changes.

    ``content``: text, or OpenAI's list of parts. ``tool_call_id``: of role ``tool``, the call that it answers.
    ``name``: an author, optional. ``usage``: what the endpoint reported with this answer; stored with a
    transcript, never sent. Other fields of an endpoint (``refusal``, …) are kept as they came.

    Raises ValueError (pydantic's ValidationError) for an unknown role; a system, developer or user message without
    content; a tool message without ``tool_call_id`` or content (which may be empty text); calls or reasoning in
    another role than assistant; and two calls with one id. An assistant may say nothing: see :attr:`is_empty`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    usage: Usage | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        role = self.role
        if role == "tool":
            if not self.tool_call_id or self.content is None:
                raise ValueError("a tool message needs the tool_call_id of the call it answers, and content")
        elif self.tool_call_id is not None:
            raise ValueError(f"tool_call_id={self.tool_call_id!r} belongs to role 'tool', not {role!r}")
        if role == "assistant":
            ids = [call.id for call in self.tool_calls or ()]
            if len(set(ids)) < len(ids):
                twice = next(i for i in ids if ids.count(i) > 1)
                raise ValueError(f"two calls have the id {twice!r}; each call needs an id of its own")
        else:
            if self.tool_calls or self.reasoning_content is not None:
                raise ValueError(f"tool_calls and reasoning_content belong to role 'assistant', not {role!r}")
            if role != "tool" and not self.content:
                raise ValueError(f"a {role} message is empty; give it content")
        return self

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls, an empty tuple where there are none."""
        return self.tool_calls or ()

    @property
    def text(self) -> str:
        """The content as text; of a list of parts, its text parts one after the other."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        return "".join(str(part.get("text", "")) for part in self.content)

    @property
    def is_empty(self) -> bool:
        """Neither content nor reasoning nor a call: models do answer that at times."""
        return not (self.text.strip() or self.reasoning_content or self.tool_calls)

    @property
    def failed(self) -> bool:
        """Whether this is the observation of a call that failed."""
        return self.role == "tool" and self.text.startswith(ERROR)

    def to_openai(self) -> dict[str, Any]:
        """The plain dictionary that an OpenAI-compatible endpoint takes: what was given, ``usage`` and fields that
        are None left out, except an assistant's content."""
        out: dict[str, Any] = {"role": self.role}
        for name in ("name", "content", "reasoning_content", "tool_call_id"):
            value = getattr(self, name)
            if value is not None or (name == "content" and "content" in self.model_fields_set):
                out[name] = value
        if self.tool_calls:
            out["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return {**out, **(self.model_extra or {})}


def without_reasoning(message: Message) -> Message:
    """The same message without its thinking; a message that only thought is left with empty content."""
    if message.reasoning_content is None:
        return message
    if message.content is None and not message.tool_calls:
        return message.model_copy(update={"reasoning_content": None, "content": ""})
    # By the pickle protocol: a view strips hundreds of messages, and model_copy takes more than twice as long.
    # What cannot change is shared.
    state = message.__getstate__()
    bare = type(message).__new__(type(message))
    bare.__setstate__({**state, "__dict__": {**state["__dict__"], "reasoning_content": None}})
    return bare


def to_openai(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A plain list of dictionaries, ready for an endpoint or for ``json.dumps``."""
    return [message.to_openai() for message in messages]


def from_openai(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Messages of such a list, each checked for itself; :meth:`dslib.agents.Transcript.from_openai` also checks
    that calls and results belong together. Raises ValueError, naming the place, as :class:`Message` does."""
    found = []
    for place, message in enumerate(messages):
        try:
            found.append(Message.model_validate(message))
        except ValueError as error:
            raise ValueError(f"message {place}: {error}") from error
    return found


def system(content: str) -> Message:
    """A system message."""
    return Message(role="system", content=content)


def user(content: str, name: str | None = None) -> Message:
    """A user message."""
    return Message(role="user", content=content, **({} if name is None else {"name": name}))


def assistant(
    content: str | None = None, calls: Sequence[ToolCall] = (), reasoning: str | None = None
) -> Message:
    """An assistant's message."""
    return Message(
        role="assistant", content=content, tool_calls=tuple(calls) or None, reasoning_content=reasoning
    )


def tool_call(name: str, arguments: Mapping[str, Any] | str = "{}", id: str = "call_0") -> ToolCall:
    """A call; ``arguments`` as a mapping, or as the JSON string itself."""
    return ToolCall(id=id, function=Function(name=name, arguments=arguments))


def tool_result(call: ToolCall | str, content: str) -> Message:
    """The answer to a call, given as such or by its id."""
    return Message(role="tool", tool_call_id=call if isinstance(call, str) else call.id, content=content)


def results_as_user(messages: Iterable[Message]) -> list[Message]:
    """The same conversation as harnesses write it that know no tool messages (Roo Code, Terminus): calls become
    part of the assistant's text, results user messages, with the harness as their author.

    Under V3.2's rule each such message counts as new words of the user, so all thinking before it is dropped
    (DeepSeek-V3.2, arXiv:2512.02556, §3.2.1, which advises against thinking models in such a harness).
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        if message.calls:
            names.update((call.id, call.function.name) for call in message.calls)
            calls = [
                f"<{call.function.name}>{call.function.arguments}</{call.function.name}>"
                for call in message.calls
            ]
            text = "\n".join(filter(None, [message.text, *calls]))
            converted.append(message.model_copy(update={"content": text, "tool_calls": None}))
        elif message.role == "tool":
            name = names.get(message.tool_call_id, "tool")
            converted.append(user(f"[{name}] {message.text}", HARNESS))
        else:
            converted.append(message)
    return converted
