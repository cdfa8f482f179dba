"""What only happens on a bad day: ports taken, a worker that hangs."""

from __future__ import annotations

import types

import pytest

from dslib.suite import engine, runner
from dslib.suite._nbformat import nbformat
from dslib.suite.rundir import RunDirectory


class Kernel:
    """Stands for a kernel manager whose first starts fail."""

    has_kernel = True

    def __init__(self):
        self.ended = 0

    async def is_alive(self):
        return False

    async def cleanup_resources(self):
        self.ended += 1


def client(failures, monkeypatch):
    kernel = Kernel()
    starts = []

    def start(self, **_):
        starts.append(len(starts))
        if len(starts) <= failures:
            raise RuntimeError("Kernel died before replying to kernel_info")
        self.kc = types.SimpleNamespace(stop_channels=lambda: None)

    monkeypatch.setattr(engine.Client, "create_kernel_manager", lambda self: setattr(self, "km", kernel))
    monkeypatch.setattr(engine.Client, "start_new_kernel", lambda self, **_: None)
    monkeypatch.setattr(engine.Client, "start_new_kernel_client", start)
    manager = types.SimpleNamespace(nb=nbformat.v4.new_notebook())
    watch = engine.Watch(lambda *_, **__: None, 10)
    return engine.Client(manager, watch), starts


def test_a_kernel_that_loses_its_ports_is_started_again(monkeypatch):
    made, starts = client(engine.START_ATTEMPTS - 1, monkeypatch)
    with made.setup_kernel():
        assert len(starts) == engine.START_ATTEMPTS


def test_a_kernel_that_never_starts_is_given_up(monkeypatch):
    made, starts = client(99, monkeypatch)
    with pytest.raises(engine.KernelStartError, match="3 attempts"), made.setup_kernel():
        raise AssertionError("nothing may run")
    assert len(starts) == engine.START_ATTEMPTS


def test_an_error_while_cells_run_is_not_tried_again(monkeypatch):
    made, starts = client(0, monkeypatch)
    with pytest.raises(RuntimeError, match="in a cell"), made.setup_kernel():
        raise RuntimeError("in a cell")
    assert len(starts) == 1


def test_a_worker_that_hangs_is_ended_by_the_runner(tmp_path, monkeypatch, write_notebook):
    monkeypatch.setattr(runner, "START_LIMIT", 0.2)
    file = write_notebook(tmp_path / "01_toy.ipynb", "x = 1")
    plan = runner.plan([file], "smoke", {})
    display = types.SimpleNamespace(begin=print, event=print, done=print, tick=lambda: None, end=lambda: None)
    outcome = runner.execute(plan, RunDirectory(tmp_path / "out"), display)
    failure = outcome.results["01_toy"]["failure"]
    assert failure["kind"] == "timeout"
    assert "did not start in 0.2 s" in failure["message"]


def test_the_headline_of_a_cell_is_its_first_words():
    assert engine.headline("\n# The iteration\nx = 1") == "The iteration"
    assert engine.headline("x = 1") == "x = 1"
    assert engine.headline("\n#\n") == ""
