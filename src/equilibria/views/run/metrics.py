"""The numbers that a training logged itself, such as its loss: panels of a report, and their last values in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.findings import counted, joined, rounded
from equilibria.records._metrics import metric_series
from equilibria.views.thinning import stretches

Floats = NDArray[np.float64]

MOST_PANELS = 4
_LOSS = "loss"
_DECADE = 10.0  # numbers that span more are drawn on a logarithmic axis
_MOST_IN_WORDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class MetricPanel:
    """One logged number over the run, as a line through its extremes.

    Attributes:
        name: as it was logged.
        steps: of the points.
        values: of the points; NaN is a gap.
        is_log: whether the axis is logarithmic: all numbers are positive, and they span more than a decade.
        note: the last value, and how many are not finite.
    """

    name: str
    steps: Floats
    values: Floats
    is_log: bool
    note: str


def metric_panels(metrics: pa.Table, *, most: int) -> list[MetricPanel]:
    """The panels of the first few numbers, the loss first.

    Args:
        metrics: a metrics table.
        most: stretches of a line, two points each.
    """
    series = metric_series(metrics)
    return [_panel(name, *series[name], most=most) for name in loss_first(series)[:MOST_PANELS]]


def loss_first(names: Iterable[str]) -> list[str]:
    """The names with the loss first, then other losses, then the rest in their own order.

    Example:
        >>> loss_first(["accuracy", "val_loss", "loss"])
        ['loss', 'val_loss', 'accuracy']
    """
    return sorted(names, key=lambda name: (name.lower() != _LOSS, _LOSS not in name.lower()))


def left_out(metrics: pa.Table) -> str:
    """A sentence about the numbers without a panel, "" if all have one."""
    others = loss_first(metric_series(metrics))[MOST_PANELS:]
    return f"Not drawn: {joined(others)} (run.metrics() has them)." if others else ""


def metric_summaries(metrics: pa.Table) -> list[dict[str, Any]]:
    """One object for each logged name, for JSON."""
    series = metric_series(metrics)
    return [_summary(name, *series[name]) for name in loss_first(series)]


def last_values(metrics: pa.Table) -> str:
    """The last value of the first few numbers, "" without any.

    Example:
        >>> from equilibria.records._metrics import KeptMetrics
        >>> kept = KeptMetrics()
        >>> kept.add("loss", [0, 1], [2.3, 2.1])
        >>> last_values(kept.table())
        'loss 2.1 at step 1'
    """
    series: Mapping[str, Any] = metric_series(metrics)
    names = loss_first(series)
    shown = [f"{name} {_value(series[name][1][-1])} at step {series[name][0][-1]:,}" for name in names[:_MOST_IN_WORDS]]
    more = len(names) - len(shown)
    return ", ".join([*shown, *([f"{more:,} more"] if more else [])])


def _panel(name: str, steps: NDArray[np.int64], values: Floats, *, most: int) -> MetricPanel:
    parts = stretches(steps, np.zeros(len(steps), np.int64), most=most)
    finite = values[np.isfinite(values)]
    is_log = bool(len(finite)) and finite.min() > 0 and finite.max() > _DECADE * finite.min()
    note = f"{_value(values[-1])} at step {steps[-1]:,}"
    if len(finite) < len(values):
        first = steps[~np.isfinite(values)][0]
        note += f"; {counted(len(values) - len(finite), 'value')} not finite, first at step {first:,}"
    return MetricPanel(name, parts.line_steps().astype(np.float64), parts.line(values), bool(is_log), note)


def _value(value: float) -> str:
    return rounded(value, digits=4) if np.isfinite(value) else str(float(value))


def _summary(name: str, steps: NDArray[np.int64], values: Floats) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    return {
        "name": name,
        "count": len(values),
        "not_finite": len(values) - len(finite),
        "first_step": int(steps[0]),
        "last_step": int(steps[-1]),
        "first": float(values[0]),
        "last": float(values[-1]),
        "lowest": float(finite.min()) if len(finite) else None,
        "highest": float(finite.max()) if len(finite) else None,
    }
