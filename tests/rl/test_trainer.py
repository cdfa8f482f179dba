"""The trainer: every algorithm learns, the step is the hand-written one, and an interruption changes nothing."""

from dataclasses import replace

import pytest
import torch

from dslib.models import DecoderConfig, MoEConfig, RWKVConfig
from dslib.optim import Muon, param_groups_for_muon
from dslib.rl import ALGORITHMS, group_advantages
from dslib.rl.config import RLConfig
from dslib.rl.rollout import SamplingConfig, sample, score
from dslib.rl.trainer import Trainer

TINY = DecoderConfig(vocab_size=8, d_model=16, layers=1, heads=2, mlp_size=16)
MIXTURE = replace(TINY, moe=MoEConfig(experts=4, top_k=2, gate_scale=1.5, bias_update_rate=0.1))
CONFIG = RLConfig(prompts=6, group_size=4, lr=1e-2, overlong=1)
KL = {"kl": 0.1}


def trainer_of(task, model=TINY, double=False, **options):
    policy = model.build(1)
    reference = options.pop("reference", None)
    optimizers = options.pop("optimizers", None)
    return Trainer(
        policy.double() if double else policy, task, replace(CONFIG, **options), reference, optimizers
    )


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.parameters()]


def differ(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_learns_the_sums(sums, algorithm):
    trainer = trainer_of(sums, algorithm=algorithm, prompts=16, group_size=8, lr=2e-2, minibatches=2)
    table = trainer.run(25)
    first, last = ([row["reward"] for row in rows] for rows in (table[:5], table[-5:]))
    assert sum(last) > sum(first) + 5 * 0.08
    assert [row["step"] for row in table] == list(range(1, 26))
    for name in ("entropy", "length", "clip_share", "grad_norm", "groups", "samples", "loss", "old_kl"):
        assert all(isinstance(row[name], int | float) for row in table), name
    assert table[0]["entropy"] > table[-1]["entropy"]


@pytest.mark.parametrize("model", [TINY, MIXTURE, RWKVConfig(vocab_size=8, d_model=16, head_size=8, rank=4)])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8, "loss": KL}, {"micro_batch": 5}]
)
def test_first_ratios_are_one(sums, model, options):
    row = trainer_of(sums, model, **options).step()
    assert row["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert row["old_kl"] == pytest.approx(0, abs=1e-5)
    assert row["clip_share"] == 0
    if "loss" in options:
        assert row["kl"] == pytest.approx(0, abs=1e-5)


def test_without_the_sampling_mask_the_first_ratio_is_below_one(sums):
    row = trainer_of(sums, top_p=0.6, keep_sampling_mask=False).step()
    assert row["ratio_mean"] < 0.95


def test_first_gradient_is_that_of_reinforce_written_by_hand(sums):
    trainer = trainer_of(sums, algorithm="grpo_no_std", double=True, max_grad_norm=1e9)
    by_hand = TINY.build(1).double()
    trainer.step()
    rollout, rewards = trainer.last.rollout, trainer.last.rewards
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    of_sequence = score(by_hand, rollout).sum(1) / rollout.lengths
    expected = torch.autograd.grad(-(advantages * of_sequence).mean(), list(by_hand.parameters()))
    for p, gradient in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "ppo"])
@pytest.mark.parametrize("cut", [{"micro_batch": 5}, {"micro_batch": 1}, {"chunk": 7}])
def test_micro_batches_and_chunks_change_nothing(sums, algorithm, cut):
    options = {"algorithm": algorithm, "double": True, "minibatches": 2}
    whole, parts = trainer_of(sums, **options), trainer_of(sums, **options, **cut)
    for _ in range(2):
        rows = [trainer.step() for trainer in (whole, parts)]
    assert differ(weights(whole), weights(parts)) < 1e-7
    for name, value in rows[0].items():
        assert value == pytest.approx(rows[1][name], abs=1e-6), name


class Interrupted(Exception):
    pass


RUNS = {
    "grpo with kl": {"loss": KL, "minibatches": 2},
    "ppo": {"algorithm": "ppo", "epochs": 2},
    "dapo": {"algorithm": "dapo", "micro_batch": 5},
    "remax": {"algorithm": "remax", "top_p": 0.9},
    "mixture": {"model": MIXTURE, "minibatches": 2, "sampler_dtype": "bfloat16"},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("where", ["in the rewards", "between two updates"])
@pytest.mark.parametrize("anew", [True, False], ids=["new process", "same trainer"])
def test_a_run_interrupted_inside_a_step_ends_the_same(sums, tmp_path, monkeypatch, options, where, anew):
    whole = trainer_of(sums, **options)
    whole.run(5)
    file = tmp_path / "run.safetensors"
    broken = trainer_of(sums, **options)
    broken.run(3, checkpoint=file, every=2)
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise Interrupted

        if where == "in the rewards":
            patch.setattr(sums, "rewards", fail, raising=False)
        else:
            update, calls = broken.update, []

            def once(*arguments):
                calls.append(arguments)
                return update(*arguments) if len(calls) == 1 else fail()

            patch.setattr(broken, "update", once)
        with pytest.raises(Interrupted):
            broken.run(9, checkpoint=file, every=100)
    if anew:
        broken = trainer_of(sums, **options)
        with torch.no_grad():
            for p in broken.model.parameters():
                p.add_(1)
    broken.run(5, checkpoint=file)
    assert differ(weights(whole), weights(broken)) == 0
    assert broken.table == whole.table
    assert torch.equal(broken.generator.get_state(), whole.generator.get_state())
    assert all(torch.equal(a, b) for a, b in zip(whole.model.buffers(), broken.model.buffers(), strict=True))


def test_runs_of_one_seed_are_equal_and_of_another_are_not(sums):
    tables = [trainer_of(sums, seed=seed).run(2) for seed in (0, 0, 1)]
    assert tables[0] == tables[1] != tables[2]


def test_a_file_of_another_run_is_refused_with_what_differs(sums, tmp_path):
    trainer_of(sums).run(1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"run with group_size=4 \(now 8\), seed=0 \(now 3\)"):
        trainer_of(sums, group_size=8, seed=3).run(2, checkpoint=tmp_path / "run")
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainer_of(sums, replace(TINY, d_model=32)).resume(tmp_path / "run")


class Judged:
    """A task whose rewards a judge(indices, rewards) changes."""

    def __init__(self, task, judge):
        self.task, self.judge = task, judge
        self.vocab_size, self.end, self.max_new_tokens = task.vocab_size, task.end, task.max_new_tokens

    def __len__(self):
        return len(self.task)

    def prompts(self, indices):
        return self.task.prompts(indices)

    def rewards(self, indices, completions, mask):
        return self.judge(indices, self.task.rewards(indices, completions, mask))


def half_decided(task, share=2):
    """Of ``share`` problems one has rewards; the others give the same to every answer: nothing to learn from."""
    return Judged(task, lambda indices, rewards: torch.where(indices % share == share - 1, rewards, 0.5))


def test_dynamic_sampling_fills_the_batch_and_counts_what_it_threw_away(sums):
    trainer = trainer_of(half_decided(sums), algorithm="dapo")
    rows = [trainer.step() for _ in range(3)]
    for row in rows:
        assert row["groups"] == 6
    assert (trainer.last.indices % 2 == 1).all()
    assert (trainer.last.rewards.amax(1) > trainer.last.rewards.amin(1)).all()
    assert len(trainer.last.rollout) == trainer.last.rewards.numel() == 24
    assert rows[-1]["samples"] >= 3 * 2 * 24 - 24
    assert rows[-1]["samples"] % 24 == 0
    plain = trainer_of(half_decided(sums))
    assert [plain.step()["samples"] for _ in range(3)] == [24, 48, 72]


def test_a_step_that_finds_nothing_to_learn_changes_nothing(sums):
    trainer = trainer_of(half_decided(sums, share=100), algorithm="dapo", rounds=3)
    before = weights(trainer)
    row = trainer.step()
    assert (row["groups"], row["samples"], row["reward"]) == (0, 72, 0.5)
    assert differ(before, weights(trainer)) == 0


def test_remax_subtracts_the_greedy_answers_reward_and_counts_it(sums):
    trainer = trainer_of(sums, algorithm="remax", top_k=2)
    policy = TINY.build(1)
    assert trainer.step()["samples"] == 6 * 4 + 6
    samples = trainer.last
    prompts = sums.prompts(samples.indices)
    greedy = sample(policy, prompts, SamplingConfig(4, temperature=0, end=7))
    expected = sums.rewards(samples.indices, greedy.completions, greedy.mask)
    assert torch.equal(samples.baseline, expected)
    batch = trainer.prepare(samples)
    assert torch.equal(batch.advantages.view(6, 4), samples.rewards - expected.unsqueeze(1))


def test_ppo_values_come_from_the_critic_and_reach_no_weight_of_the_policy(sums):
    after = []
    for coefficient in (0.5, 50.0):
        loss = {"value_coef": coefficient}
        trainer = trainer_of(sums, algorithm="ppo", loss=loss, critic_lr=1e-2)
        trainer.step()
        after.append(weights(trainer))
    assert differ(*after) == 0
    table = trainer_of(sums, algorithm="ppo", prompts=16, lr=0.0, critic_lr=3e-2).run(20)
    assert table[-1]["value_loss"] < 0.5 * table[0]["value_loss"]


def test_ppo_advantages_are_reward_minus_value_whitened(sums):
    trainer = trainer_of(sums, algorithm="ppo")
    trainer.step()
    batch = trainer.prepare(trainer.last)
    spread = trainer.last.rewards.flatten().unsqueeze(1) - batch.values_old
    scored = spread[batch.mask]
    torch.testing.assert_close(
        batch.advantages[batch.mask], (scored - scored.mean()) / scored.std(), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        batch.returns[batch.mask], (trainer.last.rewards.flatten().unsqueeze(1).expand_as(spread))[batch.mask]
    )


def test_overlong_answers_are_penalised_in_the_advantages_and_not_in_the_reward(sums):
    trainer = trainer_of(sums, algorithm="dapo", overlong=2)
    trainer.step()
    samples = trainer.last
    length = samples.rollout.lengths.view(-1, 4)
    penalty = -((length - 2) / 2).clamp(0, 1)
    batch = trainer.prepare(samples)
    expected = group_advantages(samples.rewards + penalty, "grpo")
    torch.testing.assert_close(batch.advantages.view(-1, 4), expected)


def silent(task, missing):
    """A judge that does not answer at some places."""
    places = torch.tensor(missing)
    return Judged(task, lambda _, rewards: rewards.index_fill(0, places, float("nan")))


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo"])
@pytest.mark.filterwarnings("ignore:.*rewards are NaN:RuntimeWarning")
def test_a_sample_without_reward_is_left_out(sums, algorithm):
    trainer = trainer_of(silent(sums, [2, 7]), algorithm=algorithm)
    row = trainer.step()
    assert all(value == value for value in row.values()), "no NaN in the table"
    batch = trainer.prepare(trainer.last)
    lost = trainer.last.rewards.flatten().isnan()
    assert lost.any()
    assert not batch.mask[lost].any()
    assert torch.equal(batch.mask[~lost], trainer.last.rollout.mask[~lost])
    assert batch.advantages[batch.mask if batch.advantages.ndim == 2 else ~lost].isfinite().all()


def test_samples_without_reward_are_counted_in_a_warning(sums):
    with pytest.warns(RuntimeWarning, match="2 of 24 rewards are NaN"):
        trainer_of(silent(sums, [2, 7])).step()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_a_problem_without_any_reward_is_an_error(sums, algorithm):
    trainer = trainer_of(silent(sums, [4, 5, 6, 7]), algorithm=algorithm)
    with pytest.raises(ValueError, match=r"all 4 rewards of problem \d+ are NaN"):
        trainer.step()


def test_reference_holds_still_and_may_be_another_model(sums):
    base = TINY.build(7)
    kept = [p.clone() for p in base.parameters()]
    trainer = trainer_of(sums, loss=KL, reference=base)
    first = trainer.step()
    assert first["kl"] > 1e-4
    assert all(torch.equal(a, b) for a, b in zip(kept, base.parameters(), strict=True))
    strong = trainer_of(sums, loss={"kl": 10.0}).run(15)[-1]["kl"]
    weak = trainer_of(sums, loss={"kl": 1e-3}).run(15)[-1]["kl"]
    assert strong < weak / 2


def test_routes_are_kept_and_the_bias_moves_once_an_update(sums):
    trainer = trainer_of(sums, MIXTURE, minibatches=2, micro_batch=5)
    trainer.step()
    layer = trainer.model.mixtures()[0]
    assert trainer.last.rollout.routes is not None
    assert layer.load.sum() == 0
    assert layer.bias.abs().sum() > 0
    assert trainer_of(sums, MIXTURE, keep_routing=False).step()["groups"] == 6


def test_a_bfloat16_sampler_is_a_copy_made_anew_and_its_probabilities_are_the_old_ones(sums):
    trainer = trainer_of(sums, MIXTURE, sampler_dtype="bfloat16", lr=0.1, minibatches=2)
    before = trainer.sampler()
    assert before is not trainer.model
    assert {p.dtype for p in before.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    trainer.step()
    rollout = trainer.last.rollout
    again = sample(
        before, rollout.tokens[:, : rollout.prompt_length], SamplingConfig(4, end=7), record_routes=True
    )
    assert again.logp.shape == rollout.logp.shape
    scored = score(before, rollout, routes=rollout.routes).float()
    torch.testing.assert_close(scored, rollout.logp, rtol=0, atol=0.05)
    for now, new in zip(trainer.model.parameters(), trainer.sampler().parameters(), strict=True):
        assert torch.equal(new, now.bfloat16())
    assert any(
        not torch.equal(a, b)
        for a, b in zip(before.parameters(), trainer.sampler().parameters(), strict=True)
    )
    assert trainer_of(sums).sampler().lm_head.weight.dtype == torch.float32


def test_without_an_update_a_bfloat16_sampler_already_moves_the_ratio_and_a_float32_copy_does_not(sums):
    rows = {
        x: trainer_of(sums, MIXTURE, sampler_dtype=x, temperature=0.3).step() for x in ("bfloat16", "float32")
    }
    assert rows["bfloat16"]["ratio_max"] > 1 + 1e-4
    assert rows["float32"]["ratio_max"] == pytest.approx(1, abs=1e-5)
    whole = trainer_of(sums, MIXTURE)
    assert rows["float32"] == trainer_of(sums, MIXTURE, temperature=0.3).step()
    assert whole.sampler() is whole.model


def test_optimizers_of_ones_own(sums):
    def muon(model):
        matrices, rest = param_groups_for_muon(model)
        return Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)

    trainer = trainer_of(sums, optimizers=muon)
    before = weights(trainer)
    trainer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_an_entropy_bonus_keeps_the_entropy(sums):
    ends = []
    for bonus in (0.0, 1.0):
        loss = {"entropy_coef": bonus}
        ends.append(trainer_of(sums, loss=loss, top_k=5, chunk=3).run(15)[-1]["entropy"])
    assert ends[1] > ends[0] + 0.1


def test_impossible_runs_are_refused_at_the_door(sums):
    with pytest.raises(ValueError, match="vocabulary of 7 lacks tokens of the task's 8"):
        trainer_of(sums, replace(TINY, vocab_size=7))
    with pytest.raises(ValueError, match="reference's vocabulary of 9 tokens differs from the policy's 8"):
        trainer_of(sums, loss=KL, reference=replace(TINY, vocab_size=9).build(0))
    with pytest.raises(ValueError, match="overlong=5 must lie between 1 and the task's max_new_tokens=4"):
        trainer_of(sums, algorithm="dapo", overlong=5)
    trainer = trainer_of(sums)
    sums.rewards = lambda indices, completions, mask: torch.zeros(23)
    with pytest.raises(ValueError, match=r"rewards of shape \(23,\) for 24 completions"):
        trainer.step()


@pytest.mark.parametrize("algorithm", ["reinforce++", "remax", "ppo"])
def test_groups_of_one_are_enough_where_nothing_is_compared_within_a_group(sums, algorithm):
    trainer = trainer_of(sums, algorithm=algorithm, group_size=1)
    trainer.step()
    assert trainer.prepare(trainer.last).advantages.abs().sum() > 0


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "rloo", "reinforce++", "remax"])
def test_counts_are_rewards_as_much_as_floats(sums, algorithm):
    def counted(indices, completions, mask):
        return (completions[:, 0] == sums.prompts(indices).sum(1) % 4).long()

    ends = []
    for rewards in (counted, lambda *args: counted(*args).float()):
        sums.rewards = rewards
        trainer = trainer_of(sums, algorithm=algorithm)
        trainer.step()
        ends.append(trainer.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "sarsa"}, "algorithm='sarsa'"),
        ({"prompts": 0}, "prompts=0"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 1}, "group_size=1 leaves 'grpo' nothing to compare"),
        ({"group_size": 1, "algorithm": "rloo"}, "group_size=1 leaves 'rloo' nothing to compare"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"minibatches": 25}, "minibatches=25"),
        ({"temperature": 0.0}, "temperature=0"),
        ({"sampler_dtype": "int8"}, "sampler_dtype='int8' is none of None, 'bfloat16'"),
    ],
)
def test_impossible_configurations_are_refused_with_their_value(options, words):
    with pytest.raises(ValueError, match=words):
        replace(CONFIG, **options)


@pytest.mark.parametrize("share", [2, 100], ids=["half", "all"])
def test_leaving_out_what_teaches_nothing_changes_no_weight(sums, share):
    task = half_decided(sums, share=share)
    runs = [
        trainer_of(task, double=True, skip_settled=skip, micro_batch=5, minibatches=2)
        for skip in (True, False)
    ]
    for trainer in runs:
        trainer.run(3)
        trainer.task = sums  # what the optimizer remembers of no gradient counts, too
        trainer.run(4)
    assert differ(*map(weights, runs)) < 1e-9
    assert [trainer_of(task, loss=KL).skips, trainer_of(task, algorithm="ppo").skips] == [False, False]
