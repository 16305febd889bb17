"""Optimizers that hold the norm of a weight: the angle of their steps, and the same angles with weight decay.

AdamH, MuonH (Hyperball) and all that bring a weight back to its norm after a step of AdamW, Lion or Muon:

    w' = R (w - lr u) / ||w - lr u||,      ||w|| = R,      r = lr ||u|| / R,      phi the angle between u and w

A step turns the weight by exactly ``atan2(r sin(phi), 1 - r cos(phi))``. With rho = R / ||w - lr u|| it is also
``w' = rho w - rho lr u``: a step of decoupled decay by the share 1 - rho, at the learning rate rho lr. So a sphere is
the equilibrium of some weight decay, and every path with weight decay is a path on a sphere:

    lr on the sphere = c R lr / ((1 - lr wd) ||w||),      ||w|| the norm that weight decay leaves, step by step

if the update has no scale of its own (AdamW, Lion, Muon), because the gradient of a scale-invariant weight has the
same direction at any norm. Its length goes as 1 / ||w||, so that averages with weight decay mix gradients of
different norms while the norm changes, and those on the sphere do not: c^2 is the average of 1 / ||w||^2 over the
memory of the update's size over that of AdamW's second moment; 1 for Lion and Muon. That is right for independent
gradients. With the gradients on the sphere multiplied by R / ||w|| all averages are those with weight decay, c is 1,
and both paths have the same direction at every step, for any gradients.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, scale_number, whole
from equilibria.theory._reals import Array, reals
from equilibria.theory.angles import update_memory
from equilibria.theory.citations import law
from equilibria.theory.equilibrium import constant_update_point
from equilibria.theory.identified import Identified
from equilibria.theory.moments import angle_from_chord_sq
from equilibria.theory.rules import AdamW, Lion, Muon, Rule, check_rule
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.states import cold_start, settled
from equilibria.theory.transient import Trajectory, evolve
from equilibria.theory.translation import Translation

_ROUNDS, _CONVERGED = 200, 1e-13  # of the search for a norm that goes with its own learning rates


@law("", "steps on a sphere", derived="the triangle of w, lr u and w - lr u")
def sphere_angle(ratio: ArrayLike, cosine: ArrayLike = 0.0) -> Array:
    """Angle by which a step turns a weight whose norm is held: ``atan2(r sin(phi), 1 - r cos(phi))``.

    The same for a weight that is not held, as holding it does not turn it.

    Args:
        ratio: r = lr ||u|| / ||w||, lr u the vector that the step subtracts.
        cosine: cos(phi), phi the angle between u and w.

    Returns:
        Radians.

    Example:
        >>> round(float(sphere_angle(0.01)), 8), round(float(sphere_angle(1.0, 0.5)), 6)  # 60 degrees of three
        (0.00999967, 1.047198)
    """
    r, c = reals("ratio", ratio, low=0), reals("cosine", cosine, low=-1, high=1)
    return np.asarray(np.arctan2(r * np.sqrt((1 - c) * (1 + c)), 1 - r * c))


@dataclass(frozen=True, slots=True)
class SphereMotion:
    """How an optimizer moves a weight whose norm is held, once its momentum is filled.

    Attributes:
        angle: root mean square of the radians per step.
        diffusion: radians squared per step over many steps: momentum makes them point the same way.
        cosine: mean cosine between update and weight, below 0: past steps point along the coming one.
        weight_decay: decoupled weight decay with which the optimizer would hold the same norm, at the lr ``lr``.
        lr: learning rate that goes with ``weight_decay``, a little below the sphere's.
    """

    angle: float
    diffusion: float
    cosine: float
    weight_decay: float
    lr: float


@law("", "steps on a sphere", derived="the equilibrium whose norm is that of the sphere, solved for its weight decay")
def sphere_motion(
    rule: Rule, norm: float, *, dim: float | None = None, shape: tuple[int, int] | None = None
) -> SphereMotion:
    """How AdamW, Lion, Muon or a measured law like them moves a weight of constant norm, for random gradients.

    Solves ``r^2 (1-eps)^2 S_eps = eps (2-eps)`` for eps, r = lr ||u|| / R, S_eps the sum of the update's correlations
    through the decay eps: a sphere is the equilibrium of weight decay eps / ((1-eps) lr) at the learning rate (1-eps)
    lr. Squared angles over many steps add up to 2 eps per step.

    Args:
        rule: the optimizer; its weight decay does not matter.
        norm: R, which is held.
        dim: number of entries (AdamW, Lion).
        shape: (rows, columns) (Muon), by default the rule's.

    Returns:
        The motion.

    Raises:
        EquilibriaError: a rule whose step depends on the size of the gradient, or a missing ``dim`` or ``shape``.

    Example:
        Held at its equilibrium norm, a weight turns by its equilibrium angle:

        >>> rule = AdamW(1e-3, 0.1)
        >>> there = rule.equilibrium(dim=10_000)
        >>> round(sphere_motion(rule, there.norm, dim=10_000).angle / there.angle, 3)
        1.0
    """
    rule, size = _sized(rule, dim, shape)
    memory, ratio_sq = update_memory(rule), rule.lr**2 * _update_sq(rule, size) / positive("norm", norm) ** 2
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if ratio_sq * (1 - middle) ** 2 * memory.total(middle) > middle * (2 - middle):
            low = middle
        else:
            high = middle
    eps = (low + high) / 2
    lr = (1 - eps) * rule.lr
    one_minus_cos = float(constant_update_point(lr, eps / lr, memory).one_minus_cos)
    # 1 / rho^2 = 1 - 2 r cos(phi) + r^2
    ratio = math.sqrt(ratio_sq)
    cosine = (1 + ratio_sq - (1 - eps) ** -2) / (2 * ratio)
    return SphereMotion(float(angle_from_chord_sq(2 * one_minus_cos)), 2 * eps, cosine, eps / lr, lr)


# ---- the same path with weight decay and on a sphere


@dataclass(frozen=True, slots=True)
class SphereTranslation(Translation):
    """The same path of directions with weight decay and on a sphere.

    ``rule`` has the largest learning rate of the new schedule.

    Attributes:
        lr: learning rate of every step of the new optimizer.
        angle: predicted radians of every step, the same for both.
        norm: predicted ||w|| before every step with weight decay.
        radius: ||w|| on the sphere.
        gradient: factor on the gradient of every step of the new optimizer.
    """

    lr: Array = dataclasses.field(default_factory=lambda: np.zeros(0))
    angle: Array = dataclasses.field(default_factory=lambda: np.zeros(0))
    norm: Array = dataclasses.field(default_factory=lambda: np.zeros(0))
    radius: float = 1.0
    gradient: Array = dataclasses.field(default_factory=lambda: np.zeros(0))


@law("", "steps on a sphere", derived="lr R / ((1 - lr wd) ||w||), ||w|| from the moment recursion")
def to_sphere(
    rule: Rule,
    schedule: ScheduleLike,
    *,
    steps: int,
    weight_decay: ScheduleLike | None = None,
    init_norm: float | None = None,
    norm: ArrayLike | None = None,
    radius: float | None = None,
    scale_gradients: bool = False,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
) -> SphereTranslation:
    """Learning rates with which an optimizer that holds the norm turns a weight as one with weight decay does.

    ``c_t lr_t R / ((1 - lr_t wd_t) ||w_t||)`` with ||w_t|| by `transient.evolve` and c_t by the module: warm-up, start
    norm and changes of lr included. Weights of other norms or sizes have other learning rates.

    Args:
        rule: AdamW, Lion, Muon or a measured law whose step does not depend on the gradient's size.
        schedule: learning rate of every step with weight decay.
        steps: their number.
        weight_decay: of every step; the rule's own by default.
        init_norm: ||w|| at the start; by default the equilibrium of the first step.
        norm: ||w|| before every step with weight decay, where a run has measured it; by default the predicted one, from
            which a network's is off by a few per cent, because its gradients are not independent.
        radius: R; by default the norm at the start, so that training starts from the same weights.
        scale_gradients: whether you multiply the gradient of every step on the sphere by ``gradient`` of the result,
            R / ||w_t||. With the norms of a run, ``norm``, the path is then that of the run to rounding.
        dim: number of entries (AdamW, Lion).
        shape: (rows, columns) (Muon), by default the rule's.

    Returns:
        The learning rates on the sphere, with angles and norms; ``lr / schedule`` is the factor for a scheduler.

    Example:
        Without a schedule and from its equilibrium norm, a weight on the sphere keeps about the learning rate:

        >>> t = to_sphere(AdamW(1e-3, 0.1), 1e-3, steps=100, dim=10_000)
        >>> t.lr[[0, -1]].round(9).tolist()
        [0.0010001, 0.0010001]
    """
    rule, size = _sized(rule, dim, shape)
    count = whole("steps", steps, low=1)
    lrs = as_schedule(schedule).values(count)
    decays = _decays(rule, weight_decay, count)
    measured = None if norm is None else _measured(norm, count)
    start = init_norm if measured is None else float(measured[0])
    path = _path(rule, lrs, decays, start, size)
    norms = path.norm[:-1] if measured is None else measured
    held = float(norms[0]) if radius is None else positive("radius", radius)
    size_ratio = np.ones(count) if scale_gradients else _relative_size(rule, norms, start)
    on_sphere = held * lrs * size_ratio / ((1 - lrs * decays) * norms)
    return SphereTranslation(
        dataclasses.replace(rule, lr=float(on_sphere.max()), weight_decay=0.0),
        held / float(norms[0]),
        ("direction and angle of every step, as far as ||w|| with weight decay is " + _WHICH[measured is not None],),
        (f"||w||: held at {held:.4g}, with weight decay from {norms[0]:.4g} to {norms[-1]:.4g}",),
        lr=on_sphere,
        angle=path.angle * path.norm[:-1] / norms,
        norm=norms,
        radius=held,
        gradient=held / norms if scale_gradients else np.ones(count),
    )


@law("", "steps on a sphere", derived="to_sphere, solved for the learning rate with weight decay")
def from_sphere(
    rule: Rule,
    schedule: ScheduleLike,
    *,
    steps: int,
    radius: float,
    weight_decay: ScheduleLike | None = None,
    init_norm: float | None = None,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
) -> SphereTranslation:
    """Learning rates with which an optimizer with weight decay turns a weight as one that holds its norm does.

    With q = lr / R on the sphere: ``q ||w|| / (c + q wd ||w||)``, ||w|| the norm that these learning rates leave.

    Args:
        rule: the optimizer with weight decay: AdamW, Lion, Muon or a measured law as for `to_sphere`.
        schedule: learning rate of every step on the sphere.
        steps: their number.
        radius: R.
        weight_decay: of every step; the rule's own by default.
        init_norm: ||w|| at the start; by default R.
        dim: number of entries (AdamW, Lion).
        shape: (rows, columns) (Muon), by default the rule's.

    Returns:
        The learning rates with weight decay, with angles and norms.

    Example:
        >>> there = to_sphere(AdamW(1e-3, 0.1), [1e-3, 5e-4], steps=200, init_norm=3.0, dim=10_000)
        >>> back = from_sphere(there.rule, there.lr, steps=200, radius=3.0, weight_decay=0.1, dim=10_000)
        >>> back.lr[[0, -1]].round(12).tolist()
        [0.001, 0.0005]
    """
    rule, size = _sized(rule, dim, shape)
    count = whole("steps", steps, low=1)
    speeds = as_schedule(schedule).values(count) / positive("radius", radius)
    decays = _decays(rule, weight_decay, count)
    start = radius if init_norm is None else positive("init_norm", init_norm)
    norm = np.full(count, start)
    for _ in range(_ROUNDS):  # each round is exact for some steps more: the norm depends on the past alone
        lrs = speeds * norm / (_relative_size(rule, norm, start) + speeds * decays * norm)
        path = _path(rule, lrs, decays, start, size)
        change = float(np.max(np.abs(path.norm[:-1] / norm - 1)))
        norm = path.norm[:-1]
        if change < _CONVERGED:
            break
    else:
        raise EquilibriaError(
            f"got lr up to {float(np.max(speeds * radius)):g} at radius={radius:g}; expected smaller steps: no "
            "learning rates with weight decay were found that follow them",
            argument="schedule",
        )
    return SphereTranslation(
        dataclasses.replace(rule, lr=float(lrs.max()), weight_decay=float(decays[0])),
        start / radius,
        ("direction and angle of every step, as far as ||w|| with weight decay is " + _WHICH[False],),
        (f"||w||: held at {radius:.4g}, with weight decay from {norm[0]:.4g} to {path.norm[-1]:.4g}",),
        lr=lrs,
        angle=path.angle,
        norm=norm,
        radius=radius,
        gradient=np.ones(count),
    )


_WHICH = {False: "the predicted one", True: "the measured one"}


def _measured(norm: ArrayLike, count: int) -> Array:
    norms = reals("norm", norm, above=0)
    if norms.shape != (count,):
        raise EquilibriaError(
            f"got norm of shape {norms.shape}; expected {count} numbers, one before every step", argument="norm"
        )
    return norms


def _path(rule: Rule, lrs: Array, decays: Array, init_norm: float | None, size: float) -> Trajectory:
    """The path with weight decay."""
    if init_norm is None:
        first = dataclasses.replace(rule, lr=float(lrs[0]), weight_decay=float(decays[0]))
        start = settled(first, dim=size)
    else:
        start = cold_start(rule, positive("init_norm", init_norm))
    if np.any(lrs * decays >= 1):
        raise EquilibriaError(
            f"got lr * weight_decay up to {float(np.max(lrs * decays)):g}; expected less than 1", argument="schedule"
        )
    return evolve(rule, len(lrs), start=start, dim=size, lr=lrs, weight_decay=decays)


def _relative_size(rule: Rule, norm: Array, init_norm: float | None) -> Array:
    """c: length of AdamW's update while the norm moves, over that at constant norm; 1 for the other rules."""
    if not isinstance(rule, AdamW):
        return np.ones(len(norm))
    first, second = (
        _average(norm**-2.0, beta, filled=init_norm is None) for beta in (rule.betas[0] ** 2, rule.betas[1])
    )
    return np.asarray(np.sqrt(first / second))


def _average(values: Array, beta: float, *, filled: bool) -> Array:
    """Exponential average up to each value, over those seen so far, or ``filled`` with the first one before."""
    from scipy.signal import lfilter

    if filled:
        return np.asarray(lfilter([1 - beta], [1, -beta], values, zi=[beta * values[0]])[0])
    weights = lfilter([1.0], [1, -beta], np.ones(len(values)))
    return np.asarray(lfilter([1.0], [1, -beta], values) / weights)


def _decays(rule: Rule, weight_decay: ScheduleLike | None, count: int) -> Array:
    return as_schedule(rule.weight_decay if weight_decay is None else weight_decay, name="weight_decay").values(count)


def _sized(rule: Rule, dim: float | None, shape: tuple[int, int] | None) -> tuple[Rule, float]:
    """The rule, with a shape if it is Muon, and the number that its squared norm is proportional to."""
    check_rule(rule)
    if isinstance(rule, Muon):
        rule = rule if shape is None else dataclasses.replace(rule, shape=shape)
        if rule.shape is None:
            raise EquilibriaError("got Muon without a shape; expected shape=(rows, columns)", argument="shape")
        return rule, rule.update_sq(rule.shape)
    if isinstance(rule, Identified):
        depends = rule.step.grad or rule.step.norm or rule.is_coupled or rule.step.lr != 1
    else:
        depends = not isinstance(rule, AdamW | Lion)
    if depends:
        name = rule.name if isinstance(rule, Identified) else type(rule).__name__
        raise EquilibriaError(
            f"got {name}, whose step depends on the size of the gradient; expected AdamW, Lion or Muon "
            "(equilibria.control.ProjectedGD is gradient descent on a sphere)",
            argument="rule",
        )
    if dim is None and shape is not None:
        dim = float(math.prod(shape))
    if dim is None:
        raise EquilibriaError("got no dim; expected the number of entries, which sets the norm", argument="dim")
    return rule, scale_number("dim", dim)


def _update_sq(rule: Rule, size: float) -> float:
    """Mean square of the update per lr^2, of the number that `_sized` returned."""
    if isinstance(rule, AdamW):
        b1 = rule.betas[0]
        return size * (1 - b1) / (1 + b1)  # of an average of unit gradients
    if isinstance(rule, Identified):
        length: float = rule.step(lr=1.0, weight_decay=rule.weight_decay, grad=1.0, norm=1.0, entries=size)
        return length**2
    return size
