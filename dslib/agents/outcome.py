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
    """The run ends here; ``reason`` says why, in one word."""

    reason = "stopped"


class Finished(Stop):
    """With an answer: of a tool that ends the run, or in words."""

    reason = "finished"


class TurnsSpent(Stop):
    """``max_turns`` answers of the model."""

    reason = "turns"


class TokensSpent(Stop):
    """``max_tokens`` read and written, over all calls of the model."""

    reason = "tokens"


class TimeSpent(Stop):
    """``max_seconds`` of wall time."""

    reason = "time"


class NoProgress(Stop):
    """The same calls with the same results, again and again."""

    reason = "no_progress"


class OutOfWindow(Stop):
    """The context does not fit into the window, and nothing is left to drop."""

    reason = "window"


class SummaryFailed(Stop):
    """The summariser failed, said nothing or too much, ``summary_attempts`` times in a row."""

    reason = "summary"


class ModelFailed(Stop):
    """The model gave no usable answer: an endpoint that is down, times out or answers nonsense."""

    reason = "model"


@dataclass(frozen=True)
class LoopConfig:
    """What bounds a run, and how its context is managed.

    ``max_turns``: answers of the model (ASearcher, arXiv:2508.07976, allows 32, or 128 for long searches);
    ``max_tokens``: read and written by the model and the summariser, over all calls; ``max_seconds``: wall time,
    checked between calls, for nothing here interrupts a tool. ``window``: tokens the model can read (None: no
    limit); ``trigger``: the share of it at which ``strategy`` applies, 80 % in DeepSeek-V3.2 (arXiv:2512.02556,
    §4.4); without a strategy the whole window is used. ``summary_attempts``: failed summaries in a row that end
    the run. ``no_progress``: turns in a row without anything new that end it; a reset begins the count anew.
    ``rules``: names of :data:`dslib.agents.rules.RULES`, or functions; they are counted, and with ``enforce`` the
    model reads the complaint instead of a result.

    Raises ValueError for a limit below 1, a trigger outside (0, 1], a strategy without a window, and unknown names.
    """

    max_turns: int = 32
    max_tokens: int | None = None
    max_seconds: float | None = None
    window: int | None = None
    trigger: float = 0.8
    reasoning: str = "v32"
    strategy: Strategy | Callable | None = None
    summary_attempts: int = 3
    no_progress: int = 3
    rules: tuple[str | Rule, ...] = ()
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
    """A finished run. ``stop``: the exception that ended it; ``answer``: None unless it finished. ``turns``:
    answers of the model; ``calls``: tool calls it made; tokens as reported by the endpoint, else as counted.
    ``resets``: context events of this run; ``violations``: complaints by rule."""

    stop: Stop
    transcript: Transcript
    answer: str | None = None
    turns: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    resets: int = 0
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
class Fewest:
    """The chosen one of several runs, and what all of them took. ``turns``: of all, the compute that it cost."""

    chosen: Outcome
    outcomes: tuple[Outcome, ...]

    @property
    def turns(self) -> int:
        """Answers of the model over all runs."""
        return sum(outcome.turns for outcome in self.outcomes)


def parallel_fewest_step(episode: Callable[[int], Outcome], n: int, threads: int = 1) -> Fewest:
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
    return Fewest(chosen, tuple(outcomes))


def _outcomes(episode: Callable[[int], Outcome], n: int, threads: int) -> Sequence[Any]:
    if threads == 1:
        return [episode(index) for index in range(n)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(episode, range(n)))
