"""What only a notebook needs: style, widgets, progress, sources, exercises, prose, tables."""

from dslib.notebook.environment import headless, jobs
from dslib.notebook.exercises import attempt, results, run_checks
from dslib.notebook.progress import progress
from dslib.notebook.prose import say
from dslib.notebook.setup import setup, sizes
from dslib.notebook.source import show_source
from dslib.notebook.style import COLOURS, PALETTE, band, colours, paper_line, use_style
from dslib.notebook.tables import show_table
from dslib.notebook.widgets import initial_values, interact

__all__ = [
    "COLOURS",
    "PALETTE",
    "attempt",
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
    "show_source",
    "show_table",
    "sizes",
    "use_style",
]
