"""The tables of :mod:`dslib.experiments.grpo_and_kl`: made, and read as what claims and figures are about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dslib.experiments.bases import BaseConfig
from dslib.experiments.grpo_and_kl import (
    FACTORS,
    RunConfig,
    base_policy,
    design,
    mismatch_rows,
    row,
    run,
    sampler_of,
    sampling_of,
    tails,
)
from dslib.models.decoder import DecoderConfig
from dslib.models.moe import MoEConfig
from dslib.rl.config import RLConfig
from dslib.rl.kl import kl_estimate
from dslib.rl.rollout import Rollout, sample, score
from dslib.rl.sft import SFTConfig
from dslib.runs.workers import in_workers
from dslib.tasks.countdown import Countdown

TASK = Countdown(problems=20_000, numbers=3, random_share=0.3)

#: Two layers, in each of them eight experts of which a token visits two.
MODEL = DecoderConfig(
    TASK.vocab_size, 32, layers=2, heads=2, moe=MoEConfig(experts=8, top_k=2, expert_size=32)
)

#: The run that the notebook's table is made of; rate and staleness were chosen on a seed of their own.
RUN = RunConfig(
    BaseConfig(TASK, MODEL, SFTConfig(300, 128, lr=2e-2, rest_lr=1e-2)),
    RLConfig(
        "grpo_no_std",
        prompts=16,
        group_size=8,
        minibatches=8,
        lr=1e-3,
        top_p=0.9,
        sampler_dtype="bfloat16",
    ),
    steps=30,
    problems=128,
    tested=128,
    kl=0.05,
    delta=0.05,
)

#: The same in seconds, which shows that everything runs and nothing else.
TINY = replace(
    RUN,
    base=replace(RUN.base, sft=replace(RUN.base.sft, steps=4, batch_size=8)),
    trainer=replace(RUN.trainer, prompts=4, minibatches=2),
    steps=2,
    tested=4,
)

#: A row of :func:`exploded` in words.
EXPLODED = (
    "{runs} of {of} pass a gradient norm of {above:g}, in {seeds} of the seeds; the largest is {largest:.1f}"
)

#: What is replayed in the place of what the sampler did: routes of other tokens, random sets of equal size.
REPLAYED = ("shuffled routes", "random sets")


def run_rows(config: RunConfig, seeds: Sequence[int], jobs: int = 1) -> Iterator[dict[str, Any]]:
    """A row a run of the whole design and its controls, as each is done; what is in the cache is read."""
    for seed in seeds:  # the bases first: their runs share them
        base_policy(replace(config, seed=seed))
    for found in in_workers(run, design(config, seeds), jobs):
        yield row(found)


def gap_rows(config: RunConfig, seeds: Sequence[int], problems: int) -> list[dict[str, Any]]:
    """The rows of :func:`~dslib.experiments.grpo_and_kl.mismatch_rows` of every seed."""
    return [found for seed in seeds for found in mismatch_rows(config, seed, problems)]


def control_rows(config: RunConfig, seeds: Sequence[int], problems: int = 200) -> list[dict[str, Any]]:
    """The mismatch of every seed's base and its bfloat16 sampler where something else is replayed: a row a seed
    and each of :data:`REPLAYED`, on the very samples of :func:`~dslib.experiments.grpo_and_kl.mismatch_rows`.

    Shuffled routes are compared without top-p, random sets with it and with the sampler's own routes kept.
    """
    rows = []
    for seed in seeds:
        own = replace(config, seed=seed, trainer=replace(config.trainer, sampler_dtype="bfloat16"))
        policy, sampler, prompts = base_policy(own), sampler_of(own), own.base.task.prompts(range(problems))
        for replayed, top_p in zip(REPLAYED, (None, config.trainer.top_p), strict=True):
            generator = torch.Generator().manual_seed(9_000_011)
            sampling = sampling_of(own, top_p)
            size = config.trainer.group_size
            rollout = sample(
                sampler, prompts, sampling, generator, size, record_routes=True, record_kept=True
            )
            shuffled = replayed == "shuffled routes"
            routes = shuffled_routes(rollout, generator) if shuffled else rollout.routes
            kept = rollout.kept if shuffled else random_sets(rollout, generator)
            with torch.no_grad():
                logp = score(policy, rollout, sampling.temperature, kept, routes)
            chosen = (logp - rollout.logp).double()[rollout.mask]
            named = {"kind": "control", "seed": seed, "replayed": replayed, "top_p": top_p or 1.0}
            rows.append({**named, "tokens": len(chosen), **tails(chosen)})
    return rows


def shuffled_routes(rollout: Rollout, generator: torch.Generator) -> Tensor:
    """The rollout's routes, dealt out anew among all tokens that were read: every expert as often as before."""
    read = (rollout.routes >= 0).all(-1).all(0)
    routes = rollout.routes.clone()
    routes[:, read] = routes[:, read][:, torch.randperm(int(read.sum()), generator=generator)]
    return routes


def random_sets(rollout: Rollout, generator: torch.Generator) -> Tensor:
    """Sets of tokens as large as the rollout's ``kept``, the sampled token in each, the others drawn at random."""
    keys = torch.rand(rollout.kept.shape, generator=generator)
    keys.scatter_(-1, rollout.completions.unsqueeze(-1), 2.0)  # above all others, so that it is always in
    places = keys.argsort(-1, descending=True).argsort(-1)
    return places < rollout.kept.sum(-1, keepdim=True)


def gap(gaps: Any, column: str, **where: Any) -> np.ndarray:
    """One number a seed, in their order: ``column`` of the rows in which every named column has its value.

    Raises ValueError where that is not one row a seed.
    """
    part = gaps
    for name, value in where.items():
        part = part[part[name] == value]
    if part.empty or part.seed.duplicated().any():
        named = ", ".join(f"{name}={value!r}" for name, value in where.items())
        raise ValueError(
            f"{named} selects {len(part)} rows of {part.seed.nunique()} seeds; name one row a seed"
        )
    return part.set_index("seed").sort_index()[column].to_numpy()


def flip_shares(gaps: Any) -> dict[str, list[float]]:
    """The share of tokens that visit other experts than when they were sampled, a number a seed, for each
    precision of the sampler."""
    where = {"part": "all", "top_p": 1.0, "keep_routing": 1, "keep_sampling_mask": 1}
    return {
        dtype: gap(gaps, "flip_share", dtype=dtype, **where).tolist() for dtype in ("bfloat16", "float32")
    }


def routed(gaps: Any) -> np.ndarray:
    """What one token of a thousand exceeds in |log ratio|, (seeds, 2): routed anew, and with the routes kept."""
    where = {"dtype": "bfloat16", "top_p": 1.0, "keep_sampling_mask": 1, "part": "all"}
    return np.stack([gap(gaps, "size_999", keep_routing=kept, **where) for kept in (0, 1)], axis=1)


def truncated(gaps: Any) -> np.ndarray:
    """The mean |log ratio| under top-p, (seeds, 2): sampling mask lost, and kept; routes kept in both."""
    top_p = gaps.top_p.min()
    where = {"dtype": "bfloat16", "top_p": top_p, "keep_routing": 1, "part": "all"}
    return np.stack([gap(gaps, "size_mean", keep_sampling_mask=kept, **where) for kept in (0, 1)], axis=1)


def mask_effect(runs: Any, outcome: str, off_policy_mask: int) -> tuple[np.ndarray, np.ndarray]:
    """Of keeping the sampling mask, with the off-policy mask off or on: the effect on ``outcome``, a number a seed,
    and the share of answers left out, (2,): sampling mask lost, and kept."""
    part = runs[(runs.control == "none") & (runs.off_policy_mask == off_policy_mask)]
    means = part.groupby(["seed", "keep_sampling_mask"])[[outcome, "kept_share"]].mean().unstack()
    effect = (means[outcome][1] - means[outcome][0]).to_numpy()
    return effect, 1 - means["kept_share"].mean().to_numpy()


def by_remedies(runs: Any, outcome: str) -> Any:
    """The mean of ``outcome`` over the runs with so many remedies switched on: a frame (0 … 4, seeds)."""
    part = runs[runs.control == "none"]
    return part.groupby([part[list(FACTORS)].sum(axis=1), "seed"])[outcome].mean().unstack()


def ends(runs: Any, outcome: str) -> Any:
    """``outcome`` with all remedies off and all on: a frame with the columns ``"off"`` and ``"on"``, a row a seed."""
    part = runs[(runs.control == "none") & runs[list(FACTORS)].sum(axis=1).isin((0, len(FACTORS)))]
    return part.pivot(index="seed", columns="unbiased_kl", values=outcome).rename(columns={0: "off", 1: "on"})


def two_normals(mu: float, power: int = 1) -> dict[str, float]:
    """The mean of each KL estimate's ``power`` for x from N(μ, 1) and the reference N(0, 1), by integration;
    their KL is μ²/2."""
    x = torch.linspace(-12, 14, 20_001, dtype=torch.float64)
    logp, logp_ref = (-((x - mean) ** 2) / 2 - math.log(2 * math.pi) / 2 for mean in (mu, 0))
    step = (x[1] - x[0]).item()
    return {
        kind: (kl_estimate(logp, logp_ref, kind) ** power * logp.exp()).sum().item() * step
        for kind in ("k1", "k2", "k3")
    }


def exploded(runs: Any, above: float) -> Any:
    """In how many runs of the design the gradient norm passed ``above``, before it was clipped: a row each for
    ``"k3"`` and ``"ρ·k3"``, with the columns ``above``, ``runs``, ``of`` all of them, ``seeds`` that these runs are
    of, and ``largest``, the largest norm of all."""
    part = runs[runs.control == "none"]
    large = part[part.grad_norm_max > above].groupby("unbiased_kl").seed
    found = {"runs": large.size(), "of": part.groupby("unbiased_kl").size(), "seeds": large.nunique()}
    counts = pd.DataFrame(found).reindex([0, 1]).fillna(0).astype(int)
    counts = counts.assign(above=above, largest=part.groupby("unbiased_kl").grad_norm_max.max())
    return counts.rename(index={0: "k3", 1: "ρ·k3"}).astype(object)


def ranges(ratios: Tensor) -> list[str]:
    """The smallest and the largest of each row, as text: (sequences, tokens) → as many."""
    return [f"{min(row):.2f} … {max(row):.2f}" for row in ratios.tolist()]


def gradient_of_each(loss: Callable[..., Tensor], z: Tensor, ref: Tensor) -> Tensor:
    """The gradient in the logits z (tokens,) of the loss of each token that may be sampled, on-policy:
    (tokens, tokens), a row a token. ``loss`` takes log-probabilities of policy, reference and old policy."""
    given = (ref.log_softmax(0), z.log_softmax(0))
    return torch.autograd.functional.jacobian(lambda x: loss(x.log_softmax(0), *given), z)


def two_tokens(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of two tokens of three: twelve logits → those of the first, (3,), and of the second after
    each first, (3, 3)."""
    return theta[:3].log_softmax(0), theta[3:].view(3, 3).log_softmax(1)


def kl_by_position(theta: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """The KL of the first token's distribution, (), and of the second's after each first, (3,)."""
    (p1, p2), (ref1, ref2) = two_tokens(theta), two_tokens(ref)
    return (p1.exp() * (p1 - ref1)).sum(), (p2.exp() * (p2 - ref2)).sum(1)


def whole_kl(theta: Tensor, ref: Tensor) -> Tensor:
    """The KL of whole sequences, a sum over all nine: ()."""
    (p1, p2), (ref1, ref2) = two_tokens(theta), two_tokens(ref)
    p, logp_ref = p1[:, None] + p2, ref1[:, None] + ref2
    return (p.exp() * (p - logp_ref)).sum()
