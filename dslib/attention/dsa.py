"""DeepSeek Sparse Attention: a cheap indexer scores all keys, attention sees the best few (arXiv:2512.02556).

In plain torch scoring, selection and attention go through the queries in tiles, so that their memory grows with
the length and not with its square. On a GPU, or where ``dslib.kernels.use("triton")`` says so, the kernels of
``dslib.kernels`` compute them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslib import kernels
from dslib.attention.masked import check_count, within_range
from dslib.attention.rope import apply_rotary, apply_rotary_interleaved, rotary_angles

#: Largest indexer head, and longest value and rest of a key, that the kernels hold.
_KERNEL_DIM, _KERNEL_VALUE, _KERNEL_REST = 128, 512, 256
#: float16's smallest and largest number.
_FLOAT16 = (torch.finfo(torch.float16).min, torch.finfo(torch.float16).max)
#: Bytes that one tile of scores, or of gathered entries, may take.
_TILE_BYTES = 2**23


def indexer_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I = Σ_h w_h·ReLU(q_h·k), the lightning indexer's score of every key for every query (eq. 1).

    q: (batch, time, heads, dim), k: (batch, keys, dim), w: (batch, time, heads) → (batch, time, keys). Not
    masked: :func:`select_topk` and :func:`indexer_kl_loss` see to that. Raises ValueError for sizes, dtypes
    or devices that do not fit.
    """
    _check_indexer(q, k, w)
    batch, time, heads, dim = q.shape
    if dim <= _KERNEL_DIM and kernels.attention_implementation(q) == "triton":
        from dslib.kernels import indexer

        return indexer.indexer_scores_triton(q, k, w).to(q.dtype)
    if (
        q.dtype == torch.float16
    ):  # products of float16 leave its range, and weights of both signs make NaN of them
        return indexer_scores(q.float(), k.float(), w.float()).clamp(*_FLOAT16).to(q.dtype)
    if batch * time * heads * k.shape[1] * q.element_size() <= _TILE_BYTES:
        products = (q.flatten(1, 2) @ k.mT).relu().unflatten(1, (time, heads))
        return (w.unsqueeze(2) @ products).squeeze(2)
    scores = q.new_zeros(batch, time, k.shape[1])
    for head in range(heads):  # one head at a time: its products are the only large buffer
        scores = scores + w[:, :, head, None] * (q[:, :, head] @ k.mT).relu()
    return scores


def select_topk(scores: Tensor, k: int, causal_offset: int = 0) -> Tensor:
    """The ``k`` keys of largest score that each query may see.

    scores: (batch, time, keys); query t stands at position ``causal_offset + t`` and may see keys up to there
    → (batch, time, k) int64: descending by score, ties to the smaller index, −1 for an empty slot. NaN and
    −inf are never selected. Raises ValueError for k below 1 or an offset below 0.
    """
    check_count("k", k)
    check_count("causal_offset", causal_offset, 0)
    if scores.ndim != 3:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; give (batch, time, keys)")
    batch, time, keys = scores.shape
    scores = scores.detach()
    if causal_offset < keys - 1:
        position = torch.arange(time, device=scores.device).unsqueeze(1) + causal_offset
        scores = scores.masked_fill(torch.arange(keys, device=scores.device) > position, -math.inf)
    count = min(k, keys)
    best = chosen = None
    if count < keys:
        best, chosen = scores.topk(count + 1, dim=-1)
        # Strictly falling: no NaN, which topk puts first, no tie, one −inf at most, and that behind the k-th.
        if (best[..., 1:] < best[..., :-1]).all():
            return F.pad(chosen[..., :count], (0, k - count), value=-1)
    if (scores if best is None else best).isnan().any():
        scores = scores.masked_fill(scores.isnan(), -math.inf)
        best = None
    if count < keys:
        if best is None:
            best, chosen = scores.topk(count + 1, dim=-1)
        # Which of several equal scores topk takes is its own affair: rows with a tie at the edge are sorted.
        tied = (best[..., -1] == best[..., -2]) & (best[..., -1] != -math.inf)
        chosen = chosen[..., :count]
        if tied.any():
            ordered = scores[tied].sort(dim=-1, descending=True, stable=True).indices
            chosen[tied] = ordered[:, :count]
    else:
        chosen = torch.arange(keys, device=scores.device).expand(batch, time, -1)
    chosen = chosen.sort(dim=-1).values
    value = scores.gather(-1, chosen)
    value, order = value.sort(dim=-1, descending=True, stable=True)
    chosen = chosen.gather(-1, order).masked_fill(value == -math.inf, -1)
    return F.pad(chosen, (0, k - count), value=-1)


@torch.no_grad()
def indexer_topk(q: Tensor, k: Tensor, w: Tensor, top_k: int, causal_offset: int = 0) -> Tensor:
    """:func:`select_topk` of :func:`indexer_scores`, a tile of queries at a time: no (time, keys) buffer.

    Shapes as there; → (batch, time, top_k) int64. The keys behind a tile's last query are not scored.
    """
    _check_indexer(q, k, w)
    if q.shape[3] <= _KERNEL_DIM and kernels.attention_implementation(q) == "triton":
        from dslib.kernels import indexer

        return indexer.indexer_topk(q, k, w, top_k, causal_offset)
    if q.dtype == torch.float16:  # ranked before they are cut off at float16's largest number
        q, k, w = q.float(), k.float(), w.float()
    time, keys = q.shape[1], k.shape[1]
    rows = max(1, _TILE_BYTES // (4 * max(1, keys) * max(1, q.shape[0])))
    tiles = []
    for start in range(0, time, rows):
        part = slice(start, start + rows)
        seen = min(keys, causal_offset + min(start + rows, time))
        scores = indexer_scores(q[:, part], k[:, :seen], w[:, part])
        tiles.append(select_topk(scores, top_k, causal_offset + start))
    if not tiles:
        return torch.empty(q.shape[0], 0, top_k, dtype=torch.int64, device=q.device)
    return torch.cat(tiles, dim=1)


def selection_mask(indices: Tensor, keys: int) -> Tensor:
    """indices (batch, time, k), −1 for an empty slot → (batch, time, keys) bool, True for what is selected."""
    mask = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, indices.masked_fill(indices < 0, keys), True)[..., :keys]


def sparse_attention(
    q: Tensor, kv: Tensor, indices: Tensor, value_dim: int, scale: float | None = None
) -> Tensor:
    """Attention of every head to the selected entries of its query (eq. 2), in MQA mode.

    q: (batch, heads, time, dim); kv: (batch, keys, dim), shared by all heads, its first ``value_dim`` numbers
    are the value; indices: (batch, time, k) int64, −1 for an empty slot, anywhere in a row, none named twice.
    ``scale`` is 1/√dim. Result: (batch, heads, time, value_dim); a query without any key gives 0.
    An entry is gathered once for all heads, a tile of queries at a time. Causality is the selection's
    affair. Raises ValueError for sizes, dtypes, devices or an index that do not fit.
    """
    _check_sparse(q, kv, indices, value_dim)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, time, dim = q.shape
    fits = value_dim <= _KERNEL_VALUE and dim - value_dim <= _KERNEL_REST
    if fits and kernels.attention_implementation(q) == "triton":
        from dslib.kernels import sparse_mqa

        return sparse_mqa.sparse_mqa(q, kv, indices, value_dim, scale)
    selected = indices.shape[-1]
    if 0 in (batch, heads, time, selected, kv.shape[1]):
        # Zeros that belong to the graph, whatever the entries hold.
        return q.new_zeros(batch, heads, time, value_dim) + (q[..., :0].sum() + kv[..., :0].sum())
    q, scale = within_range(q, scale)
    rows = max(1, _TILE_BYTES // (q.element_size() * batch * selected * (dim + heads)))
    table = kv.flatten(0, 1)
    first = torch.arange(batch, device=kv.device).view(-1, 1, 1) * kv.shape[1]
    tiles = []
    for start in range(0, time, rows):
        part = indices[:, start : start + rows]
        empty = part < 0
        holes = bool(empty.any())
        places = (part.clamp_min(0) + first).flatten()  # whole rows of one table are gathered fastest
        entries = table.index_select(0, places).view(*part.shape, dim)  # (batch, rows, k, dim)
        if holes:  # entry 0 stands in for them, and it may hold anything
            entries = entries.masked_fill(empty.unsqueeze(-1), 0)
        queries = q[:, :, start : start + rows].transpose(1, 2)  # (batch, rows, heads, dim)
        logits = queries @ entries.mT * scale
        if holes:
            logits = logits.masked_fill(empty.unsqueeze(2), -math.inf)
            weights = torch.where(empty.all(-1)[..., None, None], 0, logits.softmax(-1))
        else:
            weights = logits.softmax(-1)
        tiles.append((weights @ entries[..., :value_dim]).transpose(1, 2))
    return torch.cat(tiles, dim=2)


def indexer_kl_loss(
    scores: Tensor, attention: Tensor, indices: Tensor | None = None, target: str = "selected"
) -> Tensor:
    """KL(p ‖ Softmax(I)), the indexer's training signal: a scalar, the mean over queries that see a key.

    scores: (batch, time, keys), of queries that are the last positions; attention: (batch, heads, time, keys),
    the main attention's weights, from which no gradient flows. Without ``indices`` the target p sums them over
    the heads and divides by the sum, over all keys up to the query (eq. 3). With ``indices`` (batch, time, k)
    only the selected keys count, in p and in the softmax (eq. 4), and p is for ``target="selected"`` the sum of
    the heads' weights renormalised over the selection, each head as the sparse model attends, for
    ``target="full"`` the restriction of the full sum; they differ in how much a head counts that looks
    elsewhere. The papers sum over queries; the mean does not depend on the length.

    Raises ValueError for shapes that do not fit or another target.
    """
    batch, time, keys = _check_loss(scores, attention, indices, target)
    position = torch.arange(keys - time, keys, device=scores.device).unsqueeze(1)
    seen = (torch.arange(keys, device=scores.device) <= position).expand(batch, -1, -1)
    attention = attention.detach()
    if indices is not None:
        seen = seen & selection_mask(indices, keys)
        attention = attention * seen.unsqueeze(1)
        if target == "selected":
            attention = attention / _positive(attention.sum(-1, keepdim=True))
    p = attention.sum(1) * seen
    p = p / _positive(p.sum(-1, keepdim=True))
    # A row without a key would be NaN, in the gradient too: it is scored as if it saw all, and left out.
    some = (p > 0).any(-1)
    log_q = scores.masked_fill(~seen & some.unsqueeze(-1), -math.inf).log_softmax(-1)
    log_q = log_q.masked_fill(p == 0, 0)
    divergence = torch.where(p > 0, p * (p.clamp_min(torch.finfo(p.dtype).tiny).log() - log_q), 0).sum(-1)
    return (divergence * some).sum() / some.sum().clamp_min(1)


class LightningIndexer(nn.Module):
    """The indexer of DeepSeek-V3.2: a few small heads that say which keys matter (eq. 1).

    Queries and weights come from the query token, keys from the key token through a LayerNorm **with bias**;
    the first ``rope_dim`` numbers of both are rotated in the *half-split* layout, unlike the main attention's
    interleaved one (``rope_layout`` is there to show what mixing them up does). The weights carry
    heads^−½·dim^−½, which no selection depends on, but the softmax of its loss does. The real one has 64
    heads of 128, the first 64 rotated, and takes its queries from the attention's query latent.
    """

    def __init__(
        self,
        d_model: int,
        heads: int = 4,
        dim: int = 16,
        rope_dim: int = 8,
        query_dim: int | None = None,
        rope_base: float = 10_000.0,
        rope_layout: str = "half_split",
    ) -> None:
        super().__init__()
        for name, value in (("d_model", d_model), ("heads", heads), ("dim", dim)):
            check_count(name, value)
        if rope_dim % 2 or not 0 <= rope_dim <= dim:
            raise ValueError(f"rope_dim={rope_dim} must be even and between 0 and dim={dim}")
        if rope_layout not in ("half_split", "interleaved"):
            raise ValueError(f"rope_layout={rope_layout!r} is unknown; use 'half_split' or 'interleaved'")
        self.heads, self.dim, self.rope_dim, self.rope_base = heads, dim, rope_dim, rope_base
        self.rope_layout = rope_layout
        self.query = nn.Linear(query_dim or d_model, heads * dim, bias=False)
        self.key = nn.Linear(d_model, dim, bias=False)
        self.key_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weight = nn.Linear(d_model, heads, bias=False)

    def queries(self, x: Tensor, latent: Tensor | None = None, offset: int = 0) -> tuple[Tensor, Tensor]:
        """q (batch, time, heads, dim) and w (batch, time, heads) of positions ``offset`` and on.

        x: (batch, time, d_model); ``latent``: what the queries are made of, if not x.
        """
        q = self.query(x if latent is None else latent).unflatten(-1, (self.heads, self.dim))
        w = self.weight(x) * (self.heads * self.dim) ** -0.5
        return self._rotated(q.transpose(1, 2), offset).transpose(1, 2), w

    def keys(self, x: Tensor, offset: int = 0) -> Tensor:
        """k (batch, time, dim) of positions ``offset`` and on; what is cached."""
        return self._rotated(self.key_norm(self.key(x)), offset)

    def forward(self, x: Tensor, latent: Tensor | None = None) -> Tensor:
        """Scores of a whole sequence, (batch, time, time), not masked."""
        q, w = self.queries(x, latent)
        return indexer_scores(q, self.keys(x), w)

    def _rotated(self, x: Tensor, offset: int) -> Tensor:
        turned, plain = x.split((self.rope_dim, self.dim - self.rope_dim), dim=-1)
        positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
        rotate = apply_rotary if self.rope_layout == "half_split" else apply_rotary_interleaved
        angles = rotary_angles(positions, self.rope_dim, self.rope_base)
        return torch.cat((rotate(turned, angles), plain), dim=-1)


def selected_mass(attention: Tensor, indices: Tensor) -> Tensor:
    """Share of the attention's weight that a selection holds: attention (batch, heads, time, keys) — summed over
    the heads first — and indices (batch, time, k) → (batch, time)."""
    total = attention.sum(1)
    held = (total * selection_mask(indices, total.shape[-1])).sum(-1)
    return held / _positive(total.sum(-1))


def _positive(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny)


def _check_indexer(q: Tensor, k: Tensor, w: Tensor) -> None:
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, w {tuple(w.shape)}"
    if q.ndim != 4 or k.ndim != 3 or w.ndim != 3:
        raise ValueError(f"{sizes}: give (batch, time, heads, dim), (batch, keys, dim), (batch, time, heads)")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[2] or w.shape != q.shape[:3]:
        raise ValueError(
            f"{sizes} do not fit: give (batch, time, heads, dim), (batch, keys, dim), (batch, time, heads)"
        )
    _check_alike({"q": q, "k": k, "w": w})


def _check_sparse(q: Tensor, kv: Tensor, indices: Tensor, value_dim: int) -> None:
    sizes = f"q {tuple(q.shape)}, kv {tuple(kv.shape)}, indices {tuple(indices.shape)}"
    expected = "(batch, heads, time, dim), (batch, keys, dim), (batch, time, k)"
    if q.ndim != 4 or kv.ndim != 3 or indices.ndim != 3:
        raise ValueError(f"{sizes}: give {expected}")
    if (
        kv.shape[0] != q.shape[0]
        or kv.shape[2] != q.shape[3]
        or indices.shape[:2] != (q.shape[0], q.shape[2])
    ):
        raise ValueError(f"{sizes} do not fit: give {expected}")
    if not 1 <= value_dim <= kv.shape[2]:
        raise ValueError(f"value_dim={value_dim} must lie between 1 and the entries' {kv.shape[2]}")
    if indices.dtype != torch.int64:
        raise ValueError(f"indices is {indices.dtype}; give int64")
    # On a GPU this would wait for it; there a number past the keys is an empty slot.
    if indices.device.type == "cpu" and indices.numel() and int(indices.max()) >= kv.shape[1]:
        raise ValueError(f"indices holds {int(indices.max())}, and kv has {kv.shape[1]} keys")
    _check_alike({"q": q, "kv": kv})
    if indices.device != q.device:
        raise ValueError(f"indices is on {indices.device} and q on {q.device}; use one device")


def _check_alike(tensors: dict[str, Tensor]) -> None:
    for what in ("dtype", "device"):
        found = {name: getattr(x, what) for name, x in tensors.items()}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{name} {value}" for name, value in found.items())
            raise ValueError(f"different {what}s: {said}; use one")


def _check_loss(
    scores: Tensor, attention: Tensor, indices: Tensor | None, target: str
) -> tuple[int, int, int]:
    if target not in ("selected", "full"):
        raise ValueError(f"target={target!r} is unknown; use 'selected' or 'full'")
    fits = (
        scores.ndim == 3
        and attention.ndim == 4
        and scores.shape == (*attention.shape[:1], *attention.shape[2:])
    )
    if not fits or scores.shape[1] > scores.shape[2]:
        raise ValueError(
            f"scores {tuple(scores.shape)} and attention {tuple(attention.shape)} must be (batch, time, keys) and "
            "(batch, heads, time, keys), time at most keys"
        )
    if indices is not None and (indices.ndim != 3 or indices.shape[:2] != scores.shape[:2]):
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}; give (batch, time, k) for scores {tuple(scores.shape)}"
        )
    return tuple(scores.shape)
