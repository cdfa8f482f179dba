"""Where the kernels can run here: on a GPU, or on the CPU in Triton's interpreter."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def device():
    """``"cuda"`` or, in a process that was started for the interpreter, ``"cpu"``."""
    pytest.importorskip("triton", reason="triton is not installed; it exists for Linux only")
    import torch

    if INTERPRETED:
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU here; test_interpreter.py runs these cases in Triton's interpreter")
    return "cuda"


@pytest.fixture
def poisoned_memory():
    """Whatever is allocated without a value holds NaN, so that an entry which no kernel writes is seen."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(2).new_empty(3, 5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def masked_dense():
    """Attention with a (…, T, S) mask in float64: 0 for a query that sees no key. kv heads are repeated."""
    import torch

    def attend(q, k, v, mask, scale=None):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        seen = mask.any(-1, keepdim=True)
        scores = scores.masked_fill(
            ~mask & seen, -torch.inf
        )  # an empty row stays finite, and is zeroed below
        return torch.where(seen, scores.softmax(-1), 0.0) @ v

    return attend


@pytest.fixture
def agrees_with_gradients():
    """Results and gradients of ``kernel`` on tensors of ``dtype``, against ``exact`` on the same in float64."""
    import torch

    def check(kernel, exact, tensors, rtol, atol):
        ours = [x.detach().requires_grad_() for x in tensors]
        theirs = [x.detach().double().requires_grad_() for x in tensors]
        out, expected = kernel(*ours), exact(*theirs)
        assert (out.shape, out.device) == (expected.shape, ours[0].device)
        torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
        generator = torch.Generator().manual_seed(7)
        cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
        if out.numel():
            found = torch.autograd.grad(out, ours, cotangent)
            wanted = torch.autograd.grad(expected, theirs, cotangent.double())
            for x, gradient, exact_gradient in zip(ours, found, wanted, strict=True):
                assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)
                torch.testing.assert_close(gradient.double(), exact_gradient, rtol=rtol, atol=atol)
        return out

    return check
