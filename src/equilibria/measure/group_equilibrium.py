"""Where the weights of one parameter group settle: angle and norm, one entry per weight."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.theory import fixed_points
from equilibria.theory.moments import angle_from_chord_sq
from equilibria.theory.rules import SGD, SGDW, AdamL2, Muon, Rule
from equilibria.theory.targets import Targets, targets
from equilibria.theory.unit_gradient import nesterov_angle_factor

Array = NDArray[np.float64]


def group_equilibrium(
    rule: Rule, drive: Array, correlation: Array, *, sizes: Array, recall: Array
) -> tuple[Array, Array]:
    """Angle and norm once settled, NaN where the rule has no equilibrium.

    Args:
        rule: of the group.
        drive: L of every weight.
        correlation: <v, g> / ||g||^2 of gradient and momentum.
        sizes: entries of every weight; for Muon the mean square of its update per lr^2.
        recall: share of its momentum's memory that Muon's updates keep.
    """
    nothing = np.full(len(drive), np.nan)
    if rule.decay_per_step == 0:
        return nothing, nothing
    if isinstance(rule, AdamL2):
        return _adam_l2(rule, drive, sizes)
    unit = _targets(rule)
    if unit is None:
        return nothing, nothing
    if isinstance(rule, Muon):
        point = fixed_points.constant_update_point(rule.lr, rule.weight_decay, rule.memory, recall=recall)
        return angle_from_chord_sq(2 * point.one_minus_cos), np.sqrt(point.norm_sq * sizes)
    angle = np.full(len(drive), float(unit.angle))
    if isinstance(rule, SGD) and rule.nesterov:
        angle = angle * nesterov_angle_factor(rule.momentum, correlation=correlation)
    norm = np.sqrt(unit.norm_sq * (np.sqrt(drive) if isinstance(rule, SGD | SGDW) else sizes))
    return angle, np.where(norm > 0, norm, np.nan)


def _adam_l2(rule: AdamL2, drive: Array, entries: Array) -> tuple[Array, Array]:
    """Angle and norm of Adam with L2, where both depend on the gradient of each weight."""
    b1 = rule.betas[0]
    norm_sq = fixed_points.adam_l2_norm_sq(rule.lr, rule.weight_decay, b1=b1, dim=entries, unit_grad_sq=drive)
    size = fixed_points.adam_step_size(norm_sq, rule.weight_decay, dim=entries, unit_grad_sq=drive)
    chord = 2 * rule.lr * rule.weight_decay * size * (1 - b1) / (1 + b1)
    good = np.asarray((drive > 0) & (norm_sq > 0))
    angle, norm = angle_from_chord_sq(chord), np.sqrt(norm_sq)
    return np.where(good, angle, np.nan), np.where(good, norm, np.nan)


@lru_cache(maxsize=1024)
def _targets(rule: Rule) -> Targets | None:
    try:
        return targets(rule, rule.lr)
    except (EquilibriaError, ArithmeticError):
        return None
