"""The moment recursions with an L that answers to how fast the layer turns, compiled; many paths side by side.

Rows of ``law``: ln L once settled at the reference turning speed; power of the squared angle in L; ln of the squared
reference angle; rate per step at which ln L gets there; drift of ln L per e-fold of the clock; steps done at the start;
sum of squared angles at the start; factor of the angle; factor of the equilibrium angle; power of L in that angle.
Rows of ``state``: ||w||^2, <w, buffer>, ||buffer||^2, second moment, ln L, sum of squared angles.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equilibria._compiled import compiled, inner

TOLERANCE = 0.05  # of the angle, outside of which a layer is out of equilibrium
HOLD = 4  # steps for which L is held: it changes over tens of steps at least
_LEAST = -4.6  # ln of the squared angle over the reference, below which L no longer answers: a tenth of its speed

LEVEL, POWER, REFERENCE, RATE, DRIFT, STEPS, TURNED, ANGLE_SCALE, GOAL_SCALE, GOAL_POWER = range(10)
LAW_ROWS, TOTAL_ROWS = 10, 2


@inner
def _update_drive(law: Any, state: Any, speed_sq: Any, age: float, steps: int, drive: Any, goal: Any) -> None:
    """ln L on its way to what the present speed asks for, and the equilibrium angle's factor."""
    for n in range(drive.shape[0]):
        warmth = max(math.log(max(speed_sq[n], 1e-300)) - law[2, n], _LEAST)
        state[5, n] += steps * speed_sq[n]
        drift = law[4, n]
        clock = 1.0 + age / law[5, n] if drift > 0.0 else state[5, n] / law[6, n]
        target = law[0, n] + law[1, n] * warmth + drift * math.log(clock)
        state[4, n] += (target - state[4, n]) * -math.expm1(-law[3, n] * steps)
        drive[n] = math.exp(state[4, n])
        goal[n] = law[8, n] * math.exp(law[9, n] * (state[4, n] - law[0, n]))


@inner
def _note(law: Any, before: Any, state: Any, moved: Any, goals: Any, goal: Any, totals: Any, angle: Any) -> None:
    """The angle of the step just taken, and what it adds to the totals."""
    for n in range(angle.shape[0]):
        norm, after = math.sqrt(before[n]), math.sqrt(state[0, n])
        radial = after - norm
        chord_sq = max(moved[n] - radial * radial, 0.0) / (norm * after)
        # The arc from the chord, to the second order: the next term is 1e-4 of an angle of 0.5.
        turned = math.sqrt(chord_sq) * (1.0 + chord_sq / 24.0) * law[7, n]
        angle[n] = turned
        totals[0, n] += turned
        aim = goals * goal[n]
        totals[1, n] += 1.0 if aim > 0.0 and abs(turned - aim) > TOLERANCE * aim else 0.0


_MATRIX, _CUBE, _LINE, _STEPS = "float64[:,::1]", "float64[:,:,::1]", "float64[::1]", "int64[::1]"
_SHARED = f"{_LINE}, {_LINE}, {_STEPS}, {_MATRIX}, {_MATRIX}, {_CUBE}, {_MATRIX}"


@compiled(f"void({_CUBE}, {_SHARED})")
def follow_buffer(
    maps: Any, rescale_sq: Any, goals: Any, shown: Any, law: Any, state: Any, out: Any, totals: Any
) -> None:
    """SGD and SGDW: one linear map of (P, Q, R, N) per step, as `theory.moments.step_map` gives it.

    ``out`` takes ||w||^2, angle and ln L before the shown steps; ``state`` is left as it is after the last.
    """
    paths = state.shape[1]
    drive, goal, speed_sq = np.exp(state[4]), law[8].copy(), np.exp(law[2])
    before, moved, angle = np.empty(paths), np.empty(paths), np.empty(paths)
    mark = 0
    for t in range(maps.shape[0]):
        if t % HOLD == 0 and t > 0:
            _update_drive(law, state, speed_sq, float(t), HOLD, drive, goal)
        grow = rescale_sq[t]
        m = maps[t]
        for n in range(paths):
            p, q, r = state[0, n] * grow, state[1, n], state[2, n] / grow
            noise = drive[n] / p
            before[n] = p
            state[0, n] = m[0, 0] * p + m[0, 1] * q + m[0, 2] * r + m[0, 3] * noise
            state[1, n] = m[1, 0] * p + m[1, 1] * q + m[1, 2] * r + m[1, 3] * noise
            state[2, n] = m[2, 0] * p + m[2, 1] * q + m[2, 2] * r + m[2, 3] * noise
            moved[n] = m[3, 0] * p + m[3, 1] * q + m[3, 2] * r + m[3, 3] * noise
            speed_sq[n] = moved[n] / p
        _note(law, before, state, moved, goals[t], goal, totals, angle)
        if mark < shown.shape[0] and shown[mark] == t:
            out[mark, 0], out[mark, 1], out[mark, 2] = before, angle, state[4]
            mark += 1


@compiled(f"void({_MATRIX}, {_LINE}, float64, float64, {_SHARED})")
def follow_adam(
    settings: Any,
    share: Any,
    b1: float,
    b2: float,
    rescale_sq: Any,
    goals: Any,
    shown: Any,
    law: Any,
    state: Any,
    out: Any,
    totals: Any,
) -> None:
    """AdamW and Adam with L2: `theory.moments.adam_step`; settings hold its step size, share lost and coupled decay."""
    paths = state.shape[1]
    drive, goal, speed_sq = np.exp(state[4]), law[8].copy(), np.exp(law[2])
    before, moved, angle = np.empty(paths), np.empty(paths), np.empty(paths)
    fresh = 1.0 - b1
    mark = 0
    for t in range(settings.shape[0]):
        if t % HOLD == 0 and t > 0:
            _update_drive(law, state, speed_sq, float(t), HOLD, drive, goal)
        grow, size, lost, wd = rescale_sq[t], settings[t, 0], settings[t, 1], settings[t, 2]
        kept = 1.0 - lost
        for n in range(paths):
            p, r, second = state[0, n] * grow, state[2, n] / grow, state[3, n] / grow
            grad_sq = drive[n] / p + wd * wd * p
            w_dot_m = b1 * state[1, n]
            r = b1 * b1 * r + fresh * (fresh * grad_sq + 2 * wd * w_dot_m)
            w_dot_m += fresh * wd * p
            second = b2 * second + share[n] * grad_sq
            k = size / math.sqrt(second)
            radial, push = k * w_dot_m, k * k * r
            before[n] = p
            state[0, n] = kept * (kept * p - 2 * radial) + push
            state[1, n] = kept * w_dot_m - k * r
            state[2, n] = r
            state[3, n] = second
            moved[n] = lost * (lost * p + 2 * radial) + push
            speed_sq[n] = moved[n] / p
        _note(law, before, state, moved, goals[t], goal, totals, angle)
        if mark < shown.shape[0] and shown[mark] == t:
            out[mark, 0], out[mark, 1], out[mark, 2] = before, angle, state[4]
            mark += 1
