"""Problems whose sharpness-reduction flow has a closed form: a 3-D sphere, a valley, linear regression with BatchNorm.

The flow itself, and its two clocks, are in `flow`. Time is ``steps*lr*wd`` since the stability ratio crossed 1, except
for scalar RMSprop (`rmsprop_valley_position`), where it is ``steps*eta^2``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, within
from equilibria.theory._reals import Array, intrinsic_rate, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law


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

    Example:
        >>> round(float(np.sin(sphere3d_angle(np.arcsin(0.8), time=np.log(4 / 3)))), 12)  # tan: 4/3 -> 1
        0.707106781187
    """
    angle = reals("start", start, above=-np.pi / 2, below=np.pi / 2)
    tangent: Array = np.tan(angle) * np.exp(-nonnegative_reals("time", time))
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

    Example:
        >>> [round(rmsprop_valley_position(2.0, time=3.0, c_b=c_b), 4) for c_b in (0.25, 1.0, 2.0, 4.0)]
        [1.7384, 1.5302, 1.4534, 1.4033]
    """
    from scipy.optimize import brentq

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
        raise EquilibriaError(
            f"got inputs {x.shape}; expected affinely independent rows, so that a fit is exact", argument="inputs"
        )
    positive_reals("variance of targets", y.var())
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
        raise EquilibriaError(f"got weight {w.shape}; expected {x.shape[1:]}", argument="weight")
    centred = x - x.mean(axis=0)
    scale = y.std() / positive_reals("standard deviation of the pre-activation", (centred @ w).std())
    left = np.exp(-within("time", time, low=0))
    null_part = scale * (w - np.linalg.pinv(centred) @ (centred @ w)) * left
    distance, size = float(np.linalg.norm(null_part)), float(np.linalg.norm(flat.min_norm_weight))
    sharpness = flat.min_sharpness * (1 + (distance / size) ** 2)
    return RegressionFlow(flat.min_norm_weight + null_part, distance, sharpness, 2 * distance / size)


@law("sharp", "Theorem 5.1 and Appendix F", derived="both closed-form flows shrink by c = 1 - lr*wd per step")
def gap_closing_step(
    gap: ArrayLike, tolerance: ArrayLike, *, intrinsic_lr: ArrayLike, crossing: ArrayLike = 0.0
) -> Array:
    """Step at which the gap to the flattest minimum falls below a tolerance.

    ``crossing + ln(gap/tolerance)/(-ln c)``, ``c = 1 - lr*wd``. For flows with ``gap(time) = gap exp(-time)``:
    ``tan(angle)`` of `sphere3d_angle`, ``distance`` of `regression_flow`. To leading order ``ln(gap/tol)/(lr*wd)``
    steps.

    Args:
        gap: gap when the stability ratio crosses 1.
        tolerance: gap to reach.
        intrinsic_lr: ``lr*wd``.
        crossing: step of that crossing (`stability.crossing_time`).

    Returns:
        Step number (real); ``crossing`` itself if the gap is small enough already.

    Example:
        >>> round(float(gap_closing_step(1.0, 0.02, intrinsic_lr=1e-4)))
        39118
    """
    shrink = np.maximum(np.log(positive_reals("gap", gap) / positive_reals("tolerance", tolerance)), 0.0)
    steps: Array = shrink / -np.log1p(-intrinsic_rate(intrinsic_lr))
    return reals("crossing", crossing) + steps
