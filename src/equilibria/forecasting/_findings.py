"""What a forecast means, in the form that plans and reports use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from equilibria.findings import Finding, counted
from equilibria.forecasting._observed import Cohort
from equilibria.forecasting._scenario import JUMP, Course, Scenario
from equilibria.forecasting._trust import widened

if TYPE_CHECKING:
    from equilibria.forecasting._forecast import LayerForecast

_MUCH = 0.25  # share of the remaining steps out of equilibrium that is worth a warning
_LARGE, _SOON = 0.5, 200  # relative change of lr, and the steps after it in which a forecast is worse than usual
_SEAM = 2  # factor between the last lr of the record and the first of the schedule: hardly meant
_FAR = 10  # times the recorded turning that a forecast may reach without a word
_LAW = "transient.evolve"


def find(
    layers: Sequence[LayerForecast],
    refused: Mapping[str, str],
    scenario: Scenario,
    parts: Sequence[tuple[Cohort, Course]],
) -> tuple[Finding, ...]:
    """What is worth knowing, warnings first."""
    found = [
        *_another_lr(parts[0]),
        *widened(layers),
        *_just_changed(parts[0]),
        *_after_a_jump(layers, scenario),
        *_refused(refused, len(layers)),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _after_a_jump(layers: Sequence[LayerForecast], scenario: Scenario) -> Iterator[Finding]:
    """Layers that a fall of lr leaves turning too slowly for long."""
    first = layers[0]
    falls = [
        place
        for place, (before, after) in enumerate(pairwise(first.lr.tolist()), start=1)
        if 0 < after < (1 - JUMP) * before and first.step[place] == first.step[place - 1] + 1
    ]
    total = int(first.step[-1] - first.step[0]) + 1
    slow = [layer for layer in layers if layer.steps_out.value > _MUCH * total]
    if not falls or not slow:
        return
    at = falls[0]
    worst = min(slow, key=lambda layer: float(layer.angle.value[at] / layer.angle_equilibrium[at]))
    share = float(worst.angle.value[at] / worst.angle_equilibrium[at])
    if share > 1 - JUMP:
        return
    yield Finding(
        "warning",
        f"{len(slow)} of {counted(len(layers), 'layer')} will turn too slowly when lr falls at step {first.step[at]:,}",
        f"{worst.name} at {share:.0%} of its equilibrium angle then, and out of equilibrium for "
        f"{worst.steps_out.value:,.0f} of {total:,} steps ({worst.steps_out.low:,.0f} to {worst.steps_out.high:,.0f})",
        "forecast again with rescale=True (--rescale); in training, RescaleOnDecay does it"
        if not scenario.rescale
        else "more weight decay after the fall settles faster",
        _LAW,
    )


def _just_changed(part: tuple[Cohort, Course]) -> Iterator[Finding]:
    """A record that ends shortly after a jump of lr: what is fitted is the transient."""
    cohort, course = part
    jumps = np.flatnonzero(np.abs(np.diff(cohort.lr)) > _LARGE * np.maximum(cohort.lr[1:], cohort.lr[:-1]))
    if not len(jumps) or course.first - cohort.step[jumps[-1] + 1] > _SOON:
        return
    at = jumps[-1]
    since = course.first - int(cohort.step[at + 1])
    yield Finding(
        "warning",
        f"lr changed {counted(since, 'step')} before the forecast begins",
        f"from {cohort.lr[at]:.4g} to {cohort.lr[at + 1]:.4g}; L is still on its way, and a fit takes that for its "
        "drift: the angle may be 10 to 15 % off, more than the bands say",
        f"forecast again {_SOON} steps after the change, or with start={int(cohort.step[at + 1])} (--start)",
        _LAW,
    )


def _another_lr(part: tuple[Cohort, Course]) -> Iterator[Finding]:
    """A schedule that does not go on where the record ends."""
    cohort, course = part
    was, comes = float(cohort.lr[-1]), float(course.lr[0])
    if abs(comes - was) <= JUMP * max(comes, was):
        return
    yield Finding(
        "warning" if max(comes, was) >= _SEAM * min(comes, was) else "note",
        f"lr jumps where the forecast begins, at step {course.first:,}",
        f"the record ends with lr {was:.4g}, the schedule has {comes:.4g} at step {course.first:,}",
        "if this is not meant: give the schedule of the whole run, in optimizer steps from 0, with its real lr",
        _LAW,
    )


def _refused(refused: Mapping[str, str], forecast: int) -> Iterator[Finding]:
    if not refused:
        return
    name, reason = next(iter(refused.items()))
    yield Finding(
        "note",
        f"{counted(len(refused), 'layer')} of {len(refused) + forecast} cannot be forecast",
        f"{name}: {reason}",
        "nothing to do for layers without normalisation behind them",
        _LAW,
    )


def assumptions(
    layers: Sequence[LayerForecast], scenario: Scenario, parts: Sequence[tuple[Cohort, Course]]
) -> tuple[str, ...]:
    """What a forecast rests on, in sentences."""
    cohort, course = parts[0]
    seen, comes = cohort.lr[len(cohort.lr) // 2 :], course.lr[course.lr > 0]
    ratio = float(comes.min() / seen.min()) if len(comes) and seen.min() > 0 else 1.0
    first = layers[0]
    turned = float(np.sum(np.diff(cohort.step, prepend=-1) * cohort.angle[:, 0] ** 2))
    to_come = (
        float(np.sum(np.gradient(first.step.astype(float)) * first.angle.value**2)) if len(first.step) > 1 else 0.0
    )
    said = [
        "momentum, betas, model and data stay as they were recorded",
        "L drifts with what has turned (with the steps, where it grows), and answers weakly to the angle, as in the "
        "runs that the prior comes from (small residual networks with BatchNorm on digits and CIFAR-10)",
        "the band of the angle is that of single steps, the one of the norm that of the norm itself; both are meant to "
        "hold 90 % (docs/forecast-model.md says what they held)",
    ]
    if ratio < 0.5:
        said.append(f"lr falls to {ratio:.2g} of what the fitted samples show: there L follows the prior alone")
    if turned > 0 and to_come > _FAR * turned:
        said.append(f"what comes turns {to_come / turned:.0f} times as far as what was recorded")
    if scenario.batch_factor != 1:
        said.append("gradients are noise: L is inverse to the batch size (the record does not say how far that holds)")
    if scenario.rescale and (course.weight_decay * course.lr > 0).any():
        said.append(
            "weights and optimizer state are rescaled at every change of lr or weight decay, step by step under a "
            "smooth schedule; where the variance in front of a BatchNorm would come down to 1000 times its eps "
            "RescaleOnDecay stops, which a record does not show"
        )
    return tuple(said)
