"""Every scaling symmetry of a loss, found numerically and confirmed by scaling."""

from __future__ import annotations

from equilibria.measure.symmetry.granularity import Rows
from equilibria.measure.symmetry.result import Symmetries
from equilibria.measure.symmetry.search import symmetries

__all__ = ["Rows", "Symmetries", "symmetries"]
