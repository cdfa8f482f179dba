"""Generated conversations of every legal form."""

import pytest
from hypothesis import strategies as st

from dslib.agents.messages import HARNESS, Message, assistant, system, tool_call, tool_result, user

_BLOCKS = ("step", "step", "step", "parallel", "words", "user", "harness", "developer", "thought")


@st.composite
def _conversations(draw):
    """Messages that fit together: instructions, then blocks in any order. Texts are runs of a letter, so that a
    failure shrinks to something readable."""
    messages = []
    if draw(st.booleans()):
        messages.append(system("s" * draw(st.integers(1, 40))))
    if draw(st.integers(0, 9)):  # now and then nobody asks anything
        messages.append(user("q" * draw(st.integers(1, 40))))
    for place, block in enumerate(draw(st.lists(st.sampled_from(_BLOCKS), max_size=16))):
        size = draw(st.integers(1, 120))
        reasoning = None if size % 3 == 0 else "r" * (2 * size)
        if block in ("step", "parallel"):
            several = 1 if block == "step" else 2 + size % 2
            ids = [f"c{i}" if size % 2 else f"c{place}_{i}" for i in range(several)]
            calls = [tool_call("search", {"q": "a" * (size % 7)}, name) for name in ids]
            messages.append(assistant(None if size % 5 else "w", calls, reasoning))
            answered = ids[::-1] if size % 4 == 0 else ids
            messages += [
                tool_result(name, "Error: no" if size % 11 == 0 else "t" * size) for name in answered
            ]
        elif block == "words":
            messages.append(assistant("w" * size, reasoning=reasoning))
        elif block == "thought":
            messages.append(assistant(None, reasoning="r" * size))
        elif block == "user":
            messages.append(user("u" * size))
        elif block == "harness":
            messages += [
                assistant("w" * size, reasoning=reasoning),
                user("h" * (size % 9 + 1), HARNESS),
            ]
        else:
            messages.append(Message(role="developer", content="d" * size))
    return messages


@pytest.fixture(scope="session")
def conversations():
    """A hypothesis strategy for lists of messages."""
    return _conversations()
