"""The effective learning rate as a scheduler: gradient descent with weight decay next to RMSprop.

On a scale-invariant loss, gradient descent with coupled weight decay is projected gradient descent whose learning rate
``eta`` follows the gradients (GWSI). Its recursion is nearly that of a scalar RMSprop: ``eta = v^(-1/2)`` with a moment
``v`` that averages ``|g|^2/base_lr^2``. Notation as in `stability`; ``c = 1 - intrinsic_lr``, ``intrinsic_lr = lr*wd``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import within
from equilibria.theory._reals import Array, nonnegative_reals, positive_reals, reals
from equilibria.theory.citations import law


@law("sharp", "Theorem B.7", derived="Definition B.6 with Theorem B.7's parameters is a perfect square")
def gwsi_step(effective_lr: ArrayLike, unit_grad_sq: ArrayLike, *, intrinsic_lr: ArrayLike) -> Array:
    """Effective learning rate after one step of GD with weight decay on a scale-invariant loss (GWSI).

    ``1/eta' = c^2 (1/eta + eta |grad L(theta)|^2)`` with ``c = 1 - intrinsic_lr``. Same sequence as
    `gwsi_moment_step`, without its cancellations and without its parameters.

    Args:
        effective_lr: ``eta`` now.
        unit_grad_sq: ``|grad L(theta)|^2`` now.
        intrinsic_lr: ``lr*wd``.

    Returns:
        Effective learning rate of the next step.

    Example:
        >>> float(gwsi_step(0.25, 0.0, intrinsic_lr=0.5))  # no gradient: grows by 1/c^2
        1.0
    """
    eta = positive_reals("effective_lr", effective_lr)
    c = 1.0 - reals("intrinsic_lr", intrinsic_lr, low=0, below=1)
    return eta / (c**2 * (1 + eta**2 * nonnegative_reals("unit_grad_sq", unit_grad_sq)))


@dataclass(frozen=True, slots=True)
class SchedulerParameters:
    """Parameters of a quasi-RMSprop scheduler.

    Attributes:
        base_lr: base learning rate of the scheduler (dimensionless; not the optimiser's ``lr``).
        decay: decay rate of the moment per step.
    """

    base_lr: float
    decay: float


@law("sharp", "Theorem B.7")
def gwsi_parameters(intrinsic_lr: float) -> SchedulerParameters:
    """Exact scheduler parameters of GD with weight decay.

    ``decay = c^4``, ``base_lr = sqrt((1/decay - 1)/2)``; about ``1 - 4 lr wd``, ``sqrt(2 lr wd)``.

    Args:
        intrinsic_lr: ``lr*wd``.

    Returns:
        Parameters for `gwsi_moment_step`.

    Raises:
        EquilibriaError: ``intrinsic_lr`` is outside (0, 1).

    Example:
        >>> parameters = gwsi_parameters(1e-3)
        >>> round(parameters.base_lr / (2 * 1e-3) ** 0.5 - 1, 5)  # 5/4 intrinsic_lr + ...
        0.00125
    """
    log_decay = 4 * np.log1p(-within("intrinsic_lr", intrinsic_lr, above=0, below=1))
    return SchedulerParameters(float(np.sqrt(np.expm1(-log_decay) / 2)), float(np.exp(log_decay)))


@law(
    "sharp",
    "Theorem B.9",
    corrected="Appendix E.2 prints sqrt((decay - 1)/2), which is imaginary, for the base learning rate "
    "sqrt((1/decay - 1)/2) that these parameters approximate",
)
def quasi_rmsprop_parameters(intrinsic_lr: float) -> SchedulerParameters:
    """Parameters with which a plain RMSprop scheduler imitates GD with weight decay.

    ``base_lr = sqrt(2 lr wd)``, ``decay = 1 - 4 lr wd``, for `rmsprop_scheduler_step`. In one step the exact
    moment exceeds its result by ``(1-decay)^2 (6v - 16 G + 4 G^2/v)/16`` with ``G = |g|^2/base_lr^2``.

    Args:
        intrinsic_lr: ``lr*wd``; the theorem needs less than 1/4.

    Returns:
        Scheduler parameters.

    Raises:
        EquilibriaError: ``intrinsic_lr`` is outside (0, 1/4).

    Example:
        >>> quasi_rmsprop_parameters(0.125)
        SchedulerParameters(base_lr=0.5, decay=0.5)
    """
    intrinsic = within("intrinsic_lr", intrinsic_lr, above=0, below=0.25)
    return SchedulerParameters(float(np.sqrt(2 * intrinsic)), 1 - 4 * intrinsic)


@law("sharp", "Definition B.6")
def gwsi_moment_step(moment: ArrayLike, unit_grad_sq: ArrayLike, *, parameters: SchedulerParameters) -> Array:
    """One step of the GWSI scheduler in the form that the paper prints; prefer `gwsi_step`.

    ``v' = b v + (1-b) G + (1-b)^2 G^2/(4 b v)``, ``G = |g|^2/base_lr^2``, ``b = decay``, ``eta = v^(-1/2)``.

    Args:
        moment: ``v``; starts at ``1/eta^2 = c^2 |w|^4 / lr^2``.
        unit_grad_sq: ``|grad L(theta)|^2`` now.
        parameters: from `gwsi_parameters`.

    Returns:
        The next moment.

    Example:
        >>> moment = gwsi_moment_step(16.0, 0.5, parameters=gwsi_parameters(0.01))
        >>> abs(float(moment) ** -0.5 - float(gwsi_step(0.25, 0.5, intrinsic_lr=0.01))) < 1e-15
        True
    """
    v = positive_reals("moment", moment)
    gain = (1 - parameters.decay) * nonnegative_reals("unit_grad_sq", unit_grad_sq) / parameters.base_lr**2
    return parameters.decay * v + gain + gain**2 / (4 * parameters.decay * v)


@law(
    "sharp",
    "Definition B.3",
    corrected="the regime of Appendix B.3 is decay = 1 - C_b*base_lr^2, printed as decay = C_b*base_lr^2",
)
def rmsprop_scheduler_step(moment: ArrayLike, grad_sq: ArrayLike, *, parameters: SchedulerParameters) -> Array:
    """One step of the RMSprop scheduler.

    ``v' = b v + (1-b) |g|^2/base_lr^2``, and ``eta = v^(-1/2)``, with b = ``parameters.decay``.

    Args:
        moment: ``v`` now.
        grad_sq: squared gradient norm now.
        parameters: base learning rate and decay.

    Returns:
        The next moment.

    Example:
        >>> float(rmsprop_scheduler_step(16.0, 1.0, parameters=SchedulerParameters(base_lr=0.5, decay=0.5)))
        10.0
    """
    gain = (1 - parameters.decay) * nonnegative_reals("grad_sq", grad_sq) / parameters.base_lr**2
    return parameters.decay * positive_reals("moment", moment) + gain


@dataclass(frozen=True, slots=True)
class ScalarRmsprop:
    """State of scalar RMSprop.

    Attributes:
        point: parameters, last axis.
        second_moment: moving average of the squared gradient norm, squared gradient units.
    """

    point: Array
    second_moment: Array


@law("sharp", "Definition B.1, eqs. (5)-(6)")
def scalar_rmsprop_step(state: ScalarRmsprop, gradient: ArrayLike, *, parameters: SchedulerParameters) -> ScalarRmsprop:
    """One step of RMSprop with a single moment for the whole vector.

    ``x' = x - base_lr g/sqrt(m)``, then ``m' = decay m + (1-decay)|g|^2``: the step uses the *old* moment.
    ``m = base_lr^2 v`` links it to `rmsprop_scheduler_step`.

    Args:
        state: point and moment now.
        gradient: gradient at the point.
        parameters: base learning rate and decay.

    Returns:
        The next state.

    Raises:
        EquilibriaError: a value is not finite or the moment is not positive.

    Example:
        >>> state = ScalarRmsprop(np.array([1.0]), np.array(4.0))
        >>> state = scalar_rmsprop_step(state, [2.0], parameters=SchedulerParameters(base_lr=0.5, decay=0.75))
        >>> state.point.tolist(), float(state.second_moment)
        ([0.5], 4.0)
    """
    g = reals("gradient", gradient)
    moment = positive_reals("second_moment", state.second_moment)
    point = reals("point", state.point) - parameters.base_lr * g / np.sqrt(moment)[..., None]
    return ScalarRmsprop(point, parameters.decay * moment + (1 - parameters.decay) * np.sum(g * g, axis=-1))
