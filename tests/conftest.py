"""Settings that every test shares."""

import os

import pytest
from hypothesis import settings

# Shared runners are slow at times: a deadline would measure the machine, not the code.
settings.register_profile("dslib", deadline=None, max_examples=25)
settings.load_profile("dslib")

# Tests must neither read nor fill the reader's cache of heavy steps.
os.environ.setdefault("DSLIB_CACHE", "off")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors are faster on one thread, and the result does not depend on the core count."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
