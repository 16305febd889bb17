"""From a fit and a course to paths of norm and angle: the central one, and one per uncertain number of the fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting import _kernels as kernels
from equilibria.forecasting._fit import Fit
from equilibria.forecasting._observed import Cohort
from equilibria.forecasting._scenario import Course
from equilibria.theory.moments import step_map
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule
from equilibria.theory.states import step_of
from equilibria.theory.targets import targets

Array = NDArray[np.float64]

NINETY = 1.6449  # standard deviations of a normal distribution around its mean that hold 90 %
_DISPLACED = 6  # three directions of level, power and drift; angle; entries; level again, by what no fit knows
_BATCH_ERROR = 0.15  # of ln L per e-fold of the batch size: how far gradients are from being noise is not recorded


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """Of one cohort under one course.

    Attributes:
        shown: the steps shown, counted from the course's first.
        norm_sq: ||w||^2 before each shown step, steps x layers x (1 + uncertain numbers), like the two below.
        angle: radians of it.
        log_drive: ln L.
        goal: equilibrium angle of the shown steps, steps x layers; 0 where there is none.
        travelled: sum of the angles of all steps, layers x (1 + uncertain numbers).
        outside: steps out of equilibrium, the same.
    """

    shown: NDArray[np.int64]
    norm_sq: Array
    angle: Array
    log_drive: Array
    goal: Array
    travelled: Array
    outside: Array


def follow(cohort: Cohort, fitted: Fit, course: Course, *, shown: NDArray[np.int64], central: bool = False) -> Paths:
    """Integrate the recursions of all layers of a cohort, displaced ones beside.

    Args:
        cohort: the layers.
        fitted: their fit.
        course: what happens to them.
        shown: steps to keep, counted from the course's first, ascending.
        central: whether the central path is enough: no bands, and a seventh of the work.
    """
    layers, members = len(cohort.names), 1 if central else 1 + _DISPLACED
    law, state = _laws(cohort, fitted, course, members), _states(fitted, course, members)
    out = np.empty((len(shown), 3, layers * members))
    totals = np.zeros((kernels.TOTAL_ROWS, layers * members))
    goals = _goals(cohort.rule, course)
    shared = course.rescale_sq, goals, shown.astype(np.int64), law, state, out, totals
    if isinstance(cohort.rule, SGD | SGDW):
        kernels.follow_buffer(_maps(cohort.rule, course), *shared)
    else:
        size = np.repeat(fitted.size[:, np.newaxis], members, axis=1)
        size[:, 5:6] *= np.exp(fitted.size_error[:, np.newaxis])
        share = ((1 - cohort.rule.betas[1]) / size).ravel()
        kernels.follow_adam(_adam_settings(cohort.rule, fitted, course), share, *cohort.rule.betas, *shared)
    norm_sq, angle, log_drive = (out[:, row].reshape(len(shown), layers, members) for row in range(3))
    own = law.reshape(kernels.LAW_ROWS, layers, members)[:, :, 0]
    pull = np.exp(own[kernels.GOAL_POWER] * (log_drive[:, :, 0] - own[kernels.LEVEL]))
    goal = goals[shown, np.newaxis] * own[kernels.GOAL_SCALE] * pull
    travelled, outside = totals.reshape(kernels.TOTAL_ROWS, layers, members)
    return Paths(shown, norm_sq, angle, log_drive, goal, travelled, outside)


def _laws(cohort: Cohort, fitted: Fit, course: Course, members: int) -> Array:
    """The rows of `kernels`, layer by layer and in each its displaced members."""
    law = np.empty((kernels.LAW_ROWS, len(cohort.names), members))
    goal_scale, goal_power = _goal_of(cohort, fitted)
    rows = (
        *(fitted.level - np.log(course.batch_factor), fitted.power, fitted.reference, fitted.rate, fitted.drift),
        *(fitted.steps_done, fitted.turned, fitted.angle_scale, goal_scale, np.full_like(goal_scale, goal_power)),
    )
    for row, values in enumerate(rows):
        law[row] = values[:, np.newaxis]
    if members > 1:
        _displace(law, fitted, course)
    return np.ascontiguousarray(law.reshape(kernels.LAW_ROWS, -1))


def _displace(law: Array, fitted: Fit, course: Course) -> None:
    """One standard deviation each, along independent directions."""
    root = np.linalg.cholesky(fitted.covariance)
    for direction in range(3):
        for row, part in ((kernels.LEVEL, 0), (kernels.POWER, 1), (kernels.DRIFT, 2)):
            law[row, :, 1 + direction] += root[:, part, direction]
    law[kernels.ANGLE_SCALE, :, 4] *= np.exp(fitted.angle_error)
    law[kernels.LEVEL, :, 6] += np.hypot(fitted.wander, _BATCH_ERROR * np.log(course.batch_factor))


def _states(fitted: Fit, course: Course, members: int) -> Array:
    at = fitted.replay
    drive = fitted.level - np.log(course.batch_factor)
    columns = (at.norm_sq, at.radial, at.buffer_sq, at.second, drive, fitted.turned)
    return np.array([np.repeat(values, members) for values in columns])


def _maps(rule: SGD | SGDW, course: Course) -> Array:
    step, *settings = step_of(rule, course.lr, course.weight_decay, np.full(course.steps, rule.momentum))
    return np.ascontiguousarray(step_map(step, *settings))


def _adam_settings(rule: AdamW | AdamL2, fitted: Fit, course: Course) -> Array:
    (b1, b2), lr, wd = rule.betas, course.lr, course.weight_decay
    count = fitted.replay.steps_done + np.arange(1, course.steps + 1)
    size = lr * np.sqrt(1 - b2**count) / (1 - b1**count)
    lost, coupled = (lr * wd, 0 * wd) if isinstance(rule, AdamW) else (0 * wd, wd)
    return np.ascontiguousarray(np.stack([size, lost, coupled], axis=1))


def _goals(rule: Rule, course: Course) -> Array:
    """The equilibrium angle of every step, but for the factor of `_goal_of`."""
    if isinstance(rule, AdamL2):
        return np.asarray((course.weight_decay * course.lr**2) ** (1 / 3))
    lr, wd = course.lr, course.weight_decay
    firsts = np.flatnonzero(np.concatenate([[True], (lr[1:] != lr[:-1]) | (wd[1:] != wd[:-1])]))
    angle = targets(rule, lr[firsts], weight_decay=wd[firsts]).angle
    return np.repeat(angle, np.diff(firsts, append=len(lr)))


def _goal_of(cohort: Cohort, fitted: Fit) -> tuple[Array, float]:
    """A layer's factor of the equilibrium angle, and the power of L in it: 0 but for Adam with L2."""
    if not isinstance(cohort.rule, AdamL2):
        return np.ones(len(cohort.names)), 0.0
    b1 = cohort.rule.betas[0]
    scale = np.sqrt((1 - b1) / (1 + b1)) * (2 * cohort.entries) ** (1 / 3) * np.exp(-fitted.level / 6)
    return scale, -1 / 6
