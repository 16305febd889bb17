"""Sharpness: the largest curvature of a loss, raw, spherical or as the optimizer sees it."""

from __future__ import annotations

from equilibria.measure.sharpness.groups import sharpness_by_group
from equilibria.measure.sharpness.measurement import Sharpness, sharpness
from equilibria.measure.sharpness.preconditioner import adam_preconditioner

__all__ = ["Sharpness", "adam_preconditioner", "sharpness", "sharpness_by_group"]
