"""Cold start: thinking and tool calls in one trajectory, by prompting alone, and how often that works.

A model that reasons has not called tools, and a model that calls tools has not reasoned. A system prompt that asks
for both at once makes it do so now and then, which is enough for reinforcement learning to begin with
(DeepSeek-V3.2, arXiv:2512.02556, §3.2.2, Tables 6 to 8). The prompts here are ours, in the form of those tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dslib.agents.messages import Message, ToolCall, assistant, tool_call
from dslib.agents.tools import read_arguments

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{CALL}(.*?)(?:{CALL_END}|$)", re.DOTALL)

#: For reasoning data (Table 6): think first, between tags, then answer.
REASONING_PROMPT = (
    f"Think step by step before you answer. Write your thinking between {THINK} and {THINK_END}, and after it the "
    "answer alone."
)


def tool_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """For data of agents that do not reason (Table 7): which tools there are, and how to call them.

    ``tools``: schemas in OpenAI's form. Raises ValueError for none."""
    if not tools:
        raise ValueError("tools is empty; a prompt about tools needs at least one")
    return render_tools(tools)


def cold_start_prompt(tools: Sequence[Mapping[str, Any]], max_calls: int | None = None) -> str:
    """For both in one trajectory (Table 8): call tools in the course of thinking, several times if need be, and
    think on about what they return. ``max_calls`` states a limit. Raises as :func:`tool_prompt`."""
    limit = "" if max_calls is None else f" Make at most {max_calls} calls."
    return (
        f"{tool_prompt(tools)}\n\n"
        f"Think before every call and before the answer, between {THINK} and {THINK_END}. Call a tool as soon as it "
        "can settle what you are thinking about; when its result has come, go on thinking from where you were, and "
        f"call again as often as it helps.{limit} Once you are sure, think a last time and give the answer after "
        f"{THINK_END}, without a call."
    )


def render_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools' schemas, a line each, and the form of a call."""
    lines = [json.dumps(made.get("function", made), ensure_ascii=False) for made in tools]
    form = f'{CALL}{{"name": "…", "arguments": {{…}}}}{CALL_END}'
    return "You can call these tools:\n" + "\n".join(lines) + f"\nTo call one, write\n{form}"


def render_message(message: Message) -> str:
    """A message as text with tags: what :func:`parse_completion` reads back."""
    thought = "" if message.reasoning_content is None else f"{THINK}{message.reasoning_content}{THINK_END}"
    calls = [f"{CALL}{_call_json(call)}{CALL_END}" for call in message.calls]
    return "\n".join(filter(None, [thought, message.text, *calls]))


def parse_completion(text: str, opened: bool = False) -> Message:
    """The assistant's message in a completion with tags. Give the completion alone: tags in a prompt are not an
    answer. ``opened``: the prompt has written the opening ``<think>``.

    Thinking is what stands between the first pair of tags; if it never ends, everything is thinking. A call is
    JSON with a name and, optionally, arguments; ids are ``call_0``, ``call_1``, …. What looks like a call and is
    none stays in the content as it was written: nothing raises.
    """
    reasoning = None
    start = 0 if opened else text.find(THINK)
    if opened or (start >= 0 and not text[:start].strip()):
        begin = start if opened else start + len(THINK)
        reasoning, found, rest = text[begin:].partition(THINK_END)
        text = rest if found else ""
        reasoning = reasoning.strip()
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        try:
            fields = read_arguments(match[1])
            name, arguments = fields["name"], fields.get("arguments", {})
            calls.append(tool_call(name, arguments, f"call_{len(calls)}"))
        except (ValueError, KeyError, TypeError):
            return match[0]
        return ""

    content = _CALL.sub(taken, text).strip()
    return assistant(content or None, calls, reasoning)


def interleaving_fault(messages: Iterable[Message], tools: Iterable[str] | None = None) -> str | None:
    """Why a trajectory is no valid interleaved one; None if it is.

    Valid: every message of the assistant thinks (thinking that is not empty), at least one calls a tool, all calls
    have arguments that are a JSON object, name one of ``tools`` (where given) and got a result, and the last
    message of the assistant is an answer, or a call that ended the run.
    """
    known = None if tools is None else set(tools)
    called, waiting, last = False, set(), None
    for place, message in enumerate(messages):
        if message.role == "tool":
            waiting.discard(message.tool_call_id)
        elif waiting:
            return f"message {place} comes before the results of {sorted(waiting)}"
        if message.role != "assistant":
            continue
        last = message
        if not (message.reasoning_content or "").strip():
            return f"message {place} does not think"
        if any(tag in message.text for tag in (THINK, THINK_END, CALL, CALL_END)):
            return f"message {place} has tags in its text"
        for call in message.calls:
            called = True
            waiting.add(call.id)
            if known is not None and call.function.name not in known:
                return f"message {place} calls {call.function.name!r}, which is no tool"
            try:
                read_arguments(call.function.arguments)
            except ValueError as error:
                return f"message {place}: the arguments of {call.function.name} {error}"
    if waiting:
        return f"the calls {sorted(waiting)} have no result"
    if not called:
        return "no tool was called"
    if not last.calls and not last.text.strip():
        return "there is no answer"
    return None


def interleaved_share(trajectories: Iterable[Iterable[Message]], tools: Iterable[str] | None = None) -> float:
    """The share of trajectories that :func:`interleaving_fault` finds nothing wrong with: how well a cold start
    works, before and after reinforcement learning. Raises ValueError for no trajectory."""
    names = None if tools is None else set(tools)
    faults = [interleaving_fault(trajectory, names) for trajectory in trajectories]
    if not faults:
        raise ValueError("trajectories is empty; a share needs at least one")
    return sum(fault is None for fault in faults) / len(faults)


def _call_json(call: ToolCall) -> str:
    try:
        arguments: Any = read_arguments(call.function.arguments)
    except ValueError:
        arguments = call.function.arguments
    return json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
