"""The tables of sampler and trainer: controls replay something else of the same size, selections are what they say."""

import pandas as pd
import pytest
import torch

from dslib.experiments import grpo_and_kl as study
from dslib.experiments import grpo_tables as tables
from dslib.experiments.bases import BaseConfig
from dslib.models import DecoderConfig, MoEConfig
from dslib.rl import RLConfig, SFTConfig
from dslib.rl.rollout import sample
from dslib.tasks import Countdown

TASK = Countdown(problems=100, numbers=2, largest=9, digits=2)
MODEL = DecoderConfig(
    TASK.vocab_size, 16, 1, 2, mlp_size=16, moe=MoEConfig(experts=4, top_k=2, expert_size=8)
)
BASE = BaseConfig(TASK, MODEL, SFTConfig(60, 32, lr=2e-2, rest_lr=1e-2))
CONFIG = study.RunConfig(BASE, RLConfig("grpo_no_std", group_size=4, top_p=0.9, sampler_dtype="bfloat16"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DSLIB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def rollout():
    policy, sampling = study.base_policy(CONFIG), study.sampling_of(CONFIG, 0.9)
    generator = torch.Generator().manual_seed(0)
    prompts = CONFIG.base.task.prompts([0, 1])
    return sample(policy, prompts, sampling, generator, 4, record_routes=True, record_kept=True)


def test_shuffled_routes_visit_each_expert_as_often_and_stay_unread_where_nothing_was_read(rollout):
    routes = tables.shuffled_routes(rollout, torch.Generator().manual_seed(0))
    assert torch.equal(routes < 0, rollout.routes < 0)
    assert not torch.equal(routes, rollout.routes)
    for now, before in zip(routes, rollout.routes, strict=True):
        assert torch.equal(now.flatten().sort().values, before.flatten().sort().values)


def test_random_sets_are_as_large_and_hold_the_sampled_token(rollout):
    sets = tables.random_sets(rollout, torch.Generator().manual_seed(0))
    assert torch.equal(sets.sum(-1), rollout.kept.sum(-1))
    assert sets.gather(-1, rollout.completions.unsqueeze(-1)).all()
    assert not torch.equal(sets, rollout.kept)


def test_controls_are_a_row_a_seed_and_kind_and_further_off_than_the_samplers_own():
    found = pd.DataFrame(tables.control_rows(CONFIG, (0, 1), problems=4))
    assert sorted(zip(found.seed, found.replayed, strict=True)) == [
        (seed, replayed) for seed in (0, 1) for replayed in sorted(tables.REPLAYED)
    ]
    gaps = pd.DataFrame(tables.gap_rows(CONFIG, (0, 1), problems=4))
    own = tables.routed(gaps)[:, 1]
    assert (tables.gap(found, "size_999", replayed="shuffled routes") > own).all()
    own = tables.truncated(gaps)[:, 1]
    assert (tables.gap(found, "size_mean", replayed="random sets") > own).all()
    assert set(tables.flip_shares(gaps)) == {"bfloat16", "float32"}


def test_gap_wants_one_row_a_seed():
    rows = pd.DataFrame({"seed": [1, 0, 0], "arm": ["a", "a", "b"], "y": [5.0, 4.0, 3.0]})
    assert tables.gap(rows, "y", arm="a").tolist() == [4.0, 5.0]
    with pytest.raises(ValueError, match="arm='c' selects 0 rows of 0 seeds; name one row a seed"):
        tables.gap(rows, "y", arm="c")
    with pytest.raises(ValueError, match="selects 3 rows of 2 seeds"):
        tables.gap(rows, "y")


def runs(outcome):
    """The design of two seeds, in which an outcome is a function of switches and seed."""
    rows = []
    for config in study.design(CONFIG, (0, 1)):
        levels = {name: int(getattr(config, name)) for name in study.FACTORS}
        row = {"control": config.control or "none", "seed": config.seed, **levels}
        rows.append(
            row | {"y": outcome(levels, config.seed), "kept_share": 1 - 0.25 * levels["keep_routing"]}
        )
    return pd.DataFrame(rows).assign(grad_norm_max=lambda table: table.y)


def test_the_effect_of_the_sampling_mask_is_that_at_one_level_of_the_other_mask():
    table = runs(lambda x, seed: x["keep_sampling_mask"] * (1 + seed - 3 * x["off_policy_mask"]))
    alone, left_out = tables.mask_effect(table, "y", 0)
    together, _ = tables.mask_effect(table, "y", 1)
    assert (alone.tolist(), together.tolist()) == ([1, 2], [-2, -1])
    assert left_out.tolist() == [0.125, 0.125]


def test_ends_are_all_off_and_all_on_and_remedies_are_counted():
    table = runs(lambda x, seed: sum(x.values()) + 10 * seed)
    assert tables.ends(table, "y").to_dict("list") == {"off": [0, 10], "on": [4, 14]}


def test_exploded_counts_runs_of_the_design_and_says_so():
    table = runs(lambda x, seed: 9.0 if seed == 1 and not x["unbiased_kl"] else 1.0)
    count = tables.exploded(table, 5.0)
    assert count.loc["k3"].to_dict() == {"runs": 8, "of": 16, "seeds": 1, "above": 5.0, "largest": 9.0}
    assert count.loc["ρ·k3"].to_dict() == {"runs": 0, "of": 16, "seeds": 0, "above": 5.0, "largest": 1.0}
    said = tables.EXPLODED.format(**count.loc["k3"])
    assert said == "8 of 16 pass a gradient norm of 5, in 1 of the seeds; the largest is 9.0"


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_two_normals_have_the_known_means_and_squares(mu):
    means, squares = tables.two_normals(mu), tables.two_normals(mu, 2)
    assert means["k1"] == pytest.approx(mu**2 / 2, rel=1e-6)
    assert means["k3"] == pytest.approx(mu**2 / 2, rel=1e-6)
    assert means["k2"] == pytest.approx(mu**2 / 2 * (1 + mu**2 / 4), rel=1e-6)
    assert squares["k1"] == pytest.approx(mu**2 + mu**4 / 4, rel=1e-6)


def test_the_kl_of_two_tokens_is_that_of_its_positions():
    theta, ref = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = tables.kl_by_position(theta, ref)
    p1, _ = tables.two_tokens(theta)
    torch.testing.assert_close(tables.whole_kl(theta, ref), first + (p1.exp() * second).sum())
    assert tables.whole_kl(theta, theta) == 0


def test_the_gradient_of_each_token_has_their_expectation():
    z, ref = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = tables.gradient_of_each(lambda p, ref, old: (p - old).exp() * (p - ref), z, ref)
    x = z.clone().requires_grad_()
    kl = (x.softmax(0) * (x.log_softmax(0) - ref.log_softmax(0))).sum()
    torch.testing.assert_close(z.softmax(0) @ each, torch.autograd.grad(kl, x)[0])


def test_ranges_are_of_each_row():
    assert tables.ranges(torch.tensor([[1.0, 0.5], [1.25, 2.0]])) == ["0.50 … 1.00", "1.25 … 2.00"]
