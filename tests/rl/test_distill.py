"""Distillation: only verified solutions are kept, and a truncated KL is one only with its tail."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.models import DecoderConfig
from dslib.rl.distill import distillation_kl, distillation_loss, rejection_sample, solver_examples
from dslib.rl.rollout import SamplingConfig, sample
from dslib.rl.sft import SFTConfig, sft
from dslib.tasks.countdown import Countdown
from dslib.tasks.reversed_addition import ReversedAddition

TINY = DecoderConfig(vocab_size=8, d_model=16, layers=1, heads=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_rejection_sampling_keeps_each_right_answer_once(sums):
    model = TINY.build(1)
    verified = rejection_sample(model, sums, range(16), 40, seeded(), threshold=1.0, batch=5)
    examples = verified.examples
    rewards = sums.rewards(verified.indices, examples.completions, examples.mask)
    assert (rewards >= 1).all()
    assert torch.equal(examples.prompts, sums.prompts(verified.indices))
    texts = [
        (int(i), *c[m].tolist())
        for i, c, m in zip(verified.indices, examples.completions, examples.mask, strict=True)
    ]
    assert len(set(texts)) == len(texts)
    assert (verified.tried, verified.problems) == (640, 16)
    assert verified.solved == len({text[0] for text in texts}) / 16
    assert verified.yielded == len(texts) / 640


def test_per_problem_and_a_filter_of_ones_own(sums):
    model = TINY.build(1)

    def short(indices, completions, mask):
        return mask.sum(1) < 4

    verified = rejection_sample(model, sums, range(16), 40, seeded(), per_problem=2, keep=short)
    assert torch.bincount(verified.indices).max() == 2
    assert (verified.examples.mask.sum(1) < 4).all()


def test_nothing_right_gives_no_examples_and_nan_is_not_right(sums):
    never = rejection_sample(TINY.build(1), sums, [3], 4, seeded(), threshold=9.0)
    assert len(never.examples) == 0
    assert never.solved == never.yielded == 0
    sums.rewards = lambda indices, completions, mask: torch.full((len(indices),), math.nan)
    assert len(rejection_sample(TINY.build(1), sums, [3], 4, seeded()).examples) == 0


def test_a_student_learns_the_sums_from_a_verified_teacher(sums):
    verified = solver_examples(sums, range(16), lambda i: [sum(sums.problem(i)) % 4, 7], threshold=1.1)
    assert len(verified.examples) == 16
    student = TINY.build(2)
    sft(student, verified.examples, SFTConfig(steps=80, batch_size=16, lr=2e-2, rest_lr=2e-2))
    greedy = sample(student, sums.prompts(torch.arange(16)), SamplingConfig(4, temperature=0, end=7))
    assert sums.rewards(torch.arange(16), greedy.completions, greedy.mask).mean() > 0.9


def test_a_solver_that_errs_is_left_out():
    task = Countdown(problems=6, numbers=3)
    right = solver_examples(task, range(6), lambda i: task.correct_answers(i)[0])
    assert right.solved == 1
    wrong = solver_examples(task, range(6), lambda i: task.correct_answers((i + i % 2) % 6)[0])
    assert set(wrong.indices.tolist()) >= {0, 2, 4}
    assert len(wrong.examples) < 6
    addition = ReversedAddition(problems=4, digits=2)
    assert solver_examples(addition, range(4), lambda i: addition.correct_answers(i)[0]).solved == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda task: solver_examples(task, [], lambda i: [0]), "indices are empty"),
        (lambda task: solver_examples(task, [1], lambda i: []), "problem 1 has 0 tokens"),
        (lambda task: solver_examples(task, [1], lambda i: [1] * 5), "has 5 tokens; the task takes 1 to 4"),
        (lambda task: rejection_sample(TINY.build(0), task, [], 1), "indices are empty"),
        (lambda task: rejection_sample(TINY.build(0), task, [1], 0), "samples=0"),
        (lambda task: rejection_sample(TINY.build(0), task, [1], 1, per_problem=0), "per_problem=0"),
        (
            lambda task: rejection_sample(DecoderConfig(vocab_size=7, d_model=16).build(0), task, [1], 1),
            "vocabulary of 7 lacks",
        ),
    ],
)
def test_impossible_requests_are_refused(sums, call, words):
    with pytest.raises(ValueError, match=words):
        call(sums)


def test_a_truncated_kl_goes_negative_and_its_tail_mends_it():
    q, p = (torch.tensor(x, dtype=torch.float64).log() for x in ((0.6, 0.4), (0.9, 0.1)))
    assert distillation_kl(q, p).item() == pytest.approx(0.311239, abs=1e-6)
    assert distillation_kl(q, p, top_k=1, tail=False).item() == pytest.approx(-0.243279, abs=1e-6)
    assert distillation_kl(q, p, top_k=1).item() == pytest.approx(0.311239, abs=1e-6)
    forward = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert distillation_kl(q, p, "forward").item() == pytest.approx(forward)


@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 9), direction=st.sampled_from(["reverse", "forward"]))
def test_with_a_tail_it_lies_between_zero_and_the_full_kl(seed, top_k, direction):
    q, p = (3 * torch.randn(5, 9, generator=seeded(seed + i), dtype=torch.float64) for i in (0, 1))
    full = distillation_kl(q, p, direction)
    bucketed = distillation_kl(q, p, direction, top_k)
    assert (bucketed >= -1e-12).all()
    assert (bucketed <= full + 1e-12).all()
    assert distillation_kl(q, q, direction, top_k).abs().max() < 1e-12
    log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
    if direction == "reverse":
        torch.testing.assert_close(full, (log_q.exp() * (log_q - log_p)).sum(-1))
    else:
        torch.testing.assert_close(full, (log_p.exp() * (log_p - log_q)).sum(-1))


def test_a_peaked_distribution_has_finite_gradients():
    q = torch.tensor([200.0, 0.0, 0.0, -200.0], requires_grad=True)
    distillation_kl(q, torch.tensor([0.0, 200.0, 0.0, 0.0]), top_k=1).backward()
    assert q.grad.isfinite().all()


def test_on_policy_distillation_pulls_the_student_to_the_teacher():
    student, teacher = TINY.build(1), TINY.build(2)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)
    prompts = torch.randint(7, (8, 2), generator=seeded())
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        rollout = sample(student, prompts, SamplingConfig(4, end=7), seeded(step), group_size=4)
        loss = distillation_loss(student, teacher, rollout)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: distillation_kl(torch.zeros(2, 3), torch.zeros(2, 4)), "vocabularies must be the same"),
        (lambda: distillation_kl(torch.zeros(3), torch.zeros(3), "sideways"), "sideways"),
        (lambda: distillation_kl(torch.zeros(3), torch.zeros(3), top_k=4), "top_k=4"),
        (lambda: distillation_kl(torch.zeros(3), torch.zeros(3), top_k=0), "top_k=0"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()
