"""Trained weights that ship with the package: each file says which command made it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dslib import data
from dslib.runs.measurements import PROVENANCE, provenance

if TYPE_CHECKING:
    from torch import nn


def rounded(model: nn.Module) -> nn.Module:
    """``model``, its weights rounded in place to what a shipped file keeps of them: 16-bit floats.

    Who trains a model, rounds it and goes on gets the same run as who reads its file and goes on.
    Raises OverflowError for a weight beyond float16's range, naming it.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():
                kept = weight.half()
                if not kept.isfinite().all():
                    raise OverflowError(
                        f"{name} holds weights beyond ±65504, or none: they do not fit float16"
                    )
                weight.copy_(kept)
    return model


def write(name: str, model: nn.Module, command: str, about: dict[str, Any] | None = None) -> Path:
    """Write the weights of ``model``, in float16, to ``data/checkpoints/NAME.safetensors`` of the source tree.

    Beside them stand ``command``, the date, versions and sources as in :func:`dslib.runs.measurements.write`, and
    ``about``, of what JSON knows: its seed and sizes. The file appears as a whole or not at all. Raises
    OverflowError for weights that do not fit.
    """
    from dslib.runs.training_state import save_checkpoint

    rounded(model)
    target = Path(data.__file__).parent / "checkpoints" / f"{name}.safetensors"
    weights = {key: x.half() if x.is_floating_point() else x for key, x in model.state_dict().items()}
    save_checkpoint(target, weights, {"about": about or {}, **provenance(command)})
    return target


def read(name: str, model: nn.Module) -> dict[str, Any]:
    """Load the shipped weights ``NAME.safetensors`` into ``model``; returns what is known about them.

    Raises FileNotFoundError when there are none, and ValueError for a file without its provenance and
    for a model of other sizes.
    """
    from dslib.runs.training_state import load_checkpoint

    weights, state = load_checkpoint(data.path(f"checkpoints/{name}.safetensors"))
    missing = [key for key in PROVENANCE if key != "corpus" and not state.get(key)]
    if missing:
        raise ValueError(
            f"checkpoints/{name}.safetensors lacks {', '.join(missing)}: it cannot be made again"
        )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"checkpoints/{name}.safetensors is of another model: {error}") from error
    return state
