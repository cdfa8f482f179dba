"""How much of the machine a notebook may use."""

import pytest

from dslib.notebook import jobs


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("1", 1)])
def test_runner_says_how_many_processes_a_notebook_may_use(monkeypatch, given, expected):
    monkeypatch.setenv("DSLIB_JOBS_CORES", given)
    assert jobs() == expected


@pytest.mark.parametrize("given", ["", "0", "many"])
def test_without_a_runner_every_core_may_be_used(monkeypatch, given):
    monkeypatch.setenv("DSLIB_JOBS_CORES", given)
    assert jobs() >= 1
