"""The loop of an agent: show the context, take an answer, run its calls, record everything; until something stops it.

Control flow is a handful of exceptions (:mod:`dslib.agents.outcome`): whatever raises a :class:`Stop` ends the run,
and everything said until then is in the transcript.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from pydantic import ValidationError

from dslib.agents.keeper import ContextKeeper, Summariser
from dslib.agents.messages import ERROR, HARNESS, Message, tool_result, user
from dslib.agents.models import Model, ModelError
from dslib.agents.outcome import (
    Finished,
    LoopConfig,
    ModelFailed,
    NoProgress,
    Outcome,
    Stop,
    TimeSpent,
    TokensSpent,
    TurnsSpent,
)
from dslib.agents.rules import rules_of
from dslib.agents.tokens import Count, TokenCounter
from dslib.agents.tools import Tool, execute, read_arguments, toolbox
from dslib.agents.transcript import Transcript


def run(
    model: Model,
    tools: Iterable[Tool | Callable],
    transcript: Transcript | Sequence[Message],
    config: LoopConfig | None = None,
    count: Count | None = None,
    summariser: Summariser | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Let ``model`` act with ``tools`` from ``transcript`` on, which grows, until it answers or a limit ends it.

    A message without calls is the answer, and so is the result of a tool that ends the run. Calls are executed in
    their order; each gets its result, also those that fail, are refused by a rule, or come after the end. Calls
    that an interrupted run left open are answered first. ``count``: by default a :class:`TokenCounter` of the
    tools' schemas, corrected by the ``usage`` that the model's messages report. ``summariser``: for a strategy
    that summarises; when it fails, answers nothing, or answers more than it replaces, the history stays.

    Raises ValueError for an empty transcript or a missing summariser, and what the model or ``clock`` raise beside
    ModelError, which ends the run. All other ends are the outcome's ``stop``.
    """
    return _Loop(model, tools, transcript, config or LoopConfig(), count, summariser, clock).to_the_end()


class _Loop:
    def __init__(self, model, tools, transcript, config, count, summariser, clock) -> None:
        self.model, self.tools, self.config = model, toolbox(tools), config
        self.transcript = transcript if isinstance(transcript, Transcript) else Transcript.of(transcript)
        self.schemas = [made.openai() for made in self.tools.values()]
        self.count = count or TokenCounter().with_tools(self.schemas)
        self.keeper = ContextKeeper(self.transcript, config, self.count, summariser)
        self.rules, self.clock, self.started = rules_of(config.rules), clock, clock()
        if not len(self.transcript):
            raise ValueError("the transcript is empty; give it the task, a user message, first")
        self.turns = self.calls = self.prompt = self.completion = self.idle = 0
        self.violations: Counter[str] = Counter(dict.fromkeys(self.rules, 0))
        self.reports: list[tuple[int, int]] = []
        self.seen: set[tuple] = set()

    def to_the_end(self) -> Outcome:
        try:
            for call in self.transcript.open_calls:
                self.transcript.append(tool_result(call, f"{ERROR}interrupted; it may or may not have run"))
            while True:
                self.turn()
        except Stop as reached:
            stop = reached
        self.transcript.note("stop", reason=stop.reason, text=str(stop))
        answer = str(stop) if isinstance(stop, Finished) else None
        prompt, completion = self.spent()
        spent = self.turns, self.calls, prompt, completion, self.clock() - self.started
        return Outcome(stop, self.transcript, answer, *spent, self.keeper.resets, self.violations)

    def spent(self) -> tuple[int, int]:
        """Tokens read and written, by the model and the summariser."""
        return self.prompt + self.keeper.prompt_tokens, self.completion + self.keeper.completion_tokens

    def turn(self) -> None:
        """One answer of the model, and what comes of it."""
        self.check_budgets()
        context = self.keeper.context()
        if self.keeper.fresh:  # what the context no longer holds may be looked up again
            self.seen.clear()
            self.idle = 0
        self.turns += 1
        answer = self.transcript.append(self.ask(context))
        place = len(self.transcript) - 1
        complaint = self.judge(place)
        if answer.calls:
            self.act(answer, complaint)
        elif answer.is_empty:
            self.reply("you said nothing; call a tool or answer")
        elif complaint:
            self.reply(complaint)
        else:
            raise Finished(answer.text)
        self.check_progress(place)

    def check_budgets(self) -> None:
        limits = self.config
        if self.turns >= limits.max_turns:
            raise TurnsSpent(f"{self.turns} turns, the most allowed")
        if limits.max_tokens is not None and (tokens := sum(self.spent())) >= limits.max_tokens:
            raise TokensSpent(f"{tokens} tokens of {limits.max_tokens}")
        if self.out_of_time():
            raise TimeSpent(f"{self.clock() - self.started:.1f} s of {limits.max_seconds} s")

    def out_of_time(self) -> bool:
        return self.config.max_seconds is not None and self.clock() - self.started >= self.config.max_seconds

    def ask(self, context: list[Message]) -> Message:
        try:
            answer = self.model(context, self.schemas)
            answer = answer if isinstance(answer, Message) else Message.model_validate(answer)
            if answer.role != "assistant":
                raise ModelError(f"the model answered in the role {answer.role!r}")
        except (ModelError, ValidationError) as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        count, usage = self.keeper.count, answer.usage
        self.prompt += usage.prompt_tokens if usage else count(context)
        self.completion += usage.completion_tokens if usage else count([answer]) - count([])
        if usage and isinstance(self.count, TokenCounter):
            self.reports.append((self.count(context), usage.prompt_tokens))
            self.keeper.count = self.count.calibrated(self.reports)
        return answer

    def judge(self, place: int) -> str | None:
        """Count the rules that a message breaks; the complaint, where rules are enforced."""
        broken = {name: text for name, rule in self.rules.items() if (text := rule(self.transcript, place))}
        for name, text in broken.items():
            self.violations[name] += 1
            self.transcript.note("violation", rule=name, text=text)
        return "; ".join(broken.values()) if broken and self.config.enforce else None

    def act(self, answer: Message, complaint: str | None) -> None:
        """A result for every call."""
        end: Finished | None = None
        for call in answer.calls:
            self.calls += 1
            if complaint:
                result = tool_result(call, f"Refused: {complaint}")
            elif end or self.out_of_time():
                result = tool_result(call, "Skipped: the run has ended")
            else:
                result = execute(self.tools, call)
                made = self.tools.get(call.function.name)
                if made and made.ends and not result.failed:
                    end = Finished(result.text)
            self.transcript.append(result)
        if end:
            raise end

    def reply(self, text: str) -> None:
        self.transcript.append(user(text, HARNESS))

    def check_progress(self, place: int) -> None:
        answer, results = self.transcript[place], self.transcript[place + 1 :]
        found = {message.tool_call_id: message.text for message in results}
        actions = {(c.function.name, _canonical(c.function.arguments), found[c.id]) for c in answer.calls}
        actions = actions or {(answer.text,)}
        self.idle = self.idle + 1 if actions <= self.seen else 0
        self.seen |= actions
        if self.idle >= self.config.no_progress:
            raise NoProgress(f"{self.idle} turns in a row brought nothing that had not been seen")


def _canonical(arguments: str) -> str:
    """Arguments in one writing, so that spaces and order make no difference."""
    try:
        return json.dumps(read_arguments(arguments), sort_keys=True)
    except ValueError:
        return arguments
