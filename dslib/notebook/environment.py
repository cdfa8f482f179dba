"""Where the code runs: a live notebook, a headless run, or a plain Python process."""

from __future__ import annotations

import os
import sys
from typing import Any

from dslib.runs.workers import cores


def headless() -> bool:
    """Whether the notebook is executed without a reader: the runner sets DSLIB_HEADLESS=1."""
    return os.environ.get("DSLIB_HEADLESS", "") not in {"", "0"} or "PAPERMILL" in os.environ


def kernel_shell() -> Any | None:
    """The IPython shell when this process is a Jupyter kernel, else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def live() -> bool:
    """Whether a reader sits in front of a notebook, so that widgets and updates make sense."""
    return kernel_shell() is not None and not headless()


def show(plain: str, **rich: str) -> None:
    """Display the MIME types in ``rich`` (``html=...``, ``markdown=...``) with a plain fallback.

    Outside IPython the plain text is printed.
    """
    if kernel_shell() is None:
        print(plain)
        return
    from IPython.display import display

    display({"text/plain": plain, **{f"text/{kind}": text for kind, text in rich.items()}}, raw=True)


def jobs() -> int:
    """How many processes a notebook may use at once: its share of the cores in a run of the suite
    (DSLIB_JOBS_CORES, set by the runner), otherwise every core of this process."""
    given = os.environ.get("DSLIB_JOBS_CORES", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return cores()
