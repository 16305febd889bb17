"""The largest set of tensors that may all be scaled by one common factor."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from equilibria.errors import EquilibriaError


def largest_uniform_set(constraints: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """The 0/1 vector x with C x = 0 that maximises the number of elements, by a mixed-integer program.

    Args:
        constraints: integer matrix C; the exponent vectors of symmetries are those with C a = 0.
        elements: how many numbers each tensor holds.

    Returns:
        A boolean array: which tensors are in the set.

    Example:
        >>> C = np.array([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])  # the first two together, the third never
        >>> largest_uniform_set(C, np.array([10, 10, 99])).tolist()
        [True, True, False]
    """
    if len(constraints) == 0:
        return np.ones(len(elements), dtype=bool)
    solved = milp(
        -elements / elements.max(),
        integrality=np.ones(len(elements), dtype=int),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(constraints, 0, 0),
    )
    if not solved.success:
        raise EquilibriaError(f"the mixed-integer program of the largest uniform set was not solved: {solved.message}")
    chosen: np.ndarray = np.round(solved.x).astype(bool)
    return chosen
