"""Triton kernels, one file a kernel, each with a plain-torch reference in ``dslib``.

Importing this package imports neither torch nor triton, and triton need not be installed:
:func:`use` says which implementation the library takes, :func:`implementation` tells what that means
for one tensor, and only a call that takes Triton imports a kernel's file.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHOICES = ("auto", "triton", "torch")

#: From this many rows on, ``"auto"`` takes Triton. Not measured by us: authors of such kernels report a
#: gain over cuBLAS from about 2048 on. ``tests/benchmarks/gpu_session.py`` measures it on a card.
CROSSOVER = 2048

_choice = "auto"


class use:
    """Choose the implementation for the whole process, or for a ``with`` block alone.

        dslib.kernels.use("torch")            # from here on
        with dslib.kernels.use("triton"):     # here; afterwards what stood before
            newton_schulz(G)

    ``choice``: ``"auto"`` (the default) takes Triton where it is expected to be faster, see
    :func:`implementation`; ``"triton"`` always takes it where a kernel can hold the dtype; ``"torch"``
    never. The choice is one for all threads. Raises ValueError for another ``choice``, and
    RuntimeError for ``"triton"`` where triton is not installed.
    """

    def __init__(self, choice: str) -> None:
        global _choice
        if choice not in CHOICES:
            raise ValueError(f"choice={choice!r} is unknown; use 'auto', 'triton' or 'torch'")
        if choice == "triton" and not _installed():
            raise RuntimeError(
                "choice='triton', but triton is not installed; it exists for Linux: "
                "`pip install triton` there, or use 'auto' or 'torch'"
            )
        self.choice, self._before = choice, _choice
        _choice = choice

    def __enter__(self) -> use:
        global _choice
        _choice = self.choice
        return self

    def __exit__(self, *error: object) -> None:
        global _choice
        _choice = self._before

    def __repr__(self) -> str:
        return f"dslib.kernels.use({self.choice!r})"


def chosen() -> str:
    """What :func:`use` chose last: ``"auto"``, ``"triton"`` or ``"torch"``."""
    return _choice


def implementation(x: Tensor) -> str:
    """``"triton"`` or ``"torch"``: what computes products of ``x`` (..., rows, columns) now.

    float64 stays on torch whatever was chosen: the kernels accumulate in float32. ``"auto"`` takes
    Triton for float16 and bfloat16 on a GPU (NVIDIA from compute capability 8.0, or ROCm) from
    :data:`CROSSOVER` rows on. float32 without tensor cores is what the vendor's library does well, so it
    takes Triton only when ``"triton"`` was chosen.
    """
    import torch

    if _choice == "torch" or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "torch"
    if _choice == "triton":
        return "triton"
    if x.device.type != "cuda" or x.dtype == torch.float32 or x.shape[-2] < CROSSOVER or not _installed():
        return "torch"
    # ROCm calls its devices "cuda" too; its numbers are no compute capability.
    new_enough = torch.version.hip is not None or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return "triton" if new_enough else "torch"


def attention_implementation(x: Tensor) -> str:
    """``"triton"`` or ``"torch"``: what computes attention, or a recurrence in its place, over ``x`` now.

    As :func:`implementation`, but ``"auto"`` takes Triton for any such tensor on a GPU, float32 too and
    whatever its size: what torch would do instead fills memory with scores, or launches a kernel a step.
    """
    import torch

    if _choice == "torch" or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "torch"
    if _choice == "triton":
        return "triton"
    if x.device.type != "cuda" or not _installed():
        return "torch"
    new_enough = torch.version.hip is not None or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return "triton" if new_enough else "torch"


def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
