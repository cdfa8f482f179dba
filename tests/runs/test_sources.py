"""What a step can reach: enough that no old result is given, and no more than that."""

import os
import subprocess
import sys

import pytest

from dslib.runs import sources
from dslib.runs.sources import reachable, source_hash


def forget():
    for function in (sources._imports, sources.reachable, sources.source_hash):
        function.cache_clear()


@pytest.fixture
def house(tmp_path, monkeypatch):
    """Write modules by name, a package's name ending in a point; they are all that dslib consists of."""
    files = {}

    def write(**modules):
        for name, code in modules.items():
            parts = name.replace("__", ".").split(".")
            package = parts[-1] == ""
            file = tmp_path.joinpath(*parts[:-1], "__init__.py" if package else f"{parts[-1]}.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)
            files[".".join(parts).rstrip(".")] = file

    monkeypatch.setattr(sources, "_modules", lambda: files)
    forget()
    write(dslib__="", dslib__a__="", dslib__a__b="", dslib__a__c="", dslib__d="")
    yield write
    forget()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("", set()),
        ("import math", set()),
        ("import dslib", set()),
        ("import dslib.a.b as b", {"a", "a.b"}),
        ("from dslib import d", {"d"}),
        ("from dslib.a import b, name", {"a", "a.b"}),
        ("from dslib.a.c import name", {"a", "a.c"}),
        ("from . import d", {"d"}),
        ("from .a import c as x", {"a", "a.c"}),
        ("from .a.b import name", {"a", "a.b"}),
        ("def f():\n    from dslib import d\n    return d", {"d"}),
        ("try:\n    import dslib.d\nexcept ImportError:\n    pass", {"d"}),
        ("if TYPE_CHECKING:\n    from dslib import d", set()),
        ("if typing.TYPE_CHECKING:\n    from dslib import d\nelse:\n    import dslib.a", {"a"}),
        ("# from dslib import d\ntext = 'import dslib.a'", set()),
    ],
)
def test_what_a_module_imports_is_reached(house, code, found):
    house(dslib__step=code)
    assert reachable("dslib.step") == {"dslib", "dslib.step", *(f"dslib.{name}" for name in found)}


def test_relative_imports_start_at_the_package_and_climb(house):
    house(dslib__a__="from .b import name", dslib__a__b="from ..d import name")
    assert reachable("dslib.a.c") == {"dslib", "dslib.a", "dslib.a.b", "dslib.a.c", "dslib.d"}


def test_circles_end_and_a_package_on_the_way_brings_what_it_imports(house):
    house(dslib__a__="import dslib.a.c", dslib__a__c="import dslib.d", dslib__d="import dslib.a.b")
    everything = {"dslib", "dslib.a", "dslib.a.b", "dslib.a.c", "dslib.d"}
    assert reachable("dslib.a.b") == everything
    assert reachable("dslib.d") == everything


def test_a_changed_line_changes_the_hash_of_what_reaches_it_and_of_nothing_else(house):
    def hashes():
        forget()
        return {name: source_hash(name) for name in ("dslib.a", "dslib.a.b", "dslib.a.c", "dslib.d")}

    house(dslib__a__b="from dslib import d")
    before = hashes()
    house(dslib__d="x = 1  # another line")
    after = hashes()
    assert {name for name in before if before[name] != after[name]} == {"dslib.a.b", "dslib.d"}
    house(dslib__d="x = 1  # another line\r\n")
    first = hashes()
    house(dslib__d="x = 1  # another line\n")
    assert hashes() == first, "line endings are no content"


def test_a_module_that_is_none_of_ours_has_no_known_sources():
    with pytest.raises(ValueError, match="'json' is none of dslib's"):
        source_hash("json")


@pytest.mark.parametrize(
    "unreached",
    [
        "dslib.suite.console",
        "dslib.notebook.widgets",
        "dslib.experiments.muon",
        "dslib.experiments.svd_entropy",
    ],
)
def test_the_bases_forget_nothing_for_a_line_in_suite_notebook_or_another_experiment(unreached):
    found = reachable("dslib.experiments.bases")
    assert unreached in sources._modules(), "the module was renamed: name another"
    assert unreached not in found


@pytest.mark.parametrize(
    "reached",
    [
        "dslib.attention.dense",
        "dslib.models.decoder",
        "dslib.rl.sft",
        "dslib.kernels",
        "dslib.runs.checkpoints",
    ],
)
def test_the_bases_depend_on_the_methods_that_train_them(reached):
    assert reached in reachable("dslib.experiments.bases")


def test_every_experiment_reaches_nothing_of_the_suite_or_the_notebooks():
    experiments = [name for name in sources._modules() if name.startswith("dslib.experiments.")]
    assert len(experiments) > 10
    reached = frozenset().union(*map(reachable, experiments))
    assert not [name for name in reached if name.startswith(("dslib.suite", "dslib.notebook"))]


def test_no_data_file_is_among_the_sources():
    assert {file.suffix for file in sources._modules().values()} == {".py"}


def test_source_hash_is_twelve_digits_and_the_same_in_every_process():
    names = (None, "dslib.experiments.bases")
    code = f"from dslib.runs.sources import source_hash; print([source_hash(name) for name in {names}])"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=os.sep, env=environment
    ).strip()
    here = [source_hash(name) for name in names]
    assert str(here) == there
    assert here[0] != here[1]
    for found in here:
        assert len(found) == 12
        assert set(found) <= set("0123456789abcdef")
