"""State tracking: groups, parity by hand, and targets that no single token gives away."""

import pytest
import torch

from dslib.tasks import StateTracking


def batch(objects, count=64, time=12, seed=0):
    return StateTracking(objects).batch(count, time, torch.Generator().manual_seed(seed))


def test_two_objects_are_parity():
    tokens, targets = batch(2)
    assert torch.equal(targets, tokens.cumsum(1) % 2)


@pytest.mark.parametrize("objects", [2, 3, 4])
def test_products_form_a_group_with_the_identity_first(objects):
    product = StateTracking(objects).product
    n = len(product)
    assert torch.equal(product[0], torch.arange(n))
    assert torch.equal(product[:, 0], torch.arange(n))
    assert (product.sort(0).values == torch.arange(n).unsqueeze(1)).all()
    i, j, k = torch.randint(n, (3, 200), generator=torch.Generator().manual_seed(0))
    assert torch.equal(product[product[i, j], k], product[i, product[j, k]])
    assert torch.equal(product, product.T) == (objects == 2)


def test_target_is_the_product_in_the_order_of_the_tokens():
    task = StateTracking(3)
    tokens, targets = batch(3, count=5)
    for word, found in zip(tokens.tolist(), targets.tolist(), strict=True):
        things = [0, 1, 2]
        for token, target in zip(word, found, strict=True):
            # First what stood there, then the new permutation of the places.
            things = [task.permutations[token][thing] for thing in things]
            assert tuple(things) == task.permutations[target]


def test_the_last_token_says_nothing_about_the_target():
    tokens, targets = batch(3, count=6000, time=4)
    table = torch.zeros(6, 6).index_put_((tokens[:, -1], targets[:, -1]), torch.ones(6000), accumulate=True)
    assert (table / table.sum(1, keepdim=True) - 1 / 6).abs().max() < 0.05


def test_same_generator_same_words():
    assert torch.equal(batch(3)[0], batch(3)[0])
    assert not torch.equal(batch(3)[0], batch(3, seed=1)[0])


@pytest.mark.parametrize(("objects", "count", "time"), [(1, 1, 1), (6, 1, 1), (2, 0, 1), (2, 1, 0)])
def test_impossible_sizes_are_refused(objects, count, time):
    with pytest.raises(ValueError, match="must be"):
        batch(objects, count, time)
