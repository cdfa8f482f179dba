"""What the launchers of the attention kernels share: checks at the door, and layouts that a kernel can read."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRID_LIMIT = 2**31 - 1
#: Kernels step through one tile, of up to 128 rows, in int32.
ROW_LIMIT = 2**24
#: exp is 2 to a power on every chip: scores are kept in units of log 2.
LOG2E = math.log2(math.e)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Its bfloat16 arithmetic is wrong: kernels then compute in
    float32 what they load."""
    return triton.knobs.runtime.interpret


def on_hip() -> bool:
    """Whether the GPUs of this torch are AMD's."""
    return torch.version.hip is not None


def power_of_two(size: int, least: int = 16) -> int:
    """The power of two from ``size`` on, and from 16 on, the shortest side of a product on matrix cores."""
    return max(least, triton.next_power_of_2(size))


def check_tensors(tensors: dict[str, tuple[Tensor, str]]) -> dict[str, int]:
    """The sizes of the named axes of ``{"q": (q, "B H T D"), …}``: an axis has one size wherever it stands.

    Raises TypeError for anything but float16, bfloat16 or float32, ValueError for shapes, dtypes or devices
    that do not fit together, and RuntimeError for tensors on the CPU without the interpreter.
    """
    sizes: dict[str, int] = {}
    first_name, (first, _) = next(iter(tensors.items()))
    for name, (x, axes) in tensors.items():
        if not isinstance(x, Tensor) or x.dtype not in DTYPES:
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} is {kind}; the kernel takes float16, bfloat16 or float32")
        if x.ndim != len(axes.split()):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; the kernel takes ({axes.replace(' ', ', ')})"
            )
        for axis, size in zip(axes.split(), x.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}, ({axes.replace(' ', ', ')}); "
                    f"{axis} is {sizes[axis]} in the arguments before it"
                )
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}; it must match {first_name}, {first.dtype} on {first.device}"
            )
    check_device(first_name, first)
    return sizes


def check_device(name: str, x: Tensor) -> None:
    """Raises RuntimeError for a tensor that no kernel can reach."""
    if x.device.type == "cpu" and not interpreted():
        raise RuntimeError(
            f"{name} is on the CPU, where Triton runs only in its interpreter: set TRITON_INTERPRET=1 "
            "before Python starts, move the tensors to a GPU, or choose dslib.kernels.use('torch')"
        )


def check_indices(name: str, x: Tensor, axes: str, sizes: dict[str, int], like: Tensor) -> None:
    """Raises TypeError for a tensor that holds no int32 or int64, ValueError for one that does not fit ``sizes``."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {kind}; the kernel takes int32 or int64")
    wanted = [sizes.get(axis) for axis in axes.split()]
    fits = x.ndim == len(wanted) and all(w in (None, s) for w, s in zip(wanted, x.shape, strict=True))
    if not fits or x.device != like.device:
        meant = ", ".join(
            axis if size is None else f"{axis} = {size}"
            for axis, size in zip(axes.split(), wanted, strict=True)
        )
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} on {x.device}; it must be ({meant}) on {like.device}"
        )


def check_count(name: str, value: int) -> None:
    """Raises TypeError or ValueError for anything but an integer from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; use an int, at least 1")
    if value < 1:
        raise ValueError(f"{name}={value} is below 1; use at least 1")


def check_dims(sizes: dict[str, int], limits: dict[str, int]) -> None:
    """Raises ValueError for a vector that is empty or longer than the kernel's registers hold."""
    for axis, limit in limits.items():
        if not 1 <= sizes[axis] <= limit:
            raise ValueError(f"{axis} is {sizes[axis]}; the kernel takes 1 to {limit}")


def check_groups(heads: int, kv_heads: int) -> None:
    """Raises ValueError for query heads that cannot be shared out evenly among the kv heads."""
    if heads % max(kv_heads, 1) or (heads and not kv_heads):
        raise ValueError(f"q has H = {heads} heads and k Hkv = {kv_heads}; H must be a multiple of Hkv")


def check_queries(queries: int, keys: int) -> None:
    """Raises ValueError for more queries than keys: the queries are the last positions."""
    if queries > keys:
        raise ValueError(
            f"q has T = {queries} and k S = {keys}; the queries are the last T of S positions: give all keys"
        )


def check_grid(programs: int) -> None:
    """Raises ValueError for more programs than one launch can number."""
    if programs > GRID_LIMIT:
        raise ValueError(f"{programs} programs are more than one launch can number; split the batch")


def scale_of(scale: float | None, dim: int) -> float:
    """``scale``, or 1/√dim; raises ValueError for one that is not finite."""
    scale = dim**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite; leave it out for 1/√{dim}")
    return scale


def rows(x: Tensor, axis: int = -2) -> Tensor:
    """x with its last axis together in memory, and steps along ``axis``, that of a tile's rows, which int32 holds;
    a copy where it is not."""
    together = x.shape[-1] == 1 or x.stride(-1) == 1
    return x if together and x.stride(axis) < ROW_LIMIT else x.contiguous()
