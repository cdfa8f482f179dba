"""The table of :mod:`dslib.experiments.agent_context`: packed to ship, and questions to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dslib.experiments.agent_context import Arm
from dslib.experiments.search_policy import COUNTS
from dslib.tasks.search_episode import OUTCOMES

if TYPE_CHECKING:
    import pandas

#: A letter an outcome, in the order of OUTCOMES: solved, wrong, out of window, no progress, out of calls, no call.
CODES = "swopxn"
ANSWERED = ("solved", "wrong answer")


def pack(rows: pandas.DataFrame, seed: int = 0) -> pandas.DataFrame:
    """A row an arm, to ship: its outcomes a letter a world (:data:`CODES`), its counts with spaces between them.

    Raises ValueError for worlds that are not the same 0, 1, 2, … in every arm.
    """
    import pandas

    letters = dict(zip(OUTCOMES, CODES, strict=True))
    packed = []
    for name, part in rows.groupby("arm", sort=False):
        part = part.sort_values("world")
        if part.world.tolist() != list(range(len(part))) or len(part) != rows.world.nunique():
            raise ValueError(f"arm={name!r} does not hold each of the {rows.world.nunique()} worlds once")
        row = {"arm": name, "seed": seed, "worlds": len(part), "outcome": "".join(part.outcome.map(letters))}
        packed.append(row | {count: " ".join(map(str, part[count])) for count in COUNTS})
    return pandas.DataFrame(packed)


def unpack(packed: pandas.DataFrame) -> pandas.DataFrame:
    """The rows that :func:`pack` packed."""
    import pandas

    names, found = dict(zip(CODES, OUTCOMES, strict=True)), []
    for row in packed.itertuples():
        outcomes = [names[letter] for letter in row.outcome]
        columns = {count: [int(word) for word in str(getattr(row, count)).split()] for count in COUNTS}
        solved = [outcome == "solved" for outcome in outcomes]
        frame = {"arm": row.arm, "world": range(row.worlds), "outcome": outcomes, "solved": solved}
        found.append(pandas.DataFrame({**frame, **columns}))
    return pandas.concat(found, ignore_index=True)


@dataclass
class EpisodeTable:
    """Questions to a table of episodes: ``rows`` as of :func:`measure`."""

    rows: pandas.DataFrame
    _arms: dict[str, pandas.DataFrame] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = self.rows.groupby("arm", sort=False)
        self._arms = {name: part.set_index("world").sort_index() for name, part in parts}

    def __contains__(self, arm: Arm) -> bool:
        return arm.name in self._arms

    def __getitem__(self, arm: Arm) -> pandas.DataFrame:
        """The episodes of an arm by world. Raises KeyError, with what there is, for an arm that was not played."""
        if arm.name not in self._arms:
            raise KeyError(f"{arm.name!r} was not played; there are {', '.join(self._arms)}")
        return self._arms[arm.name]

    def solved(self, arm: Arm, calls: Any = None) -> np.ndarray:
        """1.0 where a world was solved, else 0.0: (worlds,). ``calls``: within so many, one number or one a world."""
        part = self[arm]
        within = True if calls is None else part.calls.to_numpy() <= np.asarray(calls)
        return (part.solved.to_numpy() & within).astype(float)

    def guessed(self, arm: Arm) -> np.ndarray:
        """Expected success if whatever ended without an answer had ended with a guess: (worlds,)."""
        part = self[arm]
        silent = ~part.outcome.isin(ANSWERED).to_numpy()
        guess = part.guess.to_numpy()
        return part.solved.to_numpy() + silent * np.where(guess > 0, 1 / np.maximum(guess, 1), 0.0)

    def parallel(self, arm: Arm, samples: int, calls: int = 10**9) -> tuple[np.ndarray, np.ndarray]:
        """Parallel-fewest-step over ``samples`` repeats of an arm, each stopped after ``calls`` calls:
        (solved, calls that all of them made), both (worlds,) floats."""
        parts = [self[replace(arm, sample=arm.sample + sample)] for sample in range(samples)]
        spent = np.stack([part.calls.to_numpy() for part in parts])
        solved = np.stack([part.solved.to_numpy() for part in parts])
        answered = np.stack([part.outcome.isin(ANSWERED).to_numpy() for part in parts])
        steps = np.where(answered & (spent <= calls), spent, np.inf)
        best = steps.argmin(axis=0)[None]
        taken = np.take_along_axis(solved, best, 0)[0] & np.isfinite(np.take_along_axis(steps, best, 0)[0])
        return taken.astype(float), np.minimum(spent, calls).sum(axis=0).astype(float)

    def restarts(self, arm: Arm, samples: int, calls: int) -> tuple[np.ndarray, np.ndarray]:
        """One attempt after another over ``samples`` repeats of an arm, ``calls`` calls in all: an attempt that ends
        without an answer is followed by the next, which starts from nothing: (solved, calls made), both (worlds,)
        floats."""
        left = np.full(len(self[arm]), float(calls))
        solved, going = np.zeros(len(left)), np.ones(len(left), dtype=bool)
        for sample in range(samples):
            part = self[replace(arm, sample=arm.sample + sample)]
            needed = part.calls.to_numpy()
            finished = going & (needed <= left)
            solved += finished & part.solved.to_numpy()
            left -= np.where(going, np.minimum(needed, left), 0)
            going &= ~(finished & part.outcome.isin(ANSWERED).to_numpy()) & (left > 0)
        return solved, calls - left

    def curve(self, arm: Arm, samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(mean calls, success) when episodes are stopped after 1, 2, … calls: one run gives every budget."""
        most = max(
            int(self[replace(arm, sample=arm.sample + sample)].calls.max()) for sample in range(samples)
        )
        points = [[v.mean() for v in self.parallel(arm, samples, calls)] for calls in range(1, most + 1)]
        success, spent = np.array(points).T
        return spent, success

    def line(self, label: str, arm: Arm, samples: int = 1) -> dict[str, Any]:
        """A row for a table: success, mean counts a world, and calls for each solved world; with ``samples``, of
        parallel-fewest-step, whose counts are those of all its episodes."""
        parts = [self[replace(arm, sample=arm.sample + sample)] for sample in range(samples)]
        success = self.parallel(arm, samples)[0]
        means = {count: sum(part[count].mean() for part in parts) for count in COUNTS[:-1]}
        each = means["calls"] * len(success) / max(success.sum(), 1)
        return {"": label, "success": success.mean(), **means, "calls per success": each}
