"""Rollouts: drawn from the right distribution, scored as they were drawn, whatever the model and the filters."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dslib.attention.nsa import NSASizes
from dslib.models import (
    DecoderConfig,
    MoBAConfig,
    MoEConfig,
    NSAConfig,
    RWKVConfig,
    SlidingWindowConfig,
    filter_logits,
    generate,
)
from dslib.rl.rollout import (
    Rollout,
    SamplingConfig,
    completion_states,
    concatenated,
    hidden_states,
    sample,
    score,
    token_entropy,
)

END = 10
TINY = DecoderConfig(vocab_size=11, d_model=16, layers=2, heads=4)
MIXTURE = replace(TINY, moe=MoEConfig(experts=5, top_k=2, gate_scale=1.5))
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])
SAMPLING = SamplingConfig(max_new_tokens=9, end=END)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def model_of(config=TINY, seed=1, sharper=2.0):
    """A model whose distributions are far from uniform, so that filters have something to cut."""
    model = config.build(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharper * 10)
    return model


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, kv_heads=2, tie_embeddings=True),
        MIXTURE,
        replace(TINY, attention=SlidingWindowConfig(window=4)),
        replace(TINY, attention=MoBAConfig(block_size=4, top_k=2)),
        replace(TINY, attention=NSAConfig(NSASizes(4, 2, 4, 3, 1, 1, 4))),
        RWKVConfig(vocab_size=11, d_model=16, head_size=8, rank=4),
    ],
    ids=["dense", "grouped", "mixture", "window", "moba", "nsa", "rwkv"],
)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.9, "top_k": 8}]
)
def test_scoring_gives_the_samplers_own_log_probabilities(config, options):
    model = model_of(config)
    sampling = replace(SAMPLING, **options)
    rollout = sample(model, PROMPTS, sampling, seeded(), group_size=6, record_routes=True, record_kept=True)
    logp = score(model, rollout, sampling.temperature, rollout.kept, rollout.routes)
    torch.testing.assert_close(logp, rollout.logp, rtol=0, atol=1e-5)
    assert logp.requires_grad
    assert (rollout.logp[rollout.mask] < 0).any()
    assert (rollout.routes is not None) == (config is MIXTURE)


def naive(model, prompts, config, drawn):
    """Row by row, without a cache: tokens and log-probabilities from the same random numbers."""
    tokens, logps = [], []
    for row, prompt in enumerate(prompts):
        sequence, own = prompt.tolist(), []
        for step in range(config.max_new_tokens):
            logits = model(torch.tensor([sequence]))[0, -1] / config.temperature
            logp = filter_logits(logits, config.top_k, config.top_p).log_softmax(-1)
            chosen = int((logp.exp().cumsum(-1) <= drawn[row, step]).sum())
            sequence.append(chosen)
            own.append(logp[chosen].item())
            if chosen == config.end:
                break
        tokens.append(sequence[len(prompt) :])
        logps.append(own)
    return tokens, logps


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}])
def test_rows_that_leave_the_batch_change_nothing(options):
    model, config = model_of(sharper=1).double(), replace(SAMPLING, **options)
    prompts = torch.randint(10, (12, 3), generator=seeded(3))
    rollout = sample(model, prompts, config, seeded(4))
    assert len(set(rollout.lengths.tolist())) > 3, "rows end at different times"
    drawn = torch.rand(12, config.max_new_tokens, generator=seeded(4), dtype=torch.float64)
    tokens, logps = naive(model, prompts, config, drawn)
    for row, (own, logp) in enumerate(zip(tokens, logps, strict=True)):
        mask = rollout.mask[row]
        assert mask.tolist() == [True] * len(own) + [False] * (config.max_new_tokens - len(own))
        assert rollout.completions[row][mask].tolist() == own
        assert rollout.logp[row][mask].tolist() == pytest.approx(logp, abs=1e-9)
        assert (rollout.completions[row][~mask] == END).all()
        assert (rollout.logp[row][~mask] == 0).all()


def test_a_group_is_what_repeated_prompts_give():
    model = model_of(MIXTURE).double()
    options = {"record_routes": True, "record_kept": True}
    grouped = sample(model, PROMPTS, SAMPLING, seeded(), group_size=5, **options)
    repeated = sample(model, PROMPTS.repeat_interleave(5, dim=0), SAMPLING, seeded(), **options)
    for name in ("tokens", "mask", "kept", "routes"):
        assert torch.equal(getattr(grouped, name), getattr(repeated, name)), name
    torch.testing.assert_close(grouped.logp, repeated.logp, rtol=0, atol=1e-9)


def test_tokens_are_drawn_with_their_probabilities():
    model = model_of(sharper=1)
    config = SamplingConfig(max_new_tokens=1, temperature=0.8, top_k=6)
    rollout = sample(model, PROMPTS[:1], config, seeded(), group_size=40_000)
    expected = filter_logits(model(PROMPTS[:1])[0, -1].detach() / 0.8, top_k=6).softmax(-1)
    found = torch.bincount(rollout.completions[:, 0], minlength=11) / 40_000
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert (found[expected == 0] == 0).all()
    entropy = -(expected * expected.clamp_min(1e-30).log()).sum()
    torch.testing.assert_close(rollout.entropy[0, 0], entropy)


def test_the_end_is_scored_and_what_follows_it_is_not():
    model = model_of(sharper=1).double()
    rollout = sample(model, PROMPTS, SAMPLING, seeded(), group_size=20)
    ended = (rollout.completions == END) & rollout.mask
    assert ended.any(1).sum() > 5
    assert (ended.sum(1) <= 1).all()
    assert torch.equal(rollout.lengths[ended.any(1)] - 1, ended.int().argmax(1)[ended.any(1)])
    logp = score(model, rollout)
    poisoned = rollout.tokens.clone()
    poisoned[:, 3:][~rollout.mask] = 0
    again = score(model, replace(rollout, tokens=poisoned))
    assert torch.equal(again, logp), "padding reaches no score"
    assert (logp[~rollout.mask] == 0).all()
    gradient = torch.autograd.grad(logp.sum(), model.lm_head.weight)[0]
    scored = sum(score(model, rollout.rows(torch.tensor([i]), trim=True)).sum() for i in range(40))
    torch.testing.assert_close(gradient, torch.autograd.grad(scored, model.lm_head.weight)[0])


def test_kept_sets_make_the_ratio_one_and_without_them_it_is_below():
    model = model_of()
    config = replace(SAMPLING, top_p=0.7)
    rollout = sample(model, PROMPTS, config, seeded(), group_size=10, record_kept=True)
    cut = ~rollout.kept.all(-1) & rollout.mask
    assert cut.any()
    ratio = (score(model, rollout, kept=rollout.kept) - rollout.logp).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    assert ((score(model, rollout) - rollout.logp).exp()[cut] < 1).all()


@given(seed=st.integers(0, 10**6), top_p=st.floats(0.01, 1), top_k=st.integers(1, 11))
def test_a_sampled_token_lies_in_its_kept_set(seed, top_p, top_k):
    model = model_of(seed=seed % 7)
    config = replace(SAMPLING, top_p=top_p, top_k=top_k, max_new_tokens=3)
    rollout = sample(model, PROMPTS, config, seeded(seed), group_size=3, record_kept=True)
    assert rollout.kept.gather(-1, rollout.completions.unsqueeze(-1)).all()
    assert rollout.kept[rollout.mask].sum(-1).max() <= top_k


def test_temperature_belongs_to_every_policy_or_the_ratio_is_off():
    model = model_of()
    rollout = sample(model, PROMPTS, replace(SAMPLING, temperature=0.5), seeded(), group_size=4)
    assert (score(model, rollout, 0.5) - rollout.logp).abs().max() < 1e-5
    assert (score(model, rollout, 1.0) - rollout.logp).abs().max() > 0.1


def test_greedy_is_generate_and_has_probability_one():
    model = model_of()
    rollout = sample(model, PROMPTS, SamplingConfig(6, temperature=0))
    assert torch.equal(rollout.tokens, generate(model, PROMPTS, 6, temperature=0))
    assert rollout.logp.abs().max() == rollout.entropy.abs().max() == 0
    with pytest.raises(ValueError, match="temperature=0"):
        score(model, rollout, 0)


def test_generator_moves_alike_whenever_the_rows_end():
    after = []
    for end in (None, END, 3):
        generator = seeded()
        sample(model_of(), PROMPTS, replace(SAMPLING, end=end), generator)
        after.append(generator.get_state())
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


def test_sampling_leaves_no_trace_in_the_model():
    model = model_of(MIXTURE).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    rollout = sample(model, PROMPTS, SAMPLING, seeded(), record_routes=True)
    assert model.training
    assert not rollout.logp.requires_grad
    assert all(layer.record is None and not layer.load.any() for layer in model.mixtures())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_states_are_what_the_head_is_given():
    model = model_of()
    logits, states = model(PROMPTS), hidden_states(model, PROMPTS)
    assert states.shape == (2, 3, 16)
    assert torch.equal(model.lm_head(states), logits)
    assert torch.equal(model(PROMPTS), logits), "the hook is gone"


def test_scores_and_gradients_are_those_of_a_full_pass():
    model = model_of().double()
    rollout = sample(model, PROMPTS, SAMPLING, seeded(), group_size=4)
    logits = model(rollout.tokens[:, :-1])[:, 2:] / 0.9
    whole = logits.log_softmax(-1).gather(-1, rollout.completions.unsqueeze(-1)).squeeze(-1) * rollout.mask
    parameters = list(model.parameters())
    expected = torch.autograd.grad(whole.square().sum(), parameters)
    ours = score(model, rollout, 0.9)
    torch.testing.assert_close(ours, whole)
    for a, b in zip(torch.autograd.grad(ours.square().sum(), parameters), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_short_floats_give_log_probabilities_in_float32():
    rollout = sample(model_of().bfloat16(), PROMPTS, SAMPLING, seeded(), record_kept=True)
    assert rollout.logp.dtype == rollout.entropy.dtype == torch.float32


def test_entropy_and_its_gradient_live_with_tokens_left_out():
    logits = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([True, True, False])
    entropy = token_entropy(logits, 2.0, kept)
    p = torch.tensor([0.0, 0.5]).double().softmax(-1)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item())
    entropy.backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[2] == 0


def test_rows_are_cut_to_their_longest_and_put_together_again():
    model = model_of(MIXTURE, sharper=1)
    whole = sample(model, PROMPTS, SAMPLING, seeded(), 10, record_routes=True, record_kept=True)
    parts = [whole.rows(slice(0, 7)), whole.rows(torch.arange(7, 20))]
    together = concatenated(parts)
    for name in ("tokens", "mask", "logp", "entropy", "kept", "routes"):
        assert torch.equal(getattr(together, name), getattr(whole, name)), name
    order = whole.lengths.argsort()
    short = whole.rows(order[:4], trim=True)
    assert short.mask.shape[1] == whole.lengths[order[3]] < whole.mask.shape[1]
    logp = score(model, short, kept=short.kept, routes=short.routes)
    torch.testing.assert_close(logp, short.logp, rtol=0, atol=1e-5)
    nothing = replace(whole, mask=torch.zeros_like(whole.mask)).rows(slice(0, 2), trim=True)
    assert nothing.mask.shape == (2, 1)
    assert len(whole.rows(slice(0, 0), trim=True)) == 0
    with pytest.raises(ValueError, match="one kind"):
        concatenated([whole, sample(model, PROMPTS, SAMPLING, seeded())])
    with pytest.raises(ValueError, match="one kind"):
        concatenated([])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_impossible_sampling_is_refused_with_its_value(options, words):
    with pytest.raises(ValueError, match=words):
        replace(SAMPLING, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": torch.empty(0, 3, dtype=torch.long)}, r"shape \(0, 3\)"),
        ({"prompts": torch.empty(2, 0, dtype=torch.long)}, r"shape \(2, 0\)"),
        ({"prompts": torch.tensor([1, 2])}, r"shape \(2,\)"),
        ({"prompts": torch.ones(2, 3)}, "float32"),
        ({"prompts": torch.tensor([[1, 11]])}, "1 to 11, but the model's vocabulary is 0 to 10"),
        ({"prompts": torch.tensor([[-1, 1]])}, "-1 to 1"),
        ({"config": SamplingConfig(3, end=11)}, "end=11"),
        ({"group_size": 0}, "group_size=0"),
    ],
)
def test_bad_prompts_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        sample(**{"model": model_of(), "prompts": PROMPTS, "config": SAMPLING, **arguments})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_has_diverged_is_named_and_not_sampled(temperature):
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="logits are not finite at new token 0 of row 0"):
        sample(model, PROMPTS, replace(SAMPLING, temperature=temperature), seeded())


def test_rollouts_whose_parts_do_not_fit_are_refused():
    rollout = sample(model_of(MIXTURE), PROMPTS, SAMPLING, seeded(), record_routes=True, record_kept=True)
    for name in ("mask", "logp", "entropy", "kept"):
        with pytest.raises(ValueError, match=name):
            replace(rollout, **{name: getattr(rollout, name)[:, :-1]})
    with pytest.raises(ValueError, match="routes"):
        replace(rollout, routes=rollout.routes[:, :, :-1])
    other = model_of(replace(TINY, vocab_size=5))
    with pytest.raises(ValueError, match="vocabulary of 5"):
        score(other, rollout)
    wrong = torch.ones_like(rollout.kept).scatter(-1, rollout.completions.unsqueeze(-1), False)
    with pytest.raises(ValueError, match="kept"):
        score(model_of(MIXTURE), rollout, kept=wrong)
    assert isinstance(rollout, Rollout)


def test_prompts_read_once_give_the_same_states_and_gradients():
    model = model_of().double()
    rollout = sample(model, PROMPTS, SAMPLING, seeded(), group_size=5)
    read = []
    hook = model.embedding.register_forward_pre_hook(lambda _, inputs: read.append(tuple(inputs[0].shape)))
    shared = completion_states(model, rollout)
    hook.remove()
    assert read == [(2, 3), (10, 8)]
    whole = hidden_states(model, rollout.tokens[:, :-1])[:, 2:]
    torch.testing.assert_close(shared, whole)
    gradients = [torch.autograd.grad(x.square().sum(), model.embedding.weight)[0] for x in (shared, whole)]
    torch.testing.assert_close(*gradients)
    shuffled = rollout.rows(torch.randperm(10, generator=seeded()))
    torch.testing.assert_close(score(model, shuffled), shuffled.logp, rtol=0, atol=1e-9)
    alone = rollout.rows(torch.tensor([0]))
    torch.testing.assert_close(score(model, alone), alone.logp, rtol=0, atol=1e-9)
