"""A training run on disk: one safetensors file, tensors and JSON, that is there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dslib.runs.files import replacing


def save_checkpoint(path: str | Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write ``tensors`` by name, and ``state``, of what JSON knows, to one file.

    It takes the name ``path`` when it is complete: whoever is interrupted while writing leaves the file that was
    there before. Tensors are stored on the CPU and each by itself, tied weights twice.
    """
    from safetensors.torch import save_file

    copies = {name: x.detach().cpu().clone().contiguous() for name, x in tensors.items()}
    with replacing(path) as unfinished:
        save_file(copies, unfinished, metadata={"state": json.dumps(state)})


def load_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of :func:`save_checkpoint`.

    Raises FileNotFoundError without the file and ValueError for a file that is none of these.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no checkpoint of a training run: {error}") from error


def with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix`` and a point, without these."""
    return {name[len(prefix) + 1 :]: x for name, x in tensors.items() if name.startswith(f"{prefix}.")}


def optimizer_parts(
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The states of optimizers as named tensors, and as JSON the rest: groups, and entries that are no tensors."""
    tensors, rest = {}, []
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        plain: dict[str, dict[str, Any]] = {}
        for index, entries in state["state"].items():
            plain[str(index)] = {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
            tensors |= {
                f"optimizer.{number}.{index}.{k}": v for k, v in entries.items() if isinstance(v, Tensor)
            }
        rest.append({"state": plain, "param_groups": state["param_groups"]})
    return tensors, rest


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tensors: dict[str, Tensor], rest: list[dict[str, Any]]
) -> None:
    """Put back what :func:`optimizer_parts` took out. Raises ValueError for another number of optimizers."""
    if len(rest) != len(optimizers):
        raise ValueError(f"the checkpoint is of {len(rest)} optimizers, and there are {len(optimizers)}")
    for number, (optimizer, saved) in enumerate(zip(optimizers, rest, strict=True)):
        state = {
            int(index): plain | with_prefix(tensors, f"optimizer.{number}.{index}")
            for index, plain in saved["state"].items()
        }
        optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
