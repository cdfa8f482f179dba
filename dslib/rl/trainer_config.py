"""The configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dslib.rl.objectives import ALGORITHMS, Algorithm, LossConfig

#: Precisions a sampler may have; None: the policy samples itself.
SAMPLER_DTYPES = (None, "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class TrainerConfig:
    """One run. ``algorithm``: a name of :data:`dslib.rl.ALGORITHMS`, or an :class:`Algorithm` of one's own;
    ``loss`` replaces its loss, to add a KL term say.

    A step draws ``prompts`` problems, with replacement, and ``group`` completions of each, and makes ``epochs``
    passes over them in ``minibatches`` updates each; ``micro_batch`` sequences at a time fit into memory (None:
    all) and change nothing else, and with ``chunk`` the logits of that many tokens at a time are ever held (not with
    kept sets or an entropy bonus). ``skip_settled``: sequences of advantage 0, all of a group whose rewards are
    equal, are left out of the passes where they add nothing to the gradient, that is without KL term, entropy bonus,
    critic and mixtures of experts; metrics of the update are then means over the others.

    AdamW with ``lr`` and ``weight_decay``; gradients longer than ``max_grad_norm`` are shortened to it.
    ``temperature``, ``top_p`` and ``top_k`` are the sampler's, and the temperature is that of
    all log-probabilities. ``keep_sampling_mask`` and ``keep_routing``: sets left by the filters, and experts of
    a mixture, are replayed in training. ``sampler_dtype``: ``"bfloat16"``, say, samples with a copy of the policy in
    that precision, made anew before each step, as engines for inference do; ``logp_old`` is then this sampler's, and
    ratios differ from 1 before anything is updated. Dynamic sampling gives up after ``rounds`` draws and takes what
    it has. ``overlong``: length of the zone before ``max_new_tokens`` in which DAPO's penalty grows. ``gamma``,
    ``lam`` and ``critic_lr`` are PPO's. ``seed`` determines problems, samples, the order of updates and the critic.
    """

    algorithm: str | Algorithm = "grpo"
    loss: LossConfig | None = None
    prompts: int = 32
    group: int = 16
    epochs: int = 1
    minibatches: int = 1
    micro_batch: int | None = None
    chunk: int | None = None
    skip_settled: bool = True
    lr: float = 2e-4
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    keep_sampling_mask: bool = True
    keep_routing: bool = True
    sampler_dtype: str | None = None
    rounds: int = 10
    overlong: int = 4
    gamma: float = 1.0
    lam: float = 1.0
    critic_lr: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, str) and self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm={self.algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
        for name in ("prompts", "group", "epochs", "minibatches", "rounds", "micro_batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.minibatches > self.prompts * self.group:
            raise ValueError(
                f"minibatches={self.minibatches} of {self.prompts * self.group} samples are empty"
            )
        if self.sampler_dtype not in SAMPLER_DTYPES:
            raise ValueError(
                f"sampler_dtype={self.sampler_dtype!r} is none of {', '.join(map(repr, SAMPLER_DTYPES))}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0: greedy samples teach nothing")

    @property
    def recipe(self) -> Algorithm:
        """The algorithm, with this run's loss."""
        named = ALGORITHMS[self.algorithm] if isinstance(self.algorithm, str) else self.algorithm
        return named if self.loss is None else replace(named, loss=self.loss)
