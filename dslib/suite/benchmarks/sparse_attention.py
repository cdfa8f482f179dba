"""DeepSeek Sparse Attention beside dense attention on the same cache: decoding, prefill, memory."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dslib.attention import indexer_scores, indexer_topk, select_topk, sparse_attention
from dslib.attention.masked import masked_attention
from dslib.suite.benchmarks import interleaved, peak_memory, print_table

HEADS, DIM, VALUE_DIM = 16, 96, 64
INDEXER_HEADS, INDEXER_DIM = 4, 32
#: Selected keys are a share of the context, as in the quality experiments at their largest.
RATIO = 32
#: context, and the share of dense decoding's time that we aim for.
DECODE = ((2048, None), (4096, None), (8192, 0.5), (16384, 0.35), (32768, None))
PREFILL = (1024, 2048, 4096)
MEMORY_LENGTH, MEMORY_GOAL = 8192, 0.25
REPEATS = 15
BUDGET_S = 60.0

NOTES = """Batch 1, 16 heads, one shared entry of 96 a position (values: its first 64), indexer 4 heads of 32, float32,
k = context/32. Sparse counts scoring, selection and attention; "parts" are the same calls timed alone.
dense: scaled_dot_product_attention, every head on the entries. one product: the same by hand, all heads in one matrix
product with the entries; where heads share everything, decoding can be written so, and the goals are not for it.
peak MiB: resident memory above the start, one after the other in one process."""


def main() -> None:
    """Measure decoding, prefill and memory and print the tables; a missed goal is printed like a reached one."""
    where = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    rows: list[list] = []
    try:
        with torch.no_grad():
            for context, goal in DECODE:
                rows += _timed("decode", context, decode_ways(context), goal)
            for length in PREFILL:
                rows += _timed("prefill", length, _prefill(length), None)
            rows += _memory()
    finally:
        columns = ["task", "median ms", "min–max", "n", "of dense", "goal", "peak MiB"]
        print_table(f"Sparse attention on a CPU, {where}", columns, rows)
        print(NOTES)


def inputs(time: int, context: int, seed: int = 0) -> dict[str, Tensor]:
    """Random queries, entries and indexer tensors of the benchmark's sizes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "q": random(1, HEADS, time, DIM),
        "kv": random(1, context, DIM),
        "index_q": random(1, time, INDEXER_HEADS, INDEXER_DIM),
        "index_k": random(1, context, INDEXER_DIM),
        "index_w": random(1, time, INDEXER_HEADS),
    }


def sparse(q: Tensor, kv: Tensor, index_q: Tensor, index_k: Tensor, index_w: Tensor) -> Tensor:
    """Scoring, selection and attention of queries that are the last positions."""
    context, time = kv.shape[1], q.shape[2]
    indices = indexer_topk(index_q, index_k, index_w, max(1, context // RATIO), context - time)
    return sparse_attention(q, kv, indices, VALUE_DIM)


def dense(q: Tensor, kv: Tensor) -> Tensor:
    """scaled_dot_product_attention on the same entries, seen by all heads. Values as long as the keys, cut
    afterwards: with shorter ones torch leaves its fast path on a CPU and takes several times as long."""
    k = kv.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[2] > 1)[..., :VALUE_DIM]


def one_product(q: Tensor, kv: Tensor) -> Tensor:
    """Dense attention of one query position by hand: all heads in one product with the entries."""
    weights = (q.squeeze(2) @ kv.mT * DIM**-0.5).softmax(-1)
    return (weights @ kv[..., :VALUE_DIM]).unsqueeze(2)


def masked_dense(q: Tensor, kv: Tensor, index_q: Tensor, index_k: Tensor, index_w: Tensor) -> Tensor:
    """The plain way to the same numbers: all scores, a mask of what is selected, dense attention under it."""
    time, keys = q.shape[2], kv.shape[1]
    indices = select_topk(indexer_scores(index_q, index_k, index_w), max(1, keys // RATIO), keys - time)
    mask = torch.zeros(1, time, keys + 1, dtype=torch.bool)
    mask = mask.scatter(-1, indices.masked_fill(indices < 0, keys), True)[..., :keys].unsqueeze(1)
    k = kv.unsqueeze(1)
    return masked_attention(q, k, k[..., :VALUE_DIM], mask, DIM**-0.5)


def decode_ways(context: int) -> dict[str, Callable[[], Tensor]]:
    """What is timed at a context: name → a call; dense ways, the sparse one, and its parts alone."""
    at = inputs(1, context)
    q, kv, index = at["q"], at["kv"], (at["index_q"], at["index_k"], at["index_w"])
    k = max(1, context // RATIO)
    scores = indexer_scores(*index)
    indices = select_topk(scores, k, context - 1)
    torch.testing.assert_close(one_product(q, kv), dense(q, kv), rtol=1e-4, atol=1e-5)
    return {
        "dense": lambda: dense(q, kv),
        "one product": lambda: one_product(q, kv),
        "sparse": lambda: sparse(q, kv, *index),
        "  part: scores": lambda: indexer_scores(*index),
        "  part: selection": lambda: select_topk(scores, k, context - 1),
        "  part: attention": lambda: sparse_attention(q, kv, indices, VALUE_DIM),
    }


def _prefill(length: int) -> dict[str, Callable[[], Tensor]]:
    at = inputs(length, length)
    torch.testing.assert_close(sparse(**at), masked_dense(**at), rtol=1e-4, atol=1e-5)
    return {"dense": lambda: dense(at["q"], at["kv"]), "sparse": lambda: sparse(**at)}


def _timed(task: str, size: int, ways: dict[str, Callable[[], Tensor]], goal: float | None) -> list[list]:
    timings = interleaved(ways, repeats=REPEATS, warmup=1, budget_s=BUDGET_S)
    rows = []
    for way, timing in timings.items():
        ratio = timing.median / timings["dense"].median
        verdict = ""
        if way == "sparse" and goal is not None:
            verdict = f"≤ {goal} {'reached' if ratio <= goal else 'missed'}"
        spread = f"{timing.min * 1e3:.2f}–{timing.max * 1e3:.2f}"
        figures = [f"{timing.median * 1e3:.2f}", spread, timing.n, f"{ratio:.3f}", verdict, ""]
        rows.append([f"{task} {size}  {way}", *figures])
    print(f"measured {task} at {size}", file=sys.stderr)
    return rows


def _memory() -> list[list]:
    at = inputs(MEMORY_LENGTH, MEMORY_LENGTH)
    ours = peak_memory(lambda: sparse(**at))
    plain = peak_memory(lambda: masked_dense(**at))
    ratio = ours / max(plain, 1)  # none is seen where the allocator has enough left from before
    verdict = f"≤ {MEMORY_GOAL} {'reached' if ratio <= MEMORY_GOAL else 'missed'}"
    title = f"prefill {MEMORY_LENGTH} "
    return [
        [f"{title} masked dense", "", "", 1, "1.000", "", f"{plain / 2**20:.0f}"],
        [f"{title} sparse", "", "", 1, f"{ratio:.3f}", verdict, f"{ours / 2**20:.0f}"],
    ]
