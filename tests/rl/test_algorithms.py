"""The named algorithms, an advantage of one's own, and changes that are added to an algorithm's loss."""

from dataclasses import dataclass, replace

import pytest
import torch

from dslib.models import DecoderConfig
from dslib.rl import ALGORITHMS, Algorithm, LossConfig, PolicyBatch, RLConfig, Trainer, policy_loss
from dslib.tasks import ReversedAddition

TASK = ReversedAddition(problems=20, digits=1)
MODEL = DecoderConfig(TASK.vocab_size, d_model=8, layers=1, heads=2)
STEP = {"prompts": 4, "group_size": 4, "lr": 1e-2}


def test_every_named_algorithm_is_a_configuration_of_the_one_loss():
    assert set(ALGORITHMS) == {
        *("ppo", "grpo", "grpo_no_std", "dr_grpo", "rloo", "reinforce++", "remax", "dapo", "gspo")
    }
    logp, mask = torch.log(torch.full((4, 3), 0.3)), torch.ones(4, 3, dtype=torch.bool)
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.critic == (algorithm.advantage == "gae") == (algorithm.loss.value_coef > 0), name
        assert algorithm.greedy_baseline == (algorithm.advantage == "remax")
        assert algorithm.source.startswith("arXiv:")
        if not algorithm.critic:
            baseline = torch.zeros(1) if algorithm.greedy_baseline else None
            batch = PolicyBatch(logp, logp, algorithm.advantages(rewards, baseline)[0], mask)
            config = replace(algorithm.loss, max_length=algorithm.loss.max_length or 6)
            assert policy_loss(batch, config).loss.isfinite()
    dapo, gspo = ALGORITHMS["dapo"], ALGORITHMS["gspo"]
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.aggregation) == (0.2, 0.28, "token")
    assert dapo.dynamic_sampling
    assert dapo.overlong
    assert (gspo.loss.clip_low, gspo.loss.clip_high, gspo.loss.ratio) == (3e-4, 4e-4, "sequence")
    settings = {(a.advantage, a.loss, a.dynamic_sampling) for a in ALGORITHMS.values()}
    assert len(settings) == len(ALGORITHMS)


def centred(rewards):
    return rewards - rewards.mean(1, keepdim=True)


def from_baseline(rewards, baseline):
    return rewards - baseline.unsqueeze(1)


class Graded(ReversedAddition):
    """Rewards that differ whatever an untrained model answers: each completion's first token."""

    def rewards(self, indices, completions, mask):
        return completions[:, 0].float()


GRADED = Graded(problems=20, digits=1)


def trained(algorithm, task=GRADED, **options):
    trainer = Trainer(MODEL.build(0), task, RLConfig(algorithm, **STEP, **options))
    trainer.run(2)
    return trainer


def test_an_advantage_of_ones_own_trains_as_the_named_one_that_it_repeats():
    loss = ALGORITHMS["grpo_no_std"].loss
    own, named = trained(Algorithm(centred, loss)), trained("grpo_no_std")
    assert [row["reward"] for row in own.table] == [row["reward"] for row in named.table]
    for a, b in zip(own.model.parameters(), named.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(own.model.parameters(), MODEL.build(0).parameters(), strict=True)
    )


def test_an_advantage_of_ones_own_may_be_given_the_greedy_answers_rewards():
    own = trained(Algorithm(from_baseline, LossConfig(), greedy_baseline=True))
    samples = own.last
    expected = (samples.rewards - samples.baseline.unsqueeze(1)).flatten()
    assert own.prepare(samples).advantages.tolist() == expected.tolist()


def test_a_run_with_an_advantage_of_ones_own_is_saved_and_gone_on_from(tmp_path):
    path, config = tmp_path / "run", RLConfig(Algorithm(centred, LossConfig()), **STEP)
    whole = Trainer(MODEL.build(0), GRADED, config)
    whole.run(3)
    Trainer(MODEL.build(0), GRADED, config).run(2, path)
    second = Trainer(MODEL.build(1), GRADED, config)
    assert second.run(3, path) == whole.table
    other = Trainer(MODEL.build(0), GRADED, replace(config, algorithm=Algorithm(torch.relu, LossConfig())))
    with pytest.raises(ValueError, match=r"algorithm=.*centred"):
        other.resume(path)


def test_what_an_advantage_of_ones_own_returns_is_checked():
    def advantages(function, rewards):
        return Algorithm(function, LossConfig()).advantages(torch.tensor(rewards))

    def divided(rewards):
        return centred(rewards) / rewards.std(1, keepdim=True)

    with pytest.raises(ValueError, match=r"returned \(2,\) for rewards \(2, 3\)"):
        advantages(lambda rewards: rewards.mean(1), [[1.0, 0.0, 0.0]] * 2)
    with pytest.raises(ValueError, match=r"divided returned nan for sample 0 of prompt 1.*\[1.0, 1.0\]"):
        advantages(divided, [[1.0, 0.0], [1.0, 1.0]])
    unknown = advantages(lambda rewards: rewards * 2, [[1.0, float("nan")]])
    assert unknown.tolist() == [[2.0, 0.0]]  # the trainer leaves that sample out


def test_an_advantage_of_ones_own_can_stand_in_a_cached_configuration():
    from dslib.rl import sft
    from dslib.runs.cache import entry_key

    @dataclass(frozen=True)
    class Powered:
        power: float

        def __call__(self, rewards):
            return centred(rewards**self.power)

    def key(power):
        return entry_key(sft, {"config": RLConfig(Algorithm(Powered(power), LossConfig()))})

    assert key(2.0) != key(3.0)
    with pytest.raises(TypeError, match=r"config.algorithm.advantage is a function"):
        entry_key(sft, {"config": RLConfig(Algorithm(centred, LossConfig()))})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "grpos"}, "advantage='grpos' is unknown; use one of 'gae', 'grpo'"),
        ({"advantage": "gae"}, "'gae' and a critic need each other"),
        ({"advantage": "grpo", "critic": True}, "'gae' and a critic need each other"),
    ],
)
def test_impossible_algorithms_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Algorithm(loss=LossConfig(), **options)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_changes_are_added_to_the_algorithms_loss_and_take_nothing_away(name):
    config = RLConfig(name, loss={"kl": 0.05})
    assert config.recipe == replace(ALGORITHMS[name], loss=replace(ALGORITHMS[name].loss, kl=0.05))
    assert RLConfig(name).recipe is ALGORITHMS[name]


def test_changes_survive_replacement_and_compare_by_content():
    config = RLConfig("gspo", loss={"kl": 0.05, "clip_low": 0.1})
    assert replace(config, lr=1.0).recipe.loss == config.recipe.loss
    assert config == RLConfig("gspo", loss={"clip_low": 0.1, "kl": 0.05})
    assert hash(config) == hash(RLConfig("gspo", loss={"clip_low": 0.1, "kl": 0.05}))
    assert replace(config, loss={**dict(config.loss), "kl": 0.0}).recipe.loss.clip_low == 0.1


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (LossConfig(kl=0.05), r"whole LossConfig.*changes alone, loss=\{"),
        ({"beta": 0.05}, "loss changes 'beta', which is unknown; use some of clip_low"),
        ({"kl": -1.0}, "kl=-1.0 must be a finite number"),
    ],
)
def test_a_whole_loss_and_unknown_or_impossible_changes_are_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        RLConfig("gspo", loss=loss)
