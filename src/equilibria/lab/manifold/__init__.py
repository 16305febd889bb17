"""The manifold of minimisers of a small loss, and how training at the edge of stability drifts along it.

- `project`: the limit of the gradient flow from a point.
- `grad_log_sharpness`: how the logarithm of the sharpness changes along the manifold.
- `decompose`: a training run as an oscillation across the manifold and a drift along it.
- `sharpness_flow`: the sharpness-reduction flow, which the drift should follow.
"""

from __future__ import annotations

from equilibria.lab.manifold.projection import Decomposition, Projection, decompose, project
from equilibria.lab.manifold.sharpness_flow import SharpnessFlow, SharpnessSlope, grad_log_sharpness, sharpness_flow

__all__ = [
    "Decomposition",
    "Projection",
    "SharpnessFlow",
    "SharpnessSlope",
    "decompose",
    "grad_log_sharpness",
    "project",
    "sharpness_flow",
]
