"""What an optimizer needs of DTensors (FSDP2, tensor parallelism): parts, wholes, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor. Imports nothing: where the module is not loaded, none exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of ``tensor`` (a gradient) when it is laid out as ``parameter`` is."""
    if is_dtensor(tensor) and tensor.placements != parameter.placements:
        tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
    return local(tensor)


def full(part: Tensor, parameter: Tensor) -> Tensor:
    """The whole tensor, of which each rank holds a ``part`` as it does of the DTensor ``parameter``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def whole_update(parameter: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Zeros of the whole shape of the DTensor ``parameter``, the same on every rank once filled, and a
    function that adds this rank's part of them to its part of the parameter. Neither communicates."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def finish() -> None:
        everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        local(parameter).add_(everywhere.redistribute(mesh, parameter.placements).to_local())

    return whole, finish
