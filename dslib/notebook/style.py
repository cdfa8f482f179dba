"""One plot style for all notebooks: colour-blind safe, inline SVG, readable on light and dark."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from dslib.notebook.environment import kernel_shell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text and axes: this grey has a contrast above 4.3 both on white and on JupyterLab's dark
# #111; the exported page replaces it by the page's own text colour.
INK = "#787878"

# Okabe and Ito's palette, ordered so that neighbours also differ in lightness (greyscale).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")

COLOURS = MappingProxyType(
    {"muon": "#0072B2", "adamw": "#E69F00", "null": "#999999", "reference": "#CC79A7", "ink": INK}
)
colours = SimpleNamespace(**COLOURS)


def style_parameters() -> dict[str, Any]:
    """The matplotlib parameters of the style, for ``matplotlib.rc_context``."""
    from cycler import cycler

    return {
        "axes.edgecolor": INK,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "figure.facecolor": "none",
        "figure.figsize": (6.4, 3.6),
        "figure.constrained_layout.use": True,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same on every machine
        "font.size": 10,
        "grid.alpha": 0.25,
        "grid.color": INK,
        "grid.linewidth": 0.7,
        "image.cmap": "viridis",
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.labelcolor": INK,
        "lines.linewidth": 1.8,
        "patch.edgecolor": "none",
        "savefig.facecolor": "none",
        "savefig.edgecolor": "none",
        "svg.fonttype": "path",  # glyphs as outlines: no font of the reader's machine is asked
        "svg.hashsalt": "dslib",  # the same figure gets the same ids, run after run
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }


def use_style() -> None:
    """Apply the style, and in a notebook switch to inline SVG figures without a date in them.

    A kernel whose MPLBACKEND says otherwise (Agg shows no figure and no error) is switched too.
    """
    import matplotlib

    shell = kernel_shell()
    if shell is not None:
        shell.run_line_magic("matplotlib", "inline")
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})
    matplotlib.rcParams.update(style_parameters())


def band(ax: Axes, x: Any, samples: Any, label: str | None = None, color: str | None = None) -> Any:
    """Draw the mean over axis 0 (the seeds) and its 95 % Student t interval as a band.

    ``samples`` has shape (seeds, points) and ``x`` (points,). With one seed there is a line and
    no band. Returns the line. Raises ValueError for other shapes and for NaN.
    """
    import numpy as np

    values, at = np.asarray(samples, dtype=float), np.asarray(x, dtype=float)
    if values.ndim != 2 or at.ndim != 1 or values.shape[1] != at.shape[0] or not values.size:
        raise ValueError(
            f"samples has shape {values.shape} and x {at.shape}; give (seeds, points) and (points,)"
        )
    if np.isnan(values).any():
        seeds = sorted(set(np.argwhere(np.isnan(values))[:, 0].tolist()))
        raise ValueError(f"samples holds NaN in the rows {seeds}; drop those seeds or find out why")
    mean = values.mean(axis=0)
    (line,) = ax.plot(at, mean, label=label, color=color)
    seeds = values.shape[0]
    if seeds > 1:
        from scipy import stats

        half = stats.t.ppf(0.975, seeds - 1) * values.std(axis=0, ddof=1) / np.sqrt(seeds)
        ax.fill_between(at, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def paper_line(ax: Axes, value: float, text: str, axis: str = "y") -> Any:
    """Draw the paper's number as a dashed line with ``text`` beside it; returns the line.

    ``axis="y"`` draws it across at that height, ``"x"`` upright at that place.
    Raises ValueError for another axis or a value that is not finite.
    """
    import math

    if axis not in {"x", "y"}:
        raise ValueError(f"axis={axis!r} is unknown; use 'x' or 'y'")
    if not math.isfinite(value):
        raise ValueError(f"value={value!r} is not finite; give the paper's number")
    line = (ax.axhline if axis == "y" else ax.axvline)(
        value, color=COLOURS["reference"], linestyle=(0, (5, 3)), linewidth=1.3, zorder=1
    )
    if axis == "y":
        place = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "xytext": (-2, 3), "ha": "right"}
    else:
        place = {"xy": (value, 1), "xycoords": ("data", "axes fraction"), "xytext": (4, -10), "ha": "left"}
    ax.annotate(text, textcoords="offset points", color=COLOURS["reference"], fontsize=9, **place)
    return line
