"""The kernel of the policy loss against float64: log-probabilities, losses and gradients of logits."""

import math

import pytest
import torch

from dslib import kernels
from dslib.rl import LossConfig, PolicyBatch, chunked_policy_loss, policy_loss, selective_log_softmax

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: (rows, columns), with blocks of 16 columns.
CASES = {
    "one column": (2, 1),
    "one row, odd columns": (1, 7),
    "one whole block": (3, 16),
    "one short of two blocks": (2, 31),
    "one past two blocks": (2, 33),
    "prime sizes": (5, 53),
}
OBJECTIVES = {
    "no KL": {},
    "k1": {"kl": 0.3, "kl_kind": "k1"},
    "k2": {"kl": 0.3, "kl_kind": "k2"},
    "k3": {"kl": 0.3},
    "k1, weighted": {"kl": 0.3, "kl_kind": "k1", "kl_unbiased": True},
    "k2, weighted": {"kl": 0.3, "kl_kind": "k2", "kl_unbiased": True},
    "k3, weighted": {"kl": 0.3, "kl_unbiased": True},
    "not clipped": {"clip_low": math.inf, "clip_high": math.inf},
    "clipped unevenly": {"clip_low": 0.1, "clip_high": 0.28},
}


@pytest.fixture
def kernel(device):
    from dslib.kernels import policy_loss

    return policy_loss


@pytest.fixture
def small(kernel, monkeypatch):
    """Several blocks a row, from few columns."""
    monkeypatch.setattr(kernel, "BLOCK", 16)


def inputs(rows, columns, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)).to(dtype)
    tokens = torch.randint(columns, (rows,), generator=generator)
    return logits.to(device), tokens.to(device)


def constants(logits, tokens, temperature=0.7, seed=1):
    """Old and reference log-probabilities near the present ones, and advantages of both signs; float32."""
    generator = torch.Generator().manual_seed(seed)
    logp = exact_logp(logits.double(), tokens, temperature).cpu()
    noise = torch.randn(3, len(tokens), generator=generator, dtype=torch.float64)
    found = logp + 0.4 * noise[0], noise[1], logp + 0.6 * noise[2]
    return tuple(x.float().to(logits.device) for x in found)


def exact_logp(logits, tokens, temperature):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def exact_losses(logits, tokens, old, advantages, ref, temperature=0.7, **options):
    """One loss a token: policy_loss of sequences of a single token, each on its own."""
    logp, config = exact_logp(logits, tokens, temperature), LossConfig(**options)
    old, advantages, ref = (x.double() for x in (old, advantages, ref))
    one = torch.ones(1, 1, dtype=torch.bool, device=logits.device)
    losses = [
        policy_loss(
            PolicyBatch(logp[i].view(1, 1), old[i].view(1, 1), advantages[i].view(1), one, ref[i].view(1, 1)),
            config,
        ).loss
        for i in range(len(tokens))
    ]
    return torch.stack(losses) if losses else logp


def cotangent(x):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def with_gradient(function, logits):
    leaf = logits.detach().clone().requires_grad_()
    out = function(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, cotangent(out))[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_softmax_at_one_token_and_its_gradient_are_float64s(kernel, small, device, case, temperature):
    logits, tokens = inputs(*CASES[case], device)
    logp, gradient = with_gradient(lambda x: kernel.selective_log_softmax(x, tokens, temperature), logits)
    exact, expected = with_gradient(lambda x: exact_logp(x, tokens, temperature), logits.double())
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_losses_and_their_gradient_are_float64s(kernel, small, device, objective):
    options = OBJECTIVES[objective]
    logits, tokens = inputs(9, 37, device)
    given = constants(logits, tokens)
    found = {}

    def ours(x):
        losses, found["logp"] = kernel.token_losses(x, tokens, *given, temperature=0.7, **options)
        return losses

    losses, gradient = with_gradient(ours, logits)
    exact, expected = with_gradient(lambda x: exact_losses(x, tokens, *given, **options), logits.double())
    torch.testing.assert_close(losses.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        found["logp"].double(), exact_logp(logits.double(), tokens, 0.7), rtol=1e-5, atol=1e-5
    )
    assert not found["logp"].requires_grad


def test_the_block_that_is_really_used_gives_the_same(kernel, device):
    logits, tokens = inputs(2, 4099, device)
    logp, gradient = with_gradient(lambda x: kernel.selective_log_softmax(x, tokens), logits)
    exact, expected = with_gradient(lambda x: exact_logp(x, tokens, 1.0), logits.double())
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_logits_are_computed_in_float32_and_their_gradient_is_rounded_at_the_end(
    kernel, small, device, dtype
):
    logits, tokens = inputs(4, 37, device, dtype)
    given = constants(logits, tokens)
    losses, gradient = with_gradient(
        lambda x: kernel.token_losses(x, tokens, *given, temperature=0.7, kl=0.3)[0], logits
    )
    exact, expected = with_gradient(lambda x: exact_losses(x, tokens, *given, kl=0.3), logits.double())
    assert (losses.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-4, atol=1e-5)
    # The interpreter truncates bfloat16, which is twice a rounding's error.
    assert (gradient.double() - expected).norm() < (
        2**-6 if dtype == torch.bfloat16 else 2**-9
    ) * expected.norm()


@pytest.mark.parametrize("name", ["by token", "KL in the graph", "by sequence", "off-policy mask"])
def test_eager_chunked_and_triton_are_one_loss(kernel, small, device, name):
    """The plain way in float64, chunks in torch, chunks in Triton: loss, metrics and both gradients."""
    config = {
        "by token": LossConfig(clip_high=0.28),
        "KL in the graph": LossConfig(kl=0.2, kl_unbiased=True, aggregation="sequence"),
        "by sequence": LossConfig(ratio="sequence", clip_low=0.15, clip_high=0.15, kl=0.1),
        "off-policy mask": LossConfig(kl=0.1, off_policy_delta=0.05),
    }[name]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    hidden, weight = normal(3, 5, 8), normal(37, 8)
    tokens = torch.randint(37, (3, 5), generator=generator).to(device)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [4]])).to(device)
    logp = selective_log_softmax(hidden @ weight.mT, tokens, 0.7)
    batch = PolicyBatch(None, logp + 0.3 * normal(3, 5), normal(3), mask, logp + 0.5 * normal(3, 5))

    def eager(hidden, weight):
        fields = {field: getattr(batch, field).double() for field in ("logp_old", "advantages", "logp_ref")}
        logp = selective_log_softmax(hidden @ weight.mT, tokens, 0.7)
        return policy_loss(PolicyBatch(logp, mask=mask, **fields), config)

    def chunked(hidden, weight):
        return chunked_policy_loss(hidden, weight, tokens, batch, config, 4, 0.7)

    results = {}
    for way, function, dtype, choice in (
        ("eager", eager, torch.float64, "torch"),
        ("chunked", chunked, torch.float32, "torch"),
        ("triton", chunked, torch.float32, "triton"),
    ):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        with kernels.use(choice):
            result = function(*leaves)
            results[way] = result, torch.autograd.grad(result.loss, leaves)
    exact, expected = results.pop("eager")
    assert 0 < exact.metrics["clip_share"] < 1 or name == "off-policy mask"
    for result, gradients in results.values():
        assert result.loss.item() == pytest.approx(exact.loss.item(), abs=1e-5)
        assert result.metrics == pytest.approx(exact.metrics, abs=1e-5)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_the_librarys_functions_take_the_kernel_that_was_chosen(kernel, device, monkeypatch):
    calls = []
    monkeypatch.setattr(kernel, "rows", lambda *x, original=kernel.rows: calls.append(len(x)) or original(*x))
    logits, tokens = inputs(6, 11, device)
    logits, tokens = logits.view(2, 3, 11), tokens.view(2, 3)
    hidden, weight = torch.eye(3).expand(2, 3, 3).to(device), torch.ones(11, 3).to(device)
    zeros = torch.zeros(2, 3).to(device)
    batch = PolicyBatch(None, zeros, zeros[:, 0], zeros == 0)
    with kernels.use("torch"):
        expected = selective_log_softmax(logits, tokens)
        chunked_policy_loss(hidden, weight, tokens, batch, LossConfig())
    assert not calls
    with kernels.use("triton"):
        torch.testing.assert_close(selective_log_softmax(logits, tokens), expected, rtol=1e-5, atol=1e-6)
        assert len(calls) == 1
        chunked_policy_loss(hidden, weight, tokens, batch, LossConfig(), 2)
        assert len(calls) == 4
        selective_log_softmax(logits.double(), tokens)  # float64 stays on torch
    assert len(calls) == 4


def test_large_logits_keep_the_digits_that_they_do_not_share(kernel, small, device):
    logits, tokens = inputs(4, 37, device)
    far = logits.clone() + 4096.0
    logits = (far - 4096.0).double()  # what float32 holds of them
    logp, gradient = with_gradient(lambda x: kernel.selective_log_softmax(x, tokens), far)
    exact, expected = with_gradient(lambda x: exact_logp(x, tokens, 1.0), logits)
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [0, 17, 36])
def test_minus_infinity_is_probability_0(kernel, small, device, place):
    logits, tokens = inputs(3, 37, device)
    logits[:, :16] = -math.inf  # a whole block
    logits[1] = -math.inf
    logits[1, 20] = 5.0  # the only one left
    tokens[:] = 20
    logits[0, place] = -math.inf
    logits[0, 20] = 1.0
    logp, gradient = with_gradient(lambda x: kernel.selective_log_softmax(x, tokens), logits)
    exact, expected = with_gradient(lambda x: exact_logp(x, tokens, 1.0), logits.double())
    torch.testing.assert_close(logp.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)
    assert logp[1] == 0


def test_nan_and_tokens_outside_the_vocabulary_stay_in_their_rows(kernel, small, device):
    logits, tokens = inputs(4, 37, device)
    logits[1, 3] = math.nan
    tokens[2], tokens[3] = 37, -1
    logp = kernel.selective_log_softmax(logits, tokens)
    assert logp.isnan().tolist() == [False, True, True, True]
    assert logp[0].item() == pytest.approx(exact_logp(logits[:1].double(), tokens[:1], 1.0).item(), abs=1e-5)


@pytest.mark.parametrize("distance", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("objective", ["k3", "k3, weighted"])
def test_huge_log_ratios_leave_losses_and_gradients_finite(kernel, small, device, objective, distance):
    logits, tokens = inputs(4, 37, device)
    old, advantages, ref = constants(logits, tokens)
    given = old + distance, advantages, ref - distance
    losses, gradient = with_gradient(
        lambda x: kernel.token_losses(x, tokens, *given, temperature=0.7, **OBJECTIVES[objective])[0], logits
    )
    exact, expected = with_gradient(
        lambda x: exact_losses(x, tokens, *given, **OBJECTIVES[objective]), logits.double()
    )
    assert losses.isfinite().all()
    torch.testing.assert_close(losses.double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


def test_small_divergences_keep_their_digits(kernel, small, device):
    logits, tokens = inputs(4, 37, device)
    logp = kernel.selective_log_softmax(logits, tokens, 0.7)
    given = logp, torch.zeros_like(logp), logp + 2**-10
    losses, _ = kernel.token_losses(logits, tokens, *given, temperature=0.7, kl=1.0)
    exact = (math.exp(2**-10) - 1 - 2**-10) * torch.ones_like(losses)
    torch.testing.assert_close(losses, exact, rtol=2e-3, atol=0)


def test_the_gradient_may_be_written_over_the_logits(kernel, small, device):
    logits, tokens = inputs(5, 33, device)
    _, sums, _, _ = kernel.rows(logits, tokens, 0.7)
    slopes = cotangent(logits[:, 0])
    expected = kernel.logits_gradient(logits, tokens, sums, slopes, 0.7)
    assert kernel.logits_gradient(logits, tokens, sums, slopes, 0.7, out=logits) is logits
    assert torch.equal(logits, expected)


def test_strides_do_not_matter_and_the_inputs_stay(kernel, small, device):
    logits, tokens = inputs(5, 33, device)
    given = constants(logits, tokens)
    expected, gradient = with_gradient(lambda x: kernel.token_losses(x, tokens, *given)[0], logits)
    wide = torch.full((5, 40), math.nan, device=device)
    wide[:, 3:36] = logits
    for view in (logits.mT.contiguous().mT, wide[:, 3:36]):
        before = view.clone()
        pairs = torch.stack((tokens, tokens), dim=1)[:, 0]
        leaf = view.detach().requires_grad_()
        losses, _ = kernel.token_losses(leaf, pairs, *given)
        assert torch.equal(losses, expected)
        assert torch.equal(torch.autograd.grad(losses, leaf, cotangent(losses))[0], gradient)
        assert torch.equal(view, before)


@pytest.mark.parametrize("columns", [1, 5])
def test_no_rows_are_no_work(kernel, device, columns):
    logits, tokens = inputs(0, columns, device)
    empty = torch.empty(0, device=device)
    losses, gradient = with_gradient(
        lambda x: kernel.token_losses(x, tokens, empty, empty, empty, kl=0.1)[0], logits
    )
    assert losses.shape == (0,)
    assert gradient.shape == (0, columns)


BAD = {
    "logits is torch.float64": (TypeError, {"logits": lambda x: x.double()}),
    "logits has shape (3,)": (ValueError, {"logits": lambda x: x[:, 0]}),
    "logits has shape (3, 0)": (ValueError, {"logits": lambda x: x[:, :0]}),
    "tokens is torch.float32": (TypeError, {"tokens": lambda x: x.float()}),
    "tokens has shape (2,)": (ValueError, {"tokens": lambda x: x[1:]}),
    "logp_old is torch.float64": (TypeError, {"logp_old": lambda x: x.double()}),
    "advantages is list": (TypeError, {"advantages": lambda x: [1.0]}),
    "logp_ref has shape (3, 1)": (ValueError, {"logp_ref": lambda x: x.unsqueeze(1)}),
    "kl=0.1 needs logp_ref": (ValueError, {"logp_ref": lambda x: None, "kl": lambda x: 0.1}),
    "kl_kind='k4'": (ValueError, {"kl_kind": lambda x: "k4"}),
    "temperature=0.0": (ValueError, {"temperature": lambda x: 0.0}),
    "temperature=nan": (ValueError, {"temperature": lambda x: math.nan}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_with_its_name_and_value(kernel, device, words):
    error, change = BAD[words]
    logits, tokens = inputs(3, 5, device)
    named = ("logp_old", "advantages", "logp_ref")
    arguments = {"logits": logits, "tokens": tokens} | dict(
        zip(named, constants(logits, tokens), strict=True)
    )
    arguments |= {name: f(arguments.get(name)) for name, f in change.items()}
    with pytest.raises(error) as caught:
        kernel.token_losses(**arguments)
    assert words in str(caught.value)


def test_a_chunked_loss_keeps_no_logits(kernel, device):
    hidden, weight = torch.zeros(1, 3, 2, device=device), torch.zeros(5, 2, device=device, requires_grad=True)
    zeros = torch.zeros(1, 3, device=device)
    batch = PolicyBatch(None, zeros, zeros[:, 0], zeros == 0)
    with kernels.use("triton"):
        result = chunked_policy_loss(hidden, weight, zeros.long(), batch, LossConfig())
    assert all(isinstance(value, float) for value in result.metrics.values())
    saved = [x for x in result.loss.grad_fn.saved_tensors if x is not None]
    assert max(x.numel() for x in saved) == weight.numel()
