"""Exact identities of squared norms along SGD with momentum on a scale-invariant loss, and their consequences.

``R_t = ||w_t||²`` and ``D_t = ||w_{t+1} - w_t||²``. Only the orthogonality of gradient and weights is used,
so the identities hold for every trajectory, in or out of equilibrium: a measured residual means a broken
assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law


def _trajectory(norm_sq: ArrayLike, step_sq: ArrayLike, *, least: int) -> tuple[Array, Array]:
    """Squared norms and squared steps with time on the first axis, one norm more than steps."""
    norms, moved = reals("norm_sq", norm_sq, low=0), reals("step_sq", step_sq, low=0)
    if moved.ndim == 0 or len(moved) < least or norms.shape != (len(moved) + 1, *moved.shape[1:]):
        raise EquilibriaError(
            f"got norm_sq of shape {norms.shape} and step_sq of shape {moved.shape}; expected time on the "
            "first axis, "
            f"at least {least} steps and one norm more than steps"
        )
    return norms, moved


def _along_time(setting: Array, name: str, like: Array) -> Array:
    """A number, or one value per step, shaped to broadcast along the first axis of ``like``."""
    if setting.shape not in {(), like.shape[:1]}:
        raise EquilibriaError(
            f"got {name} of shape {setting.shape}; expected a number or {len(like)} values", argument=name
        )
    return np.broadcast_to(setting.reshape(-1, *[1] * (like.ndim - 1)), (len(like), *[1] * (like.ndim - 1)))


@law(
    "explr",
    "Appendix A.2, eq. 11",
    corrected="the proof's P(t) has D_{t-1} on the right and enters with a factor 2; eq. 11 itself is right",
)
def norm_residual(
    norm_sq: ArrayLike,
    step_sq: ArrayLike,
    *,
    lr: ArrayLike,
    weight_decay: ArrayLike,
    momentum: ArrayLike = 0.0,
) -> Array:
    """Residual (left minus right side) of the exact norm identity, zero for a scale-invariant weight.

    ``(R_{t+1} - R_t)/lr_t - momentum_t (R_t - R_{t-1})/lr_{t-1} = D_t/lr_t + momentum_t D_{t-1}/lr_{t-1}
    - 2 weight_decay_t R_t``. Li & Arora, eq. 11; valid for settings that vary.

    Args:
        norm_sq: ``R_0 ... R_T``, time on the first axis, any trailing axes.
        step_sq: ``D_0 ... D_{T-1}``.
        lr: a number or one value per step, above 0.
        weight_decay: a number or one value per step, at least 0.
        momentum: a number or one value per step, in [0, 1).

    Returns:
        The residual at ``t = 1 ... T-1``, in units of squared norm over learning rate.

    Raises:
        EquilibriaError: bad input or shapes that do not fit.

    Example:
        >>> import numpy as np
        >>> R, D = [1.0, 1.25, 1.5, 1.75], [0.25, 0.25, 0.25]  # orthogonal steps of length 1/2
        >>> norm_residual(R, D, lr=0.1, weight_decay=0.0).tolist()
        [0.0, 0.0]
    """
    norms, moved = _trajectory(norm_sq, step_sq, least=2)
    eta = _along_time(reals("lr", lr, above=0), "lr", moved)
    decay = _along_time(reals("weight_decay", weight_decay, low=0), "weight_decay", moved)[1:]
    g = _along_time(reals("momentum", momentum, low=0, below=1), "momentum", moved)[1:]
    outward = (np.diff(norms, axis=0) - moved) / eta
    inward = (np.diff(norms, axis=0) + moved) / eta
    return outward[1:] - g * inward[:-1] + 2 * decay * norms[1:-1]


@dataclass(frozen=True, slots=True, eq=False)
class WindowIdentity:
    """Mean squared step over a window, measured and implied by the norms.

    Attributes:
        norm_sq: mean of ``R_t`` over the window.
        step_sq: mean of ``D_t`` over the window, measured.
        implied_step_sq: the same from the norms and the two ends of the window; exact.
        stationary_step_sq: ``2 lr weight_decay/(1 + momentum)`` times ``norm_sq``: right only at
            stationarity.
    """

    norm_sq: Array
    step_sq: Array
    implied_step_sq: Array
    stationary_step_sq: Array


@law(
    "explr",
    "Theorem B.2",
    derived="eq. 11 summed over a finite window keeps the end terms, so it holds before stationarity too",
)
def window_identity(
    norm_sq: ArrayLike, step_sq: ArrayLike, *, lr: float, weight_decay: float, momentum: float = 0.0
) -> WindowIdentity:
    """Mean squared step over a window of constant settings from the norms alone, exact at any time.

    Over ``t = b ... T-1``, ``N = T - b``: ``(1 + momentum) mean(D) = 2 lr weight_decay mean(R)
    + [(R_T - R_b) - momentum (R_{T-1} - R_{b-1})]/N + momentum (D_{T-1} - D_{b-1})/N``.
    At stationarity the ends vanish and Li & Arora's Theorem B.2 remains.

    Args:
        norm_sq: ``R_{b-1} ... R_T``, time on the first axis, any trailing axes.
        step_sq: ``D_{b-1} ... D_{T-1}``.
        lr: learning rate, above 0.
        weight_decay: coupled weight decay, at least 0.
        momentum: in [0, 1).

    Returns:
        `WindowIdentity`, each field of the trailing shape.

    Raises:
        EquilibriaError: bad input or shapes that do not fit.

    Example:
        >>> R, D = [1.0, 1.25, 1.5, 1.75], [0.25, 0.25, 0.25]  # orthogonal steps, not stationary
        >>> window = window_identity(R, D, lr=0.1, weight_decay=0.0)
        >>> print(window.step_sq, window.implied_step_sq, window.stationary_step_sq)
        0.25 0.25 0.0
    """
    norms, moved = _trajectory(norm_sq, step_sq, least=2)
    g = within("momentum", momentum, low=0, below=1)
    rate = 2 * positive("lr", lr) * within("weight_decay", weight_decay, low=0)
    span = len(moved) - 1
    mean_norm = norms[1:-1].mean(axis=0)
    ends = (norms[-1] - norms[1]) - g * (norms[-2] - norms[0]) + g * (moved[-1] - moved[0])
    return WindowIdentity(
        norm_sq=mean_norm,
        step_sq=moved[1:].mean(axis=0),
        implied_step_sq=(rate * mean_norm + ends / span) / (1 + g),
        stationary_step_sq=rate * mean_norm / (1 + g),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DecayFreeNorm:
    """Squared norms implied by the steps of a run without weight decay.

    Attributes:
        norm_sq: ``R_0 ... R_T``.
        least_increase: lower bound on ``R_{t+1} - R_t``, length T; 0 for an empty start buffer.
    """

    norm_sq: Array
    least_increase: Array


@law(
    "explr",
    "Theorem B.1",
    corrected="the start term is +momentum^(t+1) (lr_t/lr_{-1}) (R_0 - R_{-1}) in both parts, and part 2 needs R_0",
)
def decay_free_norm(
    norm_sq: float,
    step_sq: ArrayLike,
    *,
    lr: ArrayLike,
    momentum: float = 0.0,
    earlier_increase: float = 0.0,
    earlier_step_sq: float = 0.0,
    earlier_lr: float = 1.0,
) -> DecayFreeNorm:
    """Squared norm without weight decay as a sum over the squared steps.

    ``(R_{t+1} - R_t)/lr_t = momentum^(t+1) (R_0 - R_{-1})/lr_{-1}
    + sum_{i<=t} momentum^(t-i) (D_i/lr_i + momentum
    D_{i-1}/lr_{i-1})``, never below its first term; with constant lr ``R_{t+1} = R_0 + sum_i (1 -
    momentum^(t-i+1))/(1 - momentum) (D_i + momentum D_{i-1}) + ...``. Li & Arora, Theorem B.1, corrected.

    Args:
        norm_sq: ``R_0``.
        step_sq: ``D_0 ... D_{T-1}``.
        lr: a number or one value per step, above 0.
        momentum: in [0, 1).
        earlier_increase: ``R_0 - R_{-1}``; 0 for an empty start buffer.
        earlier_step_sq: ``D_{-1}``; 0 for an empty start buffer.
        earlier_lr: ``lr_{-1}``.

    Returns:
        `DecayFreeNorm`.

    Raises:
        EquilibriaError: bad input.

    Example:
        >>> decay_free_norm(1.0, [0.25, 0.25], lr=0.1, momentum=0.5).norm_sq.tolist()
        [1.0, 1.25, 1.75]
    """
    from scipy.signal import lfilter

    start = within("norm_sq", norm_sq, low=0)
    moved = reals("step_sq", step_sq, low=0)
    whole("number of steps", moved.size if moved.ndim == 1 else 0, low=1)
    g = within("momentum", momentum, low=0, below=1)
    eta = _along_time(reals("lr", lr, above=0), "lr", moved)
    before = positive("earlier_lr", earlier_lr)
    speed = float(reals("earlier_increase", earlier_increase)) / before
    rates = np.concatenate([[within("earlier_step_sq", earlier_step_sq, low=0) / before], moved / eta])
    growth = lfilter([1.0], [1.0, -g], rates[1:] + g * rates[:-1], zi=np.array([g * speed]))[0]
    return DecayFreeNorm(
        norm_sq=start + np.concatenate([[0.0], np.cumsum(eta * growth)]),
        least_increase=eta * speed * g ** np.arange(1.0, moved.size + 1),
    )


@law(
    "explr",
    "Theorem 3.1",
    corrected="the bound is on the angle, which is pi times the training error; it needs lr·weight_decay > "
    "2 angle², and"
    " the logarithm counts only when positive",
)
def cone_exit_bound(
    lr: float, weight_decay: float, *, angle: float, norm: ArrayLike, dim: int, failure: float = 0.01
) -> Array:
    """Steps within which normalised logistic regression with weight decay leaves every narrow cone around its optimum.

    From any step, with probability at least ``1 - failure``, the angle to the separating direction exceeds ``angle`` at
    least once within ``max(0, ln(32 norm² angle/(lr sqrt(dim)))/(2 (lr weight_decay - 2 angle²))) + 6 ln(1/failure)``
    steps of single-sample SGD without momentum: weight decay and normalisation together never converge. Li & Arora,
    Theorem 3.1, corrected wording; training error e corresponds to ``angle = pi e``.

    Args:
        lr: learning rate, above 0.
        weight_decay: weight decay, with ``2 angle² < lr·weight_decay < 1``.
        angle: half-opening of the cone, radians.
        norm: norm of the weights at the start; arrays broadcast.
        dim: number of inputs, at least 2.
        failure: probability with which the bound may fail, in (0, 1).

    Returns:
        The number of steps.

    Raises:
        EquilibriaError: bad input, or a cone too wide for the theorem.

    Example:
        >>> print(f"{cone_exit_bound(0.5, 0.1, angle=0.1, norm=1.0, dim=2):.2f}")
        52.79
    """
    phi, eta = positive("angle", angle), positive("lr", lr)
    product = eta * positive("weight_decay", weight_decay)
    if not 2 * phi**2 < product < 1:
        raise EquilibriaError(f"got lr*weight_decay={product:g}; expected 2*angle^2 = {2 * phi**2:g} < it < 1")
    inputs, odds = whole("dim", dim, low=2), within("failure", failure, above=0, below=1)
    size = reals("norm", norm, above=0)
    shrinking = np.log(32 * size**2 * phi / (eta * np.sqrt(inputs))) / (2 * (product - 2 * phi**2))
    bound: Array = (np.maximum(0.0, shrinking) - 6 * np.log(odds))[()]
    return bound
