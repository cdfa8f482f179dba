"""The cache must never give an old, a foreign or half a result."""

import dataclasses
import functools
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

from dslib.runs import cache
from dslib.runs.cache import cache_directory, cached, entry_key


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    rates: tuple[float, ...] = (0.1, 0.2)


@dataclasses.dataclass(frozen=True)
class Lazy:
    size: int = 3

    @functools.cached_property
    def worked_out(self):
        return list(range(self.size))


@dataclasses.dataclass
class Loose:
    width: int = 4


PROBE = textwrap.dedent("""
    import os, time
    from dslib.runs.cache import cached

    @cached
    def step(name, seed=0, config=None):
        with open(os.environ["PROBE_LOG"], "a") as log:
            log.write(f"{name} {seed}\\n")
        if name == "slow":
            time.sleep(0.5)
            return "done"  # without torch, which takes seconds to import in each process
        if name == "broken":
            raise RuntimeError("interrupted")
        if name == "killed":
            os._exit(7)
        import torch
        return {"weight": torch.full((2,), float(seed))}

    def told(path, times=1):
        with open(path) as file:
            return file.read()

    @cached(also=told)
    def reader(path, times=1):
        with open(os.environ["PROBE_LOG"], "a") as log:
            log.write("read\\n")
        return told(path) * times

    @cached(also=lambda: 7)
    def speechless():
        return None
""")


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A function of a module that counts as dslib's, and the log of its computations."""
    log, source = tmp_path / "log", tmp_path / "_probe.py"
    log.touch()
    source.write_text(PROBE)
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path / "cache dir ü"))
    monkeypatch.setenv("PROBE_LOG", str(log))
    module = load_probe(source)
    yield types.SimpleNamespace(
        step=module.step, module=module, source=source, runs=lambda: log.read_text().splitlines()
    )
    sys.modules.pop("dslib._probe", None)


def load_probe(source):
    import importlib.util

    spec = importlib.util.spec_from_file_location("dslib._probe", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dslib._probe"] = module
    spec.loader.exec_module(module)
    return module


START = "import sys, importlib.util as u; s = u.spec_from_file_location('dslib._probe', sys.argv[1]); "
START += (
    "m = u.module_from_spec(s); sys.modules['dslib._probe'] = m; s.loader.exec_module(m); m.step(sys.argv[2])"
)


def test_second_call_loads_and_a_changed_result_changes_nobody_elses(probe):
    first = probe.step("a", seed=3)
    first["weight"].zero_()
    assert probe.step("a", 3)["weight"].tolist() == [3.0, 3.0]
    assert probe.runs() == ["a 3"]


def test_each_configuration_has_its_entry(probe):
    probe.step("a", config=Config())
    probe.step("a", config=Config(width=5))
    probe.step("a", config=Config(rates=(0.1, 0.3)))
    probe.step("a", config=Config())
    assert len(probe.runs()) == 3


def test_what_a_configuration_has_worked_out_since_is_no_part_of_the_key(probe):
    config = Lazy()
    probe.step("a", config=config)
    assert config.worked_out == [0, 1, 2]
    probe.step("a", config=config)
    assert probe.runs() == ["a 0"]


def test_changed_sources_or_versions_give_another_entry(probe, monkeypatch):
    probe.step("a")
    monkeypatch.setattr(cache, "source_hash", lambda module: "0" * 12)
    probe.step("a")
    monkeypatch.setattr(cache, "_versions", lambda: "python 9")
    probe.step("a")
    assert len(probe.runs()) == 3


def test_parallel_processes_compute_once(probe):
    command = [sys.executable, "-c", START, str(probe.source), "slow"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    assert probe.runs() == ["slow 0"]


def test_new_process_finds_the_entry(probe):
    probe.step("first")
    subprocess.run([sys.executable, "-c", START, str(probe.source), "first"], check=True)
    assert probe.runs() == ["first 0"]


def test_what_a_step_reads_also_is_part_of_its_key(probe, tmp_path):
    file = tmp_path / "corpus"
    file.write_text("one")
    assert [probe.module.reader(str(file)) for _ in range(2)] == ["one", "one"]
    file.write_text("two")
    assert probe.module.reader(str(file)) == "two"
    assert probe.module.reader(str(file), times=2) == "twotwo"
    assert probe.runs() == ["read"] * 3


def test_what_is_read_also_must_be_text(probe):
    with pytest.raises(TypeError, match=r"also of dslib\._probe\.speechless gave a int"):
        probe.module.speechless()


def test_the_sources_of_an_arguments_class_are_part_of_the_key(probe, monkeypatch):
    from dslib.tasks import Countdown

    def key_when(changed):
        monkeypatch.setattr(cache, "source_hash", lambda module: "new" if module == changed else "old")
        return entry_key(probe.step, {"task": (Countdown(),)})

    assert key_when(Countdown.__module__) != key_when(None), "the step calls its methods without importing it"
    assert key_when("dslib.tasks.recall") == key_when(None)


def test_works_inside_loky_workers(probe):
    from joblib import Parallel, delayed, wrap_non_picklable_objects
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown()  # workers of an earlier test have its environment, not the probe's
    # By value: a worker cannot import this test file.
    job = wrap_non_picklable_objects(in_worker_by_value)
    found = Parallel(n_jobs=2, backend="loky")(delayed(job)(str(probe.source), "slow") for _ in range(2))
    assert found == ["done"] * 2
    assert probe.runs() == ["slow 0"]


def in_worker_by_value(source, name):
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("dslib._probe", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dslib._probe"] = module
    spec.loader.exec_module(module)
    return module.step(name)


def test_failed_or_killed_computation_leaves_no_entry(probe):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="interrupted"):
            probe.step("broken")
    command = [sys.executable, "-c", START, str(probe.source), "killed"]
    assert [subprocess.run(command).returncode for _ in range(2)] == [7, 7]  # and no lock is left
    assert probe.runs() == ["broken 0"] * 2 + ["killed 0"] * 2


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_entry_is_computed_again(probe, damage):
    probe.step("a", seed=1)
    (file,) = cache_directory().rglob("*.joblib")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage is None else damage)
    with pytest.warns(UserWarning, match="is damaged"):
        assert probe.step("a", seed=1)["weight"].tolist() == [1.0, 1.0]
    assert len(probe.runs()) == 2
    probe.step("a", seed=1)
    assert len(probe.runs()) == 2


def test_a_full_disk_costs_the_entry_and_not_the_result(probe, monkeypatch):
    import joblib

    def full(value, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(joblib, "dump", full)
    with pytest.warns(UserWarning, match="is not kept: no space left"):
        assert probe.step("a", seed=2)["weight"].tolist() == [2.0, 2.0]
    assert [file.suffix for file in cache_directory().rglob("*") if file.is_file()] == [".lock"]


def test_cache_can_be_switched_off(probe, monkeypatch, tmp_path):
    monkeypatch.setenv("DSLIB_CACHE", "off")
    probe.step("a")
    probe.step("a")
    assert len(probe.runs()) == 2
    assert not (tmp_path / "cache dir ü").exists()


def test_unwritable_directory_names_the_way_out(probe, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="DSLIB_CACHE"):
        probe.step("a")


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros(2), "numpy.ndarray"),
        (np.int64(3), "item"),
        ([1], "use a tuple"),
        (Loose(), "frozen=True"),
        (object(), "object"),
        ((1, [2]), r"config\[1\]"),
        (Config(rates=[1.0]), "config.rates"),
    ],
)
def test_argument_without_stable_content_is_named(probe, value, match):
    with pytest.raises(TypeError, match=match) as caught:
        probe.step("a", config=value)
    assert str(caught.value).startswith("config")


def test_tensors_and_modules_are_refused(probe):
    import torch

    for value in (torch.ones(2), torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="config is a torch"):
            probe.step("a", config=value)


def test_key_tells_types_apart_and_numpy_floats_are_floats():
    def key(value):
        return entry_key(cache_directory, {"x": value})

    assert len({key(v) for v in (1, 1.0, True, "1", None, (1,), ((1,),), b"1")}) == 8
    assert key(np.float64(0.1)) == key(0.1)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: x, "no name of its own"),
        (Config, "plain function"),
        (len, "plain function"),
        (textwrap.dedent, "dslib"),
    ],
)
def test_functions_whose_change_would_go_unnoticed_are_refused(function, match):
    with pytest.raises(TypeError, match=match):
        cached(function)


def test_functions_of_main_are_refused():
    code = "from dslib.runs.cache import cached\ndef f(x): return x\ncached(f)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "__main__.f cannot be cached" in done.stderr
