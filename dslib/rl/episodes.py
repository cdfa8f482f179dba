"""Episodes of many turns: the policy writes, an environment answers, and both are read on.

:func:`play` plays many at once with one cache; :class:`EpisodeTrainer` trains on what it recorded. What the
environment said is read and never scored: the mask of a rollout has gaps there. Where an episode manages its
context, the text that the policy sees is cut and goes on: each such stretch, a segment, is a sequence of its own
for the loss, with the advantage of its episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dslib.rl.config import RLConfig
from dslib.rl.objectives import PolicyBatch
from dslib.rl.ragged import RaggedCache
from dslib.rl.rollout import Rollout, SamplingConfig, draw, score
from dslib.rl.samples import Samples
from dslib.rl.trainer import Trainer


class Episode(Protocol):
    """What is played, one turn after another, until ``outcome`` is not None.

    ``prompt``: all that the policy reads before its next turn; ``room``: how many tokens it may write in it;
    ``forbidden``: tokens that it must not write.
    """

    prompt: list[int]
    outcome: str | None
    forbidden: list[int]

    @property
    def room(self) -> int: ...

    @property
    def reward(self) -> float: ...

    @property
    def calls(self) -> int: ...

    def ended(self, written: Sequence[int]) -> bool:
        """Whether the turn is over with the last of these tokens."""

    def write(self, written: Sequence[int]) -> None:
        """Take the turn; sets ``outcome``, or the next ``prompt``."""


class EpisodeTask(Protocol):
    """Where episodes come from. ``max_new_tokens``: what one may write at most."""

    vocab_size: int
    max_new_tokens: int

    def __len__(self) -> int: ...

    def episode(self, index: int) -> Episode: ...


@dataclass(frozen=True)
class PlayedEpisodes:
    """Episodes that were played to their end, in the order in which they were given.

    ``rollout``: a row a segment, with ``prompt_length`` 1: the mask is True for what the policy wrote. None where
    nothing was recorded. ``owner``: (segments,) int64, the episode that a segment is of. For each episode
    ``written``, ``read`` and ``reused``: tokens that it generated; tokens that it read anew; tokens of a prompt that
    stood in the cache already, a prefix that had not changed, summed over the turns; all (episodes,) int64.
    """

    episodes: list[Episode]
    written: Tensor
    read: Tensor
    reused: Tensor
    rollout: Rollout | None = None
    owner: Tensor | None = None

    @property
    def rewards(self) -> Tensor:
        """(episodes,) float32."""
        return torch.tensor([episode.reward for episode in self.episodes])

    @property
    def calls(self) -> Tensor:
        """(episodes,) int64."""
        return torch.tensor([episode.calls for episode in self.episodes])

    @property
    def outcomes(self) -> list[str]:
        """How each ended."""
        return [episode.outcome or "" for episode in self.episodes]


@dataclass
class _Segment:
    owner: int
    tokens: list[int]
    places: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)


class _Row:
    """An episode at play. ``seen`` are the tokens in the cache, ``queue`` those to be read next."""

    def __init__(self, number: int, episode: Episode, stream: Sequence[int]) -> None:
        self.number, self.episode = number, episode
        self.numbers = np.random.default_rng(stream)
        self.seen: list[int] = []
        self.turn: list[int] = []
        self.segments: list[_Segment] = []
        self.written = self.read = self.reused = 0
        self._begin()

    def next(self) -> tuple[int, int]:
        """(token to read, its position)."""
        token = self.queue[len(self.seen) - self.start]
        self.seen.append(token)
        return token, len(self.seen) - 1

    @property
    def writes(self) -> bool:
        return len(self.seen) - self.start == len(self.queue)

    def take(self, token: int, logp: float, entropy: float) -> None:
        """The policy wrote ``token``."""
        segment = self.segments[-1]
        segment.places.append(len(segment.tokens))
        segment.tokens.append(token)
        segment.logp.append(logp)
        segment.entropy.append(entropy)
        self.turn.append(token)
        self.written += 1
        if not self.episode.ended(self.turn):
            self._read([token])
            return
        self.episode.write(self.turn)
        self.turn = []
        if self.episode.outcome is None:
            self._go_on()

    def _begin(self) -> None:
        self.segments.append(_Segment(self.number, list(self.episode.prompt)))
        self._read(self.episode.prompt)
        self.read += len(self.queue)

    def _read(self, tokens: Sequence[int]) -> None:
        self.queue, self.start = list(tokens), len(self.seen)

    def _go_on(self) -> None:
        prompt, segment = self.episode.prompt, self.segments[-1]
        so_far = len(segment.tokens)
        if prompt[:so_far] == segment.tokens:
            segment.tokens = list(prompt)
            self.reused += so_far
            self.read += len(prompt) - so_far
            self._read(prompt[len(self.seen) :])
            return
        common = 0  # at least the last token is read, for the logits after it
        while common < min(len(self.seen), len(prompt) - 1) and self.seen[common] == prompt[common]:
            common += 1
        self.seen = self.seen[:common]
        self.reused += common
        self.read += len(prompt) - common
        self.segments.append(_Segment(self.number, list(prompt)))
        self._read(prompt[common:])


@torch.no_grad()
def play(
    model: nn.Module,
    episodes: Iterable[Episode],
    streams: Sequence[Sequence[int]],
    sampling: SamplingConfig | None = None,
    slots: int = 128,
    record: bool = True,
) -> PlayedEpisodes:
    """Play episodes to their end, ``slots`` at a time: where one is over, the next takes its place in the batch.

    ``streams``: for each episode whole numbers that seed its random numbers, one a token; its tokens then depend on
    no other episode, and strategies that are given the same streams meet the same luck. ``sampling``: temperature (0 is
    greedy) and filters; ``max_new_tokens`` and ``end`` are the episode's business. Raises ValueError for another
    number of streams than of episodes, for a prompt with tokens outside the model's vocabulary, and for logits
    that are not finite.
    """
    waiting = list(episodes)
    if len(waiting) != len(streams):
        raise ValueError(f"{len(streams)} streams for {len(waiting)} episodes; give one each")
    if slots < 1:
        raise ValueError(f"slots={slots} must be at least 1")
    sampling = SamplingConfig(1) if sampling is None else sampling
    vocabulary, device = model.lm_head.out_features, model.lm_head.weight.device
    for number, episode in enumerate(waiting):
        if episode.prompt and not 0 <= min(episode.prompt) <= max(episode.prompt) < vocabulary:
            raise ValueError(
                f"the prompt of episode {number} holds token {max(episode.prompt)}, and the model's vocabulary "
                f"is {vocabulary}"
            )
    rows = [_Row(i, *pair) for i, pair in enumerate(zip(waiting, streams, strict=True)) if i < slots]
    everything, started = list(rows), len(rows)
    cache, was_training = RaggedCache(model, len(rows)), model.training
    model.eval()
    try:
        while rows:
            tokens, positions = torch.tensor([row.next() for row in rows], device=device).T
            states = cache.step(tokens, positions)
            at = [place for place, row in enumerate(rows) if row.writes]
            if not at:
                continue
            for place, *found in zip(
                at, *_choices(model, states[at], [rows[i] for i in at], sampling), strict=True
            ):
                rows[place].take(*found)
            over = [place for place in at if rows[place].episode.outcome is not None]
            gone = []
            for place in over:
                if started < len(waiting):
                    rows[place] = _Row(started, waiting[started], streams[started])
                    everything.append(rows[place])
                    started += 1
                else:
                    gone.append(place)
            if gone:
                left = [place for place in range(len(rows)) if place not in set(gone)]
                cache.keep(torch.tensor(left, dtype=torch.long, device=device))
                rows = [rows[place] for place in left]
    finally:
        model.train(was_training)
    counts = {
        name: torch.tensor([getattr(r, name) for r in everything]) for name in ("written", "read", "reused")
    }
    if not record:
        return PlayedEpisodes(waiting, **counts)
    segments = [segment for row in everything for segment in row.segments if segment.places]
    owner = torch.tensor([segment.owner for segment in segments])
    return PlayedEpisodes(waiting, **counts, rollout=_rollout(segments, device), owner=owner)


def _choices(
    model: nn.Module, states: Tensor, rows: Sequence[_Row], sampling: SamplingConfig
) -> tuple[list[int], list[float], list[float]]:
    """A token, its log-probability and the entropy, for each row that writes."""
    logits = model.lm_head(states)
    for place, row in enumerate(rows):
        if row.episode.forbidden:
            logits[place, row.episode.forbidden] = float("-inf")
    numbers = torch.tensor([row.numbers.random() for row in rows], dtype=torch.float64, device=logits.device)
    chosen, logp, entropy, _ = draw(logits, numbers, sampling)
    if not logp.isfinite().all():
        place = int((~logp.isfinite()).nonzero()[0])
        raise ValueError(f"the model's logits are not finite in episode {rows[place].number}")
    return chosen.tolist(), logp.tolist(), entropy.tolist()


def _rollout(segments: Sequence[_Segment], device: torch.device) -> Rollout:
    width = max((len(segment.tokens) for segment in segments), default=2)
    tokens = torch.zeros(len(segments), width, dtype=torch.long)
    mask = torch.zeros(len(segments), width, dtype=torch.bool)
    logp, entropy = torch.zeros(len(segments), width), torch.zeros(len(segments), width)
    for row, segment in enumerate(segments):
        tokens[row, : len(segment.tokens)] = torch.tensor(segment.tokens)
        mask[row, segment.places] = True
        logp[row, segment.places] = torch.tensor(segment.logp)
        entropy[row, segment.places] = torch.tensor(segment.entropy)
    parts = (mask, logp, entropy)
    return Rollout(tokens.to(device), 1, *(part[:, 1:].to(device) for part in parts))


class EpisodeTrainer(Trainer):
    """:class:`dslib.rl.Trainer` on episodes: a step plays ``config.group_size`` episodes in each of ``config.prompts``
    worlds, and compares those of one world. Its reward is the episode's, for every token that the policy wrote in it.

    ``slots``: how many are played at once. The table also has ``calls``, their mean, and the share of each outcome.
    Raises ValueError for algorithms with a critic, a greedy baseline, dynamic sampling or a length penalty, and for
    episodes that forbid tokens: the policy that is trained would not be the one that was sampled.
    """

    def __init__(
        self,
        model: nn.Module,
        task: EpisodeTask,
        config: RLConfig,
        reference: nn.Module | None = None,
        optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] | None = None,
        slots: int = 128,
    ) -> None:
        recipe = config.recipe
        if recipe.critic or recipe.greedy_baseline or recipe.dynamic_sampling or recipe.overlong:
            raise ValueError(
                f"algorithm={config.algorithm!r} has a critic, a greedy baseline, dynamic sampling or a length "
                "penalty, which episodes do without; use 'grpo', 'grpo_no_std', 'dr_grpo', 'rloo' or 'gspo'"
            )
        if task.episode(0).forbidden:
            raise ValueError("the task forbids tokens to the policy; train on episodes that do not")
        super().__init__(model, task, config, reference, optimizers)
        self.slots = slots
        self.played: PlayedEpisodes | None = None

    def collect(self) -> Samples:
        """Play; the rows of the rollout are segments."""
        config = self.config
        indices = torch.randint(len(self.task), (config.prompts,), generator=self.generator)
        base = int(torch.randint(2**62, (), generator=self.generator))
        every = indices.repeat_interleave(config.group_size).tolist()
        episodes = [self.task.episode(index) for index in every]
        streams = [(base, number) for number in range(len(episodes))]
        sampling = SamplingConfig(1, config.temperature, config.top_p, config.top_k)
        self.played = play(self.sampler(), episodes, streams, sampling, self.slots)
        rewards = self.played.rewards.view(-1, config.group_size)
        return Samples(indices, self.played.rollout, rewards, len(episodes), rewards.double().mean().item())

    def step(self) -> dict[str, float]:
        """As in :class:`Trainer`."""
        row = super().step()
        shares = Counter(self.played.outcomes)
        row["calls"] = self.played.calls.double().mean().item()
        row |= {name: count / len(self.played.episodes) for name, count in sorted(shares.items())}
        return row

    @torch.no_grad()
    def prepare(self, samples: Samples) -> PolicyBatch:
        """An episode's advantage for each of its segments."""
        rollout = samples.rollout
        advantages = self.recipe.advantages(samples.rewards).flatten()
        logp_ref = None
        if self.reference is not None:
            logp_ref = score(self.reference, rollout, self.config.temperature)
        advantages = advantages[self.played.owner].to(rollout.tokens.device)
        return PolicyBatch(None, rollout.logp, advantages, rollout.mask, logp_ref)
