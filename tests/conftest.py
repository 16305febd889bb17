"""Shared test settings: one thread, a fast hypothesis profile, and the helpers beside the tests importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The tests are imported by path (import mode "importlib"), so a helper module needs its folder on the path.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("theory", "docs")]

settings.register_profile("fast", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=20, derandomize=True)  # make test-all
settings.load_profile("fast")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small tensors are faster on one thread, and the sums then have one order: the same numbers everywhere."""
    import torch

    torch.set_num_threads(1)
