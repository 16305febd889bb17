"""Check that a loss is scale-invariant in the selected parameters, so that its spherical sharpness is defined.

The gradient of a scale-invariant loss scales as 1/|w|, so that ``H w = -g`` holds. The loss must also stay the same
when the weights are doubled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.curvature._eigenpairs import unit_vector
from equilibria.curvature._hvp import HessianProducts
from equilibria.errors import EquilibriaError

# Defect of H w = -g, relative to the curvature and to its two sides; eps of normalisations and rounding stay far below.
_TOLERANCE, _TOLERANCE_OF_SIDES = 1e-2, 5e-2
_LOSS_TOLERANCE = 1e-2  # relative change of the loss when the weights are doubled
_OFFSET = 0.3  # of the norm: at a minimum the loss itself may be zero, or flat along the weights


def loss_is_scale_invariant(product: HessianProducts) -> bool:
    """Whether the loss passes both checks; takes two products and two evaluations of the loss."""
    direction = _random_direction(product)
    # The length of a product is at most the largest curvature: a smaller value only makes the check stricter.
    if _defect(product, float(torch.linalg.vector_norm(product(direction)))) is not None:
        return False
    return _agree(*_losses_nearby(product, direction))


def check_loss_is_scale_invariant(product: HessianProducts, curvature: float) -> None:
    """Raise if the loss fails one of the checks; takes one product and two evaluations of the loss.

    Args:
        product: the Hessian over the selected parameters.
        curvature: its largest eigenvalue, the scale of the tolerance.

    Raises:
        EquilibriaError: if the identity fails by more than eps of normalisations and rounding explain.
    """
    defect = _defect(product, curvature)
    once, twice = _losses_nearby(product, _random_direction(product))
    if defect is None and _agree(once, twice):
        return
    failure = (
        f"doubling the weights at a point nearby changes it from {once:.6g} to {twice:.6g}"
        if defect is None
        else f"H w = -grad fails by {defect:.1%} of the curvature"
    )
    names = product.layout.names
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise EquilibriaError(
        f"got spherical=True for {shown}, in which the loss is not scale-invariant: {failure}; expected "
        "select=equilibria.symmetries(objective, batches).largest_uniform(), or spherical=False",
        argument="spherical",
    )


def _random_direction(product: HessianProducts) -> Tensor:
    drawn = torch.randn(product.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return unit_vector(drawn).to(product.point)


def _losses_nearby(product: HessianProducts, direction: Tensor) -> tuple[float, float]:
    """The loss at a point nearby, and at twice that point."""
    nearby = product.point + _OFFSET * float(torch.linalg.vector_norm(product.point)) * direction
    return product.loss_at(nearby), product.loss_at(2 * nearby)


def _agree(once: float, twice: float) -> bool:
    return abs(once - twice) <= _LOSS_TOLERANCE * max(abs(once), abs(twice))


def _defect(product: HessianProducts, curvature: float) -> float | None:
    """Defect of ``H w = -g`` relative to the curvature; None if it is within the tolerance."""
    image = product(product.point)
    difference = float(torch.linalg.vector_norm(image + product.gradient))
    sides = float(torch.linalg.vector_norm(image)) + float(torch.linalg.vector_norm(product.gradient))
    size = abs(curvature) * float(torch.linalg.vector_norm(product.point))
    if difference <= _TOLERANCE * size or difference <= _TOLERANCE_OF_SIDES * sides:
        return None
    return difference / size if size else float("inf")
