"""Angles over one and many steps, and the exact balance between turning, decay and norm drift."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, whole
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.identified import Identified
from equilibria.theory.memory import Memory, ema_memory
from equilibria.theory.moments import angle_from_chord_sq
from equilibria.theory.rules import SGD, AdamL2, AdamW, Lion, Muon, Rule, check_rule, closed_rule


@law(
    "smd",
    "Fig. 7; explr Fig. 5",
    derived="exact recursions for the cosine between weights n steps apart in the noise-dominated equilibrium",
)
def n_step_angles(rule: Rule, steps: int, *, unit_grad_sq: float | None = None, dim: float | None = None) -> Array:
    """Angle between weights 0, 1, ..., ``steps`` steps apart, in equilibrium with uncorrelated gradients.

    With b_n = cos(angle_n), eps = lr wd and a = momentum: plain SGD ``b_n = (1-eps)^n``; heavy ball ``b_{n+1} =
    (1+a-eps) b_n - a b_{n-1}``, b_1 = 1 - eps/(1+a); Nesterov ``(b, m) <- ((1-eps(1+a)) b - a^2 m, a m + eps b)``, m_0
    = -eps(1+2a)/D; decoupled decay ``b_{n+1} = (1-eps) b_n + pull_n``, the pull from the memory of the update. Computed
    in 1 - b, which keeps the digits of small angles.

    Args:
        rule: the optimizer.
        steps: largest distance n.
        unit_grad_sq: L, for Adam with L2 only, and for a measured law whose decay depends on the gradient.
        dim: number of entries, for the same.

    Returns:
        Angles in radians for n = 0..steps. Not included: the ballistic part of a persistent mean gradient.

    Example:
        The per-epoch angle of a common CIFAR setting (lr 0.1, wd 5e-4, momentum 0.9, 391 steps):

        >>> from equilibria.theory import SGD
        >>> round(math.degrees(n_step_angles(SGD(0.1, 5e-4, momentum=0.9), 391)[-1]), 2)
        34.35
    """
    check_rule(rule)
    n = whole("steps", steps)
    if isinstance(rule, AdamL2):
        # At a constant second moment this is heavy ball with momentum b1, dampened by b1.
        b1 = rule.betas[0]
        eps = rule.decay_share(unit_grad_sq=unit_grad_sq, dim=dim) * (1 - b1)
        apart = _heavy_ball_apart(eps, b1, n)
    elif isinstance(rule, SGD):
        rule.equilibrium()
        nesterov = _nesterov_apart if rule.nesterov else _heavy_ball_apart
        apart = nesterov(rule.decay_per_step, rule.momentum, n)
    else:
        share = _share(rule, unit_grad_sq, dim)
        if not isinstance(rule, Identified):
            rule.equilibrium()
        apart = _decoupled_apart(share, update_memory(rule), n)
    return angle_from_chord_sq(2 * apart)


def _share(rule: Rule, unit_grad_sq: float | None, dim: float | None) -> float:
    """The share of the weight that a decay which is not in the momentum removes per step, in equilibrium."""
    if not isinstance(rule, Identified) or not rule.is_coupled:
        return rule.decay_per_step
    norm: Any = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).norm  # raises without the scales
    return float(rule.motion(norm**2, unit_grad_sq=unit_grad_sq, dim=dim)[1])


def update_memory(rule: Rule) -> Memory:
    """Autocorrelation of a rule's update: of the momentum where the update is its average."""
    if isinstance(rule, Lion | Muon | Identified):
        return rule.memory
    return ema_memory(rule.betas[0] if isinstance(rule, AdamW | AdamL2) else rule.momentum)


def _heavy_ball_apart(eps: float, a: float, steps: int) -> Array:
    """1 - b_n."""
    apart = [0.0, eps / (1 + a)]
    for _ in range(steps - 1):
        apart.append(eps + (1 + a - eps) * apart[-1] - a * apart[-2])
    return np.array(apart[: steps + 1])


def _nesterov_apart(eps: float, a: float, steps: int) -> Array:
    apart, m = [0.0], -eps * (1 + 2 * a) / (1 + a + a * eps * (1 + 2 * a))
    for _ in range(steps):
        b = 1 - apart[-1]
        apart.append(apart[-1] + eps * (1 + a) * b + a * a * m)
        m = a * m + eps * b
    return np.array(apart)


def _decoupled_apart(eps: float, memory: Memory, steps: int) -> Array:
    """1 - b_n; <u_{t+n}, w_t> is the part of the memory left n steps later."""
    first, decay = np.array(memory.first), np.array(memory.decay)
    pull = eps * (2 - eps) / memory.total(eps) * first / (1 - decay * (1 - eps))
    apart = [0.0]
    for _ in range(steps):
        apart.append(eps + (1 - eps) * apart[-1] - float(np.sum(pull)))
        pull = pull * decay
    return np.array(apart)


@law(
    "smd",
    "§6, Fig. 7, remark 3",
    corrected="one-step angles shrink with momentum, the long-run diffusion grows by 1/(1-a); both scale with lr",
)
def angular_diffusion(rule: Rule, *, unit_grad_sq: float | None = None, dim: float | None = None) -> float:
    """Squared angle per step over long distances in equilibrium.

    ``2 eps/(1-a)`` for SGD and Nesterov with momentum a, ``2 eps`` for decoupled decay, eps = lr wd; for Adam with L2
    twice its `AdamL2.decay_share`.

    Args:
        rule: the optimizer.
        unit_grad_sq: L, for Adam with L2 only, and for a measured law whose decay depends on the gradient.
        dim: number of entries, for the same.

    Returns:
        Radians squared per step, to first order in eps.

    Example:
        >>> from equilibria.theory import SGD
        >>> round(angular_diffusion(SGD(0.1, 5e-4, momentum=0.9)), 12)
        0.001
    """
    check_rule(rule)
    if isinstance(rule, SGD):
        return 2 * rule.decay_per_step / (1 - rule.momentum)
    if isinstance(rule, AdamL2):
        return 2 * rule.decay_share(unit_grad_sq=unit_grad_sq, dim=dim)
    return 2 * _share(rule, unit_grad_sq, dim)


@law(
    "smd",
    "§6, Fig. 7, 8",
    corrected="the excess under momentum is intra-momentum correlation, not a failure of linear scaling",
)
def linear_scaling_ratio(rule: Rule, factor: int) -> float:
    """Angle over n steps at lr, divided by the angle of one step at n * lr.

    1 for plain SGD to first order. Under momentum a it tends to sqrt((1+a)/(1-a)) for large n = ``factor``, because the
    steps within the memory of the momentum point the same way.

    Args:
        rule: the optimizer at lr.
        factor: n.

    Returns:
        The ratio.

    Example:
        >>> from equilibria.theory import SGD
        >>> rule = SGD(0.1, 1e-3, momentum=0.9)
        >>> round(linear_scaling_ratio(rule, 4), 3), round(linear_scaling_ratio(rule, 16), 3)
        (1.877, 3.135)
    """
    rule = closed_rule(rule)
    n = whole("factor", factor, low=1)
    if isinstance(rule, AdamL2):
        raise EquilibriaError(
            "got AdamL2; expected another rule: its angle scales with lr^(2/3), see translate", argument="rule"
        )
    return float(n_step_angles(rule, n)[-1] / replace(rule, lr=rule.lr * n).equilibrium().angle)


@dataclass(frozen=True, slots=True)
class LogCosBalance:
    """The exact balance of plain SGD over a window: turned = decayed + grown + residual.

    Attributes:
        turned: sum of -ln cos(angle).
        decayed: sum of -ln(1 - lr wd).
        grown: 1/2 ln(||w_T||^2 / ||w_0||^2), the drift of the norm.
        residual: turned - decayed - grown; rounding only if the weight is scale-invariant and the rule is plain SGD.
        expected_rms_angle: root mean square angle implied by decay and drift together.
    """

    turned: float | Array
    decayed: float | Array
    grown: float | Array
    residual: float | Array
    expected_rms_angle: float | Array


@law("smd", "eq. (12)", derived="cos(angle) = (1 - lr wd) ||w|| / ||w'||, summed; any gradients, any schedule")
def log_cos_balance(angles: ArrayLike, lr: ArrayLike, *, weight_decay: ArrayLike, norm_sq: ArrayLike) -> LogCosBalance:
    """Compare measured angles with weight decay and norm drift; exact for SGD without momentum and any gradients.

    ``sum -ln cos(angle_t) = -sum ln(1 - wd lr_t) + 1/2 ln(||w_T||^2 / ||w_0||^2)``.

    Args:
        angles: angle of each step in radians, time on the first axis, any trailing axes.
        lr: learning rate of each step, or one number.
        weight_decay: weight decay of each step, or one number.
        norm_sq: ||w||^2 at the beginning and the end of the window (other entries are ignored).

    Returns:
        The balance, each field of the trailing shape.

    Example:
        >>> from equilibria.theory import SGD, cold_start, evolve
        >>> rule = SGD(0.1, 0.05)
        >>> path = evolve(rule, 50, start=cold_start(rule, 0.3))
        >>> abs(log_cos_balance(path.angle, 0.1, weight_decay=0.05, norm_sq=path.norm_sq).residual) < 1e-12
        True
    """
    delta = reals("angle", angles, low=0, below=math.pi / 2)
    if not delta.ndim or not delta.size:
        raise EquilibriaError(f"got angles of shape {delta.shape}; expected one angle per step", argument="angles")
    squared = reals("norm_sq", norm_sq, above=0)
    decay = reals("lr", lr, low=0) * reals("weight_decay", weight_decay, low=0)
    is_window = squared.ndim and len(squared) >= 2 and squared.shape[1:] == delta.shape[1:]
    if not is_window or decay.shape not in ((), (1,), delta.shape):
        raise EquilibriaError(
            f"got norm_sq of shape {squared.shape} and lr * weight_decay of shape {decay.shape}, angles {delta.shape}; "
            "expected ||w||^2 at both ends of the window, and one lr and weight decay or one per angle"
        )
    turned = np.sum(-0.5 * np.log1p(-(np.sin(delta) ** 2)), axis=0)
    decayed = -np.sum(np.log1p(-np.broadcast_to(reals("lr * weight_decay", decay, below=1), delta.shape)), axis=0)
    grown = 0.5 * np.log(squared[-1] / squared[0])
    rms_angle = np.arccos(np.exp(-np.maximum((decayed + grown) / len(delta), 0.0)))
    fields = (turned, decayed, grown, turned - decayed - grown, rms_angle)
    return LogCosBalance(*(float(field) if delta.ndim == 1 else field for field in fields))
