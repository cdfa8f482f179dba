"""Supervised fine-tuning: only what is masked in is learnt, by whatever model, from examples or from a task."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from dslib.models import DecoderConfig, MoEConfig
from dslib.rl.sft import Examples, SFTConfig, completion_loss, demonstrations, sft
from dslib.tasks.reversed_addition import ReversedAddition

TINY = DecoderConfig(vocab_size=13, d_model=16, layers=1, heads=2)
TASK = ReversedAddition(problems=50, digits=1, noise=0.0)
CONFIG = SFTConfig(steps=30, batch_size=16, lr=2e-2, rest_lr=2e-2)


def batch(count=6):
    return demonstrations(TASK)(count, torch.Generator().manual_seed(0))


def test_loss_is_the_mean_over_the_tokens_masked_in():
    model, examples = TINY.build(1).double(), batch()
    mask = torch.tensor([[True, False], [True, True], [False, True], [True, True], [False] * 2, [True, True]])
    examples = replace(examples, mask=mask)
    logits = model(torch.cat((examples.prompts, examples.completions), 1))[:, 3:-1]
    expected = F.cross_entropy(logits[mask], examples.completions[mask])
    loss = completion_loss(model, examples)
    torch.testing.assert_close(loss, expected)
    for a, b in zip(
        *(torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_whatever_stands_outside_the_mask_is_never_read():
    model, examples = TINY.build(1), batch()
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[:, 2:] = False
    for fill in (-1, 99, 3):
        padded = F.pad(examples.completions, (0, 3), value=fill)
        assert completion_loss(model, replace(examples, completions=padded, mask=mask)) == completion_loss(
            model, examples
        )


def test_a_task_is_learnt_and_the_seed_gives_the_run():
    losses = [sft(TINY.build(1), demonstrations(TASK), replace(CONFIG, seed=s)) for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][-1] < 0.6 * losses[0][0]


def test_examples_are_all_seen_before_any_is_seen_again():
    seen = []
    examples = batch(10)

    class Spy(Examples):
        def rows(self, index):
            seen.extend(index.tolist())
            return super().rows(index)

    spy = Spy(examples.prompts, examples.completions, examples.mask)
    sft(TINY.build(1), spy, replace(CONFIG, steps=5, batch_size=4))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_mixtures_move_their_bias_and_adamw_alone_works():
    model = replace(TINY, moe=MoEConfig(experts=4, top_k=2, gate_scale=1.5, bias_update_rate=0.1)).build(1)
    sft(model, batch(), replace(CONFIG, steps=2, optimizer="adamw"))
    assert model.mixtures()[0].bias.abs().sum() > 0
    assert model.mixtures()[0].load.sum() == 0


def test_bad_examples_are_refused():
    examples, model = batch(), TINY.build(1)
    with pytest.raises(ValueError, match="nothing to learn"):
        completion_loss(model, replace(examples, mask=torch.zeros_like(examples.mask)))
    with pytest.raises(ValueError, match="2 to 13, but the model's vocabulary is 0 to 12"):
        completion_loss(model, replace(examples, completions=torch.tensor([[2, 13]] * 6)))
    with pytest.raises(ValueError, match=r"mask \(6, 1\)"):
        replace(examples, mask=examples.mask[:, :1])
    with pytest.raises(ValueError, match=r"prompts \(5, 4\)"):
        replace(examples, prompts=examples.prompts[:5])
    with pytest.raises(ValueError, match="int64 beside prompts"):
        replace(examples, mask=examples.mask.long())
    with pytest.raises(ValueError, match="no examples"):
        sft(model, examples.rows(slice(0, 0)), CONFIG)
    with pytest.raises(ValueError, match="steps=0"):
        replace(CONFIG, steps=0)
    with pytest.raises(ValueError, match="optimizer='sgd'"):
        replace(CONFIG, optimizer="sgd")


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step():
    model = TINY.build(1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="step 1 is nan"):
        sft(model, batch(), CONFIG)
