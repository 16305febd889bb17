"""From a point to the manifold of minimisers, along the gradient flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equilibria.errors import whole, within
from equilibria.lab.manifold._gradient_flow import Limits, flow_to_limits
from equilibria.lab.manifold.landscape import Landscape
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select

_DOWNHILL = 1e-6  # an eigenvalue this much below zero, relative to the largest, is not rounding


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The limit of the gradient flow from a point.

    Attributes:
        point: the selected tensors at the limit, float64, with the norm that they had.
        loss: the loss there.
        grad_norm: norm of its gradient there, on the unit sphere if spherical.
        distance: how far the limit is from the start: chord of the unit sphere, or Euclidean in the full space.
        steps: steps of the integrator, each with one dense Hessian.
        converged: whether the limit was reached and is a minimum.
        reason: why it stopped, in words.
    """

    point: Params
    loss: float
    grad_norm: float
    distance: float
    steps: int
    converged: bool
    reason: str


def project(
    objective: Objective,
    batch: Any,
    *,
    params: Mapping[str, Tensor] | None = None,
    select: Select | None = None,
    spherical: bool = True,
    tol: float = 1e-10,
    max_steps: int = 1000,
) -> Projection:
    """Project a point on the manifold of minimisers: the limit of the gradient flow ``w' = -grad L(w)`` from it.

    This is the projection ``phi`` of Lyu, Li & Arora (2022). The gradient of a scale-invariant loss is tangent to the
    sphere, so that its flow keeps the norm. For small problems: every step takes a dense Hessian in float64.

    Args:
        objective: the loss, `equilibria.objective` or `equilibria.Objective`.
        batch: what it is evaluated on.
        params: the point, or some tensors of it; default: the parameters as they are now.
        select: the tensors that move: names, patterns or a function of name and tensor; default: all. The others stay.
        spherical: whether the loss does not depend on their common scale; False for the full space.
        tol: local error of each step of the integrator, and how far from the manifold to stop, both relative to the
            norm of the point. It stops where ``|gradient| <= tol * lambda1``: within ``tol`` along the stiffest
            direction and ``tol * lambda1/lambda`` along one with eigenvalue ``lambda``.
        max_steps: steps before giving up.

    Returns:
        The limit. The model is not changed.

    Raises:
        EquilibriaError: bad arguments, more than 4096 numbers, or a loss that depends on the scale while ``spherical``.

    Example:
        On the sphere, ``x^2/|w|^2`` is least where ``x = 0``, and its flow goes there along a meridian:

        >>> import torch
        >>> from equilibria import Objective
        >>> loss = Objective(lambda p, _: p["w"][0] ** 2 / p["w"].square().sum(), {"w": torch.tensor([3.0, 0.0, 4.0])})
        >>> found = project(loss, None)
        >>> found.point["w"].round(decimals=8).tolist(), found.converged
        ([0.0, 0.0, 5.0], True)
    """
    tol, max_steps = within("tol", tol, above=0, below=1e-2), whole("max_steps", max_steps, low=1)
    landscape = Landscape(objective, batch, params=params, select=select, spherical=spherical)
    start = landscape.reference[None]
    limits = flow_to_limits(landscape, start, tol=tol, max_steps=max_steps)
    return Projection(
        point=landscape.named(limits.points[0], scale=landscape.radius),
        loss=float(landscape.losses(limits.points)),
        grad_norm=float(limits.grad_norms),
        distance=float((limits.points - start).norm()),
        steps=int(limits.steps),
        converged=bool(minima(limits)),
        reason=_reason(limits),
    )


def minima(limits: Limits) -> Tensor:
    """Which of the limits were reached and are minima."""
    return limits.arrived & (limits.lowest >= -_DOWNHILL * limits.top)


def _reason(limits: Limits) -> str:
    slope = f"gradient {float(limits.grad_norms):.2g}, largest eigenvalue {float(limits.top):.6g}"
    if not bool(limits.arrived):
        return (
            f"gave up after {int(limits.steps)} steps ({slope}): raise max_steps or tol, or the minimum is degenerate"
        )
    if not bool(minima(limits)):
        lowest = float(limits.lowest)
        return f"arrived at a saddle or maximum ({slope}, smallest eigenvalue {lowest:.3g}): start elsewhere"
    return f"arrived at a minimum ({slope})"
