"""The slow oscillation at the edge of stability: a particle in a potential well.

Around a manifold of minima the scaled displacement ``h`` along the top eigenvector and the offset ``u`` of
the learning rate from its stability limit oscillate. With scheduler parameters ``eta`` (base learning rate)
and ``decay = 1 - c_b eta^2``, ``x = log|h|`` is the position of a unit mass, ``-u`` its velocity and ``U(x) =
K^2 exp(2x) - c_b x`` its potential, ``K^2 = 2 c_b + g^2``; time is ``steps * eta``. ``h`` is the displacement
on the sphere divided by ``eta``; ``R = (1 + eta u)^(-1/2)`` is the stability ratio.

Gradient descent with weight decay on a scale-invariant loss has ``eta = sqrt(2 lr wd)`` and ``c_b = 2``.
``grad_norm`` is ``g = |grad log lambda1|`` along the manifold. To this order the energy is conserved; the
laws at the end have the terms that damp or amplify the oscillation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, whole
from equilibria.theory._reals import Array, intrinsic_rate, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law
from equilibria.theory.moments import angle_from_chord_sq

_NEWTON_STEPS = 100  # monotone convergence from outside; ten are enough unless the energy is enormous
_MAX_NODES = 1 << 16


def _coupling(grad_norm: ArrayLike, c_b: ArrayLike) -> Array:
    """``K^2 = 2 c_b + g^2``."""
    return 2 * positive_reals("c_b", c_b) + nonnegative_reals("grad_norm", grad_norm) ** 2


@law("sharp", "Appendix H.2, Figure 5")
def potential(position: ArrayLike, *, grad_norm: ArrayLike = 0.0, c_b: ArrayLike = 2.0) -> Array:
    """Potential energy of the oscillation at position ``x = log|h|``.

    ``U(x) = K^2 exp(2x) - c_b x`` with ``K^2 = 2 c_b + g^2``.

    Args:
        position: ``x = log|h|``.
        grad_norm: ``g``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        Potential energy, dimensionless.

    Example:
        >>> float(potential(0.0, grad_norm=2**0.5, c_b=1.0))  # K = 2
        4.0
    """
    x = reals("position", position)
    return _coupling(grad_norm, c_b) * np.exp(2 * x) - np.asarray(c_b, dtype=np.float64) * x


@law(
    "sharp",
    "Definition H.21",
    corrected="Lemma N.1's last term is -c_b log(h'/h); it is printed without the minus",
)
def energy(displacement: ArrayLike, offset: ArrayLike, *, grad_norm: ArrayLike = 0.0, c_b: ArrayLike = 2.0) -> Array:
    """Energy of the oscillation, constant along its continuous form.

    ``E = u^2/2 + K^2 h^2 - c_b log|h|`` with ``K^2 = 2 c_b + g^2``. On the time-scale of the flow (``1/eta^2`` steps)
    the true dynamics damp or amplify it: see `hamiltonian.sphere_energy_rate` and `hamiltonian.full_space_energy_rate`.

    Args:
        displacement: ``h``, not zero.
        offset: ``u``.
        grad_norm: ``g``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        Energy, dimensionless.

    Raises:
        EquilibriaError: a value is not finite or out of range, or ``displacement`` is 0.

    Example:
        >>> float(energy(-1.0, 3.0, c_b=1.0))  # 9/2 + 2
        6.5
    """
    size = positive_reals("|displacement|", np.abs(reals("displacement", displacement)))
    return reals("offset", offset) ** 2 / 2 + potential(np.log(size), grad_norm=grad_norm, c_b=c_b)


@dataclass(frozen=True, slots=True)
class RestPoint:
    """The bottom of the well.

    Attributes:
        displacement: ``h`` at rest, in units of ``eta``.
        position: ``log h`` at rest.
        energy: the least energy.
        period: period of small oscillations, in units of ``1/eta`` steps.
    """

    displacement: Array
    position: Array
    energy: Array
    period: Array


@law("sharp", "Appendix H.2", derived="minimum of the potential and its second derivative 2*c_b there")
def rest_point(grad_norm: ArrayLike = 0.0, c_b: ArrayLike = 2.0) -> RestPoint:
    """Equilibrium of the oscillation and its small-amplitude period.

    ``h^2 = c_b/(2K^2)``, ``u = 0``, ``E_min = (c_b/2)(1 + ln(2K^2/c_b))``, period ``2 pi/sqrt(2 c_b)``.

    Args:
        grad_norm: ``g``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        The rest point.

    Example:
        >>> rest = rest_point(2**0.5, 1.0)
        >>> [round(float(value), 6) for value in (rest.displacement, rest.position, rest.energy, rest.period)]
        [0.353553, -1.039721, 1.539721, 4.442883]
    """
    ratio = 2 * _coupling(grad_norm, c_b) / np.asarray(c_b, dtype=np.float64)
    c = np.asarray(c_b, dtype=np.float64)
    period = np.broadcast_to(2 * np.pi / np.sqrt(2 * c), ratio.shape)[()]
    return RestPoint(ratio**-0.5, -np.log(ratio) / 2, c / 2 * (1 + np.log(ratio)), period)


@law(
    "sharp",
    "Section 4.2.3 and Appendix N.2",
    corrected="Section 4.2.3 states that 2h^2 averages 2*lr*wd/(4 + g); it is h^2, and g is squared",
)
def mean_square_displacement(eta: ArrayLike, *, grad_norm: ArrayLike = 0.0, c_b: ArrayLike = 2.0) -> Array:
    """Mean squared displacement on the sphere over any orbit, ``eta^2/(4 + 2 g^2/c_b)``.

    The average of the scaled ``h^2`` is ``c_b/(2K^2)`` at every energy, because ``u`` returns after each
    period. For gradient descent with weight decay the result is ``2 lr wd/(4 + g^2)``.

    Args:
        eta: base learning rate of the scheduler; ``sqrt(2 lr wd)`` for gradient descent with weight decay.
        grad_norm: ``g``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        Mean squared displacement (unscaled), rad^2 on the sphere.

    Example:
        >>> round(float(mean_square_displacement((2 * 1e-3) ** 0.5, grad_norm=2.0)), 12)  # 2e-3 / 8
        0.00025
    """
    return positive_reals("eta", eta) ** 2 * rest_point(grad_norm, c_b).displacement ** 2


@dataclass(frozen=True, slots=True)
class Orbit:
    """One closed orbit of the oscillation.

    Attributes:
        period: in units of ``1/eta`` steps.
        smallest: least ``|h|``, in units of ``eta``.
        largest: greatest ``|h|``, in units of ``eta``.
        fastest: greatest ``|u|``.
    """

    period: Array
    smallest: Array
    largest: Array
    fastest: Array


def _well(x: Array) -> Array:
    """``exp(2x) - 1 - 2x``: the potential above its minimum, centred, in units of ``c_b/2``."""
    y = 2 * x
    series = np.zeros_like(y)
    for k in range(18, 1, -1):
        series = (1 + series) * y / k
    # The series is exp(y) - 1 - y over y, to rounding for |y| < 1/2, where the difference would cancel.
    return np.where(np.abs(y) < 0.5, series * y, np.expm1(y) - y)


def _turning_point(start: Array, height: Array) -> Array:
    """Newton's method from outside the well; the function is convex, so the approach is monotone."""
    x = start
    for _ in range(_NEWTON_STEPS):
        step = (_well(x) - height) / (2 * np.expm1(2 * x))
        x = x - step
        if np.all(np.abs(step) <= 4e-16 * np.abs(x)):
            break
    return x


def _turning_points(height: Array) -> tuple[Array, Array]:
    left = _turning_point(-np.sqrt(height / 2) - height / 2, height)
    return left, _turning_point(np.minimum(np.sqrt(height / 2), np.log(3 + 2 * height) / 2), height)


def _half_period(left: Array, right: Array, nodes: int) -> Array:
    """Integral of ``dx/sqrt(2(E - U))`` between the turning points, for ``c_b = 2``.

    With ``x = middle + radius sin(s)`` the integrand is smooth and even about both ends, so that the midpoint
    rule converges exponentially. ``E - U`` is taken from the nearer turning point to avoid cancellation.
    """
    s = (np.arange(nodes) + 0.5) * (np.pi / nodes) - np.pi / 2
    radius = (right - left)[..., None] / 2
    to_right, to_left = 2 * np.sin((np.pi / 2 - s) / 2) ** 2, 2 * np.sin((np.pi / 2 + s) / 2) ** 2
    near_right = s > 0
    distance = radius * np.where(near_right, -to_right, to_left)
    end = np.where(near_right, right[..., None], left[..., None])
    speed = np.sqrt(2 * _drop(end, distance))
    return np.asarray(np.sum(radius * np.cos(s) / speed, axis=-1) * (np.pi / nodes))


def _drop(end: Array, inward: Array) -> Array:
    """``U(end) - U(end + inward)`` for ``c_b = 2``, without cancellation at either size of ``inward``."""
    capped = np.minimum(inward, 350.0)  # beyond it exp(2 end) has long made the exponential term vanish
    near = -np.expm1(2 * end) * np.expm1(2 * capped) - _well(capped)
    far = 2 * inward - np.exp(2 * end) * np.expm1(2 * capped)
    return np.asarray(np.where(np.abs(inward) < 0.25, near, far))


@law("sharp", "Appendix H.2, eq. (17)", derived="energy conservation; quadrature of dx/sqrt(2(E - U))")
def orbit(excess_energy: ArrayLike, *, grad_norm: ArrayLike = 0.0, c_b: ArrayLike = 2.0) -> Orbit:
    """Period and extremes of the orbit with energy ``E_min + excess_energy``.

    ``T = 2 int dx/sqrt(2(E - U(x)))`` between the turning points. The period does not depend on ``g``. Long
    first periods of a run mean high energy.

    Args:
        excess_energy: energy above the minimum, positive.
        grad_norm: ``g``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        The orbit.

    Raises:
        EquilibriaError: a value is not finite or out of range, or the energy is too large for the quadrature.

    Example:
        >>> round(float(orbit(1.0, grad_norm=2**0.5, c_b=1.0).period), 6)  # Figure 5: K = 2, C_b = 1
        5.198546
    """
    excess, c = positive_reals("excess_energy", excess_energy), positive_reals("c_b", c_b)
    rest = rest_point(grad_norm, c_b)
    left, right = _turning_points(np.asarray(2 * excess / c))
    nodes, half = 64, _half_period(left, right, 32)
    while True:
        finer = _half_period(left, right, nodes)
        if np.all(np.abs(finer - half) <= 1e-13 * finer):
            break
        if nodes >= _MAX_NODES:
            raise EquilibriaError(
                f"got excess_energy={excess_energy!r}; expected less than about 1e5 c_b", argument="excess_energy"
            )
        nodes, half = 2 * nodes, finer
    # The quadrature is in units with c_b = 2; energies scale with c_b and times with its inverse root.
    period = 2 * finer * np.sqrt(2 / c)
    shape = np.broadcast_shapes(period.shape, np.shape(rest.displacement))
    return Orbit(
        period=np.broadcast_to(period, shape)[()],
        smallest=rest.displacement * np.exp(left),
        largest=rest.displacement * np.exp(right),
        fastest=np.broadcast_to(np.sqrt(2 * excess), shape)[()],
    )


@law(
    "sharp",
    "Section 4.2.3",
    derived="small-amplitude period 2*pi/(eta*sqrt(2*c_b)) with eta = sqrt(2*lr*wd), c_b = 2",
)
def period_steps(intrinsic_lr: ArrayLike) -> Array:
    """Small-amplitude period of gradient descent with weight decay, ``pi/sqrt(2 lr wd)`` steps.

    The limit of damped orbits; the first periods of a run are longer (see `orbit`). The same for every ``g``.

    Args:
        intrinsic_lr: ``lr*wd``.

    Returns:
        Optimiser steps.

    Raises:
        EquilibriaError: ``intrinsic_lr`` is outside (0, 1).

    Example:
        >>> period_steps([1e-4, 1e-3, 1e-2]).round().tolist()
        [222.0, 70.0, 22.0]
    """
    return np.pi / np.sqrt(2 * intrinsic_rate(intrinsic_lr))


@dataclass(frozen=True, slots=True)
class DriftPath:
    """An RMS-drift process, one entry per pair of optimiser steps, the start first.

    Attributes:
        displacement: ``h`` after each pair, in units of ``eta``.
        offset: ``u`` after each pair.
        descent: learning rate with which each pair descends ``log lambda1`` along the manifold,
            ``2 eta^2 h^2`` (one entry fewer).
    """

    displacement: Array
    offset: Array
    descent: Array


@law(
    "sharp",
    "Definition H.2",
    corrected="iterated as a symplectic map: the printed form gains energy as exp(4*c_b*eta^2*steps); "
    "Section 4.2.3's drift -4h^2 is -2h^2, as in the definition",
)
def rms_drift(
    displacement: ArrayLike,
    offset: ArrayLike,
    *,
    pairs: int,
    eta: float,
    grad_norm: ArrayLike = 0.0,
    c_b: ArrayLike = 2.0,
) -> DriftPath:
    """Iterate the RMS-drift process at a fixed point of the manifold, conserving energy.

    Per two optimiser steps ``h' = h exp(-2 eta u)``, then ``u' = u + 4 eta K^2 h'^2 - 2 eta c_b``; the point
    of the manifold moves by ``-2 eta^2 h^2 grad log lambda1``. Definition H.2 evaluates everything at the old
    state with ``h' = (1 - 2 eta u) h``. That describes one transition up to its error terms, but iterated it
    is Euler's method, whose energy explodes on the very time-scale of interest; the symplectic form agrees to
    the same order and does not.

    Args:
        displacement: ``h`` at the start, not zero; arrays give one process per element.
        offset: ``u`` at the start.
        pairs: number of two-step transitions.
        eta: base learning rate of the scheduler.
        grad_norm: ``g``, constant.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        The path; time runs along the first axis.

    Example:
        >>> path = rms_drift(0.5, 0.0, pairs=1, eta=0.1, c_b=2.0)  # K^2 = 4: u' = 0.4 - 0.4
        >>> path.displacement.tolist(), path.offset.round(12).tolist(), path.descent.round(12).tolist()
        ([0.5, 0.5], [0.0, 0.0], [0.005])
    """
    coupling, c = _coupling(grad_norm, c_b), np.asarray(c_b, dtype=np.float64)
    step = float(positive_reals("eta", eta))
    count = whole("pairs", pairs, low=1)
    start = reals("displacement", displacement)
    positive_reals("|displacement|", np.abs(start))
    shape = np.broadcast_shapes(start.shape, np.shape(offset), coupling.shape)
    h, u = np.empty((count + 1, *shape)), np.empty((count + 1, *shape))
    h[0], u[0] = start, reals("offset", offset)
    for t in range(count):
        h[t + 1] = h[t] * np.exp(-2 * step * u[t])
        u[t + 1] = u[t] + 4 * step * coupling * h[t + 1] ** 2 - 2 * step * c
    return DriftPath(h, u, 2 * step**2 * h[:-1] ** 2)


# ---- damping
#
# On the time-scale of the flow the shape of the valley changes the energy: with the slope across the valley
# lambda1 (a + p2 a^2 + p3 a^3) at displacement a, `quadratic` is p2 and `cubic` is p3.


@law("sharp", "Appendix H.2", derived="third-order expansion of the two-step map on the sphere, for g = 0")
def sphere_anharmonicity(quadratic: ArrayLike = 0.0, cubic: ArrayLike = 0.0) -> Array:
    """Anharmonicity q of the valley under gradient descent with weight decay, which damps or amplifies the oscillation.

    ``q = -(8/3 - 2 p3 + 4 p2^2)``. The slope across the valley at geodesic angle ``a`` is ``lambda1 (a + p2 a^2 + p3
    a^3)``. ``q`` sets the rate of `sphere_energy_rate` and shifts the stability ratio (`stability_offset`). Derived for
    ``g = 0`` and for losses whose transverse plane decouples from the manifold; unverified for general ``g``.

    Args:
        quadratic: ``p2``.
        cubic: ``p3``.

    Returns:
        ``q``.

    Example:
        >>> round(float(sphere_anharmonicity(cubic=-2 / 3)), 12)  # normalised quadratic x^2/|w|^2
        -4.0
    """
    return -(8 / 3 - 2 * reals("cubic", cubic) + 4 * reals("quadratic", quadratic) ** 2)


@law(
    "sharp",
    "Theorem H.22",
    derived="the energy changes at O(1) rate in tau although the theorem's O(1) bound holds",
)
def sphere_energy_rate(quadratic: ArrayLike = 0.0, cubic: ArrayLike = 0.0) -> Array:
    """Growth rate of the oscillation's excess energy per flow time, for gradient descent with weight decay.

    The excess energy goes as ``exp((4+q) tau)``, ``tau = steps*lr*wd``: negative rates damp the oscillation.

    Args:
        quadratic: ``p2`` of the transverse slope (see `sphere_anharmonicity`).
        cubic: ``p3``.

    Returns:
        Rate per unit of ``tau``.

    Example:
        >>> round(float(sphere_energy_rate(cubic=-19 / 6)), 12)  # the paper's 3-D example
        -5.0
    """
    return 4 + sphere_anharmonicity(quadratic, cubic)


@law("sharp", "Theorem H.22", derived="as on the sphere, for scalar RMSprop in the full space with g = 0")
def full_space_energy_rate(quadratic: ArrayLike = 0.0, cubic: ArrayLike = 0.0, *, c_b: ArrayLike = 2.0) -> Array:
    """Growth rate of the oscillation's excess energy per flow time, for scalar RMSprop.

    ``rate = c_b + p3 - 2 p2^2``. The excess energy goes as ``exp(rate*tau)``, here with ``tau = steps*eta^2``; ``p2,
    p3`` expand the slope across the valley in the Euclidean distance. An exactly quadratic valley amplifies at rate
    ``c_b``.

    Args:
        quadratic: ``p2``.
        cubic: ``p3``.
        c_b: ``(1 - decay)/eta^2``.

    Returns:
        Rate per unit of ``tau``.

    Example:
        >>> float(full_space_energy_rate(cubic=-2.0, c_b=2.0))
        0.0
    """
    return positive_reals("c_b", c_b) + reals("cubic", cubic) - 2 * reals("quadratic", quadratic) ** 2


@law("sharp", "Section 4.2", derived="fixed point of the two-step map to second order, for g = 0")
def stability_offset(intrinsic_lr: ArrayLike, *, quadratic: ArrayLike = 0.0, cubic: ArrayLike = 0.0) -> Array:
    """Mean stability ratio at the fixed point of the oscillation on the sphere, slightly off 1.

    ``R = 1 - q lr wd/4``, ``q`` of `sphere_anharmonicity`. Negative ``q`` puts the sharpness slightly above ``2/eta``
    even after averaging.

    Args:
        intrinsic_lr: ``lr*wd``.
        quadratic: ``p2`` of the transverse slope (see `sphere_anharmonicity`).
        cubic: ``p3``.

    Returns:
        Mean stability ratio, dimensionless.

    Example:
        >>> round(float(stability_offset(0.01, cubic=-19 / 6)), 12)  # q = -9
        1.0225
    """
    return 1 - sphere_anharmonicity(quadratic, cubic) * intrinsic_rate(intrinsic_lr) / 4


@law(
    "sharp",
    "Appendix F",
    derived="symmetry: both steps turn by 2*angle, and a stationary norm needs cos = 1 - lr*wd",
)
def two_cycle_angle(intrinsic_lr: ArrayLike) -> Array:
    """Angle between the minimum and the exact 2-cycle around it, at the flattest point of the valley (``g = 0``).

    ``sin^2(angle) = lr wd/2``. Exact for every ``lr*wd`` and every transverse profile that is even about the minimum.

    Args:
        intrinsic_lr: ``lr*wd``.

    Returns:
        Angle in radians; the direction turns by twice this at every step.

    Raises:
        EquilibriaError: ``intrinsic_lr`` is outside (0, 1).

    Example:
        >>> import math
        >>> angle = float(two_cycle_angle(0.04))  # the paper's run ends in (0.8, 0.6, 0) <-> (0.6, 0.8, 0)
        >>> round(math.cos(math.pi / 4 - angle), 12)
        0.8
    """
    return angle_from_chord_sq(2 * intrinsic_rate(intrinsic_lr)) / 2
