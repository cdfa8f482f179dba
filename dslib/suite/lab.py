"""``dslib lab``: JupyterLab on the notebooks, as the suite runs them and without questions."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dslib.runs.files import write_json
from dslib.runs.workers import THREAD_VARIABLES

#: What asks, at each first start, whether to fetch news, and looks for updates of JupyterLab. (Its option
#: ``news_url=None`` leaves the question.)
QUESTION = "@jupyterlab/apputils-extension:announcements"


def open_lab(directory: Path, arguments: Sequence[str] = ()) -> int:
    """Run JupyterLab in ``directory`` until it ends; returns its exit status. ``arguments`` are passed on."""
    command = [sys.executable, "-m", "jupyterlab", "--notebook-dir", str(directory), *arguments]
    with tempfile.TemporaryDirectory(prefix="dslib-lab-") as settings:
        process = subprocess.Popen(command, env=environment(Path(settings)))
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # JupyterLab asks whether to end, and ends its kernels


def environment(settings: Path) -> dict[str, str]:
    """This process' environment, with settings of our own written to ``settings`` and read besides the reader's.

    Kernels compute on one thread, as in a run of the suite: the numbers are the same.
    """
    write_json(settings / "labconfig" / "page_config.json", {"disabledExtensions": {QUESTION: True}})
    paths = [str(settings), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    return {
        **os.environ,
        "JUPYTER_CONFIG_PATH": os.pathsep.join(paths),
        **dict.fromkeys(THREAD_VARIABLES, "1"),
    }
