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
