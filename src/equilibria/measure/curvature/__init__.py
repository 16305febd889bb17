"""The curvature of a loss: Hessian-vector products, and the ends of its spectrum."""

from __future__ import annotations

from equilibria.measure.curvature.eigenpairs import Eigenpairs
from equilibria.measure.curvature.flat import FlatLayout
from equilibria.measure.curvature.following import follow
from equilibria.measure.curvature.lanczos import eigenpairs
from equilibria.measure.curvature.products import HessianProducts

__all__ = ["Eigenpairs", "FlatLayout", "HessianProducts", "eigenpairs", "follow"]
