"""The context as a pure view over a transcript: which thinking stays, and what goes when the window is full.

Two questions are answered apart. *Reasoning policies* say which ``reasoning_content`` is sent again:

    v32               none before the last user (or developer) message; all of it from there on
    keep_tool_turns   besides, that of earlier turns in which a tool was called
    keep_all          all
    drop_all          none

``v32`` is the rule of DeepSeek-V3.2 (arXiv:2512.02556, §3.2.1, Figure 4); ``keep_tool_turns`` what DeepSeek's API
documents ask for since. Calls and results stay under each. A turn begins with a user or developer message.

*Strategies* (§4.4, Figure 6) say which steps of the history leave once the context exceeds its budget: ``discard_75``
the first three quarters, ``discard_all`` all, and ``summary`` all, with a text in their place. A step is an
assistant's calls with all of their results; it stays or goes whole. The instructions, what users have said, what
was answered to them, and the newest step always stay. A reset happens once, is recorded in the transcript, and the
context fills again from there: a rule applied afresh to the whole history at every call would, after the first
overflow, hide every new result for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dslib.agents.messages import HARNESS, Message, user, without_reasoning
from dslib.agents.tokens import Count, TokenCounter
from dslib.agents.transcript import ContextEvent, Transcript

REASONING_POLICIES = ("v32", "keep_tool_turns", "keep_all", "drop_all")
#: The author of a summary; the message has the role user.
SUMMARY = "summary"
#: What stands for a summary where none has been written: only the loop asks a summariser.
PLACEHOLDER = "[summary of the steps before]"


class ContextOverflow(Exception):
    """What cannot be dropped exceeds the budget: ``tokens`` of them, against ``budget``."""

    def __init__(self, tokens: int, budget: int, strategy: str | None) -> None:
        self.tokens, self.budget, self.strategy = tokens, budget, strategy
        hint = (
            "nothing is dropped without a strategy; give one"
            if strategy is None
            else f"{strategy} has nothing left to drop: instructions, what users said and the newest step stay"
        )
        super().__init__(
            f"the context takes {tokens} tokens and the budget is {budget}; {hint}, or a wider window"
        )


@dataclass(eq=False)
class Step:
    """What stays or goes whole: an assistant's calls and their results, or words of it with the harness's reply.

    ``tokens``: the cost of its messages. ``start`` and ``stop`` are indices in the transcript.
    """

    start: int
    stop: int
    turn: _Turn = field(repr=False)
    has_calls: bool
    source: _Shown = field(repr=False)
    tokens: int = 0

    @property
    def messages(self) -> list[Message]:
        """As they are visible now."""
        return self.source.between(self.start, self.stop)


@dataclass(frozen=True)
class Strategy:
    """What to drop when the context is full.

    ``choose``: the steps that may go, oldest first, the newest not among them → those that go. If the context
    still exceeds its budget, it is asked again about the rest; an empty answer ends that. ``kind``: of the event
    that is recorded. ``summarises``: a summary takes their place. ``merges``: that summary also replaces earlier
    ones, whose facts are then the summariser's to keep; otherwise earlier summaries stay as they are.
    """

    name: str
    choose: Callable[[Sequence[Step]], Sequence[Step]]
    kind: str = "discard"
    summarises: bool = False
    merges: bool = False


def _first_three_quarters(history: Sequence[Step]) -> Sequence[Step]:
    return history[: 3 * (len(history) + 1) // 4]  # of all steps, the newest included


def _everything(history: Sequence[Step]) -> Sequence[Step]:
    return history


discard_75 = Strategy("discard_75", _first_three_quarters)
discard_all = Strategy("discard_all", _everything, kind="reset")
summary = Strategy("summary", _everything, kind="summary", summarises=True)


def as_strategy(strategy: Strategy | Callable | None) -> Strategy | None:
    """A strategy of a plain function of the steps that may go; strategies and None as they are.

    Raises TypeError for anything else."""
    if strategy is None or isinstance(strategy, Strategy):
        return strategy
    if callable(strategy):
        return Strategy(getattr(strategy, "__name__", type(strategy).__name__), strategy)
    raise TypeError(
        f"strategy={strategy!r} must be summary, discard_75, discard_all, a Strategy, or a function of the steps "
        "that may go"
    )


def view(
    transcript: Transcript | Sequence[Message],
    reasoning: str = "v32",
    strategy: Strategy | Callable[[Sequence[Step]], Sequence[Step]] | None = None,
    budget: int | None = None,
    count: Count | None = None,
) -> list[Message]:
    """The messages that a model sees next; the transcript stays as it is.

    ``reasoning``: a policy of the table above. Recorded events are applied. With ``strategy`` and ``budget``
    (tokens) the transcript is also followed from its last event on, and wherever the context before an answer
    would have passed the budget, the strategy applies, as it would have in the loop; summaries, which only the
    loop can ask for, are a placeholder. Within the budget nothing is dropped but what the policy drops.
    ``count``: messages → tokens, by default a :class:`TokenCounter`; one cost a message and one of the list.
    Linear in the length of the transcript.

    Raises ContextOverflow when what has to stay exceeds the budget; ValueError for an unknown policy, a budget
    below 1, or a strategy without one; TypeError for what is no strategy; and for a plain sequence what
    :meth:`Transcript.append` raises for messages that do not belong together.
    """
    window = Window.of(transcript, reasoning, strategy, budget, count)
    if budget is not None and window.tokens > budget:
        raise ContextOverflow(window.tokens, budget, window.strategy and window.strategy.name)
    return window.visible()


@dataclass(eq=False)
class _Turn:
    """From one user message to the next: where its assistants stand, and how many of their calls are visible."""

    assistants: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass(eq=False)
class _Shown:
    """The messages, None where one is dropped, and places of those whose thinking is cut off when they are shown."""

    messages: list[Message | None] = field(default_factory=list)
    bare: set[int] = field(default_factory=set)

    def between(self, start: int, stop: int) -> list[Message]:
        shown, bare = self.messages, self.bare
        return [
            without_reasoning(message) if place in bare else message
            for place in range(start, stop)
            if (message := shown[place]) is not None
        ]


class Window:
    """What of a transcript is visible, followed message by message; each one is added, stripped and dropped at most
    once, which makes a view linear. :func:`view` is the way in, and the loop plans its resets with this."""

    def __init__(self, reasoning: str, count: Count | None) -> None:
        if reasoning not in REASONING_POLICIES:
            raise ValueError(
                f"reasoning={reasoning!r} is unknown; use one of {', '.join(REASONING_POLICIES)}"
            )
        self.reasoning, self.count = reasoning, count
        self.base = self.tokens = 0 if count is None else count([])
        self._cost_of, self._bare_cost_of = _costs(count, self.base)
        self.strategy: Strategy | None = None
        self._shown = _Shown()
        self._cost: list[int] = []
        self._steps: list[Step] = []  # those that are visible, oldest first
        self._turn = _Turn()
        self._asked = False
        self._summaries: list[tuple[int, Message]] = []  # each stands before the message with that index

    @classmethod
    def of(cls, transcript, reasoning="v32", strategy=None, budget=None, count=None) -> Window:
        """A window at the end of a transcript; arguments and errors as of :func:`view`, but for ContextOverflow."""
        strategy = as_strategy(strategy)
        if budget is not None and budget < 1:
            raise ValueError(f"budget={budget} must be at least 1 token")
        if strategy is not None and budget is None:
            raise ValueError(f"strategy={strategy.name} needs a budget: the tokens that the context may take")
        if not isinstance(transcript, Transcript):
            transcript = Transcript.of(transcript)
        window = cls(reasoning, None if budget is None else (count or TokenCounter()))
        window.strategy = strategy
        events = transcript.events
        begin, waiting = events[-1].at if events else 0, list(reversed(events))
        for place, message in enumerate(transcript):
            while waiting and waiting[-1].at == place:
                window.apply(waiting.pop())
            if message.role == "assistant" and place > begin and strategy and window.tokens > budget:
                window._reset(strategy, budget)
            window.add(message)
        for event in reversed(waiting):
            window.apply(event)
        window._recount()
        if strategy and window.tokens > budget:
            window._reset(strategy, budget)
            window._recount()
        return window

    def _recount(self) -> None:
        """The truth, for a counter whose costs might not add up; those of a TokenCounter do."""
        if self.count is not None and not isinstance(self.count, TokenCounter):
            self.tokens = self.count(self.visible())

    def visible(self, stop: int | None = None) -> list[Message]:
        """The messages, each summary in its place; with ``stop``, those before that place in the transcript."""
        stop = len(self._shown.messages) if stop is None else stop
        out, start = [], 0
        for place, text in self._summaries:
            if place <= stop:
                out += [*self._shown.between(start, place), text]
                start = place
        return out + self._shown.between(start, stop)

    def add(self, message: Message) -> None:
        """The transcript's next message."""
        place, role = len(self._shown.messages), message.role
        self._shown.messages.append(message)
        bare = self.reasoning == "drop_all" and message.reasoning_content is not None
        if bare:
            self._shown.bare.add(place)
        cost = self._bare_cost_of(message) if bare else self._cost_of(message)
        self._cost.append(cost)
        self.tokens += cost
        if role == "assistant":
            self._turn.assistants.append(place)
            if message.tool_calls:
                self._turn.steps += 1
                self._steps.append(Step(place, place + 1, self._turn, True, self._shown))
        elif role == "tool":
            self._steps[-1].stop = place + 1
        elif role in ("user", "developer") and message.name != SUMMARY:
            before = self._shown.messages[place - 1] if place else None
            replies = before and before.role == "assistant" and not before.tool_calls
            if message.name == HARNESS and replies and self._asked:
                self._steps.append(Step(place - 1, place + 1, self._turn, False, self._shown))
            self._asked = self._asked or role == "user"
            self._close_turn()

    def apply(self, event: ContextEvent) -> None:
        """What a recorded event dropped leaves. Raises ValueError for an event that would cut a step in two."""
        starts = {step.start: step for step in self._steps}
        gone, covered = [], 0
        for first, last in event.dropped:
            place = first
            while place < last and place in starts:
                gone.append(starts[place])
                place = starts[place].stop
            covered += place == last
        if covered < len(event.dropped):
            raise ValueError(
                f"the event at {event.at} drops {event.dropped}, which does not cover whole visible steps"
            )
        self._drop(gone)
        if event.text is not None:
            if event.merged:
                self.tokens -= sum(self._cost_of(text) for _, text in self._summaries)
                self._summaries = []
            text = summary_message(event.text)
            self._summaries.append((event.dropped[-1][1], text))
            self._summaries.sort(key=lambda pair: pair[0])
            self.tokens += self._cost_of(text)

    def plan(self, strategy: Strategy, budget: int) -> tuple[ContextEvent, list[Message], int] | None:
        """What the strategy would drop now: the event without a text, the messages that leave, and their tokens;
        None when there is nothing. Raises ValueError when it chooses what is not its to drop."""
        planned = self._planned(strategy, budget)
        if planned is None:
            return None
        event, gone, tokens = planned
        earlier = [text for _, text in self._summaries] if event.merged else []
        return event, earlier + [message for step in gone for message in step.messages], tokens

    def _planned(self, strategy: Strategy, budget: int) -> tuple[ContextEvent, list[Step], int] | None:
        """The same with the steps that leave instead of their messages."""
        strategy, history, left = as_strategy(strategy), self._history(), self.tokens
        gone: list[Step] = []
        while history and left > budget:
            for step in history:
                step.tokens = sum(self._cost[step.start : step.stop])
            chosen = set(strategy.choose(tuple(history)))
            if not chosen <= set(history):
                raise ValueError(
                    f"{strategy.name} chose a step that is not among the {len(history)} which may go"
                )
            if not chosen:
                break
            gone += chosen
            left -= sum(step.tokens for step in chosen)
            history = [step for step in history if step not in chosen]
        if not gone:
            return None
        gone.sort(key=lambda step: step.start)
        ranges: list[list[int]] = []
        for step in gone:
            if ranges and ranges[-1][1] == step.start:
                ranges[-1][1] = step.stop
            else:
                ranges.append([step.start, step.stop])
        event = ContextEvent(
            kind=strategy.kind,
            at=len(self._shown.messages),
            dropped=tuple((a, b) for a, b in ranges),
            merged=strategy.merges,
        )
        earlier = sum(self._cost_of(text) for _, text in self._summaries) if strategy.merges else 0
        return event, gone, earlier + sum(step.tokens for step in gone)

    def _reset(self, strategy: Strategy, budget: int) -> None:
        planned = self._planned(strategy, budget)
        if planned is None:
            return
        event, _, tokens = planned
        if strategy.summarises:
            if self._cost_of(summary_message(PLACEHOLDER)) >= tokens:
                return
            event = event.model_copy(update={"text": PLACEHOLDER})
        self.apply(event)

    def _history(self) -> list[Step]:
        newest = max(
            (i for i, step in enumerate(self._steps) if step.has_calls), default=len(self._steps) - 1
        )
        return self._steps[: max(newest, 0)]

    def _drop(self, gone: Sequence[Step]) -> None:
        left = set(gone)
        for step in gone:
            for place in range(step.start, step.stop):
                self._shown.messages[place] = None
                self.tokens -= self._cost[place]
                self._cost[place] = 0
            if step.has_calls:
                step.turn.steps -= 1
                if step.turn is not self._turn:
                    self._forget_thinking(step.turn)
        self._steps = [step for step in self._steps if step not in left]

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        self._forget_thinking(turn)

    def _forget_thinking(self, turn: _Turn) -> None:
        """Of a turn that is over: what the policy drops of it."""
        if self.reasoning == "v32" or (self.reasoning == "keep_tool_turns" and turn.steps == 0):
            for place in turn.assistants:
                message = self._shown.messages[place]
                if message is not None and message.reasoning_content is not None:
                    self._shown.bare.add(place)
                    cost = self._bare_cost_of(message)
                    self.tokens += cost - self._cost[place]
                    self._cost[place] = cost
            turn.assistants.clear()


def summary_message(text: str) -> Message:
    """The message in which a summary stands in the context."""
    return user(text, SUMMARY)


def _costs(count: Count | None, base: int) -> tuple[Callable[[Message], int], Callable[[Message], int]]:
    """What a message costs, and what it costs without its thinking."""
    if count is None:
        return (lambda message: 0), (lambda message: 0)
    if isinstance(count, TokenCounter):
        return count.message, lambda message: count.message(message, reasoning=False)
    return (lambda m: count([m]) - base), (lambda m: count([without_reasoning(m)]) - base)
