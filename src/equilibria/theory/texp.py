"""Tapered-exponential schedules: step decay with its weight decay folded in, phase by phase or step by step.

These are the approximations people type by hand; `equilibria.theory.folding.fold` is exact for the same step decay.
`texp` computes a whole schedule in advance; `taper` advances one step at a time, for a run whose settings become known
as it goes, and `unfold_step` states which run with weight decay such a step belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, number, positive, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.exponential import Roots, decay_roots
from equilibria.theory.folding import FoldState, FoldStep

_LN2 = math.log(2.0)


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
            raise EquilibriaError(f"got phases={phases!r}; expected pairs (first_step, lr)", argument="phases")
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
    Arguments, result and errors are those of `texp`.

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


@dataclass(frozen=True, slots=True)
class Taper:
    """State of a tapered-exponential schedule at one step.

    Attributes:
        log_lr: natural logarithm of the learning rate of this step, without weight decay.
        lr: the step decay's learning rate in this step.
        first_lr: the step decay's learning rate at the start.
        log_root: ``log z1`` of this step's phase.
    """

    log_lr: float
    lr: float
    first_lr: float
    log_root: float


@law(
    "explr",
    "Theorem 2.4, eq. 5",
    corrected="the drop happens at the first step of the new phase with the factor (lr_I/lr_{I-1})/(z_{I-1} z_I)",
)
def taper(
    before: Taper | None, lr: float, *, weight_decay: float, momentum: float = 0.0, instant_drop: bool = True
) -> Taper:
    """Advance a tapered-exponential schedule by one step: `texp`, or `texp_without_drop`.

    Args:
        before: the step before; None for the first step.
        lr: the step decay's learning rate in this step, above 0.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).
        instant_drop: True for `texp`, where the learning rate drops at once; False for `texp_without_drop`, where only
            its growth rate changes.

    Returns:
        The schedule at this step.

    Raises:
        EquilibriaError: bad input, or complex roots.

    Example:
        >>> first = taper(None, 0.1, weight_decay=5e-4, momentum=0.9)
        >>> second = taper(first, 0.01, weight_decay=5e-4, momentum=0.9)
        >>> log_lr = texp([(0, 0.1), (1, 0.01)], 5e-4, steps=2, momentum=0.9).log_lr
        >>> bool(abs(second.log_lr - log_lr[1]) < 1e-15)
        True
    """
    eta = positive("lr", lr)
    log_root = math.log1p(-float(decay_roots(eta, weight_decay, momentum=momentum).decay))
    if before is None:
        return Taper(math.log(eta), eta, eta, log_root)
    log_ratio = -2 * log_root
    if instant_drop and eta != before.lr:
        log_ratio = math.log(eta / before.lr) - before.log_root - log_root
    return Taper(before.log_lr + log_ratio, eta, before.first_lr, log_root)


@law(
    "",
    "inverse of Theorem 2.5 of Li & Arora",
    derived="one step of `folding.unfold`: 1/alpha = 1 + e u with e = lr~/P²",
)
def unfold_step(state: FoldState, log_lr: float, *, weight_decay: float, momentum: float = 0.0) -> FoldStep:
    """Interpret one step without weight decay as a step of a folded run with ``weight_decay``.

    Every run without weight decay is the folded form of a run with weight decay at another learning rate. The result
    holds that run's P and q, which determine how batch-norm statistics follow and how to switch back: with
    ``e = lr~/P²`` and ``u = weight_decay + momentum q``, ``P' = P (1 + e u)`` and ``q' = u (1 + e u)``.

    Args:
        state: the state before the step.
        log_lr: natural logarithm of the learning rate, before powers of two are divided out.
        weight_decay: the coupled weight decay of that run, at least 0.
        momentum: in [0, 1).

    Returns:
        The step; its ``lr`` is that of the stored, renormalised weights.

    Raises:
        EquilibriaError: bad input, or a learning rate beyond float64.

    Example:
        >>> from equilibria.theory.folding import advance
        >>> folded = advance(FoldState(), 0.1, weight_decay=0.5)
        >>> again = unfold_step(FoldState(), folded.log_lr, weight_decay=0.5)
        >>> bool(abs(again.alpha - folded.alpha) < 1e-15 and abs(again.lr - folded.lr) < 1e-15)
        True
    """
    decay, g = within("weight_decay", weight_decay, low=0), within("momentum", momentum, low=0, below=1)
    log_effective = number("log_lr", log_lr) - 2 * state.log_scale
    if log_effective > 700:
        raise EquilibriaError(
            f"got log_lr={log_lr:g} at log_scale={state.log_scale:g}; expected a smaller one", argument="log_lr"
        )
    velocity = decay + g * state.q
    growth = 1 + math.exp(log_effective) * velocity
    after = FoldState(state.log_scale + math.log(growth), velocity * growth if g else 0.0, state.exponent)
    whole_part = round(log_lr / _LN2)  # a mantissa that does not depend on the exponent, to the bit
    lr = math.ldexp(math.exp(log_lr - whole_part * _LN2), whole_part - 2 * state.exponent)
    return FoldStep(after, lr, log_lr - 2 * state.exponent * _LN2, 1 / growth)
