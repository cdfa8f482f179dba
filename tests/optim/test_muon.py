"""Muon as an optimizer: its equation, its options, and the faults users hit elsewhere."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dslib.optim import Muon, adjusted_lr_factor, newton_schulz, svd_orthogonalize, update_rms


def parameter(*shape, seed=0, dtype=torch.float64):
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(value.to(dtype))


def with_gradient(*shape, seed=0, dtype=torch.float64):
    p = parameter(*shape, seed=seed, dtype=dtype)
    p.grad = parameter(*shape, seed=seed + 1000, dtype=dtype).detach()
    return p


def reference_steps(weight, gradients, lr, decay, momentum, nesterov, mode):
    """Moonlight eq. 1–4 written out for one matrix."""
    W, M = weight.clone(), torch.zeros_like(weight)
    for G in gradients:
        M = momentum * M + G
        O = newton_schulz(G + momentum * M if nesterov else M)
        factor = 0.2 / update_rms(O).item() if mode == "update_norm" else adjusted_lr_factor(W.shape, mode)
        W = W - lr * (factor * O + decay * W)
    return W


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["match_rms_adamw", "original", "spectral", "baseline", "update_norm", None])
def test_three_steps_equal_the_papers_equations(nesterov, mode):
    p = parameter(6, 10)
    gradients = [parameter(6, 10, seed=s).detach() for s in (1, 2, 3)]
    expected = reference_steps(p.detach(), gradients, 0.1, 0.3, 0.9, nesterov, mode)
    optimizer = Muon([p], lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr=mode)
    for G in gradients:
        p.grad = G
        optimizer.step()
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


def test_without_momentum_and_decay_a_step_is_near_the_exact_polar_factor():
    p = with_gradient(8, 8)
    before = p.detach().clone()
    Muon([p], lr=1.0, weight_decay=0, momentum=0, coefficients="polar_express", adjust_lr=None).step()
    exact = svd_orthogonalize(p.grad)
    assert ((before - p.detach() - exact).norm() / exact.norm()).item() < 0.2


def test_agrees_with_torch_on_one_matrix_whose_scale_is_its_own():
    """torch averages the momentum where the paper sums it: the orthogonalisation hides the difference."""
    ours, peers = parameter(12, 20, dtype=torch.float32), parameter(12, 20, dtype=torch.float32)
    options = {"lr": 0.002, "weight_decay": 10, "momentum": 0.9}
    a = Muon([ours], **options)
    b = torch.optim.Muon([peers], **options, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        ours.grad = parameter(12, 20, seed=seed, dtype=torch.float32).detach()
        peers.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, peers, rtol=0, atol=5e-4)


def test_every_shape_is_orthogonalised_in_one_batch(monkeypatch):
    calls = []

    def counted(G, *args, **kwargs):
        calls.append(tuple(G.shape))
        return newton_schulz(G, *args, **kwargs)

    monkeypatch.setitem(Muon.add_param_group.__globals__, "newton_schulz", counted)
    parameters = [with_gradient(4, 4, seed=s) for s in range(3)] + [with_gradient(4, 6), with_gradient(6, 4)]
    Muon(parameters, lr=0.1).step()
    assert sorted(calls) == [(2, 4, 6), (3, 4, 4)]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_many_parameters_together_equal_each_alone(shapes, seed):
    together = [with_gradient(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    alone = copy.deepcopy(together)
    for source, target in zip(together, alone, strict=True):
        target.grad = source.grad.clone()
    Muon(together, lr=0.1).step()
    for p in alone:
        Muon([p], lr=0.1).step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 3, 3), (1, 11), (12,)])
@pytest.mark.parametrize("mode", ["match_rms_adamw", "original", "update_norm"])
def test_fused_weight_with_split_sizes_equals_separate_parameters(sizes, mode):
    fused = with_gradient(12, 5)
    parts = [nn.Parameter(block.clone()) for block in fused.detach().split(sizes)]
    options = {"lr": 0.1, "weight_decay": 0.5, "adjust_lr": mode}
    a = Muon([{"params": [fused], "split_sizes": sizes}], **options)
    b = Muon(parts, **options)
    for seed in range(3):
        fused.grad = parameter(12, 5, seed=seed).detach()
        for part, G in zip(parts, fused.grad.split(sizes), strict=True):
            part.grad = G.clone()
        a.step()
        b.step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolution_equals_its_flattened_matrix(memory_format):
    conv = with_gradient(8, 3, 2, 2)
    flat = nn.Parameter(conv.detach().flatten(1).clone())
    flat.grad = conv.grad.flatten(1).clone()
    conv.data = conv.data.to(memory_format=memory_format)
    Muon([conv], lr=0.1).step()
    Muon([flat], lr=0.1).step()
    torch.testing.assert_close(conv.detach().flatten(1), flat.detach(), rtol=0, atol=1e-9)


def test_missing_gradient_leaves_parameter_and_decay_alone():
    p, q = parameter(3, 3), with_gradient(3, 3)
    before = p.detach().clone()
    optimizer = Muon([p, q], lr=0.1, weight_decay=10)
    optimizer.step()
    assert torch.equal(p, before)
    assert p not in optimizer.state


def test_zero_gradient_still_decays_and_gives_no_nan():
    p = parameter(3, 4)
    p.grad = torch.zeros_like(p)
    before = p.detach().clone()
    Muon([p], lr=0.01, weight_decay=10, adjust_lr="update_norm").step()
    torch.testing.assert_close(p.detach(), before * 0.9, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_momentum_are_never_changed_by_the_orthogonalisation(nesterov, dtype):
    p = with_gradient(4, 4, dtype=dtype)
    G = p.grad.clone()
    optimizer = Muon([p], lr=0.1, nesterov=nesterov)
    optimizer.step()
    assert torch.equal(p.grad, G)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], G)
    assert optimizer.state[p]["momentum_buffer"].data_ptr() != p.grad.data_ptr()


def test_groups_have_their_own_settings_and_a_scheduler_drives_them():
    p, q = with_gradient(4, 4), with_gradient(4, 4)
    before = p.detach().clone()
    optimizer = Muon([{"params": [p]}, {"params": [q], "lr": 0.4, "adjust_lr": None}], lr=0.2, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.step()
    schedule.step()
    O = newton_schulz(p.grad)
    torch.testing.assert_close(p.detach(), before - 0.1 * adjusted_lr_factor((4, 4), "match_rms_adamw") * O)
    torch.testing.assert_close(q.detach(), before - 0.2 * O)


def test_named_parameters_tensor_lr_and_closure_work_as_in_torch():
    model = nn.Linear(4, 4, bias=False).double()
    optimizer = Muon(model.named_parameters(), lr=torch.tensor(0.05), weight_decay=0)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.eye(4).double()).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < first.item()


@pytest.mark.parametrize("to", [torch.float64, torch.float32])
def test_momentum_survives_a_state_dict_round_trip_and_a_change_of_dtype(to):
    p = with_gradient(4, 6)
    optimizer = Muon([p], lr=0.1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    q = nn.Parameter(p.detach().to(to))
    resumed = Muon([q], lr=0.9)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 0.1
    p.grad = parameter(4, 6, seed=5).detach()
    q.grad = p.grad.to(to)
    optimizer.step()
    resumed.step()
    atol = 1e-12 if to == torch.float64 else 0.05
    torch.testing.assert_close(q.detach().double(), p.detach(), rtol=0, atol=atol)
    torch.testing.assert_close(
        resumed.state[q]["momentum_buffer"].double(), optimizer.state[p]["momentum_buffer"]
    )


def test_batches_of_many_matrices_are_cut_to_bounded_size(monkeypatch):
    monkeypatch.setitem(Muon.add_param_group.__globals__, "_BATCH_ENTRIES", 40)
    parameters = [with_gradient(4, 4, seed=s) for s in range(5)]
    whole = copy.deepcopy(parameters)
    for a, b in zip(parameters, whole, strict=True):
        b.grad = a.grad.clone()
    Muon(parameters, lr=0.1).step()
    monkeypatch.undo()
    Muon(whole, lr=0.1).step()
    for a, b in zip(parameters, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"adjust_lr": "match_rms"}, "match_rms"),
        ({"coefficients": "jordon"}, "jordon"),
    ],
)
def test_bad_options_are_refused_in_the_constructor_and_in_add_param_group(options, words):
    with pytest.raises(ValueError, match=words):
        Muon([parameter(2, 2)], **{"lr": 0.1, **options})
    optimizer = Muon([parameter(2, 2)], lr=0.1)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [parameter(3, 3)], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"params": [nn.Parameter(torch.ones(3))]}, r"\(3,\)"),
        ({"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]}, "complex64"),
        ({"params": [nn.Parameter(torch.ones(5, 2))], "split_sizes": (2, 2)}, "split_sizes"),
        ({"params": [nn.Parameter(torch.ones(5, 2))], "split_sizes": (5, 0)}, "split_sizes"),
    ],
)
def test_bad_parameters_are_refused_in_the_constructor_and_in_add_param_group(group, words):
    with pytest.raises(ValueError, match=words):
        Muon([group], lr=0.1)
    optimizer = Muon([parameter(2, 2)], lr=0.1)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_sparse_gradient_is_refused_before_anything_changes():
    p, q = with_gradient(3, 2), parameter(3, 2)
    q.grad = torch.ones(3, 2, dtype=torch.float64).to_sparse()
    before = p.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        Muon([p, q], lr=0.1).step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("scale", [6e4, 6e-8])
def test_float16_gradients_at_the_ends_of_their_range_train_on(scale):
    p = nn.Parameter(torch.eye(4, dtype=torch.float16))
    optimizer = Muon([p], lr=0.01)
    for _ in range(5):
        p.grad = torch.full((4, 4), scale, dtype=torch.float16) * torch.eye(4, dtype=torch.float16)
        optimizer.step()
    assert p.isfinite().all()
    assert p[0, 0] < 1 - 5 * 0.01 * 0.2 * 0.6
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert p.dtype == torch.float16


@pytest.mark.parametrize(
    ("group", "error", "words"),
    [
        ({"lr": 0.1}, ValueError, "'params'"),
        ({"params": {nn.Parameter(torch.ones(2, 2))}}, TypeError, "set"),
        ({"params": [nn.Parameter(torch.ones(2, 2))], "momentum": "a"}, ValueError, "momentum='a'"),
        ({"params": [nn.Parameter(torch.ones(2, 2))], "coefficients": 5}, ValueError, "coefficients=5"),
    ],
)
def test_malformed_groups_are_refused_with_a_remedy(group, error, words):
    with pytest.raises(error, match=words):
        Muon([parameter(2, 2)], lr=0.1).add_param_group(group)


def test_baseline_uses_the_hidden_size_of_its_group():
    p = with_gradient(4, 16)
    before = p.detach().clone()
    Muon([{"params": [p], "hidden_size": 9}], lr=1.0, weight_decay=0, momentum=0, adjust_lr="baseline").step()
    torch.testing.assert_close(before - p.detach(), 0.2 * 3 * newton_schulz(p.grad))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit_at_the_ends_of_its_range(dtype):
    """The sum of five gradients of 3e4 lies past float16's largest number, and torch casts loaded state to it."""

    def run(steps, resume_after=None):
        p = nn.Parameter(torch.eye(4, 6, dtype=dtype))
        optimizer = Muon([p], lr=0.1)
        for step in range(steps):
            p.grad = ((3e4 - 50 * step) * torch.eye(4, 6)).to(dtype)
            optimizer.step()
            if step == resume_after:
                saved = copy.deepcopy(optimizer.state_dict())
                p = nn.Parameter(p.detach().clone())
                optimizer = Muon([p], lr=0.1)
                optimizer.load_state_dict(saved)
        return p.detach(), optimizer.state[p]["momentum_buffer"]

    whole, resumed = run(7), run(7, resume_after=4)
    assert whole[0].isfinite().all()
    assert torch.equal(whole[0], resumed[0])
    assert torch.equal(whole[1], resumed[1])
    assert resumed[1].dtype == (torch.float32 if dtype == torch.float16 else dtype)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_a_checkpoint_of_torchs_muon_goes_on_as_there(nesterov, adjust):
    """Its momentum is an average and ours a sum: twenty times as much at 0.95, and the next step is the same."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(6, 9, generator=generator) for _ in range(4)]
    theirs = nn.Parameter(torch.randn(6, 9, generator=generator))
    before = torch.optim.Muon([theirs], lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust)
    for gradient in gradients[:3]:
        theirs.grad = gradient.clone()
        before.step()
    ours = nn.Parameter(theirs.detach().clone())
    start, saved = theirs.detach().clone(), before.state_dict()
    kept = copy.deepcopy(saved)
    after = Muon([ours], lr=1.0)
    after.load_state_dict(saved)
    assert torch.equal(saved["state"][0]["momentum_buffer"], kept["state"][0]["momentum_buffer"])
    assert saved["param_groups"][0].keys() == kept["param_groups"][0].keys()
    for p, optimizer in ((theirs, before), (ours, after)):
        p.grad = gradients[3].clone()
        optimizer.step()
    # Both iterate in bfloat16 and round at different places; unconverted, the steps are .69 of their size apart.
    assert (ours - theirs).norm() < 0.03 * (theirs - start).norm()


def test_what_a_load_pre_hook_changes_is_what_is_checked_and_loaded():
    p = nn.Parameter(torch.zeros(3, 4))
    optimizer = Muon([p], lr=0.1)

    def cut(_, state_dict):
        return {
            **state_dict,
            "state": {0: {"momentum_buffer": state_dict["state"][0]["momentum_buffer"][:3]}},
        }

    calls = []
    optimizer.register_load_state_dict_pre_hook(cut)
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(o.state[p]["momentum_buffer"].shape))
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.ones(5, 4)}}})
    assert calls == [(3, 4)]
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones(3, 4))
