"""How a run is bounded, how it may end, and what it reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dslib.agents.context import REASONING_POLICIES, Strategy, as_strategy
from dslib.agents.rules import Rule, rules_of
from dslib.agents.transcript import Transcript


class Stop(Exception):
    """The run ends here; ``reason`` says why, in one word, which a subclass gives itself by keyword."""

    reason = "stopped"

    def __init_subclass__(cls, reason: str | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if reason is not None:
            cls.reason = reason


class Finished(Stop, reason="finished"):
    """With an answer: of a tool that ends the run, or in words."""


class TurnsSpent(Stop, reason="turns"):
    """``max_turns`` answers of the model."""


class TokensSpent(Stop, reason="tokens"):
    """``max_tokens`` read and written, over all calls of the model."""


class TimeSpent(Stop, reason="time"):
    """``max_seconds`` of wall time."""


class NoProgress(Stop, reason="no_progress"):
    """The same calls with the same results, again and again."""


class OutOfWindow(Stop, reason="window"):
    """The context does not fit into the window, and nothing is left to drop."""


class SummaryFailed(Stop, reason="summary"):
    """The summariser failed, said nothing or too much, ``summary_attempts`` times in a row."""


class ModelFailed(Stop, reason="model"):
    """The model gave no usable answer: an endpoint that is down, times out or answers nonsense."""


@dataclass(frozen=True)
class LoopConfig:
    """What bounds a run, and how its context is managed.

    Raises ValueError for a limit below 1, a trigger outside (0, 1], a strategy without a window, and unknown names.
    """

    #: Answers of the model; ASearcher (arXiv:2508.07976) allows 32, or 128 for long searches.
    max_turns: int = 32
    #: Tokens read and written by the model and the summariser, over all calls (None: no limit).
    max_tokens: int | None = None
    #: Wall time, checked between calls, for nothing here interrupts a tool (None: no limit).
    max_seconds: float | None = None
    #: Tokens the model can read (None: no limit).
    window: int | None = None
    #: The share of the window at which the strategy applies, 80 % in DeepSeek-V3.2 (arXiv:2512.02556, §4.4); without a
    #: strategy the whole window is used.
    trigger: float = 0.8
    #: Which thoughts the model still sees, of :data:`dslib.agents.context.REASONING_POLICIES`.
    reasoning: str = "v32"
    #: What is done when the window is full (None: the run ends).
    strategy: Strategy | Callable | None = None
    #: Failed summaries in a row that end the run.
    summary_attempts: int = 3
    #: Turns in a row without anything new that end the run; a reset begins the count anew.
    no_progress: int = 3
    #: Names of :data:`dslib.agents.rules.RULES`, or functions; complaints are counted.
    rules: tuple[str | Rule, ...] = ()
    #: Whether the model reads a complaint instead of a result.
    enforce: bool = False

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "window", "summary_attempts", "no_progress"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds={self.max_seconds} must be above 0")
        if not (math.isfinite(self.trigger) and 0 < self.trigger <= 1):
            raise ValueError(f"trigger={self.trigger} must lie in (0, 1]")
        if self.reasoning not in REASONING_POLICIES:
            raise ValueError(
                f"reasoning={self.reasoning!r} is unknown; use one of {', '.join(REASONING_POLICIES)}"
            )
        if as_strategy(self.strategy) is not None and self.window is None:
            raise ValueError("strategy needs window, the tokens that the model can read")
        rules_of(self.rules)

    @property
    def budget(self) -> int | None:
        """Tokens of context from which on something is done: the trigger's share of the window with a strategy,
        all of it without."""
        if self.window is None:
            return None
        return self.window if self.strategy is None else max(1, int(self.trigger * self.window))


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    #: The exception that ended it.
    stop: Stop
    #: All that was said.
    transcript: Transcript
    #: None unless it finished.
    answer: str | None = None
    #: Answers of the model.
    turns: int = 0
    #: Tool calls that it made.
    calls: int = 0
    #: Read, as reported by the endpoint, else as counted.
    prompt_tokens: int = 0
    #: Written, of the same source.
    completion_tokens: int = 0
    #: Wall time.
    seconds: float = 0.0
    #: Context events of this run.
    resets: int = 0
    #: Complaints by rule.
    violations: Counter[str] = field(default_factory=Counter)

    @property
    def reason(self) -> str:
        """``finished``, ``turns``, ``tokens``, ``time``, ``no_progress``, ``window``, ``summary`` or ``model``."""
        return self.stop.reason

    @property
    def finished(self) -> bool:
        """Whether there is an answer, right or wrong."""
        return isinstance(self.stop, Finished)


@dataclass(frozen=True)
class ParallelOutcome:
    """The chosen one of several runs, and all of them."""

    chosen: Outcome
    outcomes: tuple[Outcome, ...]

    @property
    def turns(self) -> int:
        """Answers of the model over all runs: the compute that the choice cost."""
        return sum(outcome.turns for outcome in self.outcomes)


def parallel_fewest_step(episode: Callable[[int], Outcome], n: int, threads: int = 1) -> ParallelOutcome:
    """Parallel-fewest-step (DeepSeek-V3.2, arXiv:2512.02556, §4.4): run ``episode(0)`` … ``episode(n − 1)``, each
    with a transcript of its own, and take the finished one with the fewest turns; the first of equals, and where
    none finished the first of all.

    ``episode``: index → outcome; it draws its randomness from the index. ``threads``: episodes at the same time.
    The choice does not look at whether an answer is right. Raises ValueError for n or threads below 1.
    """
    if n < 1 or threads < 1:
        raise ValueError(f"n={n} and threads={threads} must be at least 1")
    outcomes = _outcomes(episode, n, threads)
    finished = [outcome for outcome in outcomes if outcome.finished]
    chosen = min(finished, key=lambda outcome: outcome.turns) if finished else outcomes[0]
    return ParallelOutcome(chosen, tuple(outcomes))


def _outcomes(episode: Callable[[int], Outcome], n: int, threads: int) -> Sequence[Any]:
    if threads == 1:
        return [episode(index) for index in range(n)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(episode, range(n)))
