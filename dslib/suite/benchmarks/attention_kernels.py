"""The kernels of sparse attention beside torch: its own dense attention, and the library's plain-torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib import kernels
from dslib.attention import block_sparse_attention, indexer_topk, sliding_window_attention, sparse_attention
from dslib.suite.benchmarks import interleaved

LENGTHS = (4096, 16384, 65536)
REPEATS = 5
BUDGET_S = 10.0

Row = dict[str, object]
Way = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is measured: the heads and dims of published models, one sequence."""

    heads: int = 16
    kv_heads: int = 4
    dim: int = 128
    window: int = 512
    block_size: int = 64
    blocks: int = 16
    mqa_dim: int = 576
    value_dim: int = 512
    selected: int = 2048
    indexer_heads: int = 64
    #: Queries, the last of the sequence, where all of them would be too much for the dense way.
    queries: int = 256


SMALL = Sizes(2, 1, 16, 8, 4, 2, 24, 16, 6, 2, 3)


def measure(
    device: str,
    dtype: torch.dtype,
    lengths: tuple[int, ...] = LENGTHS,
    sizes: Sizes = Sizes(),
    repeats: int = REPEATS,
) -> Iterator[Row]:
    """Rows of each kernel, forward and with its gradients, beside dense attention and plain torch.

    ``error``: the Frobenius distance of the kernel's result from plain torch's, as a share of that (of indices too:
    there one near tie that rounding decides the other way counts). A way that runs out of memory has no row.
    ``device="cpu"`` needs Triton's interpreter and tries the procedure alone: its timings mean nothing.
    """
    for length in lengths:
        for task, tensors, ways in _tasks(device, dtype, length, sizes):
            for name, turns in {task: ways, f"{task}, gradients": _with_gradients(tensors, ways)}.items():
                if tensors or turns is ways:  # a selection has no gradients
                    yield from _measured(name, length, turns, ways, device, repeats)


def _tasks(
    device: str, dtype: torch.dtype, length: int, at: Sizes
) -> Iterator[tuple[str, list[Tensor], dict[str, Way]]]:
    from dslib.kernels import block_sparse, indexer, sliding_window, sparse_mqa

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v = (random(1, heads, length, at.dim) for heads in (at.heads, at.kv_heads, at.kv_heads))

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    window = {
        "torch": _on_torch(lambda: sliding_window_attention(q, k, v, at.window)),
        "triton": lambda: sliding_window.sliding_window(q, k, v, at.window),
    }
    yield "window", [q, k, v], {"dense": dense, **window}

    # NSA's: the first block, the query's own and the one before, and others at random.
    own = torch.arange(length)[:, None] // at.block_size
    chance = torch.rand(1, at.kv_heads, length, -(-length // at.block_size), generator=generator)
    near = (torch.arange(chance.shape[-1]) - own).abs()
    chance = chance.masked_fill(near <= 1, 2.0).masked_fill(torch.arange(chance.shape[-1]) > own, -1.0)
    chance[..., 0] = 2.0
    best = chance.topk(min(at.blocks, chance.shape[-1]), dim=-1)
    blocks = best.indices.masked_fill(best.values < 0, -1).to(device)
    selection = {
        "torch": _on_torch(lambda: block_sparse_attention(q, k, v, blocks, at.block_size)),
        "triton": lambda: block_sparse.block_sparse(q, k, v, blocks, at.block_size),
    }
    yield "chosen blocks", [q, k, v], {"dense": dense, **selection}

    queries = min(at.queries, length)
    few, kv = random(1, at.heads, queries, at.mqa_dim), random(1, length, at.mqa_dim)
    indices = (
        torch.rand(1, queries, length, generator=generator).topk(min(at.selected, length)).indices.to(device)
    )

    def dense_mqa() -> Tensor:
        entry = kv.unsqueeze(1)
        return F.scaled_dot_product_attention(few, entry, entry[..., : at.value_dim], enable_gqa=True)

    mqa = {
        "torch": _on_torch(lambda: sparse_attention(few, kv, indices, at.value_dim)),
        "triton": lambda: sparse_mqa.sparse_mqa(few, kv, indices, at.value_dim),
    }
    yield "chosen entries", [few, kv], {"dense": dense_mqa, **mqa}

    index_q, index_k = random(1, queries, at.indexer_heads, at.dim), random(1, length, at.dim)
    index_w = random(1, queries, at.indexer_heads)
    index, offset = (index_q, index_k, index_w), length - queries
    for top_k in (min(64, length), min(at.selected, length)):
        best_keys = {
            "torch": _on_torch(lambda top_k=top_k: indexer_topk(*index, top_k, offset)),
            "triton": lambda top_k=top_k: indexer.indexer_topk(*index, top_k, offset),
        }
        yield f"indexer's best {top_k}", [], best_keys


def _on_torch(function: Way) -> Way:
    """The library's function in plain torch, whatever was chosen outside."""

    def call() -> Tensor:
        with kernels.use("torch"):
            return function()

    return call


def _with_gradients(tensors: list[Tensor], ways: dict[str, Way]) -> dict[str, Way]:
    def call(way: str) -> Tensor:
        for x in tensors:
            x.requires_grad_()
        try:
            out = ways[way]()
            torch.autograd.grad(out, tensors, torch.ones_like(out))
        finally:
            for x in tensors:
                x.requires_grad_(False)
        return out

    return {way: lambda way=way: call(way) for way in ways}


def _measured(
    task: str, length: int, turns: dict[str, Way], ways: dict[str, Way], device: str, repeats: int
) -> Iterator[Row]:
    exact = ways["torch"]().double()
    error = ((ways["triton"]().double() - exact).norm() / exact.norm()).item()

    def turn(function: Way) -> None:
        function()
        if device == "cuda":
            torch.cuda.synchronize()

    functions = {way: lambda f=f: turn(f) for way, f in turns.items() if _fits(f)}
    for way, timing in interleaved(functions, repeats=repeats, warmup=1, budget_s=BUDGET_S).items():
        milliseconds = {f"{name}_ms": getattr(timing, name) * 1e3 for name in ("median", "min", "max")}
        row = {"task": task, "size": length, "way": way, **milliseconds, "n": timing.n}
        yield row | {"error": error if way == "triton" else None}


def _fits(function: Way) -> bool:
    try:
        function()
    except torch.OutOfMemoryError:
        return False
    return True
