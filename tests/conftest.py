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


def pytest_itemcollected(item):
    """Under ``--dist loadgroup`` a file stays on one worker, for its fixtures; notebooks are spread, a test each."""
    # pytest-xdist reads the groups before it lets anybody else modify what was collected.
    if getattr(item.config.option, "loadgroup", False) and item.path.parent != NOTEBOOKS:
        group = item.path.relative_to(NOTEBOOKS.parent).with_suffix("").as_posix()
        item.add_marker(pytest.mark.xdist_group(group))


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
