"""What a problem with a checkable answer offers to whoever trains on it or measures it.

A task is a list of problems that its fields and its seed determine. A problem is known by its index; the prompts
of a task all have one length, and a completion is what a model wrote after a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

#: How many rows a round of :func:`distinct_rows` draws, at first and at most, and after how many rounds without
#: a new row it takes it that there is none.
FIRST_ROUND, LARGEST_ROUND, IDLE_ROUNDS = 4096, 65_536, 3


@runtime_checkable
class Task(Protocol):
    """Verifiable problems (RLVR: a deterministic verifier gives each completion a reward).

    ``completions`` (n, new) int64 stand beside ``mask`` (n, new) bool, True where a token was generated, the
    sampled ``end`` included; what stands elsewhere is never read. An answer that cannot be read gets 0.
    """

    vocab_size: int
    end: int
    max_new_tokens: int

    def __len__(self) -> int:
        """The number of problems."""

    def problem(self, index: int) -> Any:
        """One problem in readable form."""

    def prompts(self, indices: Tensor | Sequence[int]) -> Tensor:
        """(n, time) int64."""

    def rewards(self, indices: Tensor | Sequence[int], completions: Tensor, mask: Tensor) -> Tensor:
        """(n,) float32."""


@runtime_checkable
class EnumerableTask(Task, Protocol):
    """A task whose well-formed answers to a problem can be listed, and so the correct ones among them."""

    answer_space: int

    def answers(self, index: int) -> Tensor:
        """All well-formed answers to a problem, each once: (answer_space, length) int64."""

    def correct_answers(self, index: int) -> Tensor:
        """All completions with reward 1, each once: (m, length) int64."""


def checked_indices(indices: Tensor | Sequence[int], size: int) -> Tensor:
    """``indices`` as (n,) int64. Raises TypeError for anything but whole numbers, ValueError for another shape
    than (n,), IndexError for an index outside 0 … size − 1, negative ones included."""
    found = torch.as_tensor(indices)
    if found.ndim != 1:
        raise ValueError(f"indices have shape {tuple(found.shape)}; give one dimension, (n,)")
    if found.numel() == 0:
        return found.long()
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise TypeError(f"indices are {found.dtype}; give whole numbers")
    found = found.long()
    outside = (found < 0) | (found >= size)
    if outside.any():
        raise IndexError(f"problem {int(found[outside][0])} does not exist; there are {size}, counted from 0")
    return found


def generated_tokens(indices: Tensor, completions: Tensor, mask: Tensor) -> Tensor:
    """``completions`` with −1 wherever ``mask`` is False, (n, new) int64 on the CPU.

    Raises TypeError for other dtypes; ValueError unless both are (n, new) for the n indices and each row of
    the mask is True first and False from then on.
    """
    if completions.ndim != 2 or completions.shape != mask.shape or len(completions) != len(indices):
        raise ValueError(
            f"completions {tuple(completions.shape)} and mask {tuple(mask.shape)} must both be (n, new) "
            f"with one row for each of the n={len(indices)} indices"
        )
    if completions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"completions are {completions.dtype}; give int64 token ids")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}; give bool, True where a token was generated")
    resumed = mask[:, 1:] & ~mask[:, :-1]
    if resumed.any():
        row = int(resumed.any(dim=1).nonzero()[0])
        raise ValueError(
            f"mask of completion {row} has a gap; what is generated comes first and at a stretch"
        )
    return torch.where(mask, completions.long(), -1).cpu()


def distinct_rows(
    draw: Callable[[int, torch.Generator], Tensor],
    identity: Callable[[Tensor], Tensor],
    skip: int,
    count: int,
    seed: int,
) -> Tensor:
    """Rows ``skip`` … ``skip + count`` of an endless stream of random rows that are all different.

    ``draw(n, generator)`` makes at most n random rows (rows, fields) int64, and two rows are the same where
    ``identity`` of them is. The stream depends on the seed alone, so ranges that do not overlap share no row.
    Raises ValueError for a negative skip, a count below 1, or more rows than there are.
    """
    if skip < 0 or count < 1:
        raise ValueError(f"problems={count} must be at least 1 and skip={skip} at least 0")
    generator = torch.Generator().manual_seed(seed)
    seen: set[bytes] = set()
    rounds: list[Tensor] = []
    size, idle = FIRST_ROUND, 0
    while len(seen) < skip + count:
        rows, before = draw(size, generator), len(seen)
        new = []
        for place, key in enumerate(_row_bytes(identity(rows))):
            if key not in seen:
                seen.add(key)
                new.append(place)
        rounds.append(rows[new])
        idle = idle + 1 if len(seen) == before else 0
        if idle == IDLE_ROUNDS:
            raise ValueError(
                f"problems={count} after skip={skip} are more than the {len(seen)} different ones found; "
                "ask for fewer or for larger problems"
            )
        size = min(
            2 * size, LARGEST_ROUND
        )  # the sizes of the rounds do not depend on how many rows are wanted
    return torch.cat(rounds)[skip : skip + count].clone()


def _row_bytes(rows: Tensor) -> list[bytes]:
    data = rows.contiguous().numpy().tobytes()
    width = rows.shape[1] * rows.element_size()
    return [data[start : start + width] for start in range(0, len(data), width)]


def check_problems(**sizes: tuple[int, int, int]) -> None:
    """``name=(value, least, most)``; raises ValueError naming the first value outside its bounds."""
    for name, (value, least, most) in sizes.items():
        if not least <= value <= most:
            raise ValueError(f"{name}={value} must be {least} to {most}")
