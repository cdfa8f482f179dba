"""Keeps the context of a running agent within its window: resets that happen once and are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dslib.agents.context import Window, as_strategy, summary_message, view
from dslib.agents.messages import Message
from dslib.agents.outcome import LoopConfig, OutOfWindow, SummaryFailed
from dslib.agents.tokens import Count
from dslib.agents.transcript import Transcript

#: The messages up to the last that leaves the context, instructions and earlier summaries included → a summary.
Summariser = Callable[[Sequence[Message]], str]


class ContextKeeper:
    """The context before each answer, and what is done when it passes the budget.

    ``count`` may be replaced by a better one between answers. ``fresh``: whether the last context came right
    after a reset. ``resets``: how many there were; ``prompt_tokens``, ``completion_tokens``: what the summariser
    read and wrote. Raises ValueError for a strategy that summarises without a summariser.
    """

    def __init__(
        self, transcript: Transcript, config: LoopConfig, count: Count, summariser: Summariser | None = None
    ) -> None:
        self.transcript, self.config, self.count, self.summariser = transcript, config, count, summariser
        self.strategy = as_strategy(config.strategy)
        if self.strategy and self.strategy.summarises and summariser is None:
            raise ValueError(f"strategy={self.strategy.name} needs a summariser: messages → text")
        self.fresh, self.resets, self.prompt_tokens, self.completion_tokens = False, 0, 0, 0
        self._failures = 0

    def context(self) -> list[Message]:
        """What the model sees next. Past the budget the strategy applies; where it has nothing to drop, or its
        summary failed, the history stays as long as the window holds it.

        Raises OutOfWindow once it does not, and SummaryFailed after ``summary_attempts`` failures in a row.
        """
        budget, window, self.fresh = self.config.budget, self.config.window, False
        context = view(self.transcript, self.config.reasoning)
        if budget is None or self.count(context) <= budget:
            return context
        if self.strategy:
            self.fresh = self._reset(budget)
            context = view(self.transcript, self.config.reasoning)
        if (tokens := self.count(context)) > window:
            raise OutOfWindow(f"the context takes {tokens} tokens and the window has {window}")
        return context

    def _reset(self, budget: int) -> bool:
        window = Window.of(self.transcript, self.config.reasoning, budget=budget, count=self.count)
        planned = window.plan(self.strategy, budget)
        if planned is None:
            return False
        event, _, tokens = planned
        if self.strategy.summarises:
            try:
                text = self._summary(window.visible(event.dropped[-1][1]), tokens)
            except Exception as error:  # whatever a summariser raises, the history is still there
                self._failures += 1
                self.transcript.note("summary_failed", text=f"{type(error).__name__}: {error}")
                if self._failures >= self.config.summary_attempts:
                    raise SummaryFailed(f"{self._failures} times in a row, at last: {error}") from error
                return False
            event, self._failures = event.model_copy(update={"text": text}), 0
        self.transcript.record(event)
        self.resets += 1
        return True

    def _summary(self, messages: list[Message], replaced: int) -> str:
        """A summary that is worth its place; raises ValueError for any other."""
        text = self.summariser(messages)
        if not isinstance(text, str) or not text.strip():
            raise ValueError("the summary is empty")
        tokens = self.count([summary_message(text)]) - self.count([])
        self.prompt_tokens += self.count(messages)
        self.completion_tokens += tokens
        if tokens >= replaced:
            raise ValueError(f"the summary takes {tokens} tokens and replaces {replaced}")
        return text
