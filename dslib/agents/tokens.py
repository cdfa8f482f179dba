"""How many tokens a context costs: everything that is sent counts, and what an endpoint reports corrects it.

Counters that leave out calls, tool schemas or reasoning are off by a fifth to more than two times, and a context
that is thought to fit then does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dslib.agents.messages import Message

#: Messages → tokens. The cost of a list is that of the empty one (tool schemas, say) plus one cost a message.
Count = Callable[[Sequence[Message]], int]


def quarter_bytes(text: str) -> int:
    """A fourth of the UTF-8 bytes, rounded up: the usual guess where no tokenizer is at hand."""
    return ((len(text) if text.isascii() else len(text.encode("utf-8", "replace"))) + 3) // 4


@dataclass(frozen=True)
class TokenCounter:
    """Counts content, reasoning, the names and arguments of calls, the ids that tie results to them, and schemas.

    ``length``: text → tokens, such as ``lambda text: len(tokenizer.encode(text))``, remembered for texts seen
    before when it is wrapped in ``functools.lru_cache``. ``overhead``: tokens of a message beside its text, for
    the role and the separators; the same again for each call. ``tools``: the schemas that go with every request.
    ``scale``: a factor on everything, see :meth:`calibrated`. Each message is rounded up by itself, so costs add.

    Raises ValueError for a negative overhead or a scale that is not a finite number above 0.
    """

    length: Callable[[str], int] = quarter_bytes
    overhead: int = 4
    tools: tuple[Mapping[str, Any], ...] = ()
    scale: float = 1.0
    _base: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        if self.overhead < 0 or not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"overhead={self.overhead} must be at least 0 and scale={self.scale} a finite number above 0"
            )
        schemas = sum(self.length(json.dumps(schema, ensure_ascii=False)) for schema in self.tools)
        object.__setattr__(self, "_base", math.ceil(self.scale * schemas))

    def __call__(self, messages: Sequence[Message]) -> int:
        """Tokens of a request with these messages."""
        return self._base + sum(map(self.message, messages))

    def message(self, message: Message, reasoning: bool = True) -> int:
        """Tokens of one message, or of what is left of it without its reasoning."""
        content, overhead = message.content, self.overhead
        parts = (
            [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)]
            if content
            else []
        )
        if reasoning and message.reasoning_content:
            parts.append(message.reasoning_content)
        for call in message.tool_calls or ():
            overhead += self.overhead
            parts += call.id, call.function.name, call.function.arguments
        if message.tool_call_id:
            parts.append(message.tool_call_id)
        if message.name:
            parts.append(message.name)
        total = overhead + self.length("\n".join(parts))
        return total if self.scale == 1 else math.ceil(self.scale * total)

    def with_tools(self, tools: Iterable[Mapping[str, Any]]) -> TokenCounter:
        """The same counter for requests with these schemas."""
        return replace(self, tools=tuple(tools))

    def calibrated(self, reports: Iterable[tuple[int, int]]) -> TokenCounter:
        """A counter with the scale that makes its counts agree with ``reports``, pairs of (what this counter
        counted, what the endpoint reported as ``prompt_tokens``): the ratio of the two sums, so long requests weigh
        more. Without a report of more than 0 tokens, the counter itself."""
        counted = reported = 0
        for ours, theirs in reports:
            if ours > 0 and theirs > 0:
                counted, reported = counted + ours, reported + theirs
        return replace(self, scale=self.scale * reported / counted) if counted else self


def shared_prefix(before: Sequence[Message], after: Sequence[Message], count: Count) -> float:
    """The share of ``after``'s tokens that a prefix cache holds once it has read ``before``: the cost of the
    messages that both begin with, over the cost of ``after``. 1 for an empty ``after``.

    A context that only grows finds all of the last one in the cache; dropping the thinking of an old turn, or the
    oldest result, gives up everything behind it.
    """
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    whole = count(after)
    return count(after[:same]) / whole if whole else 1.0
