"""The trained policy of the search world as a model for the agent loop: ``(messages, tools) -> message``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dslib.agents.context import Strategy, summary
from dslib.agents.messages import Message
from dslib.agents.outcome import OutOfWindow
from dslib.agents.tools import Tool, tool
from dslib.attention import KVCache
from dslib.rl.rollout import SamplingConfig, draw
from dslib.tasks.search_tokens import RULED_OUT, SearchVocabulary
from dslib.tasks.search_world import SearchTools, SearchWorlds

#: :data:`dslib.agents.summary`, each new one in the place of the last: :func:`oracle_summary` keeps its facts.
ORACLE: Strategy = replace(summary, name="oracle summary", merges=True)


class SearchPolicy:
    """A decoder that reads OpenAI-style messages of the search world and answers with one.

    ``worlds`` gives the vocabulary. ``temperature`` 0 is greedy; ``stream``: whole numbers that seed the random
    numbers, one a token, as :func:`dslib.rl.play`'s: an episode played with the same stream has the same tokens.
    One policy then plays one episode. ``window``: how many tokens it can see, its own among them; a turn that does
    not fit raises OutOfWindow, which ends a run. ``thinking=False`` forbids verdicts. :meth:`count` counts tokens as
    the policy reads them, for the harness that manages its context.
    """

    def __init__(
        self,
        model: nn.Module,
        worlds: SearchWorlds,
        temperature: float = 0.0,
        stream: Sequence[int] = (0,),
        window: int | None = None,
        thinking: bool = True,
    ) -> None:
        self.words = SearchVocabulary(worlds)
        if model.lm_head.out_features < len(self.words):
            raise ValueError(
                f"the model's vocabulary of {model.lm_head.out_features} lacks words of the worlds' {len(self.words)}"
            )
        self.model, self.window = model, window
        self.sampling = SamplingConfig(1, temperature)
        self.forbidden = [] if thinking else list(self.words.verdicts)
        self.numbers = np.random.default_rng(stream)
        self.turns = 0

    def count(self, messages: Sequence[Message | Mapping[str, Any]]) -> int:
        """Tokens of messages, as :meth:`~dslib.tasks.search_tokens.SearchVocabulary.count`."""
        return self.words.count(map(plain, messages))

    @torch.no_grad()
    def __call__(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Message:
        """The next message, from messages or plain dictionaries. ``tools`` are not read: the policy knows its
        three. Raises ValueError for messages without a question."""
        words = self.words
        prompt = words.messages_tokens(map(plain, messages))
        if not any(token in words.questions for token in prompt):
            raise ValueError("the messages hold no question of this world, such as '?field=3 ?prize=any'")
        room = words.longest_thought + 2
        if self.window is not None:
            room = min(room, self.window - len(prompt))
        written: list[int] = []
        was_training, cache = self.model.training, KVCache()
        self.model.eval()
        try:
            read = prompt
            while not words.turn_ended(written) and len(written) < room:
                logits = self.model(torch.tensor([read]), cache=cache)[:, -1]
                logits[:, self.forbidden] = float("-inf")
                number = torch.tensor([self.numbers.random()], dtype=torch.float64)
                read = [int(draw(logits, number, self.sampling)[0])]
                written += read
        finally:
            self.model.train(was_training)
        if (
            self.window is not None
            and not words.turn_ended(written)
            and len(prompt) + len(written) >= self.window
        ):
            raise OutOfWindow(
                f"the turn after {len(prompt)} tokens does not fit into the window of {self.window}"
            )
        self.turns += 1
        return Message.model_validate(words.message(written, f"call_{self.turns}"))


def search_tools(session: SearchTools) -> list[Tool]:
    """The tools of an episode; an answer ends the run."""
    return [tool(session.search), tool(session.open), tool(session.answer, ends=True)]


def oracle_summary(messages: Sequence[Message | Mapping[str, Any]], words: SearchVocabulary) -> str:
    """What :func:`dslib.tasks.search_episode.summary` writes down, from messages: ``ruled_out: e3 e17``.

    Entities of an earlier summary, then those whose opened page contradicts the question. An oracle: a rule
    written by hand that reads without a mistake. The summariser of a run is
    ``lambda messages: oracle_summary(messages, policy.words)``, its strategy :data:`ORACLE`.
    """
    question: list[int] = []
    found: dict[int, None] = {}
    opened: dict[str, int] = {}
    for message in map(plain, messages):
        tokens = words.message_tokens(message)
        if message["role"] == "assistant" and message.get("tool_calls"):
            for call in message["tool_calls"]:
                name, argument = words.call_tokens(call)
                if name == words.open:
                    opened[call["id"]] = argument
        elif message["role"] == "tool":
            entity = opened.get(message.get("tool_call_id"))
            page = len(tokens) == len(question) and all(token in words.facts for token in tokens)
            if entity is not None and page and words.other in words.verdicts_of(question, tokens):
                found[entity] = None
        else:
            question = question or [token for token in tokens if token in words.questions]
            found |= dict.fromkeys(token for token in tokens if token in words.entities)
    return f"{RULED_OUT} {words.decode(list(found))}".strip()


def plain(message: Message | Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as a plain dictionary."""
    return message.to_openai() if isinstance(message, Message) else message
