"""Reading a measured run at the edge of stability: smoothing, crossings, and sharpness from two gradients.

There ``R``, the loss and the sharpness at the iterate alternate with period 2 on top of the slow oscillation
(`hamiltonian`); these functions remove the alternation before they count anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, within
from equilibria.theory._reals import Array, positive_reals, reals
from equilibria.theory.citations import law


@law(
    "",
    "two-step mean",
    derived="at the edge of stability R and the loss carry a period-2 component; the mean removes it",
)
def two_step_mean(series: ArrayLike) -> Array:
    """Mean of consecutive pairs, ``(x_t + x_{t+1})/2``, one shorter than the input.

    Args:
        series: at least two values, one per step.

    Returns:
        The smoothed series; entry ``i`` belongs to steps ``i`` and ``i+1``.

    Raises:
        EquilibriaError: not a one-dimensional series of at least two finite numbers.

    Example:
        >>> two_step_mean([1.025, 0.988, 1.025]).tolist()
        [1.0065, 1.0065]
    """
    values = reals("series", series)
    if values.ndim != 1 or len(values) < 2:
        raise EquilibriaError(
            f"got series of shape {values.shape}; expected one dimension and at least 2 values", argument="series"
        )
    return (values[1:] + values[:-1]) / 2


@dataclass(frozen=True, slots=True)
class Crossings:
    """Steps at which the smoothed stability ratio passed the level.

    Attributes:
        upward: first steps above the level.
        downward: first steps below it; their differences are the periods of the slow oscillation.
    """

    upward: NDArray[np.int64]
    downward: NDArray[np.int64]


@law(
    "",
    "crossing detector",
    derived="two-step mean with hysteresis: raw crossings of R = 1 give spurious periods of 2",
)
def ratio_crossings(ratio: ArrayLike, *, level: float = 1.0, band: float = 1e-3) -> Crossings:
    """Where a series of stability ratios crosses ``level``, free of the period-2 component.

    A crossing counts once the two-step mean has left ``level +- band`` on the new side, having left it on the
    other side before; it is dated to the first step beyond ``level``.

    Args:
        ratio: stability ratio ``R``, one per step.
        level: the level to cross.
        band: half width of the hysteresis band.

    Returns:
        Steps (indices into ``ratio``) of upward and downward crossings.

    Raises:
        EquilibriaError: bad series, or a negative band.

    Example:
        >>> steps = np.arange(400)
        >>> ratio = 1 + 0.05 * np.cos(2 * np.pi * steps / 100) + 0.02 * (-1.0) ** steps
        >>> np.diff(ratio_crossings(ratio).downward).tolist()
        [100, 100, 100]
    """
    mean = two_step_mean(ratio) - within("level", level)
    width = within("band", band, low=0)
    side = np.where(mean > width, 1, np.where(mean < -width, -1, 0))
    decided = np.flatnonzero(side)
    flips = decided[1:][side[decided][1:] != side[decided][:-1]]
    steps = np.arange(len(mean))
    last_low = np.maximum.accumulate(np.where(mean <= 0, steps, -1))
    last_high = np.maximum.accumulate(np.where(mean >= 0, steps, -1))
    # Entry i of the mean also looks at step i+1, hence the second + 1.
    return Crossings(last_low[flips[side[flips] > 0]] + 2, last_high[flips[side[flips] < 0]] + 2)


@law("", "secant estimator", derived="Rayleigh quotient of the mean Hessian along the last step")
def secant_sharpness(theta: ArrayLike, next_theta: ArrayLike, *, grad: ArrayLike, next_grad: ArrayLike) -> Array:
    """Sharpness along the last step from two gradients, no Hessian-vector product.

    ``<g' - g, theta' - theta> / |theta' - theta|^2``. At the edge of stability the step points along the top
    eigenvector and the estimate is a few per cent off; before it the estimate is unrelated to ``lambda1``.

    Args:
        theta: unit vectors before the step, last axis.
        next_theta: unit vectors after it.
        grad: gradients of the loss at ``theta``.
        next_grad: gradients at ``next_theta``.

    Returns:
        One estimate per vector.

    Raises:
        EquilibriaError: a value is not finite or a step has no length.

    Example:
        >>> float(secant_sharpness([1.0, 0.0], [1.0, 0.5], grad=[0.0, 0.0], next_grad=[0.0, 3.0]))
        6.0
    """
    step = reals("next_theta", next_theta) - reals("theta", theta)
    change = reals("next_grad", next_grad) - reals("grad", grad)
    length_sq = positive_reals("|next_theta - theta|^2", np.sum(step * step, axis=-1))
    return np.asarray(np.sum(change * step, axis=-1) / length_sq)[()]
