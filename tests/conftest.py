"""Settings that every test shares."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"

# Shared runners are slow at times: a deadline would measure the machine, not the code.
settings.register_profile("dslib", deadline=None, max_examples=25)
settings.load_profile("dslib")

# Tests must neither read nor fill the reader's cache of heavy steps.
os.environ.setdefault("DSLIB_CACHE", "off")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under ``--dist loadfile`` a file stays on one worker, for its fixtures; notebooks are spread, a test each."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if "notebooks/test_notebooks.py" in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    """Notebooks are the longest tests and come first, so that none is left alone at the end."""
    items.sort(key=lambda item: item.path.parent != NOTEBOOKS)


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors are faster on one thread, and the result does not depend on the core count."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
