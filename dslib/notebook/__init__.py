"""What only a notebook needs: style, widgets, progress, sources, exercises, prose, tables.

Every number of a notebook is **live**, measured by this run, or **shipped**, read from ``data/measurements``::

    table = nb.shipped(                       # read at "smoke" and "quick", made at "full"
        "sparse_attention", trained_rows,     # trained_rows() → frame, or rows; a generator shows progress
        profile=profile, save=save_measurements,
        command=f"dslib run 05 --profile full --param save_measurements=true --param seed={seed}",
        corpus=load_corpus(base.corpus).digest,  # only where a text is read
    )
    runs, gaps = nb.shipped(("grpo_runs", "grpo_mismatch"), everything, ...)  # made together

``make_at=("smoke", "full")`` makes tiny rows at smoke too. It prints when, by what and over how many seeds.

**Badges.** A cell that creates a figure calls ``nb.badge(fig, table)`` before ``plt.show()``: ``table`` is the
shipped table or a part of it (``table[table.arm == "NSA"]``), which says "shipped, 8 seeds". Else ``"live"``,
or ``"formula"`` for curves in which no run has a part; mixed: ``{"lines": table, "dots": "live"}``.
``nb.show_table(frame, caption, formats, badge=...)`` takes the same. ``dslib lint`` looks for both.

**Agreement.** A part of what ships is measured again; ``nb.agrees("loss on text", live.text_loss,
known.text_loss, 0.01, by="ratio")`` pairs by label, shows both and fails the run where they differ by more.
``by`` is "difference", "ratio" or "order"; ``effect=`` is the smallest effect judged on the table, and the
tolerance has to be smaller. Guard it by ``profile == "quick" and not corpus``, and by the seed's being there.

**Claims.** ``report(id, samples, null=...)`` of ``dslib.suite`` takes raw samples, one a seed, never verdicts.
"""

from dslib.notebook.agreement import Disagreement, agrees
from dslib.notebook.badges import badge
from dslib.notebook.environment import headless, jobs
from dslib.notebook.exercises import attempt, results, run_checks
from dslib.notebook.progress import progress
from dslib.notebook.prose import say
from dslib.notebook.setup import setup, sizes
from dslib.notebook.shipped import shipped
from dslib.notebook.source import show_source
from dslib.notebook.style import COLOURS, PALETTE, band, colours, paper_line, use_style
from dslib.notebook.tables import show_table
from dslib.notebook.widgets import initial_values, interact

__all__ = [
    "COLOURS",
    "PALETTE",
    "Disagreement",
    "agrees",
    "attempt",
    "badge",
    "band",
    "colours",
    "headless",
    "initial_values",
    "interact",
    "jobs",
    "paper_line",
    "progress",
    "results",
    "run_checks",
    "say",
    "setup",
    "shipped",
    "show_source",
    "show_table",
    "sizes",
    "use_style",
]
