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
Problems that the flow solves in closed form are in `flow_examples`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, positive, within
from equilibria.theory._reals import Array, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law


def _speed(grad_norm: Array, c_b: ArrayLike | None) -> Array:
    """Learning rate of the flow: how much of ``-grad log lambda1`` it follows per unit of its time."""
    if c_b is None:
        return 2 / (4 + grad_norm**2)
    return 1 / (4 + 2 / positive_reals("c_b", c_b) * grad_norm**2)


@law("sharp", "eqs. (3) and (8)")
def flow_velocity(gradient: ArrayLike, *, c_b: float | None = None) -> Array:
    """Velocity of the sharpness-reduction flow on the manifold of minima.

    ``-2 v/(4 + |v|^2)``, or ``-v/(4 + (2/c_b)|v|^2)`` on the scheduler's clock, ``v = gradient``.

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
    """Rate at which the logarithm of the sharpness falls along the flow.

    ``-2g^2/(4+g^2)``, between -2 and 0, ``g = grad_norm``. On the scheduler's clock ``-g^2/(4 + (2/c_b) g^2)``, between
    ``-c_b/2`` and 0.

    Args:
        grad_norm: ``g = |grad log lambda1|`` along the manifold.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2``.

    Returns:
        Change of ``log lambda1`` per unit of time.

    Example:
        >>> float(log_sharpness_rate(2.0))
        -1.0
    """
    g = nonnegative_reals("grad_norm", grad_norm)
    return -_speed(g, c_b) * g**2


@law(
    "sharp",
    "Lemmas I.2, I.5",
    corrected="the second derivative across the manifold is -grad(log lambda1)/2, printed as 0; in lemma L.6 it enters "
    "twice with opposite signs, so that eq. (26) holds",
)
def projection_shift(gradient: ArrayLike, displacement: float) -> Array:
    """Where the gradient flow ends from a point that is off the manifold along the top eigenvector, less its foot.

    ``-(x^2/4) grad log lambda1``, to second order in the displacement x: also a flow without an edge leads to flatter
    minimisers, by that much.

    Args:
        gradient: gradient of ``log lambda1`` along the manifold at the foot.
        displacement: x.

    Returns:
        Motion along the manifold.

    Example:
        >>> projection_shift([0.8], 0.1).round(6).tolist()
        [-0.002]
    """
    shift: Array = -(number("displacement", displacement) ** 2) / 4 * reals("gradient", gradient)
    return shift


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
    from scipy.integrate import solve_ivp

    grid = nonnegative_reals("times", times)
    origin = reals("start", start)
    if grid.ndim != 1 or grid.size == 0 or np.any(np.diff(grid) <= 0):
        raise EquilibriaError(f"got times={times!r}; expected an increasing one-dimensional series", argument="times")
    if origin.ndim != 1:
        raise EquilibriaError(f"got start of shape {origin.shape}; expected one dimension", argument="start")
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
    from scipy.integrate import quad

    value, error, *_ = quad(integrand, low, high, epsabs=0.0, epsrel=1e-11, limit=500, full_output=1)
    if error > 1e-8 * abs(value):
        raise EquilibriaError(
            f"got a flow time of {value:g} +- {error:g} between {low:g} and {high:g}; expected an error below 1e-8 of "
            "it: the slope is too small on the way, or not smooth"
        )
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
    if low == high:
        return 0.0
    slowness = _slowness(slope, c_b, downhill=low - high)
    for end in (low, high):  # where the slope vanishes the time is infinite, but the quadrature would extrapolate
        slowness(end)
    return _quadrature(slowness, low, high)


@law("sharp", "eqs. (3) and (8)", derived="root of curve_time")
def curve_position(
    start: float, *, time: float, minimum: float, slope: Callable[[float], float], c_b: float | None = None
) -> float:
    """Position on a one-dimensional manifold of minima after flow time ``time``: the inverse of `curve_time`.

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
    from scipy.optimize import brentq

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
            raise EquilibriaError(f"got time={time}; expected a time before the flow has come to rest", argument="time")
    root = brentq(excess, reach, 0.0, xtol=1e-13, rtol=1e-13)
    return float(minimum + span * np.exp(root))
