"""Drawings of the reasoning study: a problem as a graph, the stages as a flow, answers token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dslib.experiments.reasoning_pipeline import STAGES, Stage
from dslib.tasks.pointer_chasing import PointerProblem
from dslib.tasks.scripts import Reading, TwoScripts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The main line of the pipeline and the place of each stage, (column, row).
FLOW = {
    "base": (0, 1),
    "zero": (1, 2),
    "cold start": (1, 1),
    "RL": (2, 1),
    "SFT": (3, 1),
    "R1": (4, 1),
    "small base": (4, 0),
    "distilled": (5, 0),
}
#: The colour of each kind of token, of Okabe and Ito's palette.
TONES = {"step": "#0072B2", "wrong step": "#E69F00", "right": "#009E73", "wrong": "#D55E00", "tag": "#999999"}
#: What a stage's kind does, in words of a figure.
KINDS = {
    "text": "pretraining text",
    "cold": "readable traces",
    "verified": "verified samples",
    "rl": "RL",
}


def edge_hops(problem: PointerProblem) -> dict[int, list[int]]:
    """For each node that the path leaves, the numbers of the hops that leave it, from 1."""
    hops: dict[int, list[int]] = {}
    for hop, node in enumerate((problem.start, *problem.path[:-1]), 1):
        hops.setdefault(node, []).append(hop)
    return hops


def draw_problem(ax: Axes, problem: PointerProblem, ink: str, path: str, answer: str) -> None:
    """Draw where each symbol leads: arrows in the colour ``ink``, those that the path takes in ``path`` with the
    numbers of their hops, a ring around the start, and the answer in its own colour."""
    count, hops = len(problem.f), edge_hops(problem)
    places = [(math.sin(2 * math.pi * i / count), math.cos(2 * math.pi * i / count)) for i in range(count)]
    for node, target in enumerate(problem.f):
        tone = path if node in hops else ink
        (x, y), (u, v) = places[node], places[target]
        label, at = ", ".join(map(str, hops.get(node, ()))), (0.5 * (x + u), 0.5 * (y + v))
        if node == target:
            at = (1.5 * x, 1.5 * y)
            ax.plot(1.26 * x, 1.26 * y, "o", ms=13, mfc="none", mec=tone, mew=1.5, zorder=1)
        else:
            style = {"arrowstyle": "-|>", "color": tone, "shrinkA": 11, "shrinkB": 11, "lw": 1.5}
            bent = style | {"connectionstyle": "arc3,rad=0.15"}
            ax.annotate("", (u, v), (x, y), arrowprops=bent)
            aside = 0.075 + 0.13 / math.dist((x, y), (u, v))  # the middle of the bent arrow, and beyond
            at = (at[0] + aside * (v - y), at[1] - aside * (u - x))
        ax.text(*at, label, color=tone, fontsize=9, ha="center", va="center")
    for node, (x, y) in enumerate(places):
        tone = answer if node == problem.answer else ink
        ring = path if node == problem.start else "none"
        ax.plot(x, y, "o", ms=19, mfc="none", mec=ring, mew=2)
        ax.text(x, y, str(node), color=tone, ha="center", va="center", weight="bold")
    ax.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
    ax.axis("off")


def draw_flow(
    ax: Axes,
    weights: str,
    samples: str,
    stages: Mapping[str, Stage] = STAGES,
    places: Mapping[str, tuple[float, float]] = FLOW,
) -> None:
    """Draw ``stages`` at their ``places``: a solid arrow in the colour ``weights`` from the stage that one starts
    from, a dashed one in ``samples`` from the stage that teaches it. Raises ValueError for a stage that is not
    there, or whose start has no place."""
    boxes = {}
    for name, place in places.items():
        if name not in stages:
            raise ValueError(f"places names {name!r}; the stages are {', '.join(stages)}")
        stage = stages[name]
        what = " + ".join(stage.rewards) if stage.kind == "rl" else KINDS.get(stage.kind, stage.kind)
        text = f"{name}\n{what}".replace(" + language", "\n+ language")
        box = {"boxstyle": "round,pad=0.45", "facecolor": "none", "edgecolor": weights}
        boxes[name] = ax.text(*place, text, ha="center", va="center", fontsize=8, bbox=box)
    for name in places:
        for origin, tone, line in ((stages[name].start, weights, "-"), (stages[name].teacher, samples, "--")):
            if origin is None:
                continue
            if origin not in places:
                raise ValueError(f"{name!r} comes from {origin!r}, which has no place")
            (x, y), (u, v) = places[origin], places[name]
            bend = 0.32 if y == v and u - x > 1 else 0.0  # around the boxes between
            style = {"arrowstyle": "-|>", "color": tone, "linestyle": line, "shrinkA": 1, "shrinkB": 1}
            style |= {"patchA": boxes[origin].get_bbox_patch(), "patchB": boxes[name].get_bbox_patch()}
            ax.annotate("", (u, v), (x, y), arrowprops=style | {"connectionstyle": f"arc3,rad={bend}"})
    columns, rows = zip(*places.values(), strict=True)
    ax.set(xlim=(min(columns) - 0.5, max(columns) + 0.5), ylim=(min(rows) - 0.6, max(rows) + 0.5))
    ax.axis("off")


def draw_seeds(
    ax: Axes, names: Sequence[str], values: Sequence[Sequence[float]], tones: Sequence[str]
) -> None:
    """A column of dots for each of ``names``, one dot a seed, in its tone."""
    for place, (each, tone) in enumerate(zip(values, tones, strict=True)):
        ax.plot([place] * len(each), each, "o", ms=5, alpha=0.6, color=tone)
    ax.set_xticks(range(len(names)), list(names), rotation=30, ha="right")
    ax.set_xlim(-0.5, len(names) - 0.5)


def token_kinds(tokens: int, reading: Reading) -> list[str]:
    """What each of a completion's ``tokens`` is: ``"step"`` on the path, ``"wrong step"``, ``"right"`` or ``"wrong"``
    answer, or ``"tag"``, the end included."""
    kinds = ["tag"] * tokens
    for place, hop in enumerate(reading.pad.at):
        kinds[place + reading.tagged] = "wrong step" if hop is None else "step"
    if reading.pad.well_formed:
        kinds[-2] = "right" if reading.pad.correct else "wrong"
    return kinds


def draw_answers(
    ax: Axes,
    task: TwoScripts,
    answers: Sequence[Tensor],
    readings: Sequence[Reading],
    tones: Mapping[str, str],
) -> None:
    """Write completions (time,) int64 in rows, a token in the colour of its kind in :func:`token_kinds`; a token
    behind the task's vocabulary, a tick of an effort, is ``#``."""
    for row, (tokens, reading) in enumerate(zip(answers, readings, strict=True)):
        kinds = token_kinds(len(tokens), reading)
        for place, (token, kind) in enumerate(zip(tokens.tolist(), kinds, strict=True)):
            name = task.text([token]) if token < task.vocab_size else "#"
            ax.text(place, -row, name, color=tones[kind], ha="center", family="monospace")
    ax.set(xlim=(-1, task.max_new_tokens), ylim=(0.4 - len(answers), 0.9))
    ax.axis("off")
