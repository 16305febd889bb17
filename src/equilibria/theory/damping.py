"""Whether the oscillation at the edge of stability is damped or amplified, and where it comes to rest.

`hamiltonian` conserves the energy. On the time-scale of the flow the shape of the valley changes it: with the slope
across the valley ``lambda1 (a + p2 a^2 + p3 a^3)`` at displacement ``a``, ``quadratic`` is ``p2`` and ``cubic`` is
``p3``.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from equilibria.theory._reals import Array, intrinsic_rate, positive_reals, reals
from equilibria.theory.citations import law
from equilibria.theory.moments import angle_from_chord_sq


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

    Raises:
        EquilibriaError: a value is not finite.

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

    Raises:
        EquilibriaError: a value is not finite.

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

    Raises:
        EquilibriaError: a value is not finite or out of range.

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

    Raises:
        EquilibriaError: a value is not finite or out of range.

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
