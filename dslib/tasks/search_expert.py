"""A scripted solver of the search world, and what supervised fine-tuning learns from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dslib.tasks.search_episode import STRATEGIES, History, SearchEpisode, is_page
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds


def expert_turn(
    history: History, words: SearchVocabulary, draw: np.random.Generator, noise: float = 0.0
) -> list[int]:
    """The turn of an expert that knows what ``history`` shows and nothing else.

    After a page it writes a verdict for each attribute. An entity without a contradiction is the answer. Else it
    opens the first entity of the newest search that it has not seen opened or ruled out, and when there is none,
    searches for one of the clues, all equally likely. With probability ``noise`` it makes a random call instead: any
    tool, with an argument that it has seen, or any at all where it has seen none. Its verdicts are always right.
    """
    newest = history.turns[-1] if history.turns else None
    thought: list[int] = []
    if newest is not None and is_page(newest, words):
        thought = words.verdicts_of(history.question, newest.result)
    if noise and draw.random() < noise:
        return thought + _random_call(history, words, draw)
    if thought and words.other not in thought:
        return [*thought, words.answer, newest.call[1]]
    return thought + _next_candidate(history, words, draw)


def hasty_turn(
    history: History, words: SearchVocabulary, draw: np.random.Generator, answers: float = 0.3
) -> list[int]:
    """The turn of an agent that calls tools and does not reason: no verdicts, and no use of them.

    It searches and opens as :func:`expert_turn` does. After a page it answers with that entity with probability
    ``answers``, whatever the page says.
    """
    newest = history.turns[-1] if history.turns else None
    if newest is not None and is_page(newest, words) and draw.random() < answers:
        return [words.answer, newest.call[1]]
    return _next_candidate(history, words, draw)


def _next_candidate(history: History, words: SearchVocabulary, draw: np.random.Generator) -> list[int]:
    """Open the first entity of the newest search that is neither opened nor ruled out, or else search."""
    seen = {
        *(history.ruled_out or ()),
        *(turn.call[1] for turn in history.turns if turn.call[0] == words.open),
    }
    for turn in reversed(history.turns):
        if turn.call[0] == words.search:
            for entity in turn.result:
                if entity in words.entities and entity not in seen:
                    return [words.open, entity]
            break
    return [words.search, int(draw.choice(_clues(history, words)))]


def _clues(history: History, words: SearchVocabulary) -> list[int]:
    asked = (words.clue(token) for token in history.question)
    return [words.fact(attribute, value) for attribute, value in asked if value is not None]


def _random_call(history: History, words: SearchVocabulary, draw: np.random.Generator) -> list[int]:
    tool = int(draw.choice(words.tools))
    if tool == words.search:
        return [tool, int(draw.choice(_clues(history, words)))]
    shown = [t for turn in history.turns for t in turn.result if t in words.entities]
    return [tool, int(draw.choice(shown or words.entities))]


@dataclass(frozen=True)
class Demonstrations:
    """Episodes of the expert on ``worlds``, for supervised fine-tuning.

    They end where the ``window`` (None: never) overflows: it is not managed. ``noise`` as in :func:`expert_turn`.
    The share ``resumed`` of them goes on from a context that a reset has left, each of the strategies of
    :mod:`dslib.tasks.search_episode` as likely, after a random number of turns up to ``latest``: so the policy knows
    how a context looks after any of them. What stood before the reset is read there and not learnt, like results.
    """

    worlds: SearchWorlds
    window: int | None = None
    noise: float = 0.0
    resumed: float = 0.3
    latest: int = 20

    def __post_init__(self) -> None:
        for name in ("noise", "resumed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        if self.latest < 1:
            raise ValueError(f"latest={self.latest} must be at least 1")

    def episode(
        self, index: int, words: SearchVocabulary, draw: np.random.Generator
    ) -> tuple[list[int], list[bool], SearchEpisode]:
        """(tokens, which of them the expert wrote, the episode) of one demonstration."""
        episode = SearchEpisode(self.worlds, index, words, self.window)
        cut = int(draw.integers(1, self.latest + 1)) if draw.random() < self.resumed else 0
        kind = tuple(STRATEGIES.values())[draw.integers(len(STRATEGIES))]
        tokens, own = list(episode.prompt), [False] * len(episode.prompt)
        while episode.outcome is None:
            written = expert_turn(episode.history, words, draw, self.noise)
            before = len(episode.prompt)
            if self.window is not None:
                written = written[: self.window - before]
            episode.write(written)
            tokens += written
            own += [True] * len(written)
            if episode.outcome is None and len(episode.turns) == cut:
                episode.history = kind(episode.history, words)
                episode.prompt = episode.history.tokens(words)
                tokens, own = list(episode.prompt), [False] * len(episode.prompt)
            elif episode.outcome is None:
                result = episode.turns[-1].result
                tokens += result
                own += [False] * len(result)
        return tokens, own, episode

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """``count`` demonstrations of random worlds, the longest first: prompts (count, attributes), the words of the
        question, completions (count, new) int64, padded, and their mask, True for what the expert wrote."""
        words = SearchVocabulary(self.worlds)
        indices = torch.randint(len(self.worlds), (count,), generator=generator).tolist()
        draw = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        found = [self.episode(index, words, draw)[:2] for index in indices]
        return padded(found, self.worlds.attributes, words.pad)


def padded(
    found: Sequence[tuple[list[int], list[bool]]], start: int, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, which of them are learnt) of each demonstration as a batch, the longest first: prompts (count,
    start), completions (count, new) int64, padded, and their mask. Raises ValueError for none."""
    if not found:
        raise ValueError("found is empty; a batch needs at least one demonstration")
    found = sorted(found, key=lambda pair: -len(pair[0]))
    longest = len(found[0][0])
    completions = torch.full((len(found), longest - start), pad)
    mask = torch.zeros(len(found), longest - start, dtype=torch.bool)
    for row, (tokens, own) in enumerate(found):
        completions[row, : len(tokens) - start] = torch.tensor(tokens[start:])
        mask[row, : len(own) - start] = torch.tensor(own[start:])
    return torch.tensor([tokens[:start] for tokens, _ in found]), completions, mask


def play_expert(episode: SearchEpisode, seed: int = 0, noise: float = 0.0) -> SearchEpisode:
    """The expert plays an episode to its end, under the episode's own window and strategy; returns the episode.

    It sees what the view shows. What it writes past its ``room`` is cut off, as a model's would be.
    """
    draw = np.random.default_rng((seed, *episode.session.world.key))
    while episode.outcome is None:
        episode.write(expert_turn(episode.history, episode.words, draw, noise)[: episode.room])
    return episode
