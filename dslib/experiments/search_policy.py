"""The policy of the search world: fine-tuned on an expert that makes mistakes, then trained by GRPO, and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.training import fit
from dslib.rl.config import RLConfig
from dslib.rl.episodes import EpisodeTrainer, play
from dslib.rl.rollout import SamplingConfig
from dslib.rl.sft import Examples, SFTConfig, completion_loss
from dslib.runs import checkpoints
from dslib.runs.workers import one_thread
from dslib.tasks.search_episode import SearchTask, guessers_choice
from dslib.tasks.search_expert import Demonstrations
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

#: Fine-tuning, GRPO and measurements draw from worlds of their own.
FINE_TUNING, TRAINING, HELD_OUT = (0, 1_000_000), (1_000_000, 1_000_000), (2_000_000, 100_000)
#: What :func:`evaluate` counts in an episode.
COUNTS = ("calls", "resets", "written", "read", "reused", "guess")
#: In how many parts a batch of fine-tuning goes through the model.
PARTS = 3
#: The shipped weights, after fine-tuning and after GRPO.
SFT_CHECKPOINT, CHECKPOINT = "search_policy_sft", "search_policy"

WORLDS = SearchWorlds()
MODEL = DecoderConfig(len(SearchVocabulary(WORLDS)), d_model=128, layers=4, heads=4)
#: Fine-tuning in rounds, each with a schedule of its own.
TUNING = (
    SFTConfig(steps=1200, batch_size=24, lr=6e-3, rest_lr=3e-3),
    SFTConfig(steps=1000, batch_size=24, lr=5e-3, rest_lr=2.5e-3),
)
TRAINER = RLConfig(
    loss={"aggregation": "token"}, prompts=16, group_size=8, minibatches=2, micro_batch=32, lr=3e-4
)


@dataclass(frozen=True)
class PolicyConfig:
    """A policy of the search world: fine-tuned, then trained by GRPO.

    Raises ValueError for a model whose vocabulary is not that of the worlds.
    """

    #: Where it acts.
    worlds: SearchWorlds = WORLDS
    #: The decoder.
    model: DecoderConfig = MODEL
    #: Tokens of the window that it is trained in, without context management (None: nothing overflows).
    window: int | None = None
    #: Share of the expert's calls that are random, :class:`~dslib.tasks.search_expert.Demonstrations`.
    noise: float = 0.06
    #: Share of the demonstrations that go on from a managed context, of the same.
    resumed: float = 0.3
    #: Rounds of fine-tuning, each with a schedule of its own.
    sft: tuple[SFTConfig, ...] = TUNING
    #: GRPO.
    rl: RLConfig = TRAINER
    #: Steps of it.
    rl_steps: int = 120

    def __post_init__(self) -> None:
        size = len(SearchVocabulary(self.worlds))
        if self.model.vocab_size != size:
            raise ValueError(f"the model's vocabulary of {self.model.vocab_size} is not the worlds' {size}")

    @property
    def demonstrations(self) -> Demonstrations:
        """What fine-tuning learns from."""
        return Demonstrations(part_of(self.worlds, FINE_TUNING), self.window, self.noise, self.resumed)

    @property
    def training(self) -> SearchTask:
        """What GRPO learns from."""
        return SearchTask(part_of(self.worlds, TRAINING), self.window)

    def held_out(self, **options: Any) -> SearchTask:
        """What nothing was trained on; ``options``: ``window``, ``strategy`` … of a :class:`SearchTask`."""
        return SearchTask(part_of(self.worlds, HELD_OUT), **options)


def part_of(worlds: SearchWorlds, span: tuple[int, int]) -> SearchWorlds:
    """The ``span`` (first, count) of worlds: :data:`FINE_TUNING`, :data:`TRAINING` or :data:`HELD_OUT`."""
    return replace(worlds, skip=worlds.skip + span[0], worlds=span[1])


def sft_policy(
    config: PolicyConfig,
    seed: int = 0,
    observe: Callable[[list[float]], object] | None = None,
    model: Decoder | None = None,
    rounds: slice = slice(None),
) -> tuple[Decoder, list[float]]:
    """The fine-tuned policy and the loss of each step, nats a token. ``observe(losses so far)`` is called before
    every step. Each round of ``config.sft`` sees demonstrations of its own and ends with the weights rounded to what
    a file keeps, so that the later ``rounds`` can be trained from the ``model`` of the earlier ones.
    """
    model, losses = config.model.build(seed) if model is None else model, []
    for number, settings in list(enumerate(config.sft))[rounds]:
        tune(model, config.demonstrations, replace(settings, seed=seed + 1_000_003 * number), losses, observe)
    return model, losses


class Source(Protocol):
    """Where demonstrations come from."""

    def batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, completions, mask, as of :class:`~dslib.rl.sft.Examples`, the longest first."""


def tune(
    model: Decoder,
    source: Source,
    settings: SFTConfig,
    losses: list[float],
    observe: Callable[[list[float]], object] | None = None,
) -> None:
    """One round of fine-tuning in place, on one thread, to weights that a file keeps; the loss of each step is
    appended to ``losses``, and ``observe(losses)`` called before it.

    As :func:`dslib.rl.sft`, but that the episodes of a batch, whose lengths differ, go through the model in three
    parts of about one length each, and little is padded. The loss is that of the whole batch: batches of one length
    would not do, for the short episodes are those that an early mistake has ended.
    """
    generator = torch.Generator().manual_seed(settings.seed)

    def loss_of_batch(step: int) -> Tensor:
        if observe is not None:
            observe(losses)
        batch = Examples(*source.batch(settings.batch_size, generator))
        parts = [batch.rows(rows) for rows in torch.arange(len(batch)).tensor_split(PARTS) if len(rows)]
        loss = sum(completion_loss(model, part) * part.mask.sum() for part in parts) / batch.mask.sum()
        losses.append(loss.item())
        return loss

    model.train()
    with one_thread():
        fit(model, settings.training, loss_of_batch)
    checkpoints.rounded(model)


def rl_policy(
    config: PolicyConfig,
    model: Decoder,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    observe: Callable[[EpisodeTrainer], object] | None = None,
) -> list[dict[str, float]]:
    """Train a fine-tuned ``model`` in place by GRPO, and return the table of the steps.

    ``checkpoint``: saved there after every fifth step, and gone on from where the file is there.
    ``observe(trainer)`` is called after every step.
    """
    trainer = EpisodeTrainer(model, config.training, replace(config.rl, seed=seed))
    with one_thread():
        trainer.run(config.rl_steps, checkpoint, every=5, observe=observe)
    checkpoints.rounded(model)
    return trainer.table


def shipped_policy(name: str = CHECKPOINT) -> tuple[Decoder, SearchWorlds, dict[str, Any]]:
    """The shipped weights ``name`` in a model of their sizes, the worlds they were trained for, and what is known
    about them, :func:`dslib.runs.checkpoints.read`. Raises FileNotFoundError when there are none."""
    from dslib import data
    from dslib.runs.training_state import load_checkpoint

    about = load_checkpoint(data.path(f"checkpoints/{name}.safetensors"))[1]["about"]
    worlds = SearchWorlds(**about["worlds"])
    model = DecoderConfig(**about["model"]).build()
    return model, worlds, checkpoints.read(name, model)


def evaluate(
    model: Decoder,
    task: SearchTask,
    indices: Iterable[int] | Tensor,
    sample: int = 0,
    seed: int = 0,
    temperature: float = 1.0,
    slots: int = 128,
) -> list[dict[str, Any]]:
    """An episode in each world of ``indices``: ``world``, ``outcome``, ``solved`` and :data:`COUNTS`, of which
    ``written``, ``read`` and ``reused`` are tokens as in :class:`~dslib.rl.episodes.PlayedEpisodes`, and ``guess`` is
    :func:`~dslib.tasks.search_episode.guessers_choice`.

    The random numbers depend on ``seed``, the world, ``sample`` and the place of a token alone: strategies are
    compared in the same worlds with the same luck.
    """
    indices = [int(index) for index in indices]
    episodes = [task.episode(index) for index in indices]
    streams = [(seed, index, sample) for index in indices]
    found = play(model, episodes, streams, SamplingConfig(1, temperature), slots, record=False)
    counts = zip(indices, episodes, found.written, found.read, found.reused, strict=True)
    return [
        {
            "world": index,
            "outcome": episode.outcome,
            "solved": episode.outcome == "solved",
            "calls": episode.calls,
            "resets": len(episode.resets),
            "written": int(written),
            "read": int(read),
            "reused": int(reused),
            "guess": guessers_choice(episode),
        }
        for index, episode, written, read, reused in counts
    ]


def success(rows: Sequence[dict[str, Any]]) -> float:
    """The share of rows that are solved. Raises ValueError for none."""
    if not rows:
        raise ValueError("rows is empty; a share needs at least one episode")
    return sum(row["solved"] for row in rows) / len(rows)
