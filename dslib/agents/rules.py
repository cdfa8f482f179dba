"""Rules that the prompts of deployed agents state, as functions that can be checked and switched on.

A rule looks at the assistant's message with index ``place`` and at what came before it, and returns a complaint or
None. The loop counts complaints, and where told to, answers with them instead of running the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dslib.agents.messages import HARNESS, Message

Rule = Callable[[Sequence[Message], int], str | None]

#: Names under which agents know a tool that only thinks.
THINKING_TOOLS = ("think", "sequentialthinking", "sequential_thinking")
#: Thoughts in a row that are one too many, and failures after which a tool is to be left alone.
MOST_THOUGHTS, MOST_FAILURES = 3, 3


def no_three_thoughts(messages: Sequence[Message], place: int) -> str | None:
    """Think, act, think: never three thoughts in a row. A thought is a call of a thinking tool, or a message
    that calls nothing; a person's message begins the row anew."""
    row = 0
    for message in reversed(messages[max(0, place - 4 * MOST_THOUGHTS) : place + 1]):
        if message.role == "assistant":
            names = [call.function.name for call in message.calls] or [THINKING_TOOLS[0]]
            for name in reversed(names):
                if name not in THINKING_TOOLS:
                    return None
                row += 1
                if row == MOST_THOUGHTS:
                    return f"{row} thoughts in a row; act before you think again"
        elif message.role != "tool" and message.name != HARNESS:
            return None
    return None


def another_tool_after_failures(messages: Sequence[Message], place: int) -> str | None:
    """A tool that has failed more than three times, so after the fourth, is not to be called again; a success in
    between begins the count anew."""
    wanted = {call.function.name for call in messages[place].calls}
    if not wanted:
        return None
    failures: Counter[str] = Counter()
    names: dict[str, str] = {}
    for message in messages[:place]:
        if message.calls:
            names = {call.id: call.function.name for call in message.calls}
        elif message.role == "tool" and (name := names.get(message.tool_call_id)):
            failures[name] = failures[name] + 1 if message.failed else 0
    for name in sorted(wanted):
        if failures[name] > MOST_FAILURES:
            return f"{name} has failed {failures[name]} times in a row; try another tool"
    return None


def answer_by_tool(messages: Sequence[Message], place: int) -> str | None:
    """Every answer is a call, the last one too: words alone reach nobody."""
    return None if messages[place].calls else "you called no tool; act, and finish, by calling a tool"


RULES: dict[str, Rule] = {
    "no_three_thoughts": no_three_thoughts,
    "another_tool_after_failures": another_tool_after_failures,
    "answer_by_tool": answer_by_tool,
}


def rules_of(names: Iterable[str | Rule]) -> dict[str, Rule]:
    """Name → rule, for names of :data:`RULES` and functions of one's own. Raises ValueError for an unknown name."""
    found: dict[str, Rule] = {}
    for rule in names:
        if callable(rule):
            found[rule.__name__] = rule
        elif rule in RULES:
            found[rule] = RULES[rule]
        else:
            raise ValueError(f"the rule {rule!r} is unknown; use {', '.join(RULES)} or a function")
    return found


def violations(messages: Sequence[Message], rules: Iterable[str | Rule] = tuple(RULES)) -> Counter[str]:
    """How often each rule is broken in a finished transcript; a rule that is kept counts 0."""
    found = rules_of(rules)
    counts: Counter[str] = Counter(dict.fromkeys(found, 0))
    messages = list(messages)
    for place, message in enumerate(messages):
        if message.role == "assistant":
            counts.update(name for name, rule in found.items() if rule(messages, place))
    return counts
