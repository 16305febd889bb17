"""How long it takes to settle: closed forms, and the recursion where they do not reach.

SGD-type rules relax linearly in y = ||w||^4, constant-size updates (AdamW, Lion, Muon) in y = ||w||^2:
``y_t / y* = 1 + (y_0 / y* - 1) exp(-rate t)``, and the angle is proportional to y^(-1/2) in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, number, one_of, positive, within
from equilibria.theory._coasting import Goal, coasting_length, coasting_steps, memory_length
from equilibria.theory._known_rule import known_rule
from equilibria.theory._reals import reals
from equilibria.theory.citations import law
from equilibria.theory.rules import SGD, SGDW, AdamL2, Rule
from equilibria.theory.states import State, settled
from equilibria.theory.transient import evolve

Array = NDArray[np.float64]

_QUANTITIES = ("angle", "norm", "norm_sq")
_LONGEST_SWING = 10_000  # steps
_LONGEST_RECURSION = 30_000  # steps; beyond, strides are faster
_LAST_RESORT = 3_000_000  # steps that the recursion may take where strides are too coarse
_LONGEST_PATH = 100_000  # steps of one piece of the recursion: its arrays stay small
_RESOLVED = 1e-11  # rate per step below which float64 cannot tell how fast the norm moves


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The closed-form law of approach of a rule.

    Attributes:
        power: the power of the norm that relaxes linearly, 4 or 2.
        rate: its rate per step.
    """

    power: int
    rate: float

    def ratio(self, start: ArrayLike, steps: ArrayLike) -> Array:
        """Norm / equilibrium norm after ``steps``, from ``start`` = norm / equilibrium norm.

        Example:
            >>> round(float(Relaxation(4, 1e-3).ratio(10**0.25, 0)), 4), float(Relaxation(4, 1e-3).ratio(2.0, 1e6))
            (1.7783, 1.0)
        """
        passed = self.rate * np.asarray(steps, dtype=np.float64)
        with np.errstate(divide="ignore"):  # in logarithms: the power of a norm may leave float64
            left = self.power * np.log(np.asarray(start, dtype=np.float64)) - passed
            return np.asarray(np.exp(np.logaddexp(left, np.log(-np.expm1(-passed))) / self.power))

    def angle_ratio(self, start: ArrayLike, steps: ArrayLike) -> Array:
        """Angle / equilibrium angle after ``steps``: the norm ratio to the power -power/2."""
        return np.asarray(self.ratio(start, steps) ** (-self.power / 2))

    def steps(self, start: ArrayLike, *, tolerance: float, quantity: str = "angle") -> Array:
        """Steps until ``quantity`` ("angle", "norm" or "norm_sq") is within a tolerance of equilibrium.

        ``t = 1/rate ln[(y_0/y* - 1)/(q - 1)]`` with q the edge of the band; 0 if already inside.

        Example:
            >>> Relaxation(4, 1e-3).steps([10**0.25, 1.0], tolerance=0.05, quantity="norm").round().tolist()
            [3732.0, 0.0]
        """
        edge = np.where(
            np.asarray(start) > 1,
            *(self.edge(side, tolerance=tolerance, quantity=quantity) for side in (2.0, 0.5)),
        )
        with np.errstate(divide="ignore"):
            # ln|y - 1| in a form that neither overflows nor cancels.
            log_y = self.power * np.log(np.asarray(start, dtype=np.float64))
            excess = np.maximum(log_y, 0) + np.log(-np.expm1(-np.abs(log_y)))
            return np.asarray(np.maximum(0.0, (excess - np.log(np.abs(edge - 1))) / self.rate))

    def edge(self, start: float, *, tolerance: float, quantity: str = "angle") -> float:
        """y / y* at which the quantity enters its tolerance band; the angle is below when the norm is above.

        Example:
            >>> round(Relaxation(4, 1e-3).edge(10.0, tolerance=0.05, quantity="norm"), 6)
            1.215506
        """
        sign = 1 if start > 1 else -1
        if quantity == "angle":
            return float((1 - sign * tolerance) ** -2)
        return float((1 + sign * tolerance) ** (self.power / (1 if quantity == "norm" else 2)))


@law(
    "smd+",
    "eq. (180), (181)",
    derived="gamma = ||w||^4 obeys d(gamma)/dt = -4 eps/(1-a) gamma + 2 L lr^2/(1-a)^2, also far from equilibrium",
)
def relaxation(rule: Rule, *, unit_grad_sq: float | None = None, dim: float | None = None) -> Relaxation:
    """The closed-form law of approach: which power of the norm relaxes, and how fast.

    ``4 eps/(1-a)`` for SGD, heavy ball and Nesterov, ``4 eps`` for SGDW (power 4); the linearised rate, about 2 eps,
    for AdamW, Lion and Muon, and about 3 eps_e for Adam with L2 (power 2).

    Args:
        rule: the optimizer.
        unit_grad_sq: L, for Adam with L2 only.
        dim: number of entries, for Adam with L2 only.

    Returns:
        The law; to first order in eps. Good for eps well below the oscillation threshold and a starting
        ||w||^2 well above sqrt(2 eps/(1-a)) of the equilibrium's; use `transient.evolve` otherwise.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(relaxation(SGD(0.1, 5e-4, momentum=0.9)).rate, 12)
        0.002
    """
    known_rule(rule)
    if isinstance(rule, AdamL2):
        return Relaxation(2, 1 / rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).time_constant)
    linearised = rule.equilibrium()  # refuses settings without an equilibrium
    if isinstance(rule, SGD):
        return Relaxation(4, 4 * rule.decay_per_step / (1 - rule.momentum))
    if isinstance(rule, SGDW):
        return Relaxation(4, 4 * rule.decay_per_step)
    return Relaxation(2, 1 / linearised.time_constant)


@law("smd", "§4, remark 2, Corollary 3.1", derived="time from the closed form to a tolerance of norm or angle")
def steps_to_tolerance(
    rule: Rule,
    start_ratio: float,
    *,
    tolerance: float = 0.05,
    quantity: str = "angle",
    unit_grad_sq: float | None = None,
    dim: float | None = None,
) -> float:
    """Steps until norm or angle is within a tolerance of equilibrium, by the closed form.

    See `Relaxation.steps`.

    Args:
        rule: the optimizer after the change.
        start_ratio: norm / equilibrium norm at the start.
        tolerance: relative width of the band.
        quantity: "angle", "norm" or "norm_sq".
        unit_grad_sq: L, for Adam with L2 only.
        dim: number of entries, for Adam with L2 only.

    Returns:
        Steps; 0 if already inside.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 1e-4, momentum=0.9)
        >>> round(steps_to_tolerance(rule, 10**0.25, quantity="norm")), round(steps_to_tolerance(rule, 10**0.25))
        (9330, 11056)
    """
    delta = within("tolerance", tolerance, above=0, below=1)
    one_of("quantity", quantity, _QUANTITIES)
    ratio = positive("start_ratio", start_ratio)
    how = relaxation(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    return float(how.steps(ratio, tolerance=delta, quantity=quantity))


@law("smd", "§4", derived="last step outside the tolerance band, by the moment recursion")
def settling_steps(
    rule: Rule,
    start: State,
    *,
    tolerance: float = 0.05,
    quantity: str = "angle",
    unit_grad_sq: float = 1.0,
    dim: float = 1.0,
) -> int:
    """Steps after which norm or angle stays within a tolerance of equilibrium.

    The moment recursion where that takes some 30,000 steps; beyond, its first steps, and then strides along the way it
    would take (see `_coasting`), which agree with it to 0.1 %. Only where more than 3 million steps would be needed and
    the time constant is below ten memory lengths, or above 1e11 steps, is it the closed form (`steps_to_tolerance`).

    Args:
        rule: the optimizer, with constant settings.
        start: where to begin; see `transient`.
        tolerance: relative width of the band.
        quantity: "angle", "norm" or "norm_sq".
        unit_grad_sq: L.
        dim: number of entries; for Muon the mean square of the adjusted update.

    Returns:
        The number of steps.

    Example:
        >>> from equilibria.theory import SGD, settled
        >>> before, after = SGD(0.1, 1e-3, momentum=0.9), SGD(0.01, 1e-3, momentum=0.9)
        >>> settling_steps(after, settled(before), quantity="norm"), settling_steps(after, settled(before))
        (9320, 11040)
    """
    if not isinstance(start, State):
        raise EquilibriaError(f"got start={start!r}; expected a state: cold_start(rule, norm) or settled(rule)")
    known_rule(rule)
    delta = within("tolerance", tolerance, above=0, below=1)
    one_of("quantity", quantity, _QUANTITIES)
    scale = {"unit_grad_sq": unit_grad_sq, "dim": dim}
    target = equilibrium_norm_sq(rule, **scale)
    goal = Goal(quantity, _angle(rule, **scale) if quantity == "angle" else target, delta)
    # The norm can leave the band again while momentum builds up or swings back: wait until it has been quiet for a
    # while. Swings need an lr*wd near the oscillation threshold, and with it a short time constant: hence the cap.
    quiet = math.ceil(min(5 * _time_constant(rule, **scale), _LONGEST_SWING)) + 200
    # The first steps of a cold start can kick the norm far away, and a second moment remembers for long where it was.
    first = math.ceil((12 + 2 * abs(math.log(float(start.norm_sq) / target))) * memory_length(rule))
    how = relaxation(rule, **scale)
    done, last_outside = 0, -1
    while last_outside >= done - quiet // 2:
        expected = float(
            how.steps(math.sqrt(float(start.norm_sq) / target), tolerance=delta, quantity=quantity),
        )
        far = expected > _LONGEST_RECURSION
        strides = _strides(rule, start, goal, target, how, expected, scale) if far and done >= first else None
        if strides is not None:
            return math.ceil(done + strides)
        if done > _LAST_RESORT:
            raise EquilibriaError(
                f"got {rule}, which has not settled after {done:,} steps; expected an lr*weight_decay further from the "
                "end of the range in which an equilibrium is stable"
            )
        chunk = first if far and done < first else math.ceil(1.05 * expected) + quiet
        path = evolve(rule, min(chunk, _LONGEST_PATH), start=start, unit_grad_sq=unit_grad_sq, dim=dim)
        outside = np.flatnonzero(goal.deviation(path) > delta)
        last_outside = done + int(outside[-1]) if len(outside) else last_outside
        done, start = done + len(path.lr), path.final
    return last_outside + 1


def _strides(
    rule: Rule, start: State, goal: Goal, target: float, how: Relaxation, expected: float, scale: dict[str, float]
) -> float | None:
    """The rest of a long way in strides, by the closed form as a last resort; None where the recursion is to go on."""
    if _RESOLVED < how.rate < 0.1 / memory_length(rule) and expected > 2 * coasting_length(rule):
        ratio = math.sqrt(float(start.norm_sq) / target)
        edge = how.edge(ratio, tolerance=goal.tolerance, quantity=goal.quantity)
        return coasting_steps(rule, start, goal, norm_sq=target, power=how.power, edge=edge, **scale)
    return expected if expected > _LAST_RESORT else None


def equilibrium_norm_sq(rule: Rule, *, unit_grad_sq: float, dim: float) -> float:
    """||w*||^2 of any rule; for Muon ``dim`` is the mean square of the adjusted update."""
    return float(settled(rule, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq)


def _time_constant(rule: Rule, *, unit_grad_sq: float, dim: float) -> float:
    return rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).time_constant


def _angle(rule: Rule, *, unit_grad_sq: float, dim: float) -> float:
    if isinstance(rule, AdamL2):
        return float(rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).angle)
    return float(rule.equilibrium().angle)


@law(
    "smd",
    "Corollary 3.1",
    corrected="the lr in the bound is the new one; with the old it is k times too small",
)
def minimum_settling_steps(rule: Rule, drop: float) -> int:
    """Lower bound on the steps needed after lr was divided by ``drop`` in equilibrium.

    ``ceil((1-a) ln k / (4 wd lr_new))``. Necessary only: there the norm is still (2 - 1/k)^(1/4) times its target.

    Args:
        rule: SGD or SGDW after the drop.
        drop: k.

    Returns:
        Steps.

    Example:
        >>> from equilibria.theory import SGD
        >>> minimum_settling_steps(SGD(0.1, 1e-4, momentum=0.9), 10)
        5757
    """
    if not isinstance(rule, SGD | SGDW):
        raise EquilibriaError(f"got {type(rule).__name__}; expected SGD or SGDW, for which the corollary is stated")
    return math.ceil(math.log(within("drop", drop, low=1)) / relaxation(rule).rate)


@law("smd", "Corollary 3.1, remark 2", derived="closed form started at the equilibrium of lr * k")
def after_lr_drop(rule: Rule, drop: float, *, steps: ArrayLike) -> LrDrop:
    """Norm and angle after lr was divided by ``drop`` = k in equilibrium (k < 1 is a rise).

    SGD-type: norm ratio ``(1 + (k-1) e^(-rate t))^(1/4)``, angle ratio its power -2: the angle starts at k^(-1/2) of
    its new equilibrium, 1/k of the old one. Constant-size updates start at k^(-1/2) too, with norm ratio k^(1/2).

    Args:
        rule: the optimizer after the change.
        drop: k.
        steps: steps since the change, a number or an array.

    Returns:
        The ratios to the new equilibrium.

    Example:
        >>> from equilibria.theory import SGD
        >>> result = after_lr_drop(SGD(0.01, 5e-4, momentum=0.9), 10.0, steps=[0, 5000, 50_000])
        >>> result.angle_ratio.round(3).tolist()
        [0.316, 0.482, 1.0]
    """
    if isinstance(rule, AdamL2):
        raise EquilibriaError("got AdamL2; expected a rule with a closed form: use transient.evolve")
    how = relaxation(rule)
    start = positive("drop", drop) ** (1 / how.power)
    passed = reals("steps", steps, low=0)
    return LrDrop(how.ratio(start, passed), how.angle_ratio(start, passed))


@dataclass(frozen=True, slots=True)
class LrDrop:
    """Where a weight is after a change of lr, relative to its new equilibrium.

    Attributes:
        norm_ratio: norm / new equilibrium norm.
        angle_ratio: angle / new equilibrium angle.
    """

    norm_ratio: Array
    angle_ratio: Array


@law(
    "smd+",
    "assumption 3, 7",
    corrected="a lag replaces the condition |dL| < 4 sqrt(V) eps^(3/2), which their own demo breaks",
)
def tracking_lag(rule: SGD | SGDW, relative_drift: float) -> float:
    """How far ||w||^2 lags behind when L drifts slowly: ``x / x*_t - 1 = -1/2 (dL/dt / L) / rate``.

    Args:
        rule: SGD or SGDW.
        relative_drift: (dL/dt) / L per step.

    Returns:
        Relative deviation of ||w||^2 from the equilibrium of the present L; negative when L grows.

    Example:
        L = 10 + sin(t / 1e5) changes by at most 1e-6 of itself per step:

        >>> from equilibria.theory import SGD
        >>> round(tracking_lag(SGD(0.1, 0.001), 1e-6), 6)
        -0.00125
    """
    if not isinstance(rule, SGD | SGDW):
        raise EquilibriaError(f"got {type(rule).__name__}; expected SGD or SGDW: L does not set the norm of the others")
    return -0.5 * number("relative_drift", relative_drift) / relaxation(rule).rate
