"""The sharpness-reduction flow: where training drifts once it oscillates at the edge of stability.

The oscillation averages out to a flow on the manifold of minima that descends ``log lambda1``, the logarithm
of the top Hessian eigenvalue. Two clocks are in use, chosen by ``c_b``:

- ``c_b=None``: gradient descent with weight decay on a scale-invariant loss, ``time = steps*lr*wd``
  (``lambda1`` is the spherical sharpness).
- ``c_b`` a number: any quasi-RMSprop scheduler with base learning rate ``eta`` and
  ``decay = 1 - c_b eta^2``, ``time = steps*eta^2``.

Both agree: with ``c_b = 2`` and ``eta^2 = 2 lr wd`` the second clock runs twice as fast as the first.
Time zero is the step at which the stability ratio crosses 1 (`stability.crossing_time`), not the later step
at which the oscillation becomes visible: the first burst catches up. Expect errors of order ``sqrt(lr*wd)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import quad, solve_ivp
from scipy.optimize import brentq

from equilibria.errors import EquilibriaError, number, positive, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.stability import _intrinsic, _nonnegative, _positive


def _speed(grad_norm: Array, c_b: ArrayLike | None) -> Array:
    """Learning rate of the flow: how much of ``-grad log lambda1`` it follows per unit of its time."""
    if c_b is None:
        return 2 / (4 + grad_norm**2)
    return 1 / (4 + 2 / _positive("c_b", c_b) * grad_norm**2)


@law("sharp", "eqs. (3) and (8)")
def flow_velocity(gradient: ArrayLike, *, c_b: float | None = None) -> Array:
    """Velocity of the flow: ``-2 v/(4 + |v|^2)``, or ``-v/(4 + (2/c_b)|v|^2)`` on the scheduler's clock.

    Args:
        gradient: ``v``, gradient of ``log lambda1`` along the manifold, last axis.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``.

    Returns:
        Change of the point on the manifold per unit of time.

    Raises:
        EquilibriaError: a value is not finite or ``c_b`` is not positive.

    Example:
        >>> flow_velocity([0.0, 2.0]).tolist(), flow_velocity([0.0, 2.0], c_b=2.0).tolist()
        ([-0.0, -0.5], [-0.0, -0.25])
    """
    vector = reals("gradient", gradient)
    grad_norm = np.linalg.norm(vector, axis=-1, keepdims=True)
    return -_speed(np.asarray(grad_norm), c_b) * vector


@law("sharp", "Section 4.2.2, after eq. (3)", corrected="the derivative is d/dtau; the paper prints d/dt")
def log_sharpness_rate(grad_norm: ArrayLike, *, c_b: float | None = None) -> Array:
    """Rate of ``log lambda1`` along the flow: ``-2g^2/(4+g^2)``, between -2 and 0.

    On the scheduler's clock ``-g^2/(4 + (2/c_b) g^2)``, between ``-c_b/2`` and 0.

    Args:
        grad_norm: ``g = |grad log lambda1|`` along the manifold.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``.

    Returns:
        Change of ``log lambda1`` per unit of time.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> float(log_sharpness_rate(2.0))
        -1.0
    """
    g = _nonnegative("grad_norm", grad_norm)
    return -_speed(g, c_b) * g**2


@dataclass(frozen=True, slots=True)
class FlowPath:
    """A solution of the sharpness-reduction flow.

    Attributes:
        time: flow time of each sample.
        points: points on the manifold, one row per sample.
        log_sharpness: ``log lambda1`` relative to the start.
    """

    time: Array
    points: Array
    log_sharpness: Array


@law("sharp", "eqs. (3) and (8), Theorem 4.6")
def integrate_flow(
    grad_log_sharpness: Callable[[Array], Array],
    start: ArrayLike,
    *,
    times: ArrayLike,
    c_b: float | None = None,
    project: Callable[[Array, Array], Array] | None = None,
    retract: Callable[[Array], Array] | None = None,
    rtol: float = 1e-10,
) -> FlowPath:
    """Integrate the sharpness-reduction flow from a minimum.

    Args:
        grad_log_sharpness: gradient of ``log lambda1`` at a point of the manifold, tangent to it. Without
            projection on the tangent space the gradient of a scale-invariant sharpness has a radial part of
            -2.
        start: point of the manifold, one-dimensional.
        times: increasing flow times at which to report, none negative.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``; it also selects the
            clock.
        project: ``project(point, vector)`` puts a vector on the tangent space, for a gradient that is not
            tangent.
        retract: puts a point back on the manifold, such as ``p / |p|`` for a great circle.
        rtol: relative tolerance of the integrator.

    Returns:
        The path at the requested times.

    Raises:
        EquilibriaError: bad times or start, or the integrator failed.

    Example:
        A valley with ``lambda1 = 6/cos^2(angle)``, where ``tan(angle)`` decays as ``exp(-time)``:

        >>> path = integrate_flow(lambda angle: 2 * np.tan(angle), [1.0], times=[0.0, 2.0])
        >>> round(float(np.tan(path.points[-1, 0]) / np.tan(1.0) * np.exp(2.0)), 9)
        1.0
    """
    grid = _nonnegative("times", times)
    origin = reals("start", start)
    if grid.ndim != 1 or grid.size == 0 or np.any(np.diff(grid) <= 0):
        raise EquilibriaError(f"got times={times!r}; expected an increasing one-dimensional series")
    if origin.ndim != 1:
        raise EquilibriaError(f"got start of shape {origin.shape}; expected one dimension")
    if c_b is not None:
        positive("c_b", c_b)

    def onto(point: Array) -> Array:
        return point if retract is None else np.asarray(retract(point), dtype=np.float64)

    def derivative(_: float, state: Array) -> Array:
        point = onto(state[:-1])
        vector = np.asarray(grad_log_sharpness(point), dtype=np.float64)
        if project is not None:
            vector = np.asarray(project(point, vector), dtype=np.float64)
        velocity = flow_velocity(vector, c_b=c_b)
        return np.append(velocity, velocity @ vector)

    state = np.append(onto(origin), 0.0)
    solution = solve_ivp(
        derivative,
        (0.0, max(grid[-1], np.finfo(np.float64).tiny)),
        state,
        method="DOP853",
        t_eval=grid,
        rtol=within("rtol", rtol, above=0, below=1),
        atol=1e-12,
    )
    if not solution.success:
        raise EquilibriaError(f"the flow could not be integrated to time {grid[-1]:g}: {solution.message}")
    points = np.array([onto(point) for point in solution.y[:-1].T])
    return FlowPath(grid, points, solution.y[-1])


def _slowness(slope: Callable[[float], float], c_b: float | None, *, downhill: float) -> Callable[[float], float]:
    """Time per arc length against the direction of travel, whose sign is that of ``downhill``."""

    def slowness(position: float) -> float:
        g = number("slope(position)", slope(position))
        if g * downhill >= 0:
            raise EquilibriaError(f"got slope {g:g} at {position:g}; expected log lambda1 to fall all the way")
        return 1 / (float(_speed(np.asarray(g), c_b)) * g)

    return slowness


def _quadrature(integrand: Callable[[float], float], low: float, high: float) -> float:
    value, error, *_ = quad(integrand, low, high, epsabs=0.0, epsrel=1e-11, limit=500, full_output=1)
    if error > 1e-8 * abs(value):
        raise EquilibriaError(f"the flow time between {low:g} and {high:g} could not be integrated: slope too small")
    return float(value)


@law("sharp", "eqs. (3) and (8)", derived="a one-dimensional manifold separates: time = int dphi / speed")
def curve_time(start: float, end: float, *, slope: Callable[[float], float], c_b: float | None = None) -> float:
    """Flow time between two points of a one-dimensional manifold, by quadrature.

    ``time = int (4/g + g)/2 ds`` from ``end`` to ``start``, ``g = slope(s) = d log lambda1/ds`` over arc
    length; on the scheduler's clock ``int (4/g + (2/c_b) g) ds``.

    Args:
        start: arc length at time 0.
        end: arc length to reach; downhill from ``start``.
        slope: derivative of ``log lambda1`` with respect to arc length; it must not vanish in between.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``.

    Returns:
        Flow time, positive.

    Raises:
        EquilibriaError: ``end`` lies uphill, or the slope vanishes on the way (the flow never gets there).

    Example:
        >>> time = curve_time(1.0, 0.5, slope=lambda angle: 2 * np.tan(angle))
        >>> round(time / float(np.log(np.tan(1.0) / np.tan(0.5))), 12)
        1.0
    """
    high, low = number("start", start), number("end", end)
    return _quadrature(_slowness(slope, c_b, downhill=low - high), low, high) if low != high else 0.0


@law("sharp", "eqs. (3) and (8)", derived="root of curve_time")
def curve_position(
    start: float, *, time: float, minimum: float, slope: Callable[[float], float], c_b: float | None = None
) -> float:
    """Where the flow is after ``time`` on a one-dimensional manifold.

    Args:
        start: arc length at time 0.
        time: flow time, not negative.
        minimum: arc length of the flattest point, which the flow approaches and never reaches.
        slope: derivative of ``log lambda1`` with respect to arc length; zero only at ``minimum``.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``.

    Returns:
        Arc length.

    Raises:
        EquilibriaError: the sharpness does not fall all the way from ``start`` to ``minimum``.

    Example:
        >>> angle = curve_position(1.0, time=2.0, minimum=0.0, slope=lambda angle: 2 * np.tan(angle))
        >>> round(float(np.tan(angle) / np.tan(1.0) * np.exp(2.0)), 10)
        1.0
    """
    span = number("start", start) - number("minimum", minimum)
    target = within("time", time, low=0)
    if span == 0 or target == 0:
        return float(start)

    # Near the minimum the approach is exponential in time: work in the log of the fraction still to go.
    slowness = _slowness(slope, c_b, downhill=-span)

    def excess(log_fraction: float) -> float:
        return (
            _quadrature(lambda x: slowness(minimum + span * np.exp(x)) * span * np.exp(x), log_fraction, 0.0) - target
        )

    reach = -1.0
    while excess(reach) < 0:
        reach *= 2
        if reach < -600:
            raise EquilibriaError(f"got time={time}; expected a time before the flow has come to rest")
    root = brentq(excess, reach, 0.0, xtol=1e-13, rtol=1e-13)
    return float(minimum + span * np.exp(root))


@law(
    "sharp", "Appendix F", derived="flow (3) on Gamma: x = y > 0 with lambda1 = 6/(1 - z^2), the top eigenvalue (not 3)"
)
def sphere3d_angle(start: ArrayLike, *, time: ArrayLike) -> Array:
    """Closed-form flow of the paper's 3-D example ``2 - (x+y)/sqrt(x^2 - xy + y^2)``.

    With ``z = sin(angle)``: ``tan(angle) = tan(start) exp(-time)``.

    Args:
        start: angle from the plane ``z = 0`` at time 0, radians, below a right angle in size.
        time: ``steps*lr*wd``.

    Returns:
        Angle in radians.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> round(float(np.sin(sphere3d_angle(np.arcsin(0.8), time=np.log(4 / 3)))), 12)  # tan: 4/3 -> 1
        0.707106781187
    """
    angle = reals("start", start, above=-np.pi / 2, below=np.pi / 2)
    tangent: Array = np.tan(angle) * np.exp(-_nonnegative("time", time))
    return np.arctan(tangent)


@law("sharp", "Corollary B.14", derived="eq. (8) on the valley 0.5*(1 + y^2)*x^2, integrated in y")
def rmsprop_valley_position(start: float, *, time: float, c_b: float) -> float:
    """Closed-form flow of scalar RMSprop along the valley of ``L = (1 + y^2) x^2/2``, where ``lambda1 = 1 + y^2``.

    ``P(y) = 2 ln y + y^2 + (2/c_b) ln(1 + y^2)`` falls at unit rate: ``P(y(time)) = P(start) - time``.

    Args:
        start: ``y`` at time 0, positive.
        time: ``steps*eta^2``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        ``y`` at ``time``.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> [round(rmsprop_valley_position(2.0, time=3.0, c_b=c_b), 4) for c_b in (0.25, 1.0, 2.0, 4.0)]
        [1.7384, 1.5302, 1.4534, 1.4033]
    """
    weight = 2 / positive("c_b", c_b)
    log_start = float(np.log(positive("start", start)))
    elapsed = within("time", time, low=0)

    def clock(log_y: float) -> float:
        square = np.exp(2 * log_y)
        return float(2 * log_y + square + weight * np.log1p(square))

    target = clock(log_start) - elapsed
    # d clock / d log y >= 2, which brackets the root.
    root = brentq(lambda x: clock(x) - target, log_start - elapsed / 2 - 1e-9, log_start, xtol=1e-14)
    return float(np.exp(root))


@dataclass(frozen=True, slots=True)
class RegressionGeometry:
    """The minima of linear regression with batch normalisation and fixed affine part.

    Attributes:
        min_norm_weight: coefficients of the flattest minimum, the interpolant of least norm.
        bias: its intercept.
        min_sharpness: spherical sharpness there.
    """

    min_norm_weight: Array
    bias: float
    min_sharpness: float


def _data(inputs: ArrayLike, targets: ArrayLike) -> tuple[Array, Array]:
    x, y = reals("inputs", inputs), reals("targets", targets)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise EquilibriaError(f"got inputs {x.shape} and targets {y.shape}; expected (n, d) and (n,)")
    centred = x - x.mean(axis=0)
    if x.shape[1] < x.shape[0] - 1 or np.linalg.matrix_rank(centred) < x.shape[0] - 1:
        raise EquilibriaError(f"got inputs {x.shape}; expected affinely independent rows, so that a fit is exact")
    _positive("variance of targets", y.var())
    return x, y


@law("sharp", "Theorem 5.1, Lemma O.1", corrected="Section 5's sigma_1 is the standard deviation, not the variance")
def regression_geometry(inputs: ArrayLike, targets: ArrayLike) -> RegressionGeometry:
    """The flattest minimum of linear regression with batch normalisation.

    The least-norm interpolant ``w* = pinv(X - mean) (y - mean)``, with sharpness
    ``2 |w*|^2 lambda1(S - z z^T)``, ``S = Xc^T Xc/n``, ``z = Xc^T yc/(n std(y))``.

    Args:
        inputs: ``(n, d)`` data, rows affinely independent (``d >= n - 1``).
        targets: ``(n,)`` targets, not all equal.

    Returns:
        The flattest minimum.

    Raises:
        EquilibriaError: shapes do not fit, values are not finite, or the data cannot be interpolated.

    Example:
        >>> flat = regression_geometry([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])
        >>> flat.min_norm_weight.round(12).tolist(), round(flat.bias, 12)
        ([0.5, -0.5], 0.5)
    """
    x, y = _data(inputs, targets)
    mean, centred, n = x.mean(axis=0), x - x.mean(axis=0), len(y)
    weight = np.linalg.pinv(centred) @ (y - y.mean())
    z = centred.T @ (y - y.mean()) / (n * y.std())
    top = np.linalg.eigvalsh(centred.T @ centred / n - np.outer(z, z))[-1]
    return RegressionGeometry(weight, float(y.mean() - weight @ mean), float(2 * weight @ weight * max(top, 0.0)))


@dataclass(frozen=True, slots=True)
class RegressionFlow:
    """State of linear regression with batch normalisation along the flow.

    Attributes:
        weight: effective coefficients ``w_tilde`` of the minimum that the iterate oscillates about.
        distance: its distance from the flattest minimum; it lies in the null space of the centred data.
        sharpness: spherical sharpness.
        grad_norm: ``g`` there.
    """

    weight: Array
    distance: float
    sharpness: float
    grad_norm: float


@law(
    "sharp", "Theorem 5.1", derived="weight decay shrinks the null-space part by c per step exactly; EoS pins the rest"
)
def regression_flow(inputs: ArrayLike, targets: ArrayLike, *, weight: ArrayLike, time: float) -> RegressionFlow:
    """Closed-form flow of linear regression with batch normalisation.

    ``w(time) = w* + v exp(-time)`` with ``v`` the null-space part of the starting coefficients,
    ``lambda1 = lambda1* (1 + |v|^2 exp(-2 time)/|w*|^2)``, ``g = 2 |v| exp(-time)/|w*|``. The loss at the
    edge of stability stays at ``lr*wd*lambda1*/4`` all the way. Compare null-space parts: the iterate itself
    also oscillates in the row space.

    Args:
        inputs: ``(n, d)`` data.
        targets: ``(n,)`` targets.
        weight: raw weight vector of the model when the stability ratio crosses 1, any scale.
        time: ``steps*lr*wd`` since then.

    Returns:
        State of the flow at ``time``.

    Raises:
        EquilibriaError: shapes do not fit, values are not finite, or the weight does not see the data.

    Example:
        >>> state = regression_flow([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0], weight=[2.0, 0.0], time=np.log(2))
        >>> state.weight.round(12).tolist()  # null space (1, 1): half of (0.5, 0.5) is left
        [0.75, -0.25]
    """
    x, y = _data(inputs, targets)
    flat = regression_geometry(x, y)
    w = reals("weight", weight)
    if w.shape != x.shape[1:]:
        raise EquilibriaError(f"got weight {w.shape}; expected {x.shape[1:]}")
    centred = x - x.mean(axis=0)
    scale = y.std() / _positive("standard deviation of the pre-activation", (centred @ w).std())
    left = np.exp(-within("time", time, low=0))
    null_part = scale * (w - np.linalg.pinv(centred) @ (centred @ w)) * left
    distance, size = float(np.linalg.norm(null_part)), float(np.linalg.norm(flat.min_norm_weight))
    sharpness = flat.min_sharpness * (1 + (distance / size) ** 2)
    return RegressionFlow(flat.min_norm_weight + null_part, distance, sharpness, 2 * distance / size)


@law("sharp", "Theorem 5.1 and Appendix F", derived="both closed-form flows shrink by c = 1 - lr*wd per step")
def steps_to_tolerance(
    gap: ArrayLike, tolerance: ArrayLike, *, intrinsic_lr: ArrayLike, crossing: ArrayLike = 0.0
) -> Array:
    """Step at which an exponentially closing gap falls below a tolerance: ``crossing + ln(gap/tol)/(-ln c)``.

    For flows with ``gap(time) = gap exp(-time)``: ``tan(angle)`` of `sphere3d_angle`, ``distance`` of
    `regression_flow`. To leading order ``ln(gap/tol)/(lr*wd)`` steps.

    Args:
        gap: gap when the stability ratio crosses 1.
        tolerance: gap to reach.
        intrinsic_lr: ``lr*wd``.
        crossing: step of that crossing (`stability.crossing_time`).

    Returns:
        Step number (real); ``crossing`` itself if the gap is small enough already.

    Raises:
        EquilibriaError: a value is not finite or out of range.

    Example:
        >>> round(float(steps_to_tolerance(1.0, 0.02, intrinsic_lr=1e-4)))
        39118
    """
    shrink = np.maximum(np.log(_positive("gap", gap) / _positive("tolerance", tolerance)), 0.0)
    steps: Array = shrink / -np.log1p(-_intrinsic(intrinsic_lr))
    return reals("crossing", crossing) + steps
