"""Mixture of experts: exact against a dense reference, balanced by a bias, and split right for Muon."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.attention import KVCache
from dslib.models import Decoder, DecoderConfig, TrainConfig, train
from dslib.models.moe import (
    MoE,
    MoEConfig,
    expert_loads,
    gate_scaling_factor,
    gate_weights,
    max_violation,
    recorded_routes,
    replayed_routes,
    simulate_balance,
    updated_bias,
)
from dslib.optim import param_groups_for_muon

TINY = DecoderConfig(
    vocab_size=11, d_model=16, layers=2, heads=4, moe=MoEConfig(experts=5, top_k=2, gate_scale=1.5)
)


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(**options):
    return Decoder(replace(TINY, moe=replace(TINY.moe, **options)), seed=1).double().mixtures()[0]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_k": 1}, {"shared_experts": 0}, {"shared_experts": 2}]
)
@pytest.mark.parametrize("shape", [(2, 7, 16), (1, 16), (0, 16)])
def test_layer_equals_all_experts_computed_and_masked(options, shape):
    moe, x = layer(**options), normal(*shape)
    moe.bias += normal(5, seed=3)
    s = moe.router(x).sigmoid()
    threshold = (s + moe.bias).sort(-1, descending=True).values[..., moe.config.top_k - 1 : moe.config.top_k]
    kept = s * (s + moe.bias >= threshold)
    g = 1.5 * kept / kept.sum(-1, keepdim=True)
    dense = sum(g[..., i : i + 1] * expert(x) for i, expert in enumerate(moe.experts))
    if moe.shared is not None:
        dense = dense + moe.shared(x)
    torch.testing.assert_close(moe(x), dense, rtol=0, atol=1e-12)


def test_gradients_equal_those_of_the_masked_reference():
    moe, x = layer(), normal(9, 16)
    parameters = list(moe.parameters())
    ours = torch.autograd.grad(moe(x).square().sum(), parameters)
    chosen, g = gate_weights(moe.router(x), 2, scale=1.5)
    all_outputs = torch.stack([expert(x) for expert in moe.experts], dim=1)
    picked = all_outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 16))
    dense = moe.shared(x) + (g.unsqueeze(-1) * picked).sum(1)
    for a, b in zip(ours, torch.autograd.grad(dense.square().sum(), parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_bias_decides_who_is_chosen_and_not_with_which_weight():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    chosen, weights = gate_weights(logits, 2, bias=torch.tensor([0.0, 0.0, 0.0, 5.0]), scale=3.0)
    s = logits[0].sigmoid()
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(weights[0], 3 * s[[3, 0]] / (s[3] + s[0]))


def test_ties_go_to_the_smaller_index():
    chosen, weights = gate_weights(torch.zeros(3, 40), 7)
    assert chosen.tolist() == [list(range(7))] * 3
    assert weights.flatten().tolist() == pytest.approx([1 / 7] * 21)


@given(seed=st.integers(0, 10**6), experts=st.integers(1, 9), shift=st.floats(-3, 3))
def test_common_shift_of_the_bias_changes_no_choice(seed, experts, shift):
    logits, bias = normal(20, experts, seed=seed), normal(experts, seed=seed + 1)
    top_k = 1 + seed % experts
    shifted = gate_weights(logits, top_k, bias + shift)[0]
    assert torch.equal(gate_weights(logits, top_k, bias)[0], shifted)


def test_overloaded_experts_lose_and_moonlights_rule_keeps_the_mean():
    bias, load = torch.zeros(4, dtype=torch.float64), torch.tensor([9, 1, 2, 4])
    deepseek, moonlight = (updated_bias(bias, load, 0.1, rule) for rule in ("deepseek", "moonlight"))
    assert deepseek.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.0])
    assert moonlight.tolist() == pytest.approx([-0.125, 0.075, 0.075, -0.025])
    assert moonlight.sum().item() == pytest.approx(0, abs=1e-15)


@given(loads=st.lists(st.integers(0, 50), min_size=3, max_size=3), seed=st.integers(0, 1000))
def test_both_rules_differ_by_a_common_shift_only(loads, seed):
    bias = normal(3, seed=seed)
    rules = [updated_bias(bias, torch.tensor(loads), 0.01, rule) for rule in ("deepseek", "moonlight")]
    difference = rules[0] - rules[1]
    torch.testing.assert_close(difference, difference[:1].expand(3), rtol=0, atol=1e-12)


def test_bias_balances_a_router_that_prefers_some_experts():
    preference, generator = torch.linspace(-1, 1, 8), torch.Generator().manual_seed(0)
    violations = {}
    for rate in (0.0, 0.02):
        bias = torch.zeros(8)
        for _ in range(80):
            chosen, _ = gate_weights(torch.randn(256, 8, generator=generator) + preference, 2, bias)
            load = expert_loads(chosen, 8)
            bias = updated_bias(bias, load, rate)
        violations[rate] = max_violation(load).item()
    assert violations[0.02] < 0.35 < 0.9 < violations[0.0]


def test_rules_side_by_side_choose_alike_and_only_one_drifts():
    trail = simulate_balance(steps=60, seed=1)
    assert trail.same_choice["deepseek"] == trail.same_choice["moonlight"] == 1
    assert trail.same_choice["none"] < 0.9
    assert trail.bias_mean["moonlight"].abs().max() < 1e-12
    assert trail.bias_mean["deepseek"][-1] > 0.02
    assert trail.violation["moonlight"][-1] < trail.violation["none"][-1] / 2
    assert trail.bias["none"].abs().max() == 0
    assert trail.load["moonlight"].sum() == 2 * 256
    for bad in ({"steps": 0}, {"top_k": 33}):
        with pytest.raises(ValueError, match="must"):
            simulate_balance(**bad)


def test_max_violation_is_zero_in_balance_and_largest_on_one_expert():
    loads = torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [0, 0, 0, 0]])
    assert max_violation(loads)[:2].tolist() == [0, 3]
    assert max_violation(loads)[2].isnan()


def test_gate_scale_is_that_of_the_papers():
    assert gate_scaling_factor(64, 6) == pytest.approx(2.4464, abs=2e-3)
    assert gate_scaling_factor(384, 8, tokens=10_000) == pytest.approx(2.8277, abs=2e-3)


@pytest.mark.parametrize("k", [1, 4, 9])
def test_gate_scale_of_equal_weights_is_the_root_of_their_number(k):
    """With all experts chosen by near equal gates nothing but k is left; one expert needs no factor."""
    assert gate_scaling_factor(9, 1) == pytest.approx(1)
    assert 0.9 * math.sqrt(k) < gate_scaling_factor(max(k, 9), k) <= math.sqrt(k) + 1e-12


def test_output_has_the_size_of_one_expert_with_the_gate_scale():
    """What the factor is for: uncorrelated experts of RMS 1, weighted by the scaled gates."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 64, generator=generator, dtype=torch.float64)
    _, g = gate_weights(logits, 6, scale=gate_scaling_factor(64, 6))
    outputs = torch.randn(400, 6, 200, generator=generator, dtype=torch.float64)
    assert (g.unsqueeze(-1) * outputs).sum(1).square().mean().sqrt().item() == pytest.approx(1, abs=0.02)


def test_loads_are_recorded_in_training_only_and_the_bias_moves_once():
    moe, x = layer(bias_update_rate=0.5), normal(13, 16)
    with torch.no_grad():
        moe(x)
    moe.eval()(x)
    assert moe.load.sum() == 0
    moe.update_bias()
    assert moe.bias.tolist() == [0] * 5
    moe.train()(x)
    moe(x)
    load = moe.update_bias()
    assert load.sum() == 2 * 2 * 13
    torch.testing.assert_close(moe.bias, updated_bias(torch.zeros(5).double(), load, 0.5))
    assert moe.load.sum() == 0


def test_model_is_causal_cached_and_made_by_its_seed():
    x = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    model, cache = Decoder(TINY, seed=3).double(), KVCache()
    logits = model(x)
    in_pieces = torch.cat([model(part, cache=cache) for part in x.split((4, 1, 4), dim=1)], dim=1)
    torch.testing.assert_close(in_pieces, logits, rtol=0, atol=1e-6)
    again = Decoder(TINY, seed=3).state_dict()
    assert all(torch.equal(value.float(), again[name]) for name, value in model.state_dict().items())


def test_muon_gets_the_router_and_every_expert_as_a_matrix_of_its_own():
    model = Decoder(TINY)
    matrices, rest = param_groups_for_muon(model)
    names = {p: name for name, p in model.named_parameters()}
    assert {p.ndim for p in matrices} == {2}
    assert sum("experts" in names[p] for p in matrices) == 2 * 5 * 3
    assert sum("router" in names[p] for p in matrices) == 2
    assert not any("mlp." in names[p] for p in rest)
    assert not any("bias" in name for name in names.values()), "the selection bias is no parameter"


def test_flops_count_the_experts_that_a_token_visits():
    one_more, one_fewer = (
        Decoder(replace(TINY, moe=replace(TINY.moe, experts=n))).training_flops_per_token(8) for n in (6, 5)
    )
    assert one_more - one_fewer == 6 * 2 * 16, "another expert costs its row of the router, once a layer"
    deeper = Decoder(replace(TINY, moe=replace(TINY.moe, top_k=3, expert_size=16)))
    shallow = Decoder(replace(TINY, moe=replace(TINY.moe, top_k=2, expert_size=16)))
    assert deeper.training_flops_per_token(8) - shallow.training_flops_per_token(8) == 6 * 2 * 3 * 16 * 16


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_updates_weights_and_biases(tmp_path, optimizer):
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 100)
    config = TrainConfig(
        replace(TINY, vocab_size=256, layers=1),
        optimizer,
        steps=8,
        batch_size=4,
        context=16,
        lr=0.02,
        evaluations=1,
        evaluation_windows=2,
        corpus=str(tmp_path / "text.txt"),
    )
    seen = []
    result = train(config, observe=lambda step, model, _: seen.append(model.mixtures()[0].load.sum().item()))
    assert result.final_loss < result.train_loss[0]
    assert seen == [0] + [4 * 16 * 2] * 8, "each step starts from an empty count"
    assert train(config).train_loss == result.train_loss


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": 0}, "experts=0"),
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 0}, "top_k=0"),
        ({"shared_experts": -1}, "shared_experts=-1"),
        ({"expert_size": 0}, "expert_size=0"),
        ({"gate_scale": math.nan}, "gate_scale=nan"),
        ({"bias_update_rate": -1.0}, "bias_update_rate=-1"),
        ({"bias_rule": "loss"}, "bias_rule='loss'"),
    ],
)
def test_impossible_options_are_refused_with_their_value(options, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gate_weights(torch.zeros(2, 4), 5), "top_k=5"),
        (lambda: gate_weights(torch.zeros(2, 4), 2, torch.zeros(3)), r"\(3,\)"),
        (lambda: updated_bias(torch.zeros(2), torch.zeros(3), 0.1), r"\(3,\)"),
        (lambda: updated_bias(torch.zeros(2), torch.zeros(2), 0.1, "x"), "rule='x'"),
        (lambda: gate_scaling_factor(4, 5), "top_k=5"),
        (lambda: gate_scaling_factor(4, 2, gate="tanh"), "tanh"),
        (lambda: gate_scaling_factor(4, 2, tokens=0), "tokens=0"),
        (lambda: gate_scaling_factor(0, 0), "experts=0"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_moe_is_a_plain_module_that_can_stand_alone():
    moe = MoE(MoEConfig(experts=3, top_k=1, shared_experts=0), 4, 8, lambda size: torch.nn.Linear(4, 4))
    assert moe(torch.ones(2, 4)).shape == (2, 4)
    assert "bias" in moe.state_dict()
    assert "load" not in moe.state_dict()


def batch_of_tokens():
    return torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(5))


def test_replayed_routes_give_the_same_pass_and_the_same_gradients():
    model, tokens = Decoder(TINY, seed=2).double(), batch_of_tokens()
    with recorded_routes(model) as record:
        plain = model(tokens)
    routes = [passes[0] for passes in record]
    assert [route.shape for route in routes] == [(3, 6, 2)] * 2
    with replayed_routes(model, torch.stack(routes).to(torch.int16)):
        replayed = model(tokens)
    assert torch.equal(plain, replayed)
    gradients = [torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (plain, replayed)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_replay_visits_the_recorded_experts_when_the_router_would_choose_others():
    model, tokens = Decoder(TINY, seed=2).double(), batch_of_tokens()
    with recorded_routes(model) as record:
        model(tokens)
    routes = [passes[0] for passes in record]
    with torch.no_grad():
        for moe in model.mixtures():
            moe.router.weight.neg_()
    with recorded_routes(model) as own:
        elsewhere = model(tokens)
    assert all((a[0] != b).any() for a, b in zip(own, routes, strict=True))
    with replayed_routes(model, routes), recorded_routes(model) as seen:
        replayed = model(tokens)
    assert all(torch.equal(a[0], b) for a, b in zip(seen, routes, strict=True))
    assert not torch.allclose(replayed, elsewhere)
    assert torch.equal(model(tokens), elsewhere), "outside, routers choose again"
    replayed.sum().backward()
    assert all(moe.router.weight.grad.any() for moe in model.mixtures()), "the gate weights still learn"


def test_replayed_weights_are_todays_gates_of_yesterdays_experts():
    moe, x = layer(), normal(4, 16)
    chosen = torch.tensor([[4, 0], [1, 2], [3, 1], [0, 2]])
    with replayed_routes(moe, [chosen]):
        out = moe(x)
    s = moe.router(x).sigmoid().gather(1, chosen)
    g = 1.5 * s / s.sum(1, keepdim=True)
    experts = torch.stack([expert(x) for expert in moe.experts], dim=1)
    picked = experts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 16))
    torch.testing.assert_close(out, moe.shared(x) + (g.unsqueeze(-1) * picked).sum(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_token_of_no_expert_visits_the_shared_ones_alone_and_counts_in_no_load(shared):
    moe, x = layer(shared_experts=shared), normal(5, 16)
    chosen = torch.tensor([[0, 1], [-1, -1], [2, 3], [-1, -1], [0, 4]])
    with replayed_routes(moe, [chosen]):
        out = moe(x)
    alone = moe.shared(x) if shared else torch.zeros_like(x)
    assert torch.equal(out[[1, 3]], alone[[1, 3]])
    assert moe.update_bias().tolist() == [2, 1, 1, 1, 1]
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in moe.parameters())


def test_record_lists_every_pass_and_dense_models_have_none():
    model, cache = Decoder(TINY), KVCache()
    with recorded_routes(model) as outer, recorded_routes(model) as inner:
        for part in batch_of_tokens().split((4, 1, 1), dim=1):
            model(part, cache=cache)
    assert [[tuple(passed.shape) for passed in passes] for passes in inner] == [
        [(3, 4, 2), (3, 1, 2), (3, 1, 2)]
    ] * 2
    assert outer == [[], []], "the innermost record takes them"
    assert all(moe.record is None for moe in model.mixtures())
    dense = Decoder(replace(TINY, moe=None))
    with recorded_routes(dense) as nothing, replayed_routes(dense, []):
        dense(batch_of_tokens())
    assert nothing == []


def test_routes_that_do_not_fit_are_refused_and_nothing_stays_set():
    model, tokens = Decoder(TINY), batch_of_tokens()
    routes = torch.zeros(2, 3, 6, 2, dtype=torch.long)

    def replay(routes):
        with replayed_routes(model, routes):
            model(tokens)

    for wrong, words in (
        (routes[:1], "1 layers, but the model has 2"),
        (routes[:, :, :5], r"\(3, 5, 2\) cannot be replayed on tokens of shape \(3, 6\) with top_k=2"),
        (routes[..., :1], r"\(3, 6, 1\)"),
        (routes + 5, r"routes\[0\] name experts 5 to 5, but the layer has 5"),
        (routes - 2, "experts -2 to -2"),
    ):
        with pytest.raises(ValueError, match=words):
            replay(wrong)
        assert all(moe.replay is None for moe in model.mixtures())
    with pytest.raises(ValueError, match=r"chosen has shape \(2, 3\)"):
        gate_weights(torch.zeros(2, 4), 2, chosen=torch.zeros(2, 3, dtype=torch.long))
