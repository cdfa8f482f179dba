"""Cuts of a flat buffer: every entry has one owner, and the traffic follows from the owners."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslib.optim import newton_schulz_flops
from dslib.optim.sharding import FlatLayout, gather_rounds, planned_traffic

SIZES = st.lists(st.integers(0, 30), max_size=8)


@given(sizes=SIZES, ranks=st.integers(1, 9))
def test_every_entry_is_held_once_in_order_and_inside_its_shard(sizes, ranks):
    layout = FlatLayout(tuple(sizes), ranks)
    held = []
    for index, size in enumerate(sizes):
        pieces = layout.pieces(index)
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
        assert (pieces[-1].stop if pieces else 0) == size
        for piece in pieces:
            assert 0 <= piece.offset
            assert piece.offset + piece.stop - piece.start <= layout.shard_size
            first = piece.rank * layout.shard_size + piece.offset
            held += range(first, first + piece.stop - piece.start)
    assert held == list(range(sum(sizes)))
    assert 0 <= layout.shard_size * ranks - sum(sizes) < ranks


def test_more_ranks_than_entries_leave_empty_shards():
    layout = FlatLayout((3,), 8)
    assert [piece.rank for piece in layout.pieces(0)] == [0, 1, 2]


@pytest.mark.parametrize(("sizes", "ranks", "words"), [((3,), 0, "ranks=0"), ((3, -1), 2, "negative")])
def test_impossible_layouts_are_refused(sizes, ranks, words):
    with pytest.raises(ValueError, match=words):
        FlatLayout(sizes, ranks)


@given(st.lists(st.sets(st.integers(0, 7), min_size=2, max_size=4), max_size=10))
def test_no_rank_needs_two_matrices_of_a_round_and_none_is_forgotten(members):
    rounds = gather_rounds([tuple(m) for m in members])
    assert sorted(i for chosen in rounds for i in chosen) == list(range(len(members)))
    for chosen in rounds:
        ranks = [rank for i in chosen for rank in members[i]]
        assert len(ranks) == len(set(ranks))


def test_neighbours_in_a_chain_of_cuts_need_two_rounds_for_any_number_of_ranks():
    assert len(gather_rounds([(rank, rank + 1) for rank in range(63)])) == 2


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
)
def test_traffic_is_1_to_1_25_of_adamws_with_fp32_and_a_bf16_gather(shapes, ranks):
    plan = planned_traffic(shapes, ranks)
    assert 1 <= plan["ratio"] <= 1.25
    flops = sum(map(newton_schulz_flops, shapes))
    # The busiest rank does at least its share, and never more than everything.
    assert 1 / ranks - 1e-12 <= plan["iterations"] <= 1
    assert max(map(newton_schulz_flops, shapes)) / flops <= plan["iterations"] + 1e-12


def test_a_matrix_that_all_ranks_share_reaches_the_bound_of_its_formats():
    assert planned_traffic([(64, 64)], 8)["ratio"] == 1.25
    assert planned_traffic([(64, 64)], 8, 4, 2)["ratio"] == 1 + 2 / 6
    assert planned_traffic([(64, 64)], 8, 2, 2)["ratio"] == 1.5


def test_cuts_between_matrices_cost_nothing_and_one_rank_sends_nothing():
    assert planned_traffic([(4, 4)] * 8, 4) == {
        "gradients": 3 * 128 * 4,
        "momentum": 0,
        "parameters": 3 * 128 * 4,
        "ratio": 1.0,
        "iterations": 0.25,
    }
    assert planned_traffic([(5, 3)], 1)["gradients"] == 0
    assert planned_traffic([(5, 3)], 1)["ratio"] == 1
