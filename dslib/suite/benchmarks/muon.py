"""One Muon step beside torch.optim.Muon's, in one process: time, peak memory and accuracy."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

from dslib.optim import Muon, svd_orthogonalize
from dslib.optim.newton_schulz import JORDAN
from dslib.suite.benchmarks import interleaved, peak_memory, print_table

#: title, number of matrices, shape, and the share of torch's time that we aim for.
CASES = (
    ("48 × 128²", 48, (128, 128), 0.4),
    ("768 × 3072", 1, (768, 3072), 0.7),
    ("1024²", 1, (1024, 1024), 1.0),
    ("2048²", 1, (2048, 2048), 0.9),
)
REPEATS = 7
BUDGET_S = 120.0
LR = 1e-3

NOTES = """error: relative Frobenius distance of the first update from the exact polar factor (SVD, float64).
peak MiB: resident memory above the start of the first step, which also makes the momentum buffer; the three
are measured one after the other in one process, so a later one may reuse pages that an earlier one grew.
textbook: the plain loop in float32. torch.optim.Muon always iterates in bfloat16, which a CPU without
bfloat16 instructions emulates slowly; against the textbook loop the algorithm alone is compared."""


class TextbookMuon(torch.optim.Optimizer):
    """The blog's loop in float32, one matrix at a time: what is left to win where bfloat16 is slow."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Momentum 0.95 with Nesterov, five iterations, the scale 0.2·√max(A, B)."""
        a, b, c = JORDAN
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(0.95).add_(p.grad)
                X = p.grad + 0.95 * buffer
                X = X / X.norm()
                for _ in range(5):
                    A = X @ X.T
                    X = a * X + (b * A + c * A @ A) @ X
                p.add_(X, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


MAKERS = {
    "ours": lambda ps: Muon(ps, lr=LR, weight_decay=0),
    "torch": lambda ps: torch.optim.Muon(ps, lr=LR, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
    "textbook": lambda ps: TextbookMuon(ps, lr=LR),
}


def main() -> None:
    """Measure every case and print one table; a missed goal is printed like a reached one, and an
    interrupted benchmark prints what it has."""
    rows: list[list] = []
    try:
        for case in CASES:
            rows += _measure(*case)
            print(f"measured {case[0]}", file=sys.stderr)
    finally:
        columns = ["one step", "median ms", "min–max", "n", "ours / it", "goal", "error", "peak MiB"]
        threads = torch.get_num_threads()
        print_table(
            f"Muon.step, float32 parameters, {threads} threads, torch {torch.__version__}", columns, rows
        )
        print(NOTES)


def _measure(title: str, count: int, shape: tuple[int, int], goal: float) -> list[list]:
    """The three rows of one case."""
    steps, errors, memory, firsts = {}, {}, {}, {}
    for name, make in MAKERS.items():
        parameters = _parameters(count, shape)
        optimizer = make(parameters)
        before = [p.detach().clone() for p in parameters]
        began = time.perf_counter()
        memory[name] = peak_memory(optimizer.step)
        firsts[name] = time.perf_counter() - began
        errors[name] = _error(before, parameters)
        steps[name] = optimizer.step
    rounds = _rounds(sum(firsts.values()))
    timings = interleaved(steps, repeats=rounds, warmup=0)
    rows = []
    for name, timing in timings.items():
        ratio = timings["ours"].median / timing.median
        verdict = "" if name != "torch" else f"≤ {goal} {'reached' if ratio <= goal else 'missed'}"
        spread = f"{timing.min * 1e3:.1f}–{timing.max * 1e3:.1f}"
        figures = [f"{timing.median * 1e3:.1f}", spread, timing.n, f"{ratio:.3f}", verdict]
        rows.append([f"{title}  {name}", *figures, f"{errors[name]:.3f}", f"{memory[name] / 2**20:.0f}"])
    return rows


def _rounds(seconds_a_round: float) -> int:
    """As many rounds as the budget holds, at least two: a minimum and a maximum need them."""
    return max(2, min(REPEATS, int(BUDGET_S / max(seconds_a_round, 1e-9))))


def _parameters(count: int, shape: tuple[int, int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]
    for p in parameters:
        p.grad = torch.randn(shape, generator=generator)
    return parameters


def _error(before: list[Tensor], after: list[nn.Parameter]) -> float:
    """Relative error of the update against U·Vᵀ of its own gradient, over all matrices."""
    distance = size = 0.0
    for old, p in zip(before, after, strict=True):
        exact = svd_orthogonalize(p.grad.double())
        update = (old.double() - p.detach().double()) / (LR * 0.2 * max(p.shape) ** 0.5)
        distance += (update - exact).square().sum().item()
        size += exact.square().sum().item()
    return (distance / size) ** 0.5
