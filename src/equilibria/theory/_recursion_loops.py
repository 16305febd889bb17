"""The moment recursions of Adam and Lion over many layers, compiled by numba; see `equilibria.theory.transient`.

Layers lie side by side in memory, so that a step over all of them uses the vector units of the processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from equilibria._compiled import compiled

_LINE, _MATRIX = "float64[::1]", "float64[:,::1]"


@compiled(f"void({_MATRIX}, {_MATRIX}, {_MATRIX}, {_LINE}, float64, float64, {_MATRIX}, {_MATRIX}, {_MATRIX})")
def adam_loop(
    settings: Any,
    unit_grads: Any,
    gains: Any,
    share: Any,
    b1: float,
    b2: float,
    state: Any,
    norm_sq: Any,
    moved_sq: Any,
) -> None:
    """Take all steps of `theory.moments.adam_step`.

    Args:
        settings: step size, share lost and coupled decay of every step, (steps, 3).
        unit_grads: L of every step and layer, or one row for all steps.
        gains: kappa, likewise.
        share: (1 - b2) / d of every layer.
        b1: first-moment coefficient.
        b2: second-moment coefficient.
        state: P, Q, R and v of every layer, (4, layers); ends as after the last step.
        norm_sq: receives P after each step, (steps, layers).
        moved_sq: receives D of each step, (steps, layers).
    """
    fresh = 1.0 - b1
    for t in range(settings.shape[0]):
        size, lost, wd = settings[t, 0], settings[t, 1], settings[t, 2]
        kept = 1.0 - lost
        unit = unit_grads[min(t, unit_grads.shape[0] - 1)]
        gain = gains[min(t, gains.shape[0] - 1)]
        for n in range(state.shape[1]):
            p = state[0, n]
            noise_sq, decay_sq = unit[n] / p, wd * wd * p
            w_dot_m = b1 * state[1, n]
            r = b1 * b1 * state[2, n] + fresh * (fresh * (gain[n] * noise_sq + decay_sq) + 2 * wd * w_dot_m)
            w_dot_m += fresh * wd * p
            v = b2 * state[3, n] + share[n] * (noise_sq + decay_sq)
            k = size / math.sqrt(v)
            radial, push = k * w_dot_m, k * k * r
            after = kept * (kept * p - 2 * radial) + push
            state[0, n], state[1, n], state[2, n], state[3, n] = after, kept * w_dot_m - k * r, r, v
            norm_sq[t, n] = after
            moved_sq[t, n] = lost * (lost * p + 2 * radial) + push


@compiled(
    f"void({_LINE}, {_LINE}, {_LINE}, float64, float64, {_LINE}, {_LINE}, {_LINE}, {_LINE}, {_MATRIX}, {_MATRIX}, "
    f"{_MATRIX})"
)
def lion_loop(
    lrs: Any,
    decays: Any,
    sizes: Any,
    b1: float,
    b2: float,
    powers: Any,
    coefficients: Any,
    p: Any,
    buffer_sq: Any,
    traces: Any,
    norm_sq: Any,
    moved_sq: Any,
) -> None:
    """Take all steps of `theory.memory.LionPull`.

    Args:
        lrs: lr of every step.
        decays: weight decay of every step.
        sizes: entries of every layer.
        b1: Lion's first coefficient.
        b2: Lion's second coefficient.
        powers: of the arcsine series.
        coefficients: of the arcsine series.
        p: ||w||^2 of every layer; ends as after the last step, like the two below.
        buffer_sq: ||m||^2 of every layer in units of the unit gradient.
        traces: one row per term of the series, (terms, layers).
        norm_sq: receives P after each step, (steps, layers).
        moved_sq: receives D of each step, (steps, layers).
    """
    layers = p.shape[0]
    recalled, stored, faded, z = np.empty(layers), np.empty(layers), np.empty(layers), np.empty(layers)
    recalled_power, stored_power, faded_power = np.empty(layers), np.empty(layers), np.empty(layers)
    for t in range(lrs.shape[0]):
        lr, lost = lrs[t], lrs[t] * decays[t]
        kept = 1.0 - lost
        for n in range(layers):
            r, noise = buffer_sq[n], 1.0 / p[n]
            after = b2 * b2 * r + (1 - b2) ** 2 * noise
            size = math.sqrt(b1 * b1 * r + (1 - b1) ** 2 * noise)
            recalled[n] = b1 * math.sqrt(r) / size
            stored[n] = (b1 * b2 * r + (1 - b1) * (1 - b2) * noise) / (size * math.sqrt(after))
            faded[n] = b2 * math.sqrt(r / after)
            recalled_power[n], stored_power[n], faded_power[n] = recalled[n], stored[n], faded[n]
            buffer_sq[n] = after
            z[n] = 0.0
        power = 1.0  # the first of the series
        for j in range(powers.shape[0]):
            if powers[j] != power:  # beyond the first terms, which follow each other: x^3 = x x^2
                power = powers[j]
                for n in range(layers):
                    recalled_power[n] = recalled[n] ** power
                    stored_power[n] = stored[n] ** power
                    faded_power[n] = faded[n] ** power
            weight = coefficients[j]
            for n in range(layers):
                trace = traces[j, n]
                z[n] += weight * recalled_power[n] * trace
                traces[j, n] = kept * faded_power[n] * trace + lr * stored_power[n]
                recalled_power[n] *= recalled[n] * recalled[n]
                stored_power[n] *= stored[n] * stored[n]
                faded_power[n] *= faded[n] * faded[n]
            power += 2.0
        for n in range(layers):
            moved_sq[t, n] = lost * lost * p[n] + (lr - 2 * lost * z[n]) * lr * sizes[n]
            p[n] = kept * kept * p[n] + (lr + 2 * kept * z[n]) * lr * sizes[n]
            norm_sq[t, n] = p[n]
