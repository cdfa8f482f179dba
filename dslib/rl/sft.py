"""Supervised fine-tuning on completions: the prompt is read, and only what follows it is learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslib.models.moe import MoE
from dslib.models.training import TrainConfig, fit
from dslib.rl.rollout import hidden_states


@dataclass(frozen=True)
class Examples:
    """``prompts`` (n, time) int64, ``completions`` (n, new) int64 and ``mask`` (n, new) bool, True where a token
    is to be learnt, the end token included. Before the last of these the others are read, as what a tool answered
    is; after it anything may stand. Raises ValueError for other shapes."""

    prompts: Tensor
    completions: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(x.shape) for x in (self.prompts, self.completions, self.mask)]
        if any(len(s) != 2 or s[0] != shapes[0][0] for s in shapes) or shapes[1] != shapes[2]:
            raise ValueError(
                f"prompts {shapes[0]}, completions {shapes[1]} and mask {shapes[2]} must be (n, time), (n, new) and "
                "(n, new)"
            )
        if self.mask.dtype != torch.bool or not shapes[0][1]:
            raise ValueError(
                f"mask is {self.mask.dtype} beside prompts {shapes[0]}; give bool, and prompts of a token at least"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: Tensor | slice) -> Examples:
        """Some of them."""
        return Examples(self.prompts[index], self.completions[index], self.mask[index])


#: (batch size, generator) → a batch.
Draw = Callable[[int, torch.Generator], Examples]


@dataclass(frozen=True)
class SFTConfig:
    """A run of fine-tuning; the names are those of :class:`dslib.models.TrainConfig`, which raises the errors."""

    #: Updates, one a batch.
    steps: int = 1500
    #: Examples in a batch.
    batch_size: int = 256
    #: ``"muon"`` for the matrices and AdamW for the rest, or ``"adamw"`` for all.
    optimizer: str = "muon"
    #: Peak learning rate of the matrices.
    lr: float = 5e-3
    #: Peak learning rate of the rest (None: the same).
    rest_lr: float | None = 2e-3
    #: Of both optimizers.
    weight_decay: float = 0.1
    #: Share of the steps in which the learning rates rise.
    warmup: float = 0.1
    #: Share of the peak that is left at the end.
    final_lr: float = 0.1
    #: How the rates fall: ``"cosine"`` or ``"linear"``.
    schedule: str = "cosine"
    #: Determines which examples each batch holds.
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.training

    @property
    def training(self) -> TrainConfig:
        """The same, as the makers of optimizers and schedules want it; raises its errors."""
        return TrainConfig(**vars(self))


def completion_loss(model: nn.Module, examples: Examples) -> Tensor:
    """Mean cross-entropy over the tokens to be learnt, in nats: a scalar with gradient, in float32 at least.

    Raises ValueError where there are none, and for a token to be read outside the model's vocabulary.
    """
    mask, device = examples.mask, model.lm_head.weight.device
    if not mask.any():
        raise ValueError(f"the mask of {len(examples)} examples has nothing to learn in it")
    read = mask.flip(1).cumsum(1).flip(1) > 0
    completions = torch.where(read, examples.completions, 0)
    vocabulary = model.lm_head.out_features
    if not 0 <= completions.min() <= completions.max() < vocabulary:
        raise ValueError(
            f"completions hold tokens {int(completions.min())} to {int(completions.max())}, but the model's "
            f"vocabulary is 0 to {vocabulary - 1}"
        )
    width = int(mask.any(0).nonzero().amax()) + 1
    tokens = torch.cat((examples.prompts, completions[:, : width - 1]), dim=1).to(device)
    states = hidden_states(model, tokens)[:, examples.prompts.shape[1] - 1 :]
    mask = mask[:, :width].to(device)
    logits = model.lm_head(states[mask])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, completions[:, :width].to(device)[mask])


def demonstrations(task) -> Draw:
    """Batches of what ``task.demonstrations(indices, generator)`` shows of random problems."""

    def draw(count: int, generator: torch.Generator) -> Examples:
        indices = torch.randint(len(task), (count,), generator=generator)
        return Examples(task.prompts(indices), *task.demonstrations(indices, generator))

    return draw


def sft(model: nn.Module, source: Examples | Draw, config: SFTConfig) -> list[float]:
    """Train ``model`` in place; returns the loss of each step, nats a token.

    ``source``: examples, gone through in a new random order each time round, or a function that draws a batch,
    such as :func:`demonstrations`. Raises ValueError for no examples, and FloatingPointError, naming the step, for
    a loss that is not finite.
    """
    training = config.training
    generator = torch.Generator().manual_seed(config.seed)
    if isinstance(source, Examples):
        source = _epochs(source)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]

    def loss_of_batch(step: int) -> Tensor:
        loss = completion_loss(model, source(config.batch_size, generator))
        if not loss.isfinite():
            raise FloatingPointError(
                f"the loss of step {step + 1} is {loss.item()}; lower the learning rates"
            )
        return loss

    def balance() -> None:
        for layer in mixtures:
            layer.update_bias()

    model.train()
    return fit(model, training, loss_of_batch, balance)


def _epochs(examples: Examples) -> Draw:
    if not len(examples):
        raise ValueError("there are no examples to learn from")
    left: list[Tensor] = [torch.empty(0, dtype=torch.long)]

    def draw(count: int, generator: torch.Generator) -> Examples:
        while len(left[0]) < count:
            left[0] = torch.cat((left[0], torch.randperm(len(examples), generator=generator)))
        rows, left[0] = left[0][:count], left[0][count:]
        return examples.rows(rows)

    return draw
