"""Where the optimizer stands at the end of a record: its memory, rebuilt from the sampled steps.

A record holds norms, gradients and settings, but no momentum buffer and no second moments. They are averages of past
gradients, so that the moment recursion, run over the last samples with ||w||^2 held to what was measured, has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.forecasting.observed import Cohort, Steps
from equilibria.theory.adam import adam_step
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW
from equilibria.theory.states import step_of

Array = NDArray[np.float64]

_MEMORIES = 8  # lengths of the optimizer's memory that are gone through: e^-8 of what was before is left
_MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The recursion beside the last samples.

    Attributes:
        norm_sq: ||w||^2 after the last sampled step, one entry per layer, like the three below.
        radial: <w, buffer>.
        buffer_sq: ||buffer||^2.
        second: second moment per entry (Adam), else 0.
        steps_done: optimizer steps taken.
        sampled: places of the samples that were gone through.
        moved_sq: ||w' - w||^2 by the recursion at these samples.
    """

    norm_sq: Array
    radial: Array
    buffer_sq: Array
    second: Array
    steps_done: float
    sampled: NDArray[np.int64]
    moved_sq: Array


def replay(cohort: Cohort, smooth_drive: Array) -> Replay:
    """Go through the last steps of a record.

    Args:
        cohort: the layers.
        smooth_drive: L at every sample, samples x layers, without its noise.
    """
    rule = cohort.rule
    length = max(1 / (1 - each) for each in (rule.betas if isinstance(rule, AdamW | AdamL2) else (_momentum(rule),)))
    last = int(cohort.step[-1])
    first = max(int(cohort.step[0]), last - min(round(_MEMORIES * length), _MOST_STEPS))
    steps = np.arange(first, last + 1, dtype=np.int64)
    norm_sq = _between(steps, cohort.step, cohort.norm_sq)
    drive = _between(steps, cohort.step, smooth_drive)
    held = np.searchsorted(cohort.step, steps, side="right") - 1
    p, q, r, v, moved = _run(cohort, steps, held, norm_sq, drive)
    sampled = np.flatnonzero(cohort.step >= first)
    return Replay(p, q, r, v, float(last + 1), sampled, moved[cohort.step[sampled] - first])


def _momentum(rule: object) -> float:
    assert isinstance(rule, SGD | SGDW)
    return rule.momentum


def _between(steps: Steps, sampled: Steps, values: Array) -> Array:
    """Values at all steps, straight in their logarithm from sample to sample."""
    logs = np.log(np.maximum(values, 1e-290))
    result: Array = np.exp(np.stack([np.interp(steps, sampled, column) for column in logs.T], axis=1))
    return result


def _run(
    cohort: Cohort, steps: Steps, held: Steps, norm_sq: Array, drive: Array
) -> tuple[Array, Array, Array, Array, Array]:
    rule, fresh = cohort.rule, steps[0] == 0
    lr, wd, momentum = cohort.lr[held], cohort.weight_decay[held], cohort.momentum[held]
    q = np.zeros_like(norm_sq[0])
    grad_sq = drive[0] / norm_sq[0]
    if isinstance(rule, SGD | SGDW):
        a = rule.momentum
        r, v = (0 * q if fresh else grad_sq / (1 - a * a)), 0 * q
    else:
        b1 = rule.betas[0]
        r, v = (0 * q if fresh else grad_sq * (1 - b1) / (1 + b1)), (0 * q if fresh else grad_sq / cohort.entries)
    moved = np.empty_like(norm_sq)
    for at in range(len(steps)):
        p = norm_sq[at]
        if isinstance(rule, SGD | SGDW):
            step, *settings = step_of(rule, lr[at], wd[at], np.nan_to_num(momentum[at]))
            p, q, r, moved[at] = step(p, q, r, drive[at] / p, *settings)
        else:
            p, q, r, v, moved[at] = _adam(rule, cohort.entries, float(steps[at]), p, q, r, v, drive[at], lr[at], wd[at])
    return p, q, r, v, moved


def _adam(
    rule: AdamW | AdamL2,
    entries: Array,
    done: float,
    p: Array,
    q: Array,
    r: Array,
    v: Array,
    drive: Array,
    lr: float,
    wd: float,
) -> tuple[Array, Array, Array, Array, Array]:
    b1, b2 = rule.betas
    lost, coupled = (lr * wd, 0.0) if isinstance(rule, AdamW) else (0.0, wd)
    step_size = lr * math.sqrt(1 - b2 ** (done + 1)) / (1 - b1 ** (done + 1))
    return adam_step(p, q, r, v, drive, (1 - b2) / entries, step_size, lost, coupled, b1, b2)
