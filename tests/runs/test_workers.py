"""Runs in workers: their order, their one thread, and what they leave behind."""

import pytest
import torch

from dslib.runs.workers import in_workers, one_thread


def threads_seen(label, fails=False):
    if fails:
        raise ValueError(f"{label} failed")
    return label, torch.get_num_threads()


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_call_has_one_thread_and_its_place(jobs):
    assert list(in_workers(threads_seen, [("a",), ("b",), ("c",)], jobs)) == [("a", 1), ("b", 1), ("c", 1)]


def test_one_argument_that_is_no_tuple_is_a_call():
    assert list(in_workers(threads_seen, ["a", ("b", False)])) == [("a", 1), ("b", 1)]


def test_no_calls_are_no_results():
    assert list(in_workers(threads_seen, [])) == []


def test_threads_are_as_before_after_a_block_and_after_its_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        with pytest.raises(ValueError, match="a failed"):
            list(in_workers(threads_seen, [("a", True)]))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_shared_bases_do_not_depend_on_the_threads_of_who_asks_first(monkeypatch):
    from dslib.experiments.bases import BaseConfig, base_model
    from dslib.models import DecoderConfig, MoEConfig
    from dslib.rl import SFTConfig
    from dslib.tasks import Countdown

    monkeypatch.setenv("DSLIB_CACHE", "off")
    task = Countdown(problems=100, numbers=3)
    model = DecoderConfig(task.vocab_size, d_model=32, layers=1, heads=2, moe=MoEConfig(4, 2, expert_size=32))
    config = BaseConfig(task, model, SFTConfig(3, 64))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(base_model(config, 0).state_dict())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
