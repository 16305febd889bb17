"""The slope of the logarithm of the sharpness along the manifold of minimisers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.lab.manifold.landscape import Landscape
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select

NULL = 1e-6  # eigenvalues up to this fraction of the largest belong to the manifold
_ON_MANIFOLD = 1e-8  # |gradient| / (lambda1 |w|): at distance d, eigenvalues of the null space are of order d
SIMPLE = 1e-6  # (lambda1 - lambda2) / lambda1: below it the top eigenvector, known to 1e-16 / gap, means little


@dataclass(frozen=True, slots=True, eq=False)
class SharpnessSlope:
    """Gradient of ``log lambda1`` along the manifold of minimisers, at a point of it.

    Attributes:
        gradient: the selected tensors of it, tangent to the manifold; per radian on the unit sphere if spherical.
        norm: its norm, the ``g`` of the sharpness-reduction flow.
        sharpness: ``lambda1``, the largest eigenvalue of the Hessian; spherical sharpness if spherical.
        top_vector: its eigenvector, of unit norm.
        gap: ``(lambda1 - lambda2)/lambda1``.
        error: of the gradient, estimated from the differences it is computed by: the order of magnitude.
        dimension: of the manifold: eigenvalues not above 1e-6 ``lambda1``, less one for the radius if spherical.
        null_gap: smallest eigenvalue above that threshold over the largest absolute one below: 1000 and more is clear.
    """

    gradient: Params
    norm: float
    sharpness: float
    top_vector: Params
    gap: float
    error: float
    dimension: int
    null_gap: float


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """`SharpnessSlope` of many points, as arrays: one row or entry per point."""

    gradients: Tensor
    sharpness: Tensor
    tops: Tensor
    gaps: Tensor
    eigenvalues: Tensor
    errors: Tensor


def grad_log_sharpness(
    objective: Objective,
    batch: Any,
    *,
    params: Mapping[str, Tensor] | None = None,
    select: Select | None = None,
    spherical: bool = True,
) -> SharpnessSlope:
    """Gradient of ``log lambda1`` along the manifold of minimisers (Lyu, Li & Arora 2022, Section 4.2).

    With ``v`` the top eigenvector of the Hessian ``H``, held fixed, it is the gradient of ``v' H(w) v``, projected onto
    the null space of ``H`` (without the radius, along which ``log lambda1`` falls at rate 2) and divided by
    ``lambda1``. The gradient is the derivative of ``H v`` along ``v``, by differences whose step is chosen by their
    agreement; its ``error`` is about 1e-11 where the loss is smooth at the scale of the weights. Eigenvalues of at most
    1e-6 ``lambda1`` count as null. The null space is tangent to the manifold only on the manifold, so `project` the
    point first.

    Args:
        objective: the loss.
        batch: the data.
        params: the point, or some tensors of it; default: the present parameters.
        select: the tensors that move; default: all.
        spherical: whether the loss does not depend on their common scale; False for the full space.

    Returns:
        The gradient, its norm and the sharpness.

    Raises:
        EquilibriaError: if the point is not a minimum (``|gradient| > 1e-8 lambda1 |w|``, or a negative eigenvalue),
            or the largest eigenvalue is not simple (``lambda1 - lambda2 <= 1e-6 lambda1``).

    Example:
        The 3-D example of the paper: ``lambda1 = 6/(1 - z^2)``, whose logarithm has slope ``2 tan(angle)``:

        >>> import torch
        >>> from equilibria import Objective
        >>> def loss(p, _):
        ...     x, y, z = p["w"]
        ...     return 2 - (x + y) / (x * x - x * y + y * y).sqrt()
        >>> half = 0.32**0.5
        >>> point = {"w": torch.tensor([half, half, 0.6], dtype=torch.float64)}
        >>> slope = grad_log_sharpness(Objective(loss, point), None)
        >>> round(slope.sharpness, 9), round(slope.norm, 9)  # tan(angle) = 0.6/0.8
        (9.375, 1.5)
    """
    landscape = Landscape(objective, batch, params=params, select=select, spherical=spherical)
    point = landscape.reference[None]
    slopes = slopes_at(landscape, point)
    check_on_manifold(landscape, point, slopes)
    check_simple(slopes)
    values, limit = slopes.eigenvalues[0], NULL * float(slopes.sharpness)
    null = values[values <= limit]
    return SharpnessSlope(
        gradient=landscape.named(slopes.gradients[0]),
        norm=float(slopes.gradients.norm()),
        sharpness=float(slopes.sharpness),
        top_vector=landscape.named(slopes.tops[0]),
        gap=float(slopes.gaps),
        error=float(slopes.errors),
        dimension=len(null) - spherical,
        null_gap=float(values[values > limit].min() / null.abs().max()) if len(null) else float("inf"),
    )


def slopes_at(landscape: Landscape, points: Tensor) -> Slopes:
    """The gradient of ``log lambda1`` at every row, without checks that it exists."""
    values, vectors = torch.linalg.eigh(landscape.hessians(points))
    sharpness, tops = values[:, -1], vectors[:, :, -1]
    second = values[:, -2] if values.shape[1] > 1 else torch.zeros_like(sharpness)
    gradients, errors = landscape.curvature_gradients(points, tops)
    raw = gradients / sharpness[:, None]
    return Slopes(
        gradients=_tangent(landscape, points, raw, vectors, values <= NULL * sharpness[:, None]),
        sharpness=sharpness,
        tops=tops,
        gaps=(sharpness - second) / sharpness,
        eigenvalues=values,
        errors=errors / sharpness.abs(),
    )


def _tangent(landscape: Landscape, points: Tensor, rows: Tensor, vectors: Tensor, null: Tensor) -> Tensor:
    """Project rows onto the null spaces, and on the sphere also off the points themselves."""
    parts = (vectors.mT @ rows[..., None])[..., 0] * null
    inside = (vectors @ parts[..., None])[..., 0]
    if landscape.spherical:
        inside = inside - points * (inside * points).sum(dim=-1, keepdim=True)
    return inside


def check_on_manifold(landscape: Landscape, points: Tensor, slopes: Slopes) -> None:
    """Raise EquilibriaError if a row is not a minimum, or the loss is flat there."""
    flattest = float(slopes.sharpness.min())
    if not flattest > 0:
        raise EquilibriaError(f"got a point with lambda1 = {flattest:g}; expected a minimum with a positive eigenvalue")
    sizes = points.norm(dim=-1)
    off = landscape.gradients(points).norm(dim=-1) / slopes.sharpness
    worst = float((off / torch.where(sizes > 0, sizes, 1.0)).max())
    if not worst <= _ON_MANIFOLD:
        raise EquilibriaError(
            f"got a point that is not on the manifold of minimisers: |gradient| / (lambda1 |w|) = {worst:.2g}; "
            f"expected at most {_ON_MANIFOLD:g}: use the point of project(objective, batch)"
        )
    lowest = float((slopes.eigenvalues[:, 0] / slopes.sharpness).min())
    if not lowest >= -NULL:
        raise EquilibriaError(
            f"got a stationary point whose smallest eigenvalue is {lowest:.2g} lambda1; expected a minimum: at least "
            f"-{NULL:g} lambda1"
        )


def check_simple(slopes: Slopes) -> None:
    """Raise EquilibriaError if the largest eigenvalue of a row is not simple."""
    gap = float(slopes.gaps.min())
    if not gap > SIMPLE:
        raise EquilibriaError(
            f"got a largest eigenvalue that is not simple: (lambda1 - lambda2)/lambda1 = {gap:.2g} at lambda1 = "
            f"{float(slopes.sharpness.max()):.6g}; expected more than {SIMPLE:g}: log lambda1 has no gradient there"
        )
