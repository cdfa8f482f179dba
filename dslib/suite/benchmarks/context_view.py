"""Views of long transcripts: what the context costs at every call of an agent, and how that grows."""

from __future__ import annotations

from collections.abc import Callable

from dslib.agents.context import REASONING_POLICIES, discard_75, discard_all, summary, view
from dslib.agents.messages import Message
from dslib.agents.tokens import TokenCounter
from dslib.agents.transcript import Transcript
from dslib.suite.benchmarks import interleaved, print_table

#: Messages of the transcripts; what a view of the first may take, in milliseconds.
MESSAGES, GOAL_MS = (1_000, 2_000, 4_000, 8_000), 5.0
#: The budget as a share of the whole transcript: strategies reset several times on the way.
SHARE = 0.2
REPEATS = 50
BUDGET_S = 20.0

NOTES = """A transcript of one question, and calls with thoughts of 20 words and results of 50. A strategy has a
budget of a fifth of it, and its view follows the transcript from the start. times: the median, as a multiple of that
of the shortest transcript; a linear view takes as many times as long as the transcript is."""


def main() -> None:
    """Time every policy and strategy and print the table; a missed goal is printed like a reached one."""
    rows: list[list] = []
    try:
        for name in cases(transcript(2)):
            rows += timed(name)
    finally:
        columns = ["view", "messages", "median ms", "min–max", "n", "times", "goal"]
        print_table("dslib.agents.view", columns, rows)
        print(NOTES)


def transcript(messages: int) -> Transcript:
    """A question, then calls and their results in turns."""
    found = [
        {"role": "system", "content": "You search until you know."},
        {"role": "user", "content": "Who wrote it?"},
    ]
    for number in range((messages - 1) // 2):
        function = {"name": "search", "arguments": f'{{"query": "page {number}"}}'}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        thought = f"Page {number} may say more about it." * 3
        found += [
            {"role": "assistant", "reasoning_content": thought, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": f"Line {number} of what it says. " * 10},
        ]
    return Transcript.of(found[:messages] if found[messages - 1 :] else found)


def cases(whole: Transcript) -> dict[str, Callable[[], list[Message]]]:
    """The view by name: each reasoning policy without a budget, then each strategy under ``v32``."""
    budget = max(1, int(SHARE * TokenCounter()(list(whole))))
    plain = {policy: lambda policy=policy: view(whole, policy) for policy in REASONING_POLICIES}
    managed = {
        strategy.name: lambda strategy=strategy: view(whole, "v32", strategy, budget)
        for strategy in (discard_75, discard_all, summary)
    }
    return plain | managed


def timed(name: str) -> list[list]:
    """Rows of one view, a transcript each."""
    views = {str(count): cases(transcript(count))[name] for count in MESSAGES}
    timings = interleaved(views, repeats=REPEATS, budget_s=BUDGET_S)
    shortest, rows = timings[str(MESSAGES[0])].median, []
    for count in MESSAGES:
        timing = timings[str(count)]
        reached = "reached" if timing.median * 1e3 <= GOAL_MS else "missed"
        rows.append(
            [
                name,
                count,
                f"{timing.median * 1e3:.2f}",
                f"{timing.min * 1e3:.2f}–{timing.max * 1e3:.2f}",
                timing.n,
                f"{timing.median / shortest:.1f}",
                f"{GOAL_MS:g} ms {reached}" if count == MESSAGES[0] else "",
            ]
        )
    return rows
