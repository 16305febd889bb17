"""How long it takes to settle: closed forms, and the moment recursion where they are too coarse.

SGD-type rules relax linearly in y = ||w||^4, constant-size updates (AdamW, Lion, Muon) in y = ||w||^2:
``y_t / y* = 1 + (y_0 / y* - 1) exp(-rate t)``, and the angle is proportional to y^(-1/2) in both.

`settling_steps` runs the recursion. Where that takes too many steps it uses the speed of the norm instead
(`_quasi_static_steps`): after a few memory lengths the buffers follow the norm, and the norm alone determines how fast
it moves. So the recursion runs for a few memory lengths from many norms between here and equilibrium at once, and the
steps are the integral of the inverse speed. In u = ln|y/y* - 1| that speed is nearly constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, one_of, positive, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.angles import angular_diffusion
from equilibria.theory.citations import law
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Rule, check_rule
from equilibria.theory.states import State, rescaled, settled
from equilibria.theory.transient import Trajectory, evolve

Quantity: TypeAlias = Literal["angle", "norm", "norm_sq"]

_LONGEST_SWING = 10_000  # steps
_LONGEST_RECURSION = 30_000  # steps; beyond, the quasi-static integral is faster
_LAST_RESORT = 3_000_000  # steps that the recursion may take where the quasi-static integral is too coarse
_LONGEST_PATH = 100_000  # steps per call of the recursion: its arrays stay small
_RESOLVED = 1e-11  # rate per step below which float64 cannot resolve how fast the norm moves
_NORMS = 256  # norms at which the quasi-static integral takes the speed
# Memory lengths after which the buffers follow the norm: <w, buffer> of a rescaled state may be many times too large,
# a second moment is off only by the ratio of its memory to the time constant.
_FIRST_MOMENT, _SECOND_MOMENT = 32, 8
_STRETCH = 5000  # steps per call of the recursion from many norms: its arrays stay small


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Closed-form approach of the norm to its equilibrium.

    Attributes:
        power: the power of the norm that relaxes linearly, 4 or 2; of a measured law a power like these.
        rate: its rate per step.
    """

    power: float
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

    def steps(self, start: ArrayLike, *, tolerance: float, quantity: Quantity = "angle") -> Array:
        """Steps until ``quantity`` ("angle", "norm" or "norm_sq") is within a tolerance of equilibrium.

        ``t = 1/rate ln[(y_0/y* - 1)/(q - 1)]`` with q the `edge` of the band; 0 if already inside.

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

    def edge(self, start: float, *, tolerance: float, quantity: Quantity = "angle") -> float:
        """y / y* at which the quantity enters its tolerance band; a norm above equilibrium means an angle below it.

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
    """Closed form of the approach to equilibrium: which power of the norm relaxes, and how fast.

    ``4 eps/(1-a)`` for SGD, heavy ball and Nesterov, ``4 eps`` for SGDW (power 4); the linearised rate, about 2 eps,
    for AdamW, Lion and Muon, and about 3 eps_e for Adam with L2 (power 2).

    Args:
        rule: the optimizer.
        unit_grad_sq: L, for Adam with L2 only.
        dim: number of entries, for Adam with L2 only.

    Returns:
        The power and its rate, to first order in eps. Good for eps well below the oscillation threshold and a starting
        ||w||^2 well above sqrt(2 eps/(1-a)) of the equilibrium's; use `transient.evolve` otherwise.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(relaxation(SGD(0.1, 5e-4, momentum=0.9)).rate, 12)
        0.002
    """
    check_rule(rule)
    if isinstance(rule, AdamL2):
        return Relaxation(2, 1 / rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).time_constant)
    if isinstance(rule, Identified):
        scale = {} if unit_grad_sq is None and dim is None else {"unit_grad_sq": unit_grad_sq, "dim": dim}
        return Relaxation(2 * (1 - rule.step.radial), 1 / rule.equilibrium(**scale).time_constant)
    linearised = rule.equilibrium()  # raises where there is no equilibrium
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
    quantity: Quantity = "angle",
    unit_grad_sq: float | None = None,
    dim: float | None = None,
) -> float:
    """Steps until norm or angle is within a tolerance of equilibrium, by the closed form of `Relaxation.steps`.

    ``t = 1/rate ln[(y_0/y* - 1)/(q - 1)]``, y the power of the norm that relaxes and q the edge of the band in y / y*.

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
    one_of("quantity", quantity, get_args(Quantity))
    ratio = positive("start_ratio", start_ratio)
    relaxing = relaxation(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    return float(relaxing.steps(ratio, tolerance=delta, quantity=quantity))


@dataclass(frozen=True, slots=True)
class Timescale:
    """How long a weight remembers.

    Attributes:
        steps: steps in which decay removes the share 1 - 1/e of what a step added.
        samples: the examples or tokens of these steps.
        epochs: the same over the size of the data; None if that is not known.
    """

    steps: float
    samples: float
    epochs: float | None


@law(
    "",
    "Power Lines (arXiv 2505.13738), tau = B / (lr wd D)",
    derived="for every rule: 2 over the angular diffusion per step, which is 1 / (lr wd) for decoupled decay",
)
def decay_timescale(
    rule: Rule,
    *,
    batch_size: float,
    data_size: float | None = None,
    unit_grad_sq: float | None = None,
    dim: float | None = None,
) -> Timescale:
    """Over how many steps, samples and epochs of data the weights average the updates: ``B / (lr wd D)`` epochs.

    1 / (lr wd) steps for decoupled decay, (1 - momentum) / (lr wd) for SGD. Twice the time constant of ||w||^2 near
    equilibrium for updates of constant size, four times that of ||w||^4 for SGD.

    Args:
        rule: the optimizer.
        batch_size: B, examples or tokens per step.
        data_size: D, examples or tokens in the data, at least B.
        unit_grad_sq: L, for Adam with L2 only.
        dim: number of entries, for Adam with L2 only.

    Returns:
        The timescale.

    Raises:
        EquilibriaError: without weight decay, which never forgets, or a batch larger than the data.

    Example:
        >>> from equilibria.theory import AdamW
        >>> decay_timescale(AdamW(1e-3, 0.1), batch_size=500_000, data_size=10e9)
        Timescale(steps=10000.0, samples=5000000000.0, epochs=0.5)
    """
    check_rule(rule)
    if rule.decay_per_step == 0:
        raise EquilibriaError(
            f"got lr={rule.lr:g}, weight_decay={rule.weight_decay:g}; expected both above 0: nothing is forgotten",
            argument="weight_decay",
        )
    steps = 2 / angular_diffusion(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    samples = steps * positive("batch_size", batch_size)
    if data_size is not None and positive("data_size", data_size) < batch_size:
        raise EquilibriaError(
            f"got data_size={data_size:g} at batch_size={batch_size:g}; expected at least one batch of data",
            argument="data_size",
        )
    return Timescale(steps, samples, None if data_size is None else samples / data_size)


@law("smd", "§4", derived="last step outside the tolerance band, by the moment recursion")
def settling_steps(
    rule: Rule,
    start: State,
    *,
    tolerance: float = 0.05,
    quantity: Quantity = "angle",
    unit_grad_sq: float = 1.0,
    dim: float = 1.0,
) -> int:
    """Steps after which norm or angle stays within a tolerance of equilibrium, by the moment recursion.

    Up to about 30,000 steps are counted by running the recursion. Beyond, its first steps are run and the rest is an
    integral of the inverse speed of the norm (see the module), which agrees with the recursion to 0.1 %. The closed
    form `steps_to_tolerance` replaces both only where more than 3 million steps would be needed and the time constant
    is below ten memory lengths or above 1e11 steps.

    Args:
        rule: the optimizer, with constant settings.
        start: the state to begin with; see `states`.
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
        raise EquilibriaError(
            f"got start={start!r}; expected a state: cold_start(rule, norm) or settled(rule)", argument="start"
        )
    check_rule(rule)
    delta = within("tolerance", tolerance, above=0, below=1)
    one_of("quantity", quantity, get_args(Quantity))
    scale = {"unit_grad_sq": unit_grad_sq, "dim": dim}
    target = float(settled(rule, **scale).norm_sq)
    equilibrium = rule.equilibrium(**scale) if isinstance(rule, AdamL2 | Identified) else rule.equilibrium()
    band = _Band(quantity, float(equilibrium.angle) if quantity == "angle" else target, delta)
    # The norm can leave the band again while momentum builds up or swings back: wait until it has stayed inside for a
    # while. Swings need an lr*wd near the oscillation threshold, hence a short time constant: hence the cap.
    quiet = math.ceil(min(5 * equilibrium.time_constant, _LONGEST_SWING)) + 200
    # The first steps of a cold start can push the norm far away, and a second moment remembers the old norm for long.
    first = math.ceil((12 + 2 * abs(math.log(float(start.norm_sq) / target))) * max(memory_lengths(rule)))
    relaxing = relaxation(rule, **scale)
    done, last_outside = 0, -1
    while last_outside >= done - quiet // 2:
        ratio = math.sqrt(float(start.norm_sq) / target)
        expected = float(relaxing.steps(ratio, tolerance=delta, quantity=quantity))
        far = expected > _LONGEST_RECURSION
        if far and done >= first:
            rest = _remaining_steps(
                rule, start, band, norm_sq=target, relaxing=relaxing, expected=expected, scale=scale
            )
            if rest is not None:
                return math.ceil(done + rest)
        if done > _LAST_RESORT:
            raise EquilibriaError(
                f"got {rule}, which has not settled after {done:,} steps; expected an lr*weight_decay further from the "
                "end of the range in which an equilibrium is stable"
            )
        chunk = first if far and done < first else math.ceil(1.05 * expected) + quiet
        path = evolve(rule, min(chunk, _LONGEST_PATH), start=start, unit_grad_sq=unit_grad_sq, dim=dim)
        outside = np.flatnonzero(band.deviation(path) > delta)
        last_outside = done + int(outside[-1]) if len(outside) else last_outside
        done, start = done + len(path.lr), path.final
    return last_outside + 1


def memory_lengths(rule: Rule) -> tuple[float, float]:
    """Steps in which the first and the second moment forget by a factor e; 0 for a moment that the rule lacks."""
    if isinstance(rule, AdamW | AdamL2):
        return 1 / (1 - rule.betas[0]), 1 / (1 - rule.betas[1])
    if isinstance(rule, Identified):
        return 1 / (1 - max(rule.memory.decay, default=0.0)), 0.0
    return 1 / (1 - (rule.betas[1] if isinstance(rule, Lion) else rule.momentum)), 0.0


@dataclass(frozen=True, slots=True)
class _Band:
    """Tolerance band around the equilibrium of one quantity.

    Attributes:
        quantity: "angle", "norm" or "norm_sq".
        value: its equilibrium value; ||w*||^2 for "norm" too.
        tolerance: relative half width.
    """

    quantity: Quantity
    value: float
    tolerance: float

    def deviation(self, path: Trajectory) -> Array:
        """Relative deviation at every step of a path."""
        series = path.angle if self.quantity == "angle" else path.norm_sq[:-1]
        ratio = np.sqrt(series / self.value) if self.quantity == "norm" else series / self.value
        return np.abs(ratio - 1)


def _remaining_steps(
    rule: Rule,
    start: State,
    band: _Band,
    *,
    norm_sq: float,
    relaxing: Relaxation,
    expected: float,
    scale: dict[str, float],
) -> float | None:
    """The rest of a long approach by the quasi-static integral, or the closed form; None to continue the recursion."""
    first, second = memory_lengths(rule)
    length = math.ceil(_FIRST_MOMENT * first + _SECOND_MOMENT * second)
    if _RESOLVED < relaxing.rate < 0.1 / max(first, second) and expected > 2 * length:
        return _quasi_static_steps(rule, start, band, norm_sq=norm_sq, relaxing=relaxing, length=length, scale=scale)
    return expected if expected > _LAST_RESORT else None


def _quasi_static_steps(
    rule: Rule,
    start: State,
    band: _Band,
    *,
    norm_sq: float,
    relaxing: Relaxation,
    length: int,
    scale: dict[str, float],
) -> float:
    """Steps until the band is reached from a state whose buffers follow the norm; see the module.

    Args:
        rule: the optimizer.
        start: the present state of one weight.
        band: the band to reach.
        norm_sq: ||w*||^2.
        relaxing: the power of the norm that relaxes linearly, or nearly so.
        length: steps to run the recursion before taking the speed.
        scale: L and number of entries.

    Returns:
        The steps, with a fraction.
    """
    power, ratio = relaxing.power, float(start.norm_sq) / norm_sq
    edge = relaxing.edge(math.sqrt(ratio), tolerance=band.tolerance, quantity=band.quantity)
    side = 1.0 if ratio > 1 else -1.0
    # One e-fold beyond the edge, since all norms move while the buffers settle and the angle lags behind the norm.
    ends = math.log(abs(ratio ** (power / 2) - 1)), math.log(abs(edge - 1)) - 1
    norms = (1 + side * np.exp(np.linspace(*ends, _NORMS))) ** (1 / power)
    run = partial(evolve, rule, unit_grad_sq=scale["unit_grad_sq"], dim=scale["dim"])
    state = _prepended(start, rescaled(settled(rule, **scale), norms[1:]))
    for done in range(0, length, _STRETCH):
        state = run(min(_STRETCH, length - done), start=state).final
    last = run(2, start=state)
    depth = np.log(side * ((last.norm_sq / norm_sq) ** (power / 2) - 1))
    return length + _time(depth[1], (depth[0] - depth[2]) / 2, band.deviation(last)[1], band.tolerance)


def _prepended(one: State, many: State) -> State:
    """A state with one weight followed by many."""
    fields = {
        name: np.append(getattr(one, name), np.broadcast_to(getattr(many, name), many.norm_sq.shape))
        for name in ("norm_sq", "radial", "buffer_sq", "second")
    }
    memory = np.column_stack([one.memory.reshape(len(many.memory)), many.memory])
    return State(**fields, memory=memory, steps_done=one.steps_done)


def _time(depth: Array, speed: Array, deviation: Array, tolerance: float) -> float:
    """Time from the first norm until the deviation has fallen to the tolerance, by the trapezium rule."""
    inside = int(np.argmax(deviation <= tolerance))
    fraction = math.log(deviation[inside - 1] / tolerance) / math.log(deviation[inside - 1] / deviation[inside])
    times = (depth[:-1] - depth[1:]) * (1 / speed[:-1] + 1 / speed[1:]) / 2
    return float(times[: inside - 1].sum() + fraction * times[inside - 1])


@law(
    "smd",
    "Corollary 3.1",
    corrected="the lr in the bound is the new one; with the old it is k times too small",
)
def minimum_settling_steps(rule: Rule, drop: float) -> int:
    """Lower bound on the steps to settle after lr was divided by ``drop`` = k in equilibrium.

    ``ceil((1-a) ln k / (4 wd lr_new))``. A necessary condition only: at that step the norm is still (2 - 1/k)^(1/4) of
    its equilibrium.

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
        raise EquilibriaError(
            f"got {type(rule).__name__}; expected SGD or SGDW, for which the corollary is stated", argument="rule"
        )
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
    if isinstance(rule, AdamL2 | Identified):
        name = type(rule).__name__
        raise EquilibriaError(f"got {name}; expected a rule with a closed form: use transient.evolve", argument="rule")
    relaxing = relaxation(rule)
    start = positive("drop", drop) ** (1 / relaxing.power)
    passed = reals("steps", steps, low=0)
    return LrDrop(relaxing.ratio(start, passed), relaxing.angle_ratio(start, passed))


@dataclass(frozen=True, slots=True)
class LrDrop:
    """Norm and angle of a weight after a change of lr, relative to its new equilibrium.

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
    """Lag of ||w||^2 behind its equilibrium while L drifts slowly.

    ``x / x*_t - 1 = -1/2 (dL/dt / L) / rate``, x = ||w||^2, rate that of `relaxation`.

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
        raise EquilibriaError(
            f"got {type(rule).__name__}; expected SGD or SGDW: L does not set the norm of the others", argument="rule"
        )
    return -0.5 * number("relative_drift", relative_drift) / relaxation(rule).rate
