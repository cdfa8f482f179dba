"""What only happens on a bad day: ports taken, a worker that hangs."""

from __future__ import annotations

import types

import pytest

from dslib.suite import engine, rundir, runner
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


class Order:
    """A display that writes down which notebooks were started, and gives each no process at all."""

    def __init__(self, monkeypatch, cores=2):
        self.began, self.started, self.shares = [], [], []
        monkeypatch.setattr(runner.processes, "cores", lambda: cores)
        monkeypatch.setattr(runner, "_Worker", self.worker)

    def worker(self, execution, job):
        self.shares.append(
            runner.processes.worker_environment("run", "job", execution.workers, "smoke", "there")
        )
        result = {"name": job.name, "status": "ok", "seconds": 0.0, "reports": []}
        runner.write_json(execution.run.result_file(job.name), result)
        process = types.SimpleNamespace(wait=lambda *_: 0, returncode=0)
        worker = types.SimpleNamespace(
            job=job, id="none/such", last={}, ready=True, overdue=False, started=0.0, deadline=float("inf")
        )
        worker.process = process
        execution.events.put((worker, {"event": "exit"}))
        return worker

    def begin(self, names):
        self.began = list(names)

    def event(self, name, event):
        self.started.append(name)

    def done(self, name, result): ...
    def tick(self): ...
    def end(self): ...


@pytest.fixture
def three(tmp_path, write_notebook):
    return [
        write_notebook(tmp_path / f"0{n}_{name}.ipynb", f"x = {'1 + ' * size}1")
        for n, (name, size) in enumerate((("short", 1), ("long", 900), ("middle", 90)), start=1)
    ]


def test_the_longest_notebook_starts_first_and_is_shown_where_it_stands(three, tmp_path, monkeypatch):
    display = Order(monkeypatch)
    plan = runner.plan(three, "smoke", {})
    outcome = runner.execute(plan, RunDirectory(tmp_path / "out"), display)
    assert display.started == ["02_long", "03_middle", "01_short"]
    assert display.began == ["01_short", "02_long", "03_middle"]
    assert outcome.results.keys() == set(display.began)


def test_what_a_notebook_took_before_counts_more_than_its_length(three):
    jobs = runner.plan(three, "smoke", {}, seconds={"01_short": 60.0, "02_long": 2.0}).jobs
    first, second, third = (job.seconds for job in jobs)
    assert (first, second) == (60.0, 2.0)
    assert 2.0 < third < 60.0, "guessed from its length, at the pace of the others"


@pytest.mark.parametrize(
    ("cores", "jobs", "notebooks", "workers", "share"),
    [(2, None, 3, 2, 1), (8, None, 3, 3, 2), (8, None, 1, 1, 8), (8, 2, 3, 2, 4), (2, 3, 3, 3, 1)],
)
def test_the_cores_are_shared_out_and_each_process_computes_on_one_thread(
    three, tmp_path, monkeypatch, cores, jobs, notebooks, workers, share
):
    display = Order(monkeypatch, cores)
    plan = runner.plan(three[:notebooks], "smoke", {}, jobs=jobs)
    assert plan.workers == workers
    runner.execute(plan, RunDirectory(tmp_path / "out"), display)
    for environment in display.shares:
        assert environment["DSLIB_JOBS_CORES"] == str(share)
        assert {environment[name] for name in runner.processes.THREAD_VARIABLES} == {"1"}


def test_seconds_are_remembered_from_the_newest_good_run_of_the_profile(tmp_path):
    def write(stamp, profile, **seconds):
        run = RunDirectory(tmp_path / stamp)
        run.prepare({"profile": profile, "notebooks": sorted(seconds)}, keep=False)
        for name, taken in seconds.items():
            status = "ok" if taken > 0 else "failed"
            runner.write_json(run.result_file(name), {"name": name, "status": status, "seconds": abs(taken)})

    assert rundir.seconds_before(tmp_path, "quick") == {}
    write("20260101-000000", "quick", a=1.0, b=2.0)
    write("20260102-000000", "quick", a=3.0, b=-9.0)
    write("20260103-000000", "smoke", a=5.0)
    (tmp_path / "latest").symlink_to("20260103-000000")
    assert rundir.seconds_before(tmp_path, "quick") == {"a": 3.0, "b": 2.0}


def test_the_headline_of_a_cell_is_its_first_words():
    assert engine.headline("\n# The iteration\nx = 1") == "The iteration"
    assert engine.headline("x = 1") == "x = 1"
    assert engine.headline("\n#\n") == ""
