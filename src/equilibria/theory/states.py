"""The state of a weight and its optimizer: second moments, the usual states to start from, and how to rescale one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError
from equilibria.theory import approach, moments
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import constant_update_point
from equilibria.theory.identified import Identified, identified_point
from equilibria.theory.memory import lion_equilibrium_traces
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, check_rule


@dataclass(frozen=True, slots=True)
class State:
    """Second moments of the weight and its optimizer state, one entry per layer.

    Attributes:
        norm_sq: P = ||w||^2.
        radial: Q = <w, buffer>.
        buffer_sq: R = ||buffer||^2.
        second: second moment per entry (Adam), else 0.
        memory: correlation of the weight with past updates, one entry per component of the rule's memory (Lion, Muon),
            shape (components,) or, where it differs between layers, (components, layers).
        steps_done: optimizer steps taken so far; infinite for a settled state.
    """

    norm_sq: Array
    radial: Array
    buffer_sq: Array
    second: Array
    memory: Array
    steps_done: float


_SMALLEST_NORM, _LARGEST_NORM = 1e-70, 1e70  # powers of the norm up to the fourth, and L over them, stay in float64


def cold_start(rule: Rule, norm: ArrayLike) -> State:
    """The state of a fresh optimizer on weights of the given norm(s), each between 1e-70 and 1e70."""
    check_rule(rule)
    array = reals("norm", norm, low=_SMALLEST_NORM, high=_LARGEST_NORM)
    zero = np.zeros_like(array)
    return State(array**2, zero, zero, zero, np.zeros(memory_size(rule)), 0.0)


def settled(rule: Rule, *, unit_grad_sq: ArrayLike = 1.0, dim: ArrayLike = 1.0) -> State:
    """The state of a weight in equilibrium with ``rule``, every average of the optimizer included.

    Args:
        rule: the optimizer.
        unit_grad_sq: L per layer (SGD, SGDW, Adam with L2).
        dim: number of entries per layer (AdamW, Adam with L2, Lion); for Muon the mean square of the adjusted update.

    Returns:
        The state.

    Example:
        >>> from equilibria.theory import SGD, evolve
        >>> rule = SGD(0.1, 5e-4, momentum=0.9)
        >>> path = evolve(rule, 100, start=settled(rule))
        >>> bool(np.allclose(path.norm_sq, path.norm_sq[0], rtol=1e-12))
        True
    """
    check_rule(rule)
    if isinstance(rule, Lion | Muon):
        return _settled_constant(rule, reals("dim", dim, above=0))
    if isinstance(rule, Identified):
        return _settled_identified(rule, reals("unit_grad_sq", unit_grad_sq, above=0), reals("dim", dim, above=0))
    if isinstance(rule, AdamL2) and (np.ndim(unit_grad_sq) or np.ndim(dim)):
        return _stack([settled(rule, unit_grad_sq=x, dim=d) for x, d in np.broadcast(unit_grad_sq, dim)])
    norm = rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).norm  # type: ignore[arg-type]
    p = np.asarray(norm, dtype=np.float64) ** 2
    if isinstance(rule, AdamW | AdamL2):
        return _settled_adam(rule, p, unit_grad_sq=np.asarray(unit_grad_sq, dtype=np.float64), dim=np.asarray(dim))
    ratios, _ = approach.fixed_point(*step_of(rule, rule.lr, rule.weight_decay, rule.momentum))
    return State(p, ratios[1] * p, ratios[2] * p, np.zeros_like(p), np.zeros(0), math.inf)


def _stack(states: list[State]) -> State:
    """One state of many layers from states of one layer each (rules whose equilibrium is solved layer by layer)."""
    p, q, r, v = (
        np.array([getattr(state, name) for state in states]) for name in ("norm_sq", "radial", "buffer_sq", "second")
    )
    return State(p, q, r, v, states[0].memory, states[0].steps_done)


def _settled_constant(rule: Lion | Muon, size: Array) -> State:
    rule.equilibrium()  # raises where there is no equilibrium
    norm_sq = np.asarray(size * constant_update_point(rule.lr, rule.weight_decay, rule.memory).norm_sq)
    zero, kept = np.zeros_like(norm_sq), 1 - rule.decay_per_step
    if isinstance(rule, Muon):
        return State(norm_sq, zero, zero, zero, rule.lr / (1 - np.array(rule.memory.decay) * kept), math.inf)
    buffer_sq, traces = lion_equilibrium_traces(rule.betas, norm_sq, lr=rule.lr, kept=kept)
    return State(norm_sq, zero, buffer_sq, zero, traces, math.inf)


def _settled_identified(rule: Identified, unit_grad_sq: Array, dim: Array) -> State:
    rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)  # raises where there is no equilibrium
    norm_sq = identified_point(rule, rule.lr, rule.weight_decay, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
    length, share = rule.motion(norm_sq, unit_grad_sq=unit_grad_sq, dim=dim)
    decay = np.reshape(rule.memory.decay, (-1, *(1,) * norm_sq.ndim))
    zero = np.zeros_like(norm_sq)
    return State(norm_sq, zero, zero, zero, length / (1 - decay * (1 - share)), math.inf)


def _settled_adam(rule: AdamW | AdamL2, p: Array, *, unit_grad_sq: Array, dim: Array) -> State:
    coupled = rule.weight_decay if isinstance(rule, AdamL2) else 0.0
    second = (unit_grad_sq / p + coupled**2 * p) / dim
    k = rule.lr / np.sqrt(second)
    b1 = rule.betas[0]
    if isinstance(rule, AdamW):
        ratios, _ = approach.fixed_point(moments.sgdw_step, 1.0, rule.decay_per_step, b1)
        return State(p, ratios[1] * p / k, ratios[2] * p / k / k, second, np.zeros(0), math.inf)
    decay = float(k) * coupled
    ratios, _ = approach.fixed_point(moments.heavy_ball_step, 1.0, decay, b1, 1 - b1)
    return State(p, ratios[1] * p / k, ratios[2] * p / k / k, second, np.zeros(0), math.inf)


@law("smd", "§5.2", corrected="the optimizer state is rescaled with the weights: first moments by 1/r, second by 1/r^2")
def rescaled(state: State, factor: ArrayLike) -> State:
    """The state after multiplying weights by r, first moments by 1/r and second moments by 1/r^2.

    Args:
        state: the state before the change.
        factor: r, one number or one per layer; see `rescale_factors`.

    Returns:
        The new state; <w, buffer> does not change.
    """
    r = reals("factor", factor, above=0)
    memory = state.memory if state.memory.ndim > 1 else state.memory.reshape(-1, *(1,) * r.ndim)
    return dataclasses.replace(
        state,
        norm_sq=state.norm_sq * r**2,
        buffer_sq=state.buffer_sq / r**2,
        second=state.second / r**2,
        memory=memory * r,
    )


def memory_size(rule: Rule) -> int:
    """Number of components of the rule's memory; 0 for rules without one."""
    return len(rule.memory.decay) if isinstance(rule, Lion | Muon | Identified) else 0


def adam_settings(rule: AdamW | AdamL2, lr: Any, weight_decay: Any, count: Any) -> tuple[Any, Any, Any]:
    """The settings of `moments.adam_step` at the count-th step (from 1): step size, share lost, coupled decay."""
    b1, b2 = rule.betas
    size = lr * np.sqrt(1 - b2**count) / (1 - b1**count)
    nothing = 0 * weight_decay
    return (size, lr * weight_decay, nothing) if isinstance(rule, AdamW) else (size, nothing, weight_decay)


def _without_stale_buffer(step: moments.MomentStep) -> moments.MomentStep:
    """The step, changed to leave no buffer where momentum is 0."""

    def cleared(p: Any, q: Any, r: Any, n: Any, lr: Any, wd: Any, a: Any, own: Any) -> tuple[Any, Any, Any, Any]:
        p, q, r, moved = step(p, q, r, n, lr, wd, a, own)
        kept = a > 0
        return p, q * kept, r * kept, moved

    return cleared


def step_of(rule: SGD | SGDW, lr: Any, weight_decay: Any, momentum: Any, *, correlation: Any = 0.0) -> tuple[Any, ...]:
    """The rule's step function and its four settings: lr, weight decay, momentum, and one that depends on the rule.

    The fourth is the correlation for Nesterov and 1 - dampening otherwise. As in torch, a step at momentum 0 leaves no
    buffer and damps nothing.
    """
    step: moments.MomentStep
    own: Any
    if isinstance(rule, SGDW):
        step, own = moments.sgdw_step, 1
    elif rule.nesterov:
        step, own = moments.nesterov_step, correlation
    else:
        step, own = moments.heavy_ball_step, 1 - rule.dampening * np.sign(momentum)
    return step if np.all(momentum) else _without_stale_buffer(step), lr, weight_decay, momentum, own


# ---- rescaling into another equilibrium


@dataclass(frozen=True, slots=True)
class RescaleFactors:
    """Factors to apply between one `optimizer.step()` and the next forward pass.

    Attributes:
        weight: r, for the scale-invariant weight (and its EMA, SWA and float32 master copies).
        first_moment: 1/r, for momentum buffers, `exp_avg`, and a gradient already accumulated.
        second_moment: 1/r^2, for `exp_avg_sq`.
        running_mean: r, for the running mean of the BatchNorm that the weight feeds: b + r (mean - b), b the bias
            between.
        running_var: r^2, for the running variance of that BatchNorm.
    """

    weight: float
    first_moment: float
    second_moment: float
    running_mean: float
    running_var: float


@law(
    "smd",
    "§5.2",
    corrected="optimizer state and BatchNorm's running statistics are rescaled too; any rule, any change of lr, wd",
)
def rescale_factors(old: Rule, new: Rule, *, unit_grad_sq: float = 1.0, dim: float = 1.0) -> RescaleFactors:
    """Factors that move a weight from the equilibrium of ``old`` to that of ``new``.

    ``r = ||w*_new|| / ||w*_old||`` from the exact fixed points (to first order for a measured law with coupled decay).
    For lr / k it is close to k^(-1/4) (SGD, Nesterov, SGDW), k^(-1/2) (AdamW, Lion, Muon), k^(-1/3) (Adam with L2); the
    papers rescale the weights only, which leaves the angle off by 33 % (SGD) or 190 % (AdamW) after lr / 10.

    Args:
        old: the rule before the change.
        new: the same kind of rule after it.
        unit_grad_sq: L; matters for Adam with L2 only.
        dim: number of entries; matters for Adam with L2 only.

    Returns:
        The factors; all 1 if nothing changes.

    Example:
        >>> from equilibria.theory import SGD
        >>> factors = rescale_factors(SGD(0.1, 5e-4, momentum=0.9), SGD(0.02, 5e-4, momentum=0.9))
        >>> round(factors.weight, 3), round(factors.first_moment, 3)
        (0.669, 1.495)
    """
    if type(old) is not type(new):
        raise EquilibriaError(
            f"got {type(old).__name__} and {type(new).__name__}; expected two rules of one kind: a change of optimizer "
            "leaves no state to rescale"
        )
    if isinstance(old, Identified) and isinstance(new, Identified) and new.is_coupled:
        r = new.first_order_norm / old.first_order_norm
    else:
        before = settled(old, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
        after = settled(new, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
        r = math.sqrt(float(after / before))
    return RescaleFactors(r, 1 / r, 1 / r**2, r, r**2)
