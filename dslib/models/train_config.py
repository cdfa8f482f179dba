"""What a training run is: its configuration, its schedule, what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dslib.models.decoder import DecoderConfig
from dslib.optim import newton_schulz_flops, param_groups_for_muon
from dslib.optim.update_rms import ADAMW_RMS
from dslib.tasks.recall import RecallTask


@dataclass(frozen=True)
class TrainConfig:
    """One run. The same ``seed`` gives the same weights and batches to every optimizer; each run ends its own
    schedule. By default Muon runs as in Moonlight §2.2: at AdamW's learning rate and weight decay."""

    #: The model's sizes; its ``build(seed)`` makes it.
    model: DecoderConfig = field(default_factory=DecoderConfig)
    #: ``"adamw"`` for everything, or ``"muon"``: Muon for the matrices and AdamW for the rest.
    optimizer: str = "adamw"
    steps: int = 400
    #: Windows in a step.
    batch_size: int = 8
    #: Bytes in a window.
    context: int = 128
    #: Peak learning rate, of the matrices if the rest has its own.
    lr: float = 4e-3
    #: That of embedding, head and norms, under either optimizer (None: the same).
    rest_lr: float | None = None
    weight_decay: float = 0.1
    #: Muon's μ.
    momentum: float = 0.95
    #: Whether Muon looks a step ahead.
    nesterov: bool = True
    #: Newton–Schulz iterations of a step.
    ns_steps: int = 5
    #: Their polynomials: see :func:`dslib.optim.newton_schulz`.
    coefficients: str = "jordan"
    #: How Muon scales an update by its shape: see :class:`dslib.optim.Muon`.
    adjust_lr: str | None = "match_rms_adamw"
    #: The RMS of an update that ``adjust_lr`` aims at.
    target_rms: float = ADAMW_RMS
    #: Weight decay of the norms' gains (None: as all; 0: none, as some do).
    norm_weight_decay: float | None = None
    #: AdamW's β₁ and β₂.
    betas: tuple[float, float] = (0.9, 0.95)
    #: Share of the steps in which the learning rate rises, linearly.
    warmup: float = 0.1
    #: Share of the peak to which it falls.
    final_lr: float = 0.1
    #: On a ``"cosine"``, or on a line: ``"linear"``, as in Moonlight's fine-tuning.
    schedule: str = "cosine"
    #: Of the weights and the batches.
    seed: int = 0
    #: How often the run is measured, evenly spaced, the last time at its end …
    evaluations: int = 8
    #: … and on how many held-out windows.
    evaluation_windows: int = 64
    #: The text: what :func:`dslib.tasks.load_corpus` takes (None: the standard library).
    corpus: str | None = None
    #: What is planted into the text, to be looked up far back (None: nothing).
    recall: RecallTask | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer={self.optimizer!r} is unknown; use 'adamw' or 'muon'")
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r} is unknown; use 'cosine' or 'linear'")
        for name in ("steps", "batch_size", "context", "evaluations", "evaluation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate at ``step`` (0-based): linear warm-up, then a cosine or a line."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr + (1 - config.final_lr) * left


def flops_per_step(config: TrainConfig) -> float:
    """Model FLOPs of one step, plus Newton–Schulz's for Muon."""
    model = config.model.build()
    flops = config.batch_size * config.context * model.training_flops_per_token(config.context)
    if config.optimizer == "muon":
        matrices, _ = param_groups_for_muon(model)
        flops += sum(newton_schulz_flops(weight.shape, config.ns_steps) for weight in matrices)
    return float(flops)


def with_compute(config: TrainConfig, flops: float) -> TrainConfig:
    """The same run with as many whole steps as ``flops`` buys, its schedule fitted to them.

    Raises ValueError when it buys none.
    """
    steps = int(flops / flops_per_step(config))
    if steps < 1:
        raise ValueError(f"flops={flops:.3g} buys no step of {flops_per_step(config):.3g}")
    return replace(config, steps=steps)
