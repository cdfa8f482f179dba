"""The policy of the search world: fine-tuned on an expert that makes mistakes, then trained by GRPO, and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslib import checkpoints
from dslib.models.decoder import Decoder, DecoderConfig
from dslib.models.training import fit
from dslib.rl.episodes import EpisodeTrainer, play
from dslib.rl.objectives import LossConfig
from dslib.rl.rollout import SamplingConfig
from dslib.rl.sft import Examples, SFTConfig, completion_loss
from dslib.rl.trainer_config import TrainerConfig
from dslib.tasks.search_episode import SearchTask
from dslib.tasks.search_expert import Demonstrations
from dslib.tasks.search_tokens import SearchVocabulary
from dslib.tasks.search_world import SearchWorlds

#: Fine-tuning, GRPO and measurements draw from worlds of their own.
FINE_TUNING, TRAINING, HELD_OUT = (0, 1_000_000), (1_000_000, 1_000_000), (2_000_000, 100_000)
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
TRAINER = TrainerConfig(
    loss=LossConfig(aggregation="token"), prompts=16, group=8, minibatches=2, micro_batch=32, lr=3e-4
)


@dataclass(frozen=True)
class PolicyConfig:
    """A policy of ``worlds``. ``window``: what it is trained in, without context management (None: nothing
    overflows). ``noise`` and ``resumed``: of the :class:`~dslib.tasks.search_expert.Demonstrations`. ``rl_steps``
    steps of GRPO follow the fine-tuning."""

    worlds: SearchWorlds = WORLDS
    model: DecoderConfig = MODEL
    window: int | None = None
    noise: float = 0.06
    resumed: float = 0.3
    sft: tuple[SFTConfig, ...] = TUNING
    rl: TrainerConfig = TRAINER
    rl_steps: int = 60

    def __post_init__(self) -> None:
        size = len(SearchVocabulary(self.worlds))
        if self.model.vocab_size != size:
            raise ValueError(f"the model's vocabulary of {self.model.vocab_size} is not the worlds' {size}")

    @property
    def demonstrations(self) -> Demonstrations:
        """What fine-tuning learns from."""
        return Demonstrations(_part(self.worlds, FINE_TUNING), self.window, self.noise, self.resumed)

    @property
    def training(self) -> SearchTask:
        """What GRPO learns from."""
        return SearchTask(_part(self.worlds, TRAINING), self.window)

    def held_out(self, **options: Any) -> SearchTask:
        """What nothing was trained on; ``options``: ``window``, ``strategy`` … of a :class:`SearchTask`."""
        return SearchTask(_part(self.worlds, HELD_OUT), **options)


def _part(worlds: SearchWorlds, span: tuple[int, int]) -> SearchWorlds:
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

    As :func:`dslib.rl.sft`, but that the episodes of a batch, whose lengths differ, go through the model in three
    parts of about one length each, and little is padded. The loss is that of the whole batch: batches of one length
    would not do, for the short episodes are those that an early mistake has ended.
    """
    model, losses = config.model.build(seed) if model is None else model, []
    for number, settings in list(enumerate(config.sft))[rounds]:
        _tune(
            model, config.demonstrations, replace(settings, seed=seed + 1_000_003 * number), losses, observe
        )
    return model, losses


def _tune(
    model: Decoder,
    source: Demonstrations,
    settings: SFTConfig,
    losses: list[float],
    observe: Callable[[list[float]], object] | None,
) -> None:
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
    if checkpoint is not None and Path(checkpoint).is_file():
        trainer.resume(checkpoint)
    while len(trainer.table) < config.rl_steps:
        trainer.step()
        done = len(trainer.table)
        if checkpoint is not None and (done % 5 == 0 or done == config.rl_steps):
            trainer.save(checkpoint)
        if observe is not None:
            observe(trainer)
    checkpoints.rounded(model)
    return trainer.table


def shipped_policy(name: str = CHECKPOINT) -> tuple[Decoder, SearchWorlds, dict[str, Any]]:
    """The shipped weights ``name`` in a model of their sizes, the worlds they were trained for, and what is known
    about them, :func:`dslib.checkpoints.read`. Raises FileNotFoundError when there are none."""
    from dslib import data
    from dslib.rl.checkpoint import load_checkpoint

    about = load_checkpoint(data.path(f"checkpoints/{name}.safetensors"))[1]["about"]
    worlds = SearchWorlds(**about["worlds"])
    model = DecoderConfig(**about["model"]).build()
    return model, worlds, checkpoints.read(name, model)


def evaluate(
    model: Decoder,
    task: SearchTask,
    indices: Iterable[int] | Tensor,
    samples: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    slots: int = 128,
) -> list[dict[str, Any]]:
    """Play ``samples`` episodes in each world of ``indices``; a row each, those of a world beside each other.

    ``world``, ``sample``, ``outcome``, ``solved``, ``calls``, ``resets``, and in tokens ``written``, ``read``,
    ``reused`` as in :class:`~dslib.rl.episodes.Played`. The random numbers
    depend on ``seed``, world and sample alone: strategies are compared in the same worlds with the same luck.
    """
    keys = [(int(index), sample) for index in indices for sample in range(samples)]
    episodes = [task.episode(index) for index, _ in keys]
    streams = [(seed, *key) for key in keys]
    played = play(model, episodes, streams, SamplingConfig(1, temperature), slots, record=False)
    counts = zip(played.written.tolist(), played.read.tolist(), played.reused.tolist(), strict=True)
    return [
        {
            "world": index,
            "sample": sample,
            "outcome": episode.outcome,
            "solved": episode.reward == 1,
            "calls": episode.calls,
            "resets": len(episode.resets),
            "written": written,
            "read": read,
            "reused": reused,
        }
        for (index, sample), episode, (written, read, reused) in zip(keys, episodes, counts, strict=True)
    ]


def fewest_steps(rows: Sequence[dict[str, Any]], samples: int) -> list[dict[str, Any]]:
    """Parallel-fewest-step: of the first ``samples`` episodes of each world the one that answered after the fewest
    calls, the first where none answered; its ``calls`` and tokens are those of all of them, which were spent.

    rows: of :func:`evaluate`. Raises ValueError for a world with fewer episodes.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    by_world: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["sample"] < samples:
            by_world.setdefault(row["world"], []).append(row)
    found = []
    for world, some in by_world.items():
        if len(some) < samples:
            raise ValueError(f"samples={samples} exceeds the {len(some)} episodes of world {world}")
        answered = [row for row in some if row["outcome"] in ("solved", "wrong answer")]
        best = min(answered, key=lambda row: row["calls"]) if answered else some[0]
        spent = {
            key: sum(row[key] for row in some) for key in ("calls", "resets", "written", "read", "reused")
        }
        found.append(best | spent)
    return found


def success(rows: Sequence[dict[str, Any]]) -> float:
    """The share of rows that are solved."""
    return sum(row["solved"] for row in rows) / len(rows)
