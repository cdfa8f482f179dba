"""Agents: messages, transcripts that forget nothing, contexts as views over them, tools, models and the loop."""

from dslib.agents.context import (
    REASONING_POLICIES,
    ContextOverflow,
    Step,
    Strategy,
    discard_75,
    discard_all,
    summary,
    view,
)
from dslib.agents.loop import run
from dslib.agents.messages import Message, ToolCall, Usage, from_openai, results_as_user, to_openai
from dslib.agents.models import Endpoint, Model, ModelError, Scripted, SmolLM2, summarise_with
from dslib.agents.outcome import LoopConfig, Outcome, ParallelOutcome, Stop, parallel_fewest_step
from dslib.agents.prompts import (
    cold_start_prompt,
    interleaved_share,
    interleaving_fault,
    parse_completion,
)
from dslib.agents.rules import RULES, violations
from dslib.agents.tokens import TokenCounter, shared_prefix
from dslib.agents.tools import Tool, execute, finish, mcp_tools, openai_tools, tool
from dslib.agents.transcript import (
    ContextEvent,
    DamagedTranscript,
    Note,
    OrphanResult,
    Transcript,
    TranscriptError,
    UnansweredCalls,
)

__all__ = [
    "REASONING_POLICIES",
    "RULES",
    "ContextEvent",
    "ContextOverflow",
    "DamagedTranscript",
    "Endpoint",
    "LoopConfig",
    "Message",
    "Model",
    "ModelError",
    "Note",
    "OrphanResult",
    "Outcome",
    "ParallelOutcome",
    "Scripted",
    "SmolLM2",
    "Step",
    "Stop",
    "Strategy",
    "TokenCounter",
    "Tool",
    "ToolCall",
    "Transcript",
    "TranscriptError",
    "UnansweredCalls",
    "Usage",
    "cold_start_prompt",
    "discard_75",
    "discard_all",
    "execute",
    "finish",
    "from_openai",
    "interleaved_share",
    "interleaving_fault",
    "mcp_tools",
    "openai_tools",
    "parallel_fewest_step",
    "parse_completion",
    "results_as_user",
    "run",
    "shared_prefix",
    "summarise_with",
    "summary",
    "to_openai",
    "tool",
    "view",
    "violations",
]
