"""Rollouts on disk: Parquet with a row a sequence, lists in its columns, for whatever reads Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslib.rl.rollout import Rollout


def save_rollout(path: str | Path, rollout: Rollout, **columns: Tensor) -> None:
    """Write a rollout, and ``columns`` of one number a sequence beside it, such as rewards and problem indices.

    Columns: ``prompt``, ``completion``, ``mask``, ``logp`` and ``entropy``, lists as long as the row's completion
    without its padding, and where it has them ``kept``, for each token the list of ids that were left to choose
    from, and ``routes``, for each token that was read the experts of all layers in one list.
    Raises ModuleNotFoundError, saying what to install, without pyarrow; ValueError for a column of another shape or
    of a name that is taken.
    """
    arrow, parquet = _pyarrow()
    size, width = rollout.mask.shape
    lengths = torch.where(rollout.mask, torch.arange(1, width + 1, device=rollout.mask.device), 0).amax(1)
    own = torch.arange(width, device=rollout.mask.device) < lengths.unsqueeze(1)

    def lists(values: Tensor, counts: Tensor) -> Any:
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32).cpu().numpy()
        return arrow.ListArray.from_arrays(offsets, arrow.array(values.cpu().numpy()))

    table = {
        "prompt": lists(
            rollout.tokens[:, : rollout.prompt_length].flatten(),
            torch.full_like(lengths, rollout.prompt_length),
        ),
        "completion": lists(rollout.completions[own], lengths),
        **{name: lists(getattr(rollout, name)[own], lengths) for name in ("mask", "logp", "entropy")},
    }
    if rollout.kept is not None:
        kept = rollout.kept[own]
        ids = lists(kept.nonzero()[:, 1].to(torch.int32), kept.sum(1))
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32).cpu().numpy()
        table["kept"] = arrow.ListArray.from_arrays(offsets, ids)
    if rollout.routes is not None:
        read = lengths + rollout.prompt_length - 1
        here = torch.arange(rollout.routes.shape[2], device=read.device) < read.unsqueeze(1)
        by_token = rollout.routes.permute(1, 2, 0, 3).flatten(2)
        table["routes"] = lists(by_token[here].flatten(), read * by_token.shape[-1])
    for name, column in columns.items():
        if name in table:
            raise ValueError(f"the column {name!r} is the rollout's own; choose another name")
        if column.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(column.shape)}; it must be ({size},), one a sequence")
        table[name] = arrow.array(column.cpu().numpy())
    padding = rollout.completions[~own]
    shape = {
        "prompt_length": rollout.prompt_length,
        "width": width,
        "fill": int(padding[0]) if len(padding) else 0,
        "vocabulary": None if rollout.kept is None else rollout.kept.shape[-1],
        "routes": None if rollout.routes is None else [rollout.routes.shape[0], rollout.routes.shape[3]],
    }
    written = arrow.table(table).replace_schema_metadata({"dslib.rollout": json.dumps(shape)})
    parquet.write_table(written, path)


def load_rollout(path: str | Path) -> tuple[Rollout, dict[str, Tensor]]:
    """The rollout of :func:`save_rollout`, and the columns beside it.

    Raises ModuleNotFoundError without pyarrow, FileNotFoundError without the file, and ValueError for a Parquet file
    that holds none.
    """
    _, parquet = _pyarrow()
    table = parquet.read_table(path)
    metadata = table.schema.metadata or {}
    if b"dslib.rollout" not in metadata:
        raise ValueError(f"{path} holds no rollout: it was not written by save_rollout")
    shape = json.loads(metadata[b"dslib.rollout"])
    size, start, width = table.num_rows, shape["prompt_length"], shape["width"]
    columns = {name: table[name].combine_chunks() for name in table.column_names}

    def flat(column: Any) -> Tensor:
        return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())

    def lists(column: Any) -> tuple[Any, Tensor]:
        return column.flatten(), flat(column.value_lengths()).long()

    prompts = flat(lists(columns.pop("prompt"))[0]).view(size, start)
    values, lengths = lists(columns.pop("completion"))
    own = torch.arange(width) < lengths.unsqueeze(1)
    completions = torch.full((size, width), shape["fill"])
    completions[own] = flat(values)
    padded = {}
    for name in ("mask", "logp", "entropy"):
        found = flat(lists(columns.pop(name))[0])
        padded[name] = found.new_zeros(size, width).masked_scatter(own, found)
    kept = routes = None
    if shape["vocabulary"] is not None:
        kept = torch.ones(size, width, shape["vocabulary"], dtype=torch.bool)
        ids, counts = lists(columns.pop("kept").flatten())
        token = torch.arange(len(counts)).repeat_interleave(counts)
        sets = torch.zeros(len(counts), shape["vocabulary"], dtype=torch.bool)
        sets[token, flat(ids).long()] = True
        kept[own] = sets
    if shape["routes"] is not None:
        layers, top_k = shape["routes"]
        here = torch.arange(start + width - 1) < (lengths + start - 1).unsqueeze(1)
        by_token = torch.full((size, start + width - 1, layers * top_k), -1, dtype=torch.int16)
        by_token[here] = flat(lists(columns.pop("routes"))[0]).view(-1, layers * top_k)
        routes = by_token.view(size, -1, layers, top_k).permute(2, 0, 1, 3).contiguous()
    tokens = torch.cat((prompts, completions), dim=1)
    rollout = Rollout(tokens, start, **padded, kept=kept, routes=routes)
    return rollout, {name: flat(column) for name, column in columns.items()}


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "rollouts are stored as Parquet by pyarrow, which is not installed; pip install 'dslib-notebooks[spark]'"
        ) from error
    return pyarrow, pyarrow.parquet
