"""What the charts of a page draw, as JSON: curves without NaN, and axes that leave out what runs off to infinity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.pages.words import mark
from equilibria.planning.planner import Phase, Plan

Array = NDArray[np.float64]

_RANGES = ("angle_range", "norm_range", "schedule_range")
_RUN_OFF = 5  # a ramp to zero has no lower end on a log axis: its last per cent may run out of the chart


def chart_data(plan: Plan) -> dict[str, object]:
    """The curves of a plan, the ends of every axis, and the phases: all that the charts of the page draw.

    Without weight decay ``band`` is None: there is no equilibrium to draw, and the norm itself is shown.
    """
    curve, situation = plan.curve, plan.situation
    unit = situation.steps_per_epoch or 1
    with np.errstate(divide="ignore", invalid="ignore"):
        angle_ratio, norm_ratio = curve.angle / curve.angle_equilibrium, curve.norm / curve.norm_equilibrium
    band = None if situation.start_norm is None else _norm_band(plan)
    return {
        "unit": "step" if situation.steps_per_epoch is None else "epoch",
        "end": situation.steps / unit,
        "x": _column(curve.step / unit, digits=12),
        "angle": _log_column(curve.angle),
        "equilibrium": _log_column(curve.angle_equilibrium),
        "by_lr": _log_column(curve.angle_by_lr),
        "ratio": _column(angle_ratio),
        "norm_ratio": _log_column(norm_ratio),
        "norm": _log_column(curve.norm),
        "lr": _log_column(curve.lr),
        "wd": _log_column(curve.weight_decay),
        "band": band,
        "angle_range": _widen(_range(plan, curve.angle, curve.angle_equilibrium, curve.angle_by_lr), 4.0),
        "norm_range": _norm_range(plan, norm_ratio, band) if band else _widen(_range(plan, curve.norm), 4.0),
        "schedule_range": _widen(_range(plan, curve.lr, curve.weight_decay), 4.0),
        "phases": [
            {
                "number": phase.number,
                "from": phase.first_step / unit,
                "to": (phase.first_step + phase.steps) / unit,
                "mark": "" if phase.settles else mark(phase.end.angle_ratio, situation.tolerance),
            }
            for phase in plan.phases
        ],
    }


def page_data(plans: Mapping[str, Plan]) -> dict[str, object]:
    """The first plan and, under "alternatives", the others; all with the same axes: a button changes curves alone."""
    found = [{**chart_data(plan), "name": name} for name, plan in plans.items()]
    ranges = {name: _hull([each[name] for each in found]) for name in _RANGES}
    first, *others = ({**each, **ranges} for each in found)
    return {**first, "alternatives": others}


def _hull(ranges: list[Any]) -> list[float]:
    return [min(low for low, _ in ranges), max(high for _, high in ranges)]


def _norm_band(plan: Plan) -> list[float]:
    """Norm ratios between which the angle is within the tolerance."""
    power, tolerance = plan.situation.norm_power, plan.situation.tolerance
    return [(1 + tolerance) ** (-1 / power), (1 - tolerance) ** (-1 / power)]


def _norm_range(plan: Plan, ratio: Array, band: list[float]) -> list[float]:
    """The ratios that occur, and enough around the band to see it."""
    low, high = _range(plan, ratio)
    return [min(low, band[0] / 1.1), max(high, band[1] * 1.1)]


def _range(plan: Plan, *columns: Array) -> list[float]:
    """Both ends of a log axis: all of every constant phase, but a ramp only until it runs off to zero or infinity."""
    in_flat = np.concatenate([np.full(len(part), phase.flat) for phase, part in _parts(plan)])
    lows, highs = [], []
    for column in columns:
        positive = np.isfinite(column) & (column > 0)
        if not positive.any():
            continue
        shown, flat = column[positive], column[positive & in_flat]
        low, high = np.percentile(shown, [_RUN_OFF, 100 - _RUN_OFF])
        lows.append(max(shown.min(), min(low / 2, flat.min(initial=np.inf))))
        highs.append(min(shown.max(), max(high * 2, flat.max(initial=0))))
    return [float(min(lows)) / 1.25, float(max(highs)) * 1.25]


def _widen(ends: list[float], factor: float) -> list[float]:
    """Ends at least this factor apart: around a flat line small differences must not look large."""
    low, high = ends
    room = max(1.0, (factor * low / high) ** 0.5)
    return [low / room, high * room]


def _parts(plan: Plan) -> list[tuple[Phase, NDArray[np.int64]]]:
    """Every phase with the steps of the curve inside it."""
    edges = np.searchsorted(plan.curve.step, [phase.first_step for phase in plan.phases[1:]])
    return list(zip(plan.phases, np.split(plan.curve.step, edges), strict=True))


def _log_column(values: Array) -> list[float | None]:
    """As a JSON column for a log axis, on which zero has no place."""
    return _column(np.where(values > 0, values, np.nan))


def _column(values: ArrayLike, *, digits: int = 6) -> list[float | None]:
    """Six digits are more than a screen can show; JSON has no NaN."""
    column = np.asarray(values, float).tolist()
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in column]
