"""Whether a part of a loss is scale-invariant, so that spherical sharpness is defined for it."""

from __future__ import annotations

import torch

from equilibria.errors import EquilibriaError
from equilibria.measure.curvature import HessianProducts

# Of the curvature, and of the two sides of the identity; eps of normalisations and rounding stay far below.
_ALLOWED, _ALLOWED_OF_SIDES = 1e-2, 5e-2


def is_invariant(product: HessianProducts) -> bool:
    """Whether ``H w = -g`` holds, as it must for a scale-invariant loss. Takes two products."""
    drawn = torch.randn(product.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (drawn / torch.linalg.vector_norm(drawn)).to(product.point)
    # The length of a product is at most the largest curvature: less than it can only make the check stricter.
    return _defect(product, float(torch.linalg.vector_norm(product(unit)))) is None


def check_invariant(product: HessianProducts, curvature: float) -> None:
    """Refuse what is not scale-invariant: there ``H w = -g`` must hold, for the gradient scales as 1/|w|.

    Takes one product.

    Args:
        product: the Hessian over the selected parameters.
        curvature: its largest eigenvalue, to say what is small.

    Raises:
        EquilibriaError: if the identity fails by more than eps of normalisations and rounding explain.
    """
    defect = _defect(product, curvature)
    if defect is not None:
        names = product.layout.names
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise EquilibriaError(
            f"got spherical=True for {shown}, in which the loss is not scale-invariant: H w = -grad fails by "
            f"{defect:.1%} of the curvature; expected "
            "select=equilibria.symmetries(objective, batches).largest_uniform(), or spherical=False"
        )


def _defect(product: HessianProducts, curvature: float) -> float | None:
    """By how much the identity fails, as a part of the curvature; None if it holds."""
    image = product(product.point)
    difference = float(torch.linalg.vector_norm(image + product.gradient))
    sides = float(torch.linalg.vector_norm(image)) + float(torch.linalg.vector_norm(product.gradient))
    size = abs(curvature) * float(torch.linalg.vector_norm(product.point))
    if difference <= _ALLOWED * size or difference <= _ALLOWED_OF_SIDES * sides:
        return None
    return difference / size if size else float("inf")
