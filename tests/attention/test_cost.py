"""Costs: the paper's sizes, sums by hand, and growth."""

import numpy as np
import pytest

from dslib.attention.cost import (
    AttentionSizes,
    cache_numbers,
    decode_bytes,
    decode_flops,
    growth_exponent,
    prefill_flops,
    total,
)

SMALL = AttentionSizes(
    heads=2, kv_rank=4, rope_dim=2, nope_dim=3, value_dim=3, indexer_heads=1, indexer_dim=2, top_k=3
)


def test_decoding_is_counted_pair_by_pair():
    cost = decode_flops([2, 10], SMALL)
    assert cost["dense"]["attention"].tolist() == [2 * 2 * 2 * 10, 10 * 2 * 2 * 10]
    assert cost["sparse"]["attention"].tolist() == [2 * 40, 3 * 40]
    assert cost["sparse"]["indexer"].tolist() == [2 * 7, 10 * 7]


def test_prefill_is_the_sum_of_its_tokens():
    lengths = np.arange(1, 9)
    tokens = decode_flops(lengths, SMALL)["sparse"]
    whole = prefill_flops(lengths, SMALL)["sparse"]
    for part in tokens:
        np.testing.assert_allclose(whole[part], np.cumsum(tokens[part]))


def test_all_keys_selected_costs_the_attention_of_dense_mqa():
    cost = decode_flops(2, SMALL)
    assert cost["sparse"]["attention"] == cost["dense"]["attention"]


def test_bytes_are_entries_and_indexer_keys():
    cost = decode_bytes(10, SMALL)
    assert total(cost["dense"]) == 10 * 6 * 2
    assert total(cost["sparse"]) == 3 * 6 * 2 + 10 * 2


def test_published_sizes_cache_576_numbers_where_all_heads_would_need_40960():
    assert cache_numbers() == {"MHA": 128 * (128 + 64 + 128), "MQA": 576, "MQA + indexer": 704}


def test_growth_exponent_is_exact_for_a_power_and_names_bad_input():
    lengths = np.array([10.0, 100.0, 1000.0])
    assert growth_exponent(lengths, 3 * lengths**1.5) == pytest.approx(1.5)
    for bad in (([1], [1]), ([1, 2], [1, 2, 3])):
        with pytest.raises(ValueError, match="n at least 2"):
            growth_exponent(*bad)
    with pytest.raises(ValueError, match="must be positive"):
        growth_exponent([1, 2], [0, 1])
