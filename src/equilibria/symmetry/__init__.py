"""Every scaling symmetry of a loss, found numerically and confirmed by scaling."""

from __future__ import annotations

from equilibria.symmetry._result import Symmetries
from equilibria.symmetry._rows import Rows
from equilibria.symmetry._search import symmetries

__all__ = ["Rows", "Symmetries", "symmetries"]
