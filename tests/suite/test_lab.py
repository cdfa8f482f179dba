"""JupyterLab opens without questions, takes its own options, and leaves the reader's settings alone."""

import json
import sys
from pathlib import Path

import pytest

from dslib.suite import lab


@pytest.fixture
def page(tmp_path, monkeypatch):
    """What JupyterLab tells its page, given the environment it was started with."""

    def read(**before):
        from jupyterlab_server.config import get_page_config

        for name, value in before.items():
            monkeypatch.setenv(name, value)
        for name, value in lab.environment(tmp_path / "ours").items():
            monkeypatch.setenv(name, value)
        return get_page_config([])

    return read


def test_the_question_about_news_is_off(page):
    assert lab.QUESTION in page()["disabledExtensions"]


def test_the_readers_own_settings_stay(page, tmp_path):
    own = tmp_path / "own" / "labconfig"
    own.mkdir(parents=True)
    (own / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {"theirs": True}, "appName": "Mine"})
    )
    found = page(JUPYTER_CONFIG_PATH=str(own.parent))
    assert {lab.QUESTION, "theirs"} <= set(found["disabledExtensions"])
    assert found["appName"] == "Mine"


def test_the_plugin_that_asks_is_called_so_in_the_installed_version():
    import jupyterlab

    scripts = Path(jupyterlab.__file__).parent / "static"
    assert any(lab.QUESTION.encode() in file.read_bytes() for file in scripts.glob("*.js"))


def test_kernels_compute_on_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert lab.environment(tmp_path)["OMP_NUM_THREADS"] == "1"


def test_options_are_passed_on_and_the_status_comes_back(
    tmp_path, monkeypatch, write_notebook, dslib_command
):
    write_notebook(tmp_path / "01_toy.ipynb", "x = 1")
    seen = []

    class Process:
        def __init__(self, command, env):
            seen.append(command)
            self.interrupted = False

        def wait(self):
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            return 3

    monkeypatch.setattr(lab.subprocess, "Popen", Process)
    assert dslib_command("lab", "--notebooks", tmp_path, "--", "--no-browser", "--port=9999") == 3
    (command,) = seen
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert command[3:] == ["--notebook-dir", str(tmp_path), "--no-browser", "--port=9999"]
