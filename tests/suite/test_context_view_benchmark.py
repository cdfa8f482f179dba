"""The benchmark's rows on short transcripts: all views are timed, and a goal is judged by what was measured."""

import pytest

from dslib.agents import TokenCounter
from dslib.suite import benchmarks
from dslib.suite.benchmarks import context_view as benchmark


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in {"MESSAGES": (40, 80), "REPEATS": 2}.items():
        monkeypatch.setattr(benchmark, name, value)


def test_prints_every_policy_and_strategy_at_every_length(tiny, capsys):
    benchmarks.run_benchmark("context_view")
    printed = capsys.readouterr().out
    for name in ("v32", "keep_tool_turns", "keep_all", "drop_all", "discard_75", "discard_all", "summary"):
        assert sum(line.split()[:1] == [name] for line in printed.splitlines()) == 2, name


@pytest.mark.parametrize("messages", [4, 40, 1000])
def test_transcripts_have_the_length_they_say(messages):
    assert len(benchmark.transcript(messages)) == messages


def test_strategies_have_something_to_drop_and_policies_do_not():
    whole = benchmark.transcript(200)
    shown = {name: show() for name, show in benchmark.cases(whole).items()}
    assert len(shown["keep_all"]) == 200
    for name in ("discard_75", "discard_all", "summary"):
        assert TokenCounter()(shown[name]) <= benchmark.SHARE * TokenCounter()(list(whole)), name


@pytest.mark.parametrize(("median", "verdict"), [(0.0049, "5 ms reached"), (0.0051, "5 ms missed")])
def test_goal_is_for_the_shortest_transcript(tiny, monkeypatch, median, verdict):
    found = lambda ways, **options: {way: benchmarks.Timing(median, median, median, 3) for way in ways}  # noqa: E731
    monkeypatch.setattr(benchmark, "interleaved", found)
    first, second = benchmark.timed("v32")
    assert first[-1] == verdict
    assert second[-1] == ""
