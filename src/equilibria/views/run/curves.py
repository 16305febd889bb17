"""The data of the charts of a report: the curves of every layer on few points, and where most layers lie."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from equilibria.views.run.metrics import MetricPanel, metric_panels
from equilibria.views.thinning import Stretches, stretches

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_LAYERS = 500
"""The number of layers with curves; a page with more would be slow to open."""

MOST_STRETCHES = 800
"""Stretches of a line: as many as a wide screen has room for."""

_LINE_BYTES = 2_500_000
_POINTS_PER_STRETCH = 8  # of one layer: two for each of the lines that are its own
_BYTES_PER_POINT = 16 / 3  # four, in base64
_SAMPLES_PER_AVERAGE = 8  # an average over fewer scatters as much as they do
_AVERAGES = (60, 240)
_MOST_BREAKS = 50  # an lr that jumps more often than this is a zigzag, not steps
_JUMP = 0.1
_FEW = 40  # with more layers, only the worst and the middle of all are drawn at first
_MIDDLE = (0.1, 0.5, 0.9)
_LINES = {
    "predicted": "angle_predicted",
    "equilibrium": "angle_equilibrium",
    "norm": "norm",
    "norm_predicted": "norm_predicted",
    "norm_equilibrium": "norm_equilibrium",
    "lr": "lr",
    "wd": "weight_decay",
}


def curves(
    samples: pa.Table,
    names: Sequence[str],
    *,
    steps_per_epoch: int | None,
    most: int = MOST_STRETCHES,
    metrics: pa.Table | None = None,
) -> dict[str, object]:
    """The curves of the named layers, ready for JSON.

    Args:
        samples: a sample table. A row may stand for several samples: ``angle`` is then their root mean square, and
            further columns ``angle_low`` and ``angle_high`` hold the smallest and the largest.
        names: layers, in the order in which the page numbers them; the first `MOST_LAYERS` get curves.
        steps_per_epoch: None to count in steps.
        most: stretches of a line, two points each; fewer draw faster.
        metrics: the numbers that the training logged.

    Returns:
        ``arrays`` (see `Arrays`), ``layers`` (name of a curve -> number of its array, None for a curve of gaps only),
        ``middle`` (10 %, 50 % and 90 % of the layers by kind of curve; None with few layers), ``metrics`` (name, note
        and curve of the logged numbers), and the ``unit`` and ``range`` of the x axis.
    """
    shown, unit = list(names[:MOST_LAYERS]), steps_per_epoch or 1
    steps, layers, columns = samples["step"].to_numpy(), _numbers(samples, shown), _columns(samples)
    breaks = _breaks(steps, layers, columns)
    fine = stretches(steps, layers, most=min(most, _most_stretches(len(shown))), breaks=breaks)
    coarse = stretches(steps, layers, most=_most_averages(steps, len(shown)), breaks=breaks)
    averages = {"x": (coarse.first + coarse.last) / 2 / unit, **_averages(coarse, columns)}
    lines = {"line_x": fine.line_steps() / unit, **_lines(fine, columns)}
    arrays = Arrays()
    parts = _split(coarse, averages, arrays, len(shown)), _split(fine, lines, arrays, len(shown))
    panels = [] if metrics is None else metric_panels(metrics, most=most)
    return {
        "unit": "step" if steps_per_epoch is None else "epoch",
        "range": _range(fine, panels, unit),
        "layers": [{"name": name, **average, **line} for name, average, line in zip(shown, *parts, strict=True)],
        "middle": None if len(shown) <= _FEW else _middle(coarse, averages, arrays),
        "metrics": [
            {
                "name": panel.name,
                "note": panel.note,
                "log": panel.is_log,
                "x": arrays.add(panel.steps / unit),
                "y": arrays.add(panel.values),
            }
            for panel in panels
        ],
        "arrays": arrays.encoded,
    }


class Arrays:
    """The arrays behind the curves of a page, each stored once; a curve refers to its array by number.

    Example:
        >>> arrays = Arrays()
        >>> arrays.add([1.0, 2.0]), arrays.add([3.0]), arrays.add([1.0, 2.0]), arrays.add([float("nan")])
        (0, 1, 0, None)
        >>> len(arrays.encoded)
        2
    """

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, values: ArrayLike, *, rounding: float | None = None) -> int | None:
        """Store an array and return its number; None if all of it is a gap.

        Args:
            values: numbers that are not finite are gaps.
            rounding: direction in which to round to 32 bits: ``-inf`` downwards, ``inf`` upwards, None to the nearest.
        """
        exact = np.asarray(values, dtype=np.float64)
        if not np.isfinite(exact).any():
            return None
        short = _to_single(exact, rounding)
        content = short.tobytes()
        if content not in self._numbers:
            self._numbers[content] = len(self.encoded)
            self.encoded.append(base64.b64encode(content).decode())
        return self._numbers[content]


def _to_single(exact: np.ndarray, rounding: float | None) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number too large for 32 bits becomes a gap
        short = exact.astype("<f4")
    if rounding is not None:
        inside = short > exact if rounding < 0 else short < exact
        short = np.where(inside, np.nextafter(short, np.float32(rounding)), short)
    return np.where(np.isfinite(short), short, np.float32(np.nan)).astype("<f4")


def _most_stretches(layers: int) -> int:
    room = _LINE_BYTES / (_POINTS_PER_STRETCH * _BYTES_PER_POINT * max(layers, 1))
    return min(MOST_STRETCHES, int(room))


def _most_averages(steps: Integers, layers: int) -> int:
    least, most = _AVERAGES
    sampled = len(np.unique(steps))
    return min(max(sampled // _SAMPLES_PER_AVERAGE, least), most if layers <= _FEW else least)


def _numbers(samples: pa.Table, names: Sequence[str]) -> Integers:
    """The number of every row's layer, -1 for layers without curves."""
    numbers = pc.index_in(samples["param"].cast(pa.string()), value_set=pa.array(names, pa.string()))
    return np.asarray(numbers.fill_null(-1).to_numpy(), dtype=np.int64)


def _columns(samples: pa.Table) -> dict[str, Floats]:
    wanted = {"angle", "norm", *_LINES.values(), *({"angle_low", "angle_high"} & {*samples.column_names})}
    return {name: np.asarray(samples[name].to_numpy(), dtype=np.float64) for name in wanted}  # null becomes NaN


def _breaks(steps: Integers, layers: Integers, columns: dict[str, Floats]) -> Integers:
    """The steps at which lr or wd jump; no average should go across them."""
    order = np.lexsort((steps, layers))
    jump = np.zeros(len(order), dtype=bool)
    for name in ("lr", "weight_decay"):
        values = columns[name][order]
        jump[1:] |= np.abs(np.diff(values)) > _JUMP * np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    jump[1:] &= np.diff(layers[order]) == 0
    breaks = np.unique(steps[order][jump])
    return breaks if len(breaks) <= _MOST_BREAKS else breaks[:0]


def _averages(parts: Stretches, columns: dict[str, Floats]) -> dict[str, Floats]:
    """Root mean squares, and the smallest and largest angle, of every stretch."""
    angle, predicted = columns["angle"], columns["angle_predicted"]
    both = np.isfinite(angle) & np.isfinite(predicted)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = parts.rms(np.where(both, angle, np.nan)) / parts.rms(np.where(both, predicted, np.nan))
        norm_ratio = parts.rms(columns["norm"] / columns["norm_equilibrium"])
    ratio[~np.isfinite(ratio)] = np.nan
    (low, _), (_, high) = (parts.envelope(columns.get(name, angle)) for name in ("angle_low", "angle_high"))
    norm_rms = parts.rms(columns["norm"])
    averages = {"angle": parts.rms(angle), "low": low, "high": high, "ratio": ratio, "norm_ratio": norm_ratio}
    return averages | {"norm_rms": norm_rms}


def _lines(parts: Stretches, columns: dict[str, Floats]) -> dict[str, Floats]:
    return {name: parts.line(columns[column]) for name, column in _LINES.items()}


def _split(parts: Stretches, kinds: dict[str, Floats], arrays: Arrays, count: int) -> list[dict[str, int | None]]:
    """Each layer's share of every curve, as the numbers of its arrays."""
    edges = np.searchsorted(parts.layer, np.arange(count + 1))
    points = {kind: len(values) // max(len(parts.layer), 1) for kind, values in kinds.items()}
    rounding = {"low": -np.inf, "high": np.inf}
    return [
        {
            kind: arrays.add(values[begin * points[kind] : end * points[kind]], rounding=rounding.get(kind))
            for kind, values in kinds.items()
        }
        for begin, end in itertools.pairwise(edges)
    ]


def _middle(parts: Stretches, averages: dict[str, Floats], arrays: Arrays) -> dict[str, object]:
    """Where the middle 80 % of the layers lie in every stretch, and their median."""
    numbers, column = np.unique(parts.stretch, return_inverse=True)
    middle: dict[str, object] = {}
    for kind, values in averages.items():
        table = np.full((int(parts.layer.max()) + 1, len(numbers)), np.nan)
        table[parts.layer, column] = values
        middle[kind] = [arrays.add(quantile) for quantile in _quantiles(table)]
    return middle


def _quantiles(table: Floats) -> Floats:
    known = np.any(np.isfinite(table), axis=0)
    quantiles = np.full((len(_MIDDLE), len(known)), np.nan)
    if known.any():
        quantiles[:, known] = np.nanquantile(table[:, known], _MIDDLE, axis=0)
    return quantiles


def _range(parts: Stretches, panels: Sequence[MetricPanel], unit: int) -> list[float]:
    ends = np.concatenate([parts.first, parts.last, *(panel.steps[[0, -1]] for panel in panels)])
    if not len(ends):
        return [0.0, 1.0]
    first, last = int(ends.min()), int(ends.max())
    return [first / unit, (last if last > first else first + 1) / unit]
