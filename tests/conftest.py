"""Shared test settings: one thread, a fast hypothesis profile, and helpers that child processes can import."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

from equilibria import errors
from tests.helpers import ROOT

# Processes that tests start import `tests.helpers` too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# Laws that tests measure stay out of the user's cache.
_cache = tempfile.TemporaryDirectory(prefix="equilibria-cache-")
os.environ["EQUILIBRIA_CACHE"] = _cache.name

os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels for GPUs run in main memory; read when triton is imported

settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=20, derandomize=True)  # make test-all
settings.load_profile("fast")


def pytest_collection():
    gc.disable()


def pytest_collection_finish():
    """Searches for garbage leave alone what collecting has imported: a million objects, nearly a second each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors are faster on one thread, and the sums then have one order: the same numbers everywhere."""
    import torch

    torch.set_num_threads(1)


_printed: list[str] = []
errors._print_warning = _printed.append


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test in which the library warned unexpectedly during training: it prints where others would raise."""
    _printed.clear()
    result = yield
    assert not _printed, f"unexpected warnings: {_printed}"
    return result
