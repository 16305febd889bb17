"""Whether a part of a loss is scale-invariant, so that spherical sharpness is defined for it."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.curvature import HessianProducts
from equilibria.errors import EquilibriaError

# Of the curvature, and of the two sides of the identity; eps of normalisations and rounding stay far below.
_ALLOWED, _ALLOWED_OF_SIDES = 1e-2, 5e-2
_ALLOWED_OF_LOSS = 1e-2  # by which the loss may change if the weights are doubled, some way from where they are
_AWAY = 0.3  # of the norm: at a minimum the loss itself may be zero, or flat along the weights


def is_invariant(product: HessianProducts) -> bool:
    """Whether the loss is scale-invariant, as far as can be seen: ``H w = -g``, and doubling the weights keeps it.

    Takes two products and the loss at two points.
    """
    unit = _random_unit(product)
    # The length of a product is at most the largest curvature: less than it can only make the check stricter.
    if _defect(product, float(torch.linalg.vector_norm(product(unit)))) is not None:
        return False
    return _same(*_losses_beside(product, unit))


def check_invariant(product: HessianProducts, curvature: float) -> None:
    """Refuse what is not scale-invariant: there ``H w = -g`` must hold, for the gradient scales as 1/|w|.

    Takes one product, and the loss at two points.

    Args:
        product: the Hessian over the selected parameters.
        curvature: its largest eigenvalue, to say what is small.

    Raises:
        EquilibriaError: if the identity fails by more than eps of normalisations and rounding explain.
    """
    defect = _defect(product, curvature)
    once, twice = _losses_beside(product, _random_unit(product))
    if defect is None and _same(once, twice):
        return
    seen = (
        f"doubling weights beside them changes it from {once:.6g} to {twice:.6g}"
        if defect is None
        else f"H w = -grad fails by {defect:.1%} of the curvature"
    )
    names = product.layout.names
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise EquilibriaError(
        f"got spherical=True for {shown}, in which the loss is not scale-invariant: {seen}; expected "
        "select=equilibria.symmetries(objective, batches).largest_uniform(), or spherical=False"
    )


def _random_unit(product: HessianProducts) -> Tensor:
    drawn = torch.randn(product.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: Tensor = (drawn / torch.linalg.vector_norm(drawn)).to(product.point)
    return found


def _losses_beside(product: HessianProducts, direction: Tensor) -> tuple[float, float]:
    beside = product.point + _AWAY * float(torch.linalg.vector_norm(product.point)) * direction
    return product.loss_at(beside), product.loss_at(2 * beside)


def _same(once: float, twice: float) -> bool:
    return abs(once - twice) <= _ALLOWED_OF_LOSS * max(abs(once), abs(twice))


def _defect(product: HessianProducts, curvature: float) -> float | None:
    """By how much the identity fails, as a part of the curvature; None if it holds."""
    image = product(product.point)
    difference = float(torch.linalg.vector_norm(image + product.gradient))
    sides = float(torch.linalg.vector_norm(image)) + float(torch.linalg.vector_norm(product.gradient))
    size = abs(curvature) * float(torch.linalg.vector_norm(product.point))
    if difference <= _ALLOWED * size or difference <= _ALLOWED_OF_SIDES * sides:
        return None
    return difference / size if size else float("inf")
