"""The policy loss in chunks beside the eager way, which holds logits of all tokens: time and memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from dslib.rl import LossConfig, PolicyBatch, chunked_policy_loss, policy_loss, selective_log_softmax
from dslib.suite.benchmarks import interleaved, peak_memory, print_table

SEQUENCES, TOKENS, VOCABULARY, DIM = 16, 512, 32_768, 256
CHUNK = 512
CONFIGS = {
    "token ratio": LossConfig(clip_high=0.28, kl=0.01, kl_unbiased=True),
    "sequence ratio": LossConfig(ratio="sequence", aggregation="sequence"),
}
TIME_GOAL, MEMORY_GOAL = 1.2, 0.25
REPEATS = 5
BUDGET_S = 120.0

NOTES = """Forward and backward pass from the last hidden states, float32, on a CPU; every token is scored.
eager: logits of all tokens, log_softmax, gather, policy_loss. chunked: chunked_policy_loss, {chunk} tokens at a time.
A token ratio takes three matrix products either way; a sequence ratio needs all log-probabilities before the first
gradient, and in chunks a fourth product: the goals are for the token ratio.
peak MiB: resident memory above the start, one after the other in one process, the gradients among it."""


def main() -> None:
    """Measure time and memory and print the table; a missed goal is printed like a reached one."""
    where = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    sizes = f"{SEQUENCES * TOKENS} tokens × {VOCABULARY} vocabulary, dim {DIM}"
    rows: list[list] = []
    try:
        for name, config in CONFIGS.items():
            check(config)
            goals = (TIME_GOAL, MEMORY_GOAL) if name == "token ratio" else (None, None)
            rows += _measured(name, ways(config), *goals)
    finally:
        columns = [
            "policy loss",
            "median s",
            "min–max",
            "n",
            "of eager",
            "goal",
            "peak MiB",
            "of eager",
            "goal",
        ]
        print_table(f"{sizes}, {where}", columns, rows)
        print(NOTES.format(chunk=CHUNK))


def inputs(
    sequences: int, tokens: int, vocabulary: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, PolicyBatch]:
    """Random hidden states and output layer, tokens, and a batch whose old and reference policies are near."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = random(sequences, tokens, DIM), random(vocabulary, DIM) / DIM**0.5
    chosen = torch.randint(vocabulary, (sequences, tokens), generator=generator)
    logp = -10.0 + 0.1 * random(sequences, tokens)
    mask = torch.ones(sequences, tokens, dtype=torch.bool)
    batch = PolicyBatch(None, logp, random(sequences), mask, logp + 0.1 * random(sequences, tokens))
    return hidden.requires_grad_(), weight.requires_grad_(), chosen, batch


def eager(
    hidden: Tensor, weight: Tensor, tokens: Tensor, batch: PolicyBatch, config: LossConfig
) -> tuple[Tensor, ...]:
    """Loss and gradients with the logits of all tokens at once."""
    logp = selective_log_softmax(hidden @ weight.mT, tokens)
    loss = policy_loss(dataclasses.replace(batch, logp=logp), config).loss
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def chunked(
    hidden: Tensor, weight: Tensor, tokens: Tensor, batch: PolicyBatch, config: LossConfig
) -> tuple[Tensor, ...]:
    """Loss and gradients, ``CHUNK`` tokens at a time."""
    loss = chunked_policy_loss(hidden, weight, tokens, batch, config, CHUNK).loss
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def check(config: LossConfig) -> None:
    """Raise AssertionError unless both ways give the same numbers, on a small case of several chunks."""
    at = inputs(2, CHUNK, 64)
    for ours, exact in zip(chunked(*at, config), eager(*at, config), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-5)


def ways(config: LossConfig) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """What is measured: name → a call."""
    at = inputs(SEQUENCES, TOKENS, VOCABULARY)
    return {"eager": lambda: eager(*at, config), "chunked": lambda: chunked(*at, config)}


def _measured(
    name: str,
    calls: dict[str, Callable[[], tuple[Tensor, ...]]],
    time_goal: float | None,
    memory_goal: float | None,
) -> list[list]:
    # Ours before the plain way: what that leaves to the allocator would hide some of ours.
    peaks = {way: peak_memory(calls[way]) for way in ("chunked", "eager")}
    timings = interleaved(calls, repeats=REPEATS, warmup=0, budget_s=BUDGET_S)
    rows = []
    for way, timing in timings.items():
        ratio = timing.median / timings["eager"].median
        share = peaks[way] / max(
            peaks["eager"], 1
        )  # none is seen where the allocator has enough left from before
        ours = way == "chunked"
        rows.append(
            [
                *(f"{name}  {way}", f"{timing.median:.2f}", f"{timing.min:.2f}–{timing.max:.2f}", timing.n),
                *(f"{ratio:.3f}", _verdict(ratio, time_goal if ours else None)),
                *(
                    f"{peaks[way] / 2**20:.0f}",
                    f"{share:.3f}",
                    _verdict(share, memory_goal if ours else None),
                ),
            ]
        )
    print(f"measured {name}", file=sys.stderr)
    return rows


def _verdict(ratio: float, goal: float | None) -> str:
    return "" if goal is None else f"≤ {goal} {'reached' if ratio <= goal else 'missed'}"
