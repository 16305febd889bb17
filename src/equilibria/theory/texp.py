"""Tapered-exponential schedules: step decay with its weight decay folded in, phase by phase.

These are the approximations people type by hand; `equilibria.theory.folding.fold` is exact for the same step
decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.exponential import Roots, decay_roots


@dataclass(frozen=True, slots=True, eq=False)
class TaperedSchedule:
    """An approximately equivalent weight-decay-free schedule for step decay.

    Attributes:
        lr: learning rate per step; ``inf`` where it exceeds float64.
        log_lr: its natural logarithm.
        first_step: first step of each phase.
        root: ``z1`` of each phase, per step.
    """

    lr: Array
    log_lr: Array
    first_step: NDArray[np.int64]
    root: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Phases:
    first_step: NDArray[np.int64]
    lr: Array
    roots: Roots

    @classmethod
    def read(cls, phases: Sequence[tuple[int, float]], weight_decay: float, momentum: float, steps: int) -> _Phases:
        if any(np.ndim(pair) != 1 or len(pair) != 2 for pair in phases):
            raise EquilibriaError(f"got phases={phases!r}; expected pairs (first_step, lr)")
        pairs = [(whole("first_step", first), positive("lr", lr)) for first, lr in phases]
        first = [pair[0] for pair in pairs] + [steps]
        if first[0] != 0 or len(first) < 2 or any(b <= a for a, b in pairwise(first)):
            raise EquilibriaError(
                f"got first steps {first[:-1]} and steps={steps}; expected 0 first, then strictly "
                "increasing, "
                "all below steps"
            )
        lr = np.array([pair[1] for pair in pairs])
        return cls(np.array(first[:-1]), lr, decay_roots(lr, weight_decay, momentum=momentum))

    def schedule(self, steps: int, *, instant_drop: bool) -> TaperedSchedule:
        log_z = np.log1p(-self.roots.decay)
        log_ratio = np.repeat(-2 * log_z, np.diff([*self.first_step, steps]))
        log_ratio[0] = math.log(self.lr[0])
        if instant_drop:
            log_ratio[self.first_step[1:]] = np.diff(np.log(self.lr)) - log_z[1:] - log_z[:-1]
        log_lr = np.cumsum(log_ratio)
        with np.errstate(over="ignore"):
            return TaperedSchedule(np.exp(log_lr), log_lr, self.first_step, self.roots.z1)


@law(
    "explr",
    "Theorem 2.4, eq. 5",
    corrected="the drop happens at the first step of the new phase, not one later, with the factor"
    " (lr_I/lr_{I-1})/(z_{I-1} z_I), because that step's first decay factor still belongs to the old phase",
)
def texp(
    phases: Sequence[tuple[int, float]], weight_decay: float, *, steps: int, momentum: float = 0.0
) -> TaperedSchedule:
    """Tapered-exponential schedule: step decay with its weight decay folded in, up to a start-up transient.

    ``lr~_0 = lr_0``; inside phase I ``lr~_t = lr~_{t-1} z_I^-2``; at its first step
    ``lr~_t = lr~_{t-1} (lr_I/lr_{I-1})/(z_{I-1} z_I)``. Compared with the exact `fold` the only first-order
    error is the constant factor of the start, ``z_0^-1 A^-2``. Li & Arora, Theorem 2.4, with the boundary
    corrected.

    Args:
        phases: pairs ``(first_step, lr)`` starting at step 0.
        weight_decay: coupled weight decay, at least 0.
        steps: total number of steps.
        momentum: in [0, 1).

    Returns:
        `TaperedSchedule`.

    Raises:
        EquilibriaError: bad phases, or complex roots in one of them.

    Example:
        >>> schedule = texp([(0, 0.1), (1000, 0.01)], 5e-4, steps=2000, momentum=0.9)
        >>> print(f"{schedule.lr[999] / schedule.lr[0]:.5f} {schedule.lr[1000] / schedule.lr[999]:.7f}")
        2.72861 0.1000553
    """
    total = whole("steps", steps, low=1)
    return _Phases.read(phases, weight_decay, momentum, total).schedule(total, instant_drop=True)


@law(
    "explr",
    "section 4, TEXP without instant decay",
    derived="emulates constant lr with a reduced weight decay",
)
def texp_without_drop(
    phases: Sequence[tuple[int, float]], weight_decay: float, *, steps: int, momentum: float = 0.0
) -> TaperedSchedule:
    """Tapered-exponential schedule without the drop: at a new phase the growth rate changes, the lr does not jump.

    ``lr~_0 = lr_0`` and ``lr~_t = lr~_{t-1} z_I^-2``. It emulates a constant ``lr_0`` with the weight decay
    reduced to ``weight_decay · lr_I/lr_0`` in phase I, up to transients of about ``1/(1 - momentum)`` steps.

    Args:
        phases: pairs ``(first_step, lr)`` starting at step 0.
        weight_decay: coupled weight decay, at least 0.
        steps: total number of steps.
        momentum: in [0, 1).

    Returns:
        `TaperedSchedule`.

    Raises:
        EquilibriaError: bad phases, or complex roots in one of them.

    Example:
        >>> schedule = texp_without_drop([(0, 0.1), (1000, 0.01)], 5e-4, steps=2000, momentum=0.9)
        >>> print(f"{schedule.lr[1000] / schedule.lr[999]:.7f}")
        1.0001001
    """
    total = whole("steps", steps, low=1)
    return _Phases.read(phases, weight_decay, momentum, total).schedule(total, instant_drop=False)


@dataclass(frozen=True, slots=True, eq=False)
class RatioError:
    """How far the exact per-step ratio is from the exponential one inside the phases; dimensionless.

    Attributes:
        step: the steps ``t`` covered: all but the first step of each phase.
        error: ``|alpha_t alpha_{t+1} - z_I²|``.
        bound: Theorem 2.7's ``3/2 (momentum/z_0²)^(t - T_I)``.
        sharp_bound: ``2 |alpha_{T_I+1} - z_I| (momentum/z_0²)^(t - T_I - 1)``.
    """

    step: NDArray[np.int64]
    error: Array
    bound: Array
    sharp_bound: Array


@law(
    "explr",
    "Theorem 2.7",
    derived="sharp_bound starts from the true distance at the phase boundary instead of 1/2",
)
def texp_ratio_error(
    phases: Sequence[tuple[int, float]], alpha: ArrayLike, *, weight_decay: float, momentum: float = 0.0
) -> RatioError:
    """Error of the tapered-exponential ratio against the exact schedule, with Theorem 2.7's bound and a sharper one.

    For ``T_I + 1 <= t < T_{I+1}``: ``|lr~_{t-1}/lr~_t - z_I²| = |alpha_t alpha_{t+1} - z_I²|``, bounded as in
    `RatioError`.

    Args:
        phases: pairs ``(first_step, lr)`` with learning rates that do not increase.
        alpha: exact decay factors per step, ``fold(...).alpha``; its length is the number of steps.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).

    Returns:
        `RatioError`; the errors carry rounding noise of about 1e-16.

    Raises:
        EquilibriaError: bad phases, increasing learning rates, or a root below 1/2.

    Example:
        >>> from equilibria.theory.folding import fold
        >>> alpha = fold(0.1, 5e-4, momentum=0.9, steps=100).alpha
        >>> gap = texp_ratio_error([(0, 0.1)], alpha, weight_decay=5e-4, momentum=0.9)
        >>> print(f"{gap.error[0]:.2e} <= {gap.sharp_bound[0]:.2e} <= {gap.bound[0]:.2f}")
        8.59e-04 <= 9.05e-04 <= 1.35
    """
    factors = reals("alpha", alpha, above=0)
    read = _Phases.read(phases, weight_decay, momentum, factors.size)
    if (np.diff(read.lr) > 0).any() or read.roots.z1.min() < 0.5:
        raise EquilibriaError(
            f"got lr={read.lr.tolist()} with roots {read.roots.z1.tolist()}; "
            "expected learning rates that do not increase and roots of at least 1/2"
        )
    phase = np.repeat(np.arange(read.lr.size), np.diff([*read.first_step, factors.size]))
    step = np.setdiff1d(np.arange(factors.size), read.first_step)
    index = phase[step]
    age = step - read.first_step[index]
    rate = momentum / read.roots.z1[0] ** 2
    start = np.abs(factors[read.first_step] - read.roots.z1)
    error = np.abs(factors[step - 1] * factors[step] - read.roots.z1[index] ** 2)
    return RatioError(step, error, 1.5 * rate**age, 2 * start[index] * rate ** (age - 1.0))
