"""The curvature of a loss: Hessian-vector products, the ends of its spectrum, sharpness."""

from __future__ import annotations

from equilibria.curvature._eigenpairs import Eigenpairs
from equilibria.curvature._hvp import FlatLayout, HessianProducts
from equilibria.curvature._lanczos import eigenpairs
from equilibria.curvature._sharpness import Sharpness, sharpness, sharpness_by_group
from equilibria.curvature._thresholds import adam_preconditioner
from equilibria.curvature._warm_start import follow

__all__ = [
    "Eigenpairs",
    "FlatLayout",
    "HessianProducts",
    "Sharpness",
    "adam_preconditioner",
    "eigenpairs",
    "follow",
    "sharpness",
    "sharpness_by_group",
]
