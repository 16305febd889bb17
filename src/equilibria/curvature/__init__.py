"""The curvature of a loss: Hessian-vector products, eigenpairs at the ends of the spectrum, sharpness."""

from __future__ import annotations

from equilibria.curvature._eigenpairs import Eigenpairs, SpectrumEnd, WarmStart
from equilibria.curvature._hvp import FlatLayout, HessianProducts, HvpMethod
from equilibria.curvature._lanczos import eigenpairs
from equilibria.curvature._sharpness import Sharpness, sharpness, sharpness_by_group
from equilibria.curvature._thresholds import adam_preconditioner
from equilibria.curvature._warm_start import update_eigenpairs

__all__ = [
    "Eigenpairs",
    "FlatLayout",
    "HessianProducts",
    "HvpMethod",
    "Sharpness",
    "SpectrumEnd",
    "WarmStart",
    "adam_preconditioner",
    "eigenpairs",
    "sharpness",
    "sharpness_by_group",
    "update_eigenpairs",
]
