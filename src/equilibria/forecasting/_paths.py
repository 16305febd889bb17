"""Paths of norm and angle along a schedule: the central one, and one per uncertain number of the fit.

The recursions are those of `theory.evolve`, which cannot be used here: it takes L as given, while the L of a forecast
depends on the path itself, on how fast the layer turns and how far it has turned. Hence kernels that update L every few
steps, compiled so that seven paths per layer cost one to three times as much as one path of `evolve`
(benchmarks/forecast.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria._compiled import compiled, inner
from equilibria.forecasting._fit import Fit
from equilibria.forecasting._gain import GAIN_FALL, RELAXING, GainFit
from equilibria.forecasting._layers import Cohort, InvariantRule, Steps
from equilibria.forecasting._scenario import GroupSchedule
from equilibria.theory._reals import Array
from equilibria.theory.moments import step_map
from equilibria.theory.rules import SGD, SGDW, AdamL2, Rule
from equilibria.theory.states import adam_settings, step_of
from equilibria.theory.targets import targets_per_step

NINETY = 1.6449  # a normal distribution has 90 % within this many standard deviations of its mean
_DISPLACED = 6  # three directions of level, power and drift; gain; pull; level again, for its wander
_BATCH_ERROR = 0.15  # of ln L per e-fold of the batch size: how far gradients are from being noise is not recorded
TOLERANCE = 0.05  # relative distance of the angle beyond which a layer is out of equilibrium
_HOLD = 4  # steps between updates of L: it changes over tens of steps at least
_MOST = math.log(20)  # change of ln L: none of the trainings that the prior comes from changed by more after its record
GAIN_POWER = (
    0.25  # of the squared angle in kappa - 1 and L / N - 1: gradients are the less correlated, the less a layer turns
)
_FADE = 4.0  # power of the clock with which a rise of L fades: it ends when features are learned; a fall goes on
_LEAST = -4.6  # ln of squared angle over reference below which L no longer responds: a tenth of the speed

# Rows of `law` below.
_LEVEL, _POWER, _REFERENCE, _RATE, _DRIFT, _STEPS_DONE = range(6)
_EQUILIBRIUM_SCALE, _EQUILIBRIUM_POWER, _GAIN, _PULL, _WANDER = range(6, 11)
_LAW_ROWS, _TOTAL_ROWS = 11, 2


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The paths of one cohort under one schedule: the central one, and one per uncertain number of the fit.

    Attributes:
        shown: the steps shown, counted from the schedule's first.
        norm_sq: ||w||^2 before each shown step, steps x layers x (1 + uncertain numbers), like the two below.
        angle: radians of each shown step.
        log_unit_grad_sq: ln L; NaN by the measured gain.
        angle_equilibrium: equilibrium angle of the shown steps, steps x layers; 0 if there is none.
        travelled: sum of the angles of all steps, layers x (1 + uncertain numbers).
        steps_out: number of steps out of equilibrium, layers x (1 + uncertain numbers).
    """

    shown: NDArray[np.int64]
    norm_sq: Array
    angle: Array
    log_unit_grad_sq: Array
    angle_equilibrium: Array
    travelled: Array
    steps_out: Array


def integrate(
    cohort: Cohort, fitted: Fit | GainFit, schedule: GroupSchedule, *, shown: Steps, central: bool = False
) -> Paths:
    """Integrate the recursion of all layers of a cohort along a schedule.

    Args:
        cohort: the layers.
        fitted: their fit.
        schedule: their lr, weight decay and rescaling.
        shown: steps to keep, counted from the schedule's first, ascending.
        central: integrate the central path only: no bands, and a seventh of the work.
    """
    if isinstance(fitted, GainFit):
        return _by_gain(fitted, schedule, shown, central=central)
    assert isinstance(cohort.rule, InvariantRule)
    layers, members = len(cohort.names), 1 if central else 1 + _DISPLACED
    law, state = _law_rows(cohort, fitted, schedule, members), _start_states(fitted, schedule, members)
    out = np.empty((len(shown), 3, layers * members))
    totals = np.zeros((_TOTAL_ROWS, layers * members))
    base = _base_equilibrium(cohort.rule, schedule)
    shared = schedule.rescale_sq, base, shown.astype(np.int64), law, state, out, totals
    if isinstance(cohort.rule, SGD | SGDW):
        _integrate_buffer(_maps(cohort.rule, schedule), *shared)
    else:
        share = np.repeat((1 - cohort.rule.betas[1]) / cohort.entries, members)
        count = fitted.replay.steps_done + np.arange(1, schedule.steps + 1)
        lr = schedule.lr
        settings = np.stack([*adam_settings(cohort.rule, lr, schedule.weight_decay, count), lr], axis=1)
        _integrate_adam(np.ascontiguousarray(settings), share, *cohort.rule.betas, *shared)
    norm_sq, angle, log_unit_grad_sq = (out[:, row].reshape(len(shown), layers, members) for row in range(3))
    centre = law.reshape(_LAW_ROWS, layers, members)[:, :, 0]
    factor = np.exp(centre[_EQUILIBRIUM_POWER] * (log_unit_grad_sq[:, :, 0] - centre[_LEVEL]))
    angle_equilibrium = base[shown, np.newaxis] * centre[_EQUILIBRIUM_SCALE] * factor
    travelled, steps_out = totals.reshape(_TOTAL_ROWS, layers, members)
    return Paths(shown, norm_sq, angle, log_unit_grad_sq, angle_equilibrium, travelled, steps_out)


def _law_rows(cohort: Cohort, fitted: Fit, schedule: GroupSchedule, members: int) -> Array:
    """The rows of ``law`` for the kernels below, layer by layer, and in each layer its displaced members."""
    law = np.empty((_LAW_ROWS, len(cohort.names), members))
    scale, power = _equilibrium_factor(cohort, fitted)
    rows = (
        *(fitted.level - np.log(schedule.batch_factor), fitted.power, fitted.reference, fitted.rate, fitted.drift),
        *(fitted.clock, scale, np.full_like(scale, power), fitted.gain, fitted.pull, 0 * scale),
    )
    for row, values in enumerate(rows):
        law[row] = values[:, np.newaxis]
    if members > 1:
        _displace(law, fitted, schedule)
    return np.ascontiguousarray(law.reshape(_LAW_ROWS, -1))


def _displace(law: Array, fitted: Fit, schedule: GroupSchedule) -> None:
    """Displace every member but the first by one standard deviation, along independent directions."""
    root = np.linalg.cholesky(fitted.covariance)
    for direction in range(3):
        for row, part in ((_LEVEL, 0), (_POWER, 1), (_DRIFT, 2)):
            law[row, :, 1 + direction] += root[:, part, direction]
    law[_GAIN, :, 4] *= np.exp(fitted.gain_error)
    law[_PULL, :, 5] += fitted.pull_error
    law[_LEVEL, :, 6] += np.hypot(fitted.wander, _BATCH_ERROR * np.log(schedule.batch_factor))
    law[_WANDER, :, 6] = fitted.wander_slope


def _start_states(fitted: Fit, schedule: GroupSchedule, members: int) -> Array:
    memory = fitted.replay
    level = fitted.level - np.log(schedule.batch_factor)
    moments = (memory.norm_sq, memory.radial, memory.buffer_sq, memory.second)
    columns = (*moments, level, fitted.clock, fitted.gain)
    return np.array([np.repeat(values, members) for values in columns])


def _maps(rule: SGD | SGDW, schedule: GroupSchedule) -> Array:
    step, *settings = step_of(rule, schedule.lr, schedule.weight_decay, np.full(schedule.steps, rule.momentum))
    return np.ascontiguousarray(step_map(step, *settings))


def _base_equilibrium(rule: Rule, schedule: GroupSchedule) -> Array:
    """The equilibrium angle of every step, up to the layer's factor of `_equilibrium_factor`."""
    if isinstance(rule, AdamL2):
        return np.asarray((schedule.weight_decay * schedule.lr**2) ** (1 / 3))
    return targets_per_step(rule, schedule.lr, schedule.weight_decay).angle


def _equilibrium_factor(cohort: Cohort, fitted: Fit) -> tuple[Array, float]:
    """A layer's factor of the equilibrium angle, and the power of L in it: 0 except for Adam with L2."""
    if not isinstance(cohort.rule, AdamL2):
        return np.ones(len(cohort.names)), 0.0
    b1 = cohort.rule.betas[0]
    scale = np.sqrt((1 - b1) / (1 + b1)) * (2 * cohort.entries) ** (1 / 3) * np.exp(-fitted.level / 6)
    return scale, -1 / 6


_GAIN_DISPLACED = 3  # gain; wander of the update's size; its change with lr


def _by_gain(fitted: GainFit, schedule: GroupSchedule, shown: Steps, *, central: bool) -> Paths:
    """`integrate` by the law of the measured gain."""
    layers, members = len(fitted.gain), 1 if central else 1 + _GAIN_DISPLACED
    exponent = 1 / (1 - GAIN_FALL / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_decay = 2 * fitted.in_force * fitted.angle_sq ** (-GAIN_FALL / 2) / fitted.gain
        scale = np.where(fitted.balanced, per_decay, 0.0) ** (exponent / 2)
    none = np.zeros(layers)
    rows = (fitted.gain, fitted.size_sq, fitted.relaxed, none, fitted.angle_sq, fitted.in_force, scale, none)
    law = np.repeat(np.stack(rows)[:, :, np.newaxis], members, axis=2)
    if members > 1:
        law[0, :, 1] += fitted.gain_error
        law[7, :, 1] = fitted.fall_wander
        law[3, :, 2] = fitted.size_wander
        law[2, :, 3] = 1.0
    lr, decay = schedule.lr, schedule.lr * schedule.weight_decay
    done = np.log1p(np.arange(schedule.steps) / fitted.steps_done)
    relaxing = np.minimum(lr / fitted.lr, 1.0) ** RELAXING
    settings = np.stack([lr ** (2 * fitted.lr_power), decay, relaxing, done, decay ** (exponent / 2)], axis=1)
    log_norm_sq = np.repeat(np.log(fitted.norm_sq), members)
    out, totals = np.empty((len(shown), 2, layers * members)), np.zeros((_TOTAL_ROWS, layers * members))
    _integrate_gain(
        np.ascontiguousarray(settings),
        np.log(schedule.rescale_sq),
        fitted.norm_power,
        shown.astype(np.int64),
        np.ascontiguousarray(law.reshape(len(rows), -1)),
        log_norm_sq,
        out,
        totals,
    )
    norm_sq, angle = (out[:, row].reshape(len(shown), layers, members) for row in range(2))
    travelled, steps_out = totals.reshape(_TOTAL_ROWS, layers, members)
    equilibrium = settings[shown, 4][:, np.newaxis] * scale
    return Paths(shown, norm_sq, angle, np.full_like(angle, np.nan), equilibrium, travelled, steps_out)


# ---- the compiled recursions, many paths side by side
#
# Rows of `law`: ln L in equilibrium at the reference speed; power of the squared angle in L; ln of the squared
# reference angle; rate per step at which ln L gets there; drift of ln L per e-fold of the clock; steps done at the
# start; factor of the equilibrium angle; power of L in it; gain; pull (Adam); wander of ln L per e-fold
# of the clock, which does not fade.
# Rows of `state`: ||w||^2, <w, buffer>, ||buffer||^2, second moment, ln L, clock, gain.


@inner
def _update_l(law: Any, state: Any, speed_sq: Any, steps: int, unit_grad_sq: Any, factor: Any) -> None:
    """Move ln L towards the value for the present speed, and update the factor of the equilibrium angle."""
    for n in range(unit_grad_sq.shape[0]):
        faster = math.log(max(speed_sq[n], 1e-300)) - law[2, n]
        excess = max(faster, _LEAST)
        state[5, n] += steps * math.exp(0.5 * min(faster, 0.0))
        later = math.log(state[5, n] / law[5, n])
        lasting = later if law[4, n] < 0.0 else -math.expm1(-_FADE * later) / _FADE
        drifted = law[4, n] * lasting + law[10, n] * later
        change = min(max(law[1, n] * excess + drifted, -_MOST), _MOST)
        target = law[0, n] + change
        state[4, n] += (target - state[4, n]) * -math.expm1(-law[3, n] * steps)
        unit_grad_sq[n] = math.exp(state[4, n])
        factor[n] = law[6, n] * math.exp(law[7, n] * (state[4, n] - law[0, n]))
        state[6, n] = 1.0 + (law[8, n] - 1.0) * math.exp(GAIN_POWER * min(faster, 0.0))


@inner
def _add_angle(before: Any, state: Any, moved: Any, base: Any, factor: Any, totals: Any, angle: Any) -> None:
    """Compute the angle of the step just taken and add it to the totals."""
    for n in range(angle.shape[0]):
        norm, after = math.sqrt(before[n]), math.sqrt(state[0, n])
        radial = after - norm
        chord_sq = max(moved[n] - radial * radial, 0.0) / (norm * after)
        # The arc from the chord, to the second order: the next term is 1e-4 of an angle of 0.5.
        turned = math.sqrt(chord_sq) * (1.0 + chord_sq / 24.0)
        angle[n] = turned
        totals[0, n] += turned
        wanted = base * factor[n]
        totals[1, n] += 1.0 if wanted > 0.0 and abs(turned - wanted) > TOLERANCE * wanted else 0.0


_MATRIX, _CUBE, _LINE, _STEPS = "float64[:,::1]", "float64[:,:,::1]", "float64[::1]", "int64[::1]"
_SHARED = f"{_LINE}, {_LINE}, {_STEPS}, {_MATRIX}, {_MATRIX}, {_CUBE}, {_MATRIX}"


@compiled(f"void({_CUBE}, {_SHARED})")
def _integrate_buffer(
    maps: Any, rescale_sq: Any, base: Any, shown: Any, law: Any, state: Any, out: Any, totals: Any
) -> None:
    """SGD and SGDW: one linear map of (P, Q, R, N) per step, as `theory.moments.step_map` gives it.

    ``out`` receives ||w||^2, angle and ln L before the shown steps; ``state`` ends as after the last step.
    """
    paths = state.shape[1]
    unit_grad_sq, factor, speed_sq = np.exp(state[4]), law[6].copy(), np.exp(law[2])
    before, moved, angle = np.empty(paths), np.empty(paths), np.empty(paths)
    row = 0
    for t in range(maps.shape[0]):
        if t % _HOLD == 0 and t > 0:
            _update_l(law, state, speed_sq, _HOLD, unit_grad_sq, factor)
        grow = rescale_sq[t]
        m = maps[t]
        for n in range(paths):
            p, q, r = state[0, n] * grow, state[1, n], state[2, n] / grow
            noise = state[6, n] * unit_grad_sq[n] / p
            before[n] = p
            state[0, n] = m[0, 0] * p + m[0, 1] * q + m[0, 2] * r + m[0, 3] * noise
            state[1, n] = m[1, 0] * p + m[1, 1] * q + m[1, 2] * r + m[1, 3] * noise
            state[2, n] = m[2, 0] * p + m[2, 1] * q + m[2, 2] * r + m[2, 3] * noise
            moved[n] = m[3, 0] * p + m[3, 1] * q + m[3, 2] * r + m[3, 3] * noise
            speed_sq[n] = moved[n] / p
        _add_angle(before, state, moved, base[t], factor, totals, angle)
        if row < shown.shape[0] and shown[row] == t:
            out[row, 0], out[row, 1], out[row, 2] = before, angle, state[4] + np.log(state[6])
            row += 1


@compiled(f"void({_MATRIX}, {_LINE}, float64, float64, {_SHARED})")
def _integrate_adam(
    settings: Any,
    share: Any,
    b1: float,
    b2: float,
    rescale_sq: Any,
    base: Any,
    shown: Any,
    law: Any,
    state: Any,
    out: Any,
    totals: Any,
) -> None:
    """AdamW and Adam with L2, as `theory.moments.adam_step`, with the gain in ||m||^2 and the pull on the norm.

    Columns of ``settings``: step size, share lost to decay, coupled decay, lr.
    """
    paths = state.shape[1]
    unit_grad_sq, factor, speed_sq = np.exp(state[4]), law[6].copy(), np.exp(law[2])
    before, moved, angle = np.empty(paths), np.empty(paths), np.empty(paths)
    fresh = 1.0 - b1
    row = 0
    for t in range(settings.shape[0]):
        if t % _HOLD == 0 and t > 0:
            _update_l(law, state, speed_sq, _HOLD, unit_grad_sq, factor)
        grow, size, lost, wd = rescale_sq[t], settings[t, 0], settings[t, 1], settings[t, 2]
        for n in range(paths):
            p, r, second = state[0, n] * grow, state[2, n] / grow, state[3, n] / grow
            noise, decay_sq = unit_grad_sq[n] / p, wd * wd * p
            w_dot_m = b1 * state[1, n]
            r = b1 * b1 * r + fresh * (fresh * (state[6, n] * noise + decay_sq) + 2 * wd * w_dot_m)
            w_dot_m += fresh * wd * p
            second = b2 * second + share[n] * (noise + decay_sq)
            kept = 1.0 - lost - settings[t, 3] * law[9, n]
            k = size / math.sqrt(second)
            radial, push = k * w_dot_m, k * k * r
            before[n] = p
            state[0, n] = kept * (kept * p - 2 * radial) + push
            state[1, n] = kept * w_dot_m - k * r
            state[2, n] = r
            state[3, n] = second
            moved[n] = lost * (lost * p + 2 * radial) + push
            speed_sq[n] = moved[n] / p
        _add_angle(before, state, moved, base[t], factor, totals, angle)
        if row < shown.shape[0] and shown[row] == t:
            out[row, 0], out[row, 1], out[row, 2] = before, angle, state[4]
            row += 1


@compiled(f"void({_MATRIX}, {_LINE}, float64, {_STEPS}, {_MATRIX}, {_LINE}, {_CUBE}, {_MATRIX})")
def _integrate_gain(
    settings: Any, rescaling: Any, power: float, shown: Any, law: Any, log_norm_sq: Any, out: Any, totals: Any
) -> None:
    """The measured gain: ln ||w||^2 changes by G angle^2 - 2 eps, with angle^2 = lr^2 u^2 / ||w||^(2p).

    Columns of ``settings``: lr^2, lr wd, share of u^2 that has not relaxed, ln of the steps done over those at the
    start, and the power of lr wd in the equilibrium angle. Rows of ``law``: G; u^2, its share that stays at lr 0, its
    wander; the squared angle that G belongs to; decay in force over lr wd; factor of the equilibrium angle; change of G
    per e-fold that the angle has fallen.
    """
    paths = log_norm_sq.shape[0]
    gain, size_sq = law[0].copy(), law[1].copy()
    row = 0
    for t in range(settings.shape[0]):
        lr_sq, decay, kept, done, base = settings[t, 0], settings[t, 1], settings[t, 2], settings[t, 3], settings[t, 4]
        keep = row < shown.shape[0] and shown[row] == t
        for n in range(paths):
            before = log_norm_sq[n] + rescaling[t]
            if t % _HOLD == 0:
                share = law[2, n] + (1.0 - law[2, n]) * kept
                size_sq[n] = law[1, n] * share * math.exp(2.0 * law[3, n] * done)
            angle_sq = lr_sq * size_sq[n] * math.exp(-power * before)
            if t % _HOLD == 0 and angle_sq > 0.0:
                risen = 0.5 * math.log(angle_sq / law[4, n])
                gain[n] = law[0, n] * (math.exp(-GAIN_FALL * risen) if law[0, n] > 0.0 else 1.0)
                gain[n] += law[7, n] * max(-risen, 0.0)
            turned_sq = angle_sq if gain[n] > 0.0 else min(angle_sq, law[4, n])
            log_norm_sq[n] = before + gain[n] * turned_sq - 2.0 * law[5, n] * decay
            angle, wanted = math.sqrt(angle_sq), base * law[6, n]
            totals[0, n] += angle
            totals[1, n] += 1.0 if wanted > 0.0 and abs(angle - wanted) > TOLERANCE * wanted else 0.0
            if keep:
                out[row, 0, n], out[row, 1, n] = math.exp(before), angle
        if keep:
            row += 1
