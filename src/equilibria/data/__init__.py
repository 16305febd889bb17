"""Data sets as tensors, and batches whose order depends on a seed alone."""

from __future__ import annotations

from equilibria.data.batches import Batches
from equilibria.data.digits import Digits, load_digits

__all__ = ["Batches", "Digits", "load_digits"]
