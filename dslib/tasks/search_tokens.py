"""The search world in symbols: one word a token, and OpenAI's messages to tokens and back without loss.

| message | its tokens |
|---|---|
| user, the question | a word an attribute: ``?prize=3``, ``?field=any`` |
| a summary, in whatever message | ``ruled_out:`` and entities |
| assistant | ``reasoning_content``, a verdict an attribute of the page just read, then the call: tool, argument |
| tool | entities, or facts, or ``nothing``, or ``error`` for whatever else it says |

What else a message says (instructions, prose) is no token: the policy cannot read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from dslib.tasks.search_world import ANY, ATTRIBUTES, SearchWorlds

TOOLS = ("search", "open", "answer")
ARGUMENTS = {"search": "clue", "open": "entity", "answer": "entity"}
#: The thinking bits: the value is that of the clue, is another one, is not asked for.
VERDICTS = ("same", "other", "unasked")
RULED_OUT, NO_RESULT, ERROR, PAD = "ruled_out:", "nothing", "error", "■"

Message = Mapping[str, Any]


class SearchVocabulary:
    """The words of ``worlds`` and their tokens. ``words`` lists them; ``tools``, ``verdicts``, ``facts``,
    ``entities`` and ``questions`` are ranges of tokens."""

    def __init__(self, worlds: SearchWorlds) -> None:
        self.worlds = worlds
        self.words = [PAD, RULED_OUT, NO_RESULT, ERROR]
        self.tools = self._added(TOOLS)
        self.verdicts = self._added(VERDICTS)
        self.facts = self._added(worlds.fact_names)
        choices = [*range(worlds.values), ANY]
        self.questions = self._added(
            f"?{name}={v}" for name in ATTRIBUTES[: worlds.attributes] for v in choices
        )
        self.entities = self._added(worlds.entity_names)
        self.search, self.open, self.answer = self.tools
        self.same, self.other, self.unasked = self.verdicts
        self.pad, self.ruled_out, self.no_result, self.error = range(4)

    def _added(self, words: Iterable[str]) -> range:
        start = len(self.words)
        self.words += words
        return range(start, len(self.words))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def longest_thought(self) -> int:
        """Tokens that a turn may spend before its call: twice the verdicts of a page."""
        return 2 * self.worlds.attributes

    @cached_property
    def tokens(self) -> dict[str, int]:
        """word → token."""
        return {word: token for token, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; raises ValueError, naming it, for a word that is none."""
        try:
            return [self.tokens[word] for word in text.split()]
        except KeyError as error:
            raise ValueError(
                f"word {error.args[0]!r} is not among the {len(self)} words of this world"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; raises ValueError for a token that is none."""
        for token in tokens:
            if not 0 <= token < len(self):
                raise ValueError(f"token {token} is not below the vocabulary's {len(self)}")
        return " ".join(self.words[token] for token in tokens)

    def clue(self, token: int) -> tuple[int, int | None]:
        """(attribute, value or None) of a word of a question."""
        attribute, value = divmod(token - self.questions.start, self.worlds.values + 1)
        return attribute, None if value == self.worlds.values else value

    def fact(self, attribute: int, value: int) -> int:
        """The token of ``attribute=value``."""
        return self.facts.start + attribute * self.worlds.values + value

    def verdicts_of(self, question: Sequence[int], page: Sequence[int]) -> list[int]:
        """A verdict for each fact of a page, against the words of the question: both one an attribute."""
        found = []
        for asked, fact in zip(question, page, strict=True):
            attribute, value = self.clue(asked)
            if value is None:
                found.append(self.unasked)
            else:
                found.append(self.same if fact == self.fact(attribute, value) else self.other)
        return found

    def split_turn(self, written: Sequence[int]) -> tuple[list[int], list[int]]:
        """What a turn wrote as (thought, call): the call is a tool's token and whatever follows it, or empty."""
        for place, token in enumerate(written):
            if token in self.tools:
                return list(written[:place]), list(written[place:])
        return list(written), []

    def turn_ended(self, written: Sequence[int]) -> bool:
        """Whether the last token is the argument of a call."""
        return len(written) >= 2 and written[-2] in self.tools

    def message(self, written: Sequence[int], call_id: str) -> dict[str, Any]:
        """The assistant's message that a turn of tokens is. Without a whole call it has no ``tool_calls``."""
        thought, call = self.split_turn(written)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if len(call) < 2:  # a tool without its argument is no call
            thought = list(written)
        if thought:
            message["reasoning_content"] = self.decode(thought)
        if len(call) >= 2:
            name, argument = self.words[call[0]], self.words[call[1]]
            function = {"name": name, "arguments": json.dumps({ARGUMENTS[name]: argument})}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        return message

    def message_tokens(self, message: Message) -> list[int]:
        """The tokens of one message, as the table above has them; arguments that are no JSON become an error's
        token, so a broken call can still be read."""
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            return self._result(content)
        tokens = [] if role == "assistant" and message.get("tool_calls") else self._prose_tokens(content)
        tokens += self._known(message.get("reasoning_content") or "")
        for call in message.get("tool_calls") or ():
            tokens += self.call_tokens(call)
        return tokens

    def call_tokens(self, call: Mapping[str, Any]) -> tuple[int, int]:
        """(tool, argument) of a tool call; each is the error's token where it cannot be read."""
        function = call["function"]
        name = self.tokens.get(function["name"], self.error)
        return name if name in self.tools else self.error, self._argument(function["arguments"])

    def messages_tokens(self, messages: Iterable[Message]) -> list[int]:
        """The tokens of a conversation."""
        return [token for message in messages for token in self.message_tokens(message)]

    def count(self, messages: Iterable[Message]) -> int:
        """How many tokens the policy reads: thoughts, calls and results are all counted, each word once."""
        return len(self.messages_tokens(messages))

    def _result(self, content: str) -> list[int]:
        words = content.split()
        if words == ["answered"]:
            return []
        tokens = [self.tokens.get(word, self.error) for word in words]
        readable = {self.no_result, *self.entities, *self.facts}
        return tokens if tokens and readable.issuperset(tokens) else [self.error]

    def _prose_tokens(self, content: str) -> list[int]:
        """Words of a question, and what a summary rules out; other prose is skipped."""
        before, marker, after = content.partition(RULED_OUT)
        tokens = [t for t in self._known(before) if t in self.questions]
        if marker:
            tokens += [self.ruled_out, *(t for t in self._known(after) if t in self.entities)]
        return tokens

    def _known(self, text: str) -> list[int]:
        return [self.tokens[word] for word in re.split(r"[\s,;]+", text) if word in self.tokens]

    def _argument(self, arguments: str) -> int:
        try:
            values = list(json.loads(arguments).values())
        except (json.JSONDecodeError, AttributeError, TypeError):
            return self.error
        return (
            self.tokens.get(values[0], self.error)
            if len(values) == 1 and isinstance(values[0], str)
            else self.error
        )
