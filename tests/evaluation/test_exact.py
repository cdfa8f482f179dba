"""The exact laboratory against sampling, against every text there is, and against gradients by hand."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dslib.evaluation import (
    Distribution,
    answer_entropy,
    answer_kl,
    answer_logp,
    correct_probability,
    exact_pass_at_k,
    grouped_kl,
    guesser_rates,
    sequence_logp,
)
from dslib.models import Decoder, DecoderConfig, MoEConfig, RWKVConfig, filter_logits, generate
from dslib.tasks import Countdown, ReversedAddition

TASK = Countdown(problems=4, numbers=2, largest=3, digits=1)  # six answers of three tokens
SHAPE = {"vocab_size": TASK.vocab_size, "d_model": 16, "layers": 2, "heads": 2}


def sharp(seed=1, factor=40.0, **other):
    """A tiny model in float64 whose predictions are far from uniform."""
    model = Decoder(DecoderConfig(**{**SHAPE, **other}), seed=seed).double()
    with torch.no_grad():
        model.lm_head.weight *= factor
    return model


def taught():
    """A tiny model that has seen the form of answers for a moment: each problem's rate is of the order of 0.1."""
    model = sharp(factor=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    prompts = TASK.prompts(range(4)).repeat_interleave(6, dim=0)
    answers = torch.cat([TASK.answers(index) for index in range(4)])
    for _ in range(12):
        optimizer.zero_grad()
        (-sequence_logp(model, prompts, answers).mean()).backward()
        optimizer.step()
    return model


MODEL = taught()


@pytest.fixture(scope="module")
def every_text():
    """All texts of three tokens after the prompt of problem 0, and their log-probabilities."""
    texts = torch.tensor(list(itertools.product(range(TASK.vocab_size), repeat=3)))
    with torch.no_grad():
        logp = sequence_logp(MODEL, TASK.prompts([0]).expand(len(texts), -1), texts).sum(1)
    return texts, logp


def test_probability_is_the_reward_expected_over_every_text(every_text):
    texts, logp = every_text
    assert logp.exp().sum().item() == pytest.approx(1, abs=1e-12)
    mask = torch.ones_like(texts, dtype=torch.bool)
    rewards = TASK.rewards([0] * len(texts), texts, mask)
    assert 0 < rewards.sum() < 6
    found = correct_probability(MODEL, TASK, [0])
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx((rewards * logp.exp()).sum().item(), rel=1e-12)


def test_probability_is_how_often_a_sampler_is_right():
    samples, indices = 12_000, torch.arange(4)
    exact = correct_probability(MODEL, TASK, indices).detach()
    prompts = TASK.prompts(indices).repeat_interleave(samples // 4, dim=0)
    tokens = generate(MODEL, prompts, 3, generator=torch.Generator().manual_seed(0))[:, prompts.shape[1] :]
    rewards = TASK.rewards(indices.repeat_interleave(samples // 4), tokens, torch.ones_like(tokens) > 0)
    found = rewards.double().view(4, -1).mean(1)
    deviation = (exact * (1 - exact) / (samples // 4)).sqrt()
    assert exact.min() > 1e-3
    assert ((found - exact).abs() < 4 * deviation + 1e-9).all()


def test_pass_at_k_is_how_often_k_samples_hold_a_right_one():
    exact, k, groups = correct_probability(MODEL, TASK, range(4)).detach(), 8, 300
    prompts = TASK.prompts(range(4)).repeat_interleave(k * groups, dim=0)
    tokens = generate(MODEL, prompts, 3, generator=torch.Generator().manual_seed(1))[:, prompts.shape[1] :]
    rewards = TASK.rewards(torch.arange(4).repeat_interleave(k * groups), tokens, torch.ones_like(tokens) > 0)
    solved = rewards.view(4, groups, k).amax(2).mean()
    assert solved.item() == pytest.approx(exact_pass_at_k(exact, k), abs=4 * 0.5 / (4 * groups) ** 0.5)


@pytest.mark.parametrize("rows", [1, 2, 5, 1024])
def test_shared_prefixes_and_rows_of_their_own_agree(rows):
    indices = torch.tensor([2, 0, 3])
    prompts = TASK.prompts(indices)
    answers = torch.cat([TASK.answers(int(i)) for i in indices])
    owner = torch.arange(3).repeat_interleave(6)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    answers, owner = answers[order], owner[order]
    with torch.no_grad():
        tree = answer_logp(MODEL, prompts, answers, owner, rows=rows)
        plain = answer_logp(MODEL, prompts, answers, owner, rows=rows, share_prefixes=False)
        forced = sequence_logp(MODEL, prompts[owner], answers).sum(1)
    torch.testing.assert_close(tree, forced, rtol=0, atol=1e-12)
    torch.testing.assert_close(plain, forced, rtol=0, atol=1e-12)


def test_shared_prefixes_are_read_once():
    seen = []
    hook = MODEL.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel()))
    try:
        with torch.no_grad():
            answer_logp(MODEL, TASK.prompts([0]), TASK.answers(0), torch.zeros(6, dtype=torch.long))
    finally:
        hook.remove()
    # The prompt; two first numbers; two numbers with three operators each.
    assert seen == [TASK.prompts([0]).shape[1], 2, 6]


@pytest.mark.parametrize("kind", ["rwkv", "mixture", "float32"])
def test_other_models_agree_with_teacher_forcing(kind):
    if kind == "rwkv":
        model = RWKVConfig(vocab_size=TASK.vocab_size, d_model=16, layers=1, head_size=8).build(seed=0)
    elif kind == "mixture":
        model = sharp(moe=MoEConfig(experts=4, top_k=2))
    else:
        model = sharp().float()
    tolerance = 1e-10 if kind == "mixture" else 1e-4
    answers, owner = TASK.answers(1), torch.zeros(6, dtype=torch.long)
    model.train()
    with torch.no_grad():
        found = answer_logp(model, TASK.prompts([1]), answers, owner)
        forced = sequence_logp(model, TASK.prompts([1]).expand(6, -1), answers).sum(1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, forced, rtol=0, atol=tolerance)
    assert model.training


def test_gradient_is_that_of_the_reward_expected_over_every_text():
    model = sharp(layers=1)
    texts = torch.tensor(list(itertools.product(range(TASK.vocab_size), repeat=3)))
    rewards = TASK.rewards([0] * len(texts), texts, torch.ones_like(texts, dtype=torch.bool))
    logp = sequence_logp(model, TASK.prompts([0]).expand(len(texts), -1), texts).sum(1)
    # REINFORCE, summed over all texts instead of sampled: Σ π · R · ∇ log π.
    (rewards * logp.exp().detach() * logp).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    correct_probability(model, TASK, [0]).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("settings", [{"temperature": 0.6}, {"top_k": 4}, {"temperature": 1.4, "top_p": 0.9}])
def test_distribution_is_the_one_that_a_sampler_draws_from(settings):
    model, distribution = sharp(factor=15.0), Distribution(**settings)
    found = correct_probability(model, TASK, range(4), distribution).detach()
    for index in range(4):
        total = 0.0
        for answer in TASK.correct_answers(index):
            probability, text = 1.0, TASK.prompts([index])
            for token in answer:
                with torch.no_grad():
                    logits = model(text)[0, -1] / distribution.temperature
                kept = filter_logits(logits, distribution.top_k, distribution.top_p)
                probability *= kept.softmax(-1)[token].item()
                text = torch.cat((text, token.view(1, 1)), dim=1)
            total += probability
        assert found[index].item() == pytest.approx(total, rel=1e-9, abs=1e-300)


def test_a_filter_can_take_all_support_away():
    answers = correct_probability(MODEL, TASK, range(4), Distribution(top_k=1)).detach()
    assert set(answers.tolist()) <= {0.0, 1.0}  # greedy


def test_entropy_and_kl_are_those_over_every_text_with_the_rest_as_one_outcome(every_text):
    texts, logp = every_text
    other = sharp(seed=5, factor=20.0)
    with torch.no_grad():
        logq = sequence_logp(other, TASK.prompts([0]).expand(len(texts), -1), texts).sum(1)
    listed = {tuple(answer) for answer in TASK.answers(0).tolist()}
    inside = torch.tensor([tuple(text) in listed for text in texts.tolist()])
    p, q = logp.exp(), logq.exp()
    coarse_p = torch.cat((p[inside], p[~inside].sum()[None]))
    coarse_q = torch.cat((q[inside], q[~inside].sum()[None]))
    entropy, outside = answer_entropy(MODEL, TASK, [0, 1])
    kl, _ = answer_kl(MODEL, other, TASK, [0, 1])
    assert outside[0].item() == pytest.approx(p[~inside].sum().item(), rel=1e-9)
    assert entropy[0].item() == pytest.approx(-(coarse_p * coarse_p.log()).sum().item(), rel=1e-9)
    assert kl[0].item() == pytest.approx((coarse_p * (coarse_p / coarse_q).log()).sum().item(), rel=1e-9)
    # Bounds from below of the texts' own.
    assert entropy[0] <= -(p * logp).sum()
    assert 0 <= kl[0] <= (p * (logp - logq)).sum()


@dataclass(frozen=True)
class AnyDigits(ReversedAddition):
    """All texts of two tokens are well-formed answers, so that nothing is outside."""

    digits: int = 1
    vocab_size = 10
    plus = equals = end = 0


def test_nothing_outside_gives_the_entropy_and_kl_of_the_text():
    task, uniform = AnyDigits(problems=3), sharp(vocab_size=10, factor=0.0)
    model = sharp(vocab_size=10)
    entropy, outside = answer_entropy(uniform, task, range(3))
    torch.testing.assert_close(entropy, torch.full((3,), 2 * np.log(10), dtype=torch.float64))
    assert outside.tolist() == [0.0] * 3
    entropy, outside = answer_entropy(model, task, range(3))
    kl, rest = answer_kl(model, uniform, task, range(3))
    torch.testing.assert_close(kl, 2 * np.log(10) - entropy)  # KL to the uniform distribution
    assert outside.tolist() == rest.tolist() == [0.0] * 3
    assert answer_kl(model, model, task, range(3))[0].abs().max() < 1e-12


def test_kl_without_the_rest_would_be_negative():
    p, q = torch.tensor([0.6, 0.4], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)
    first = torch.zeros(1, dtype=torch.long)
    assert (p * (p / q).log())[0].item() == pytest.approx(-0.243279, abs=1e-6)
    assert grouped_kl(p[:1].log(), q[:1].log(), first, 1).item() == pytest.approx(0.311239, abs=1e-6)
    both = torch.zeros(2, dtype=torch.long)
    assert grouped_kl(p.log(), q.log(), both, 1).item() == pytest.approx(0.311239, abs=1e-6)


def test_kl_where_one_side_says_nothing():
    none, all_ = torch.tensor([-torch.inf, 0.0]).double(), torch.tensor([0.5, 0.5]).double().log()
    both = torch.zeros(2, dtype=torch.long)
    assert grouped_kl(none, all_, both, 1).item() == pytest.approx(np.log(2))
    assert grouped_kl(all_, none, both, 1).item() == np.inf


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}])
def test_kl_and_entropy_have_finite_gradients_also_where_something_is_never_said(settings):
    model = sharp()
    kl, _ = answer_kl(model, model, TASK, [0, 1], Distribution(**settings))
    entropy, _ = answer_entropy(model, TASK, [0, 1], Distribution(**settings))
    (kl + entropy).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_shorter_answers_are_padded_and_what_follows_their_end_counts_nothing():
    answers = torch.tensor([[1, 4, 2], [2, 0, -1], [0, -1, -1]])
    prompts, owner = TASK.prompts([0, 1]), torch.tensor([0, 1, 0])
    with torch.no_grad():
        for shared in (True, False):
            found = answer_logp(MODEL, prompts, answers, owner, share_prefixes=shared)
            for row, length in enumerate((3, 2, 1)):
                own = sequence_logp(MODEL, prompts[owner[row], None], answers[row, None, :length]).sum()
                assert found[row].item() == pytest.approx(own.item(), abs=1e-12)


def test_poisoned_padding_changes_nothing():
    completions = torch.tensor([[1, 4, 2], [2, 5, 3]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    clean = sequence_logp(MODEL, TASK.prompts([0, 1]), completions, mask)
    poisoned = sequence_logp(MODEL, TASK.prompts([0, 1]), completions.masked_fill(~mask, 10**9), mask)
    assert torch.equal(clean, poisoned)
    assert poisoned[0, 2] == 0


def test_guesser_knows_the_form_and_nothing_else():
    task = Countdown(problems=50, numbers=3, largest=9, digits=2)
    rates = guesser_rates(task, range(50))
    assert rates.dtype == np.float64
    generator = torch.Generator().manual_seed(0)
    for index in (0, 7):
        answers = task.answers(index)
        guesses = answers[torch.randint(len(answers), (4000,), generator=generator)]
        right = task.rewards([index] * 4000, guesses, torch.ones_like(guesses) > 0).mean().item()
        assert right == pytest.approx(rates[index], abs=4 * (rates[index] / 4000) ** 0.5)
    addition = ReversedAddition(problems=3, digits=4)
    assert guesser_rates(addition, [0, 2]).tolist() == [1e-5, 1e-5]


def test_guesser_of_three_numbers_solves_nearly_all_and_of_five_does_not():
    small, large = Countdown(problems=60, numbers=3), Countdown(problems=200)
    assert exact_pass_at_k(guesser_rates(small, range(60)), 256) > 0.97
    found = exact_pass_at_k(guesser_rates(large, range(200)), [1, 4, 16, 64, 256, 1024, 4096])
    published = [0.004, 0.015, 0.056, 0.188, 0.459, 0.765, 0.949]
    np.testing.assert_allclose(found, published, atol=0.07)


def test_exact_pass_at_k_is_the_mean_over_problems_for_one_k_or_many():
    rates = torch.tensor([0.0, 0.5, 1.0], requires_grad=True)
    assert exact_pass_at_k(rates, 2) == pytest.approx((0 + 0.75 + 1) / 3)
    assert isinstance(exact_pass_at_k([0.5], 1), float)
    np.testing.assert_allclose(exact_pass_at_k([0.0, 0.5], [1, 2, 3]), [0.25, 0.375, 0.4375])
    assert exact_pass_at_k([0.3], 10**9) == 1.0


class Twice(Countdown):
    def correct_answers(self, index):
        return super().correct_answers(index)[[0, 0]]


class Hopeless(Countdown):
    def correct_answers(self, index):
        return super().correct_answers(index)[:0]


def test_a_problem_without_a_correct_answer_has_the_rate_zero():
    task = Hopeless(problems=2, numbers=2, largest=3, digits=1)
    assert correct_probability(MODEL, task, [0, 1]).tolist() == [0.0, 0.0]
    assert guesser_rates(task, [0, 1]).tolist() == [0.0, 0.0]


SMALL = sharp(vocab_size=TASK.vocab_size - 1)
LARGE = sharp(vocab_size=TASK.vocab_size + 1)
FIRST = torch.zeros(1, dtype=torch.long)
EMPTY = torch.empty(1, 0, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: correct_probability(MODEL, TASK, []), "indices are empty"),
        (lambda: guesser_rates(TASK, []), "indices are empty"),
        (lambda: answer_entropy(MODEL, TASK, []), "indices are empty"),
        (
            lambda: correct_probability(SMALL, TASK, [0]),
            "the model has a vocabulary of 17 tokens and the task of 18",
        ),
        (
            lambda: answer_kl(MODEL, LARGE, TASK, [0]),
            "the policy has a vocabulary of 18 tokens and the reference of 19",
        ),
        (lambda: answer_kl(MODEL, SMALL, TASK, [0]), "vocabulary of 17 tokens and the task of 18"),
        (lambda: correct_probability(MODEL, Twice(problems=1, numbers=2, largest=3, digits=1), [0]), "twice"),
        (lambda: answer_logp(MODEL, EMPTY, torch.ones(1, 2).long(), FIRST), "prompts"),
        (
            lambda: answer_logp(MODEL, TASK.prompts([0]), torch.ones(1, 2).long(), torch.ones(1).long()),
            "owner",
        ),
        (
            lambda: answer_logp(MODEL, TASK.prompts([0]), torch.full((1, 2), 18), FIRST),
            "token 18",
        ),
        (
            lambda: answer_logp(MODEL, TASK.prompts([0]), TASK.answers(0), torch.zeros(6).long(), rows=0),
            "rows=0",
        ),
        (lambda: sequence_logp(MODEL, TASK.prompts([0]), torch.tensor([[3, 18]])), "token 18 lies outside"),
        (lambda: sequence_logp(MODEL, TASK.prompts([0]), torch.tensor([[-2, 3]])), "token -2 lies outside"),
        (lambda: sequence_logp(MODEL, torch.tensor([[40]]), torch.tensor([[3, 2]])), "token 40 lies outside"),
        (
            lambda: answer_logp(MODEL, TASK.prompts([0]), torch.tensor([[1, -1, 2]]), FIRST),
            "goes on after −1",
        ),
        (lambda: answer_logp(MODEL, TASK.prompts([0]), torch.tensor([[-1, -1]]), FIRST), "is empty"),
        (lambda: sequence_logp(MODEL, TASK.prompts([0, 1]), torch.tensor([[3, 1]])), "must be"),
        (lambda: sequence_logp(MODEL, TASK.prompts([0]), EMPTY), "must not be empty"),
        (lambda: Distribution(temperature=0.0), "temperature=0.0"),
        (lambda: Distribution(temperature=float("nan")), "temperature=nan"),
        (lambda: Distribution(top_p=0.0), "top_p=0.0"),
        (lambda: exact_pass_at_k([], 2), "no problem"),
        (lambda: exact_pass_at_k([[0.5]], 2), "dimensions"),
        (lambda: exact_pass_at_k([0.5, float("nan")], 2), "nan"),
    ],
)
def test_bad_input_is_refused_with_its_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_problem_is_an_index_error():
    with pytest.raises(IndexError, match="problem 4 does not exist"):
        correct_probability(MODEL, TASK, [4])
