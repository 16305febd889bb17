"""What the charts of a forecast's page draw, as JSON: measured samples, forecasts with their bands, axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.forecasting.backtest import FORECAST, BackTest, LayerTest
from equilibria.forecasting.forecast import Forecast, LayerForecast, Measured

Array = NDArray[np.float64]

MOST_LAYERS = 60  # with curves; a page of more would take megabytes, and nobody leafs through them
_POINTS, _SAMPLES = 160, 150
_JUMP = 0.05  # relative change of lr or weight decay, both sides of which are shown
_ROOM = 1.3  # factor above and below what an axis shows
_OUTLIERS = 0.5  # per cent of the measured samples at each end that may run out of the chart


def forecast_data(forecasts: Mapping[str, Forecast], *, names: Sequence[str]) -> dict[str, object]:
    """The curves of what-if: every layer of ``names`` under every scenario, and what was measured before."""
    first = next(iter(forecasts.values()))
    unit = first.steps_per_epoch or 1
    samples = [_samples(first.measured(name), unit) for name in names]
    scenarios = [_scenario(name, [each[layer] for layer in names], unit) for name, each in forecasts.items()]
    return _page(samples, scenarios, names, first=first.first, steps=first.steps, per=first.steps_per_epoch)


def backtest_data(test: BackTest, *, names: Sequence[str], steps_per_epoch: int | None) -> dict[str, object]:
    """The curves of a back-test: the forecast and each baseline, and what was measured beside them."""
    unit = steps_per_epoch or 1
    tests = {each.forecast.name: each for each in test.layers}
    layers = [tests[name] for name in names]
    measured = [
        _samples(Measured(each.forecast.step, each.angle, each.norm, each.forecast.lr), unit) for each in layers
    ]
    scenarios = [_scenario(FORECAST, [each.forecast for each in layers], unit)]
    scenarios += [_guess(name, layers, unit) for name in layers[0].guesses]
    return _page(measured, scenarios, names, first=test.start, steps=test.steps, per=steps_per_epoch)


def _page(
    measured: list[dict[str, Any]],
    scenarios: list[dict[str, Any]],
    names: Sequence[str],
    *,
    first: int,
    steps: int,
    per: int | None,
) -> dict[str, object]:
    return {
        "unit": "step" if per is None else "epoch",
        "end": steps / (per or 1),
        "first": first / (per or 1),
        "names": list(names),
        "measured": measured,
        "scenarios": scenarios,
        "ranges": [_ranges(measured[at], [each["layers"][at] for each in scenarios]) for at in range(len(names))],
        "schedule_range": _ends(
            values for each in scenarios for course in each["courses"] for values in (course["lr"], course["wd"])
        ),
    }


def _samples(found: Measured, unit: int) -> dict[str, Any]:
    at = np.linspace(0, len(found.step) - 1, min(len(found.step), _SAMPLES)).round().astype(np.int64)
    columns = {"angle": found.angle, "norm": found.norm, "elr": found.lr / found.norm**2}
    x = column(found.step[at] / unit, digits=9)
    return {"x": x, **{name: column(values[at]) for name, values in columns.items()}}


def _scenario(name: str, layers: Sequence[LayerForecast], unit: int) -> dict[str, Any]:
    """Layers of one parameter group share their course: steps, lr and weight decay."""
    courses: dict[bytes, int] = {}
    shown: list[dict[str, Any]] = []
    drawn = []
    for layer in layers:
        key = layer.step.tobytes() + layer.lr.tobytes() + layer.weight_decay.tobytes()
        at = _thinned(layer)
        if key not in courses:
            courses[key] = len(shown)
            x = column(layer.step[at] / unit, digits=9)
            shown.append({"x": x, "lr": column(layer.lr[at]), "wd": column(layer.weight_decay[at])})
        bands = {"angle": layer.angle, "norm": layer.norm, "elr": layer.effective_lr}
        drawn.append(
            {
                "course": courses[key],
                "goal": column(layer.angle_equilibrium[at]),
                **{kind: column(band.value[at]) for kind, band in bands.items()},
                **{f"{kind}_low": column(band.low[at]) for kind, band in bands.items()},
                **{f"{kind}_high": column(band.high[at]) for kind, band in bands.items()},
            }
        )
    return {"name": name, "courses": shown, "layers": drawn}


def _guess(name: str, layers: Sequence[LayerTest], unit: int) -> dict[str, Any]:
    """A baseline says something about the angle only, and without a band."""
    like = _scenario(name, [each.forecast for each in layers], unit)
    for drawn, each in zip(like["layers"], layers, strict=True):
        at = _thinned(each.forecast)
        drawn |= {key: None for key in drawn if key not in ("course", "goal")}
        drawn["angle"] = column(each.guesses[name][at])
    return like


def _thinned(layer: LayerForecast) -> NDArray[np.int64]:
    """Evenly spread points, and both sides of every jump."""
    count = len(layer.step)
    even = np.linspace(0, count - 1, min(count, _POINTS)).round().astype(np.int64)
    jumps = [
        np.flatnonzero(np.abs(np.diff(values)) > _JUMP * np.maximum(values[1:], values[:-1]))
        for values in (layer.lr, layer.weight_decay)
    ]
    sides = np.concatenate(jumps) if sum(map(len, jumps)) <= _POINTS // 2 else np.empty(0, dtype=np.int64)
    return np.array(sorted({*even.tolist(), *sides.tolist(), *(sides + 1).tolist()}), dtype=np.int64)


def _ranges(measured: dict[str, Any], drawn: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """One axis for all scenarios, so that a button changes the curves alone."""
    found = {}
    for kind in ("angle", "norm", "elr"):
        keys = (kind, f"{kind}_low", f"{kind}_high", *(("goal",) if kind == "angle" else ()))
        curves = [each[key] for each in drawn for key in keys if each[key] is not None]
        found[kind] = _ends([_inner(measured[kind]), *curves])
    return found


def _inner(values: list[float | None]) -> list[float]:
    known = np.array([value for value in values if value is not None])
    low, high = np.percentile(known, [_OUTLIERS, 100 - _OUTLIERS]) if len(known) else (np.nan, np.nan)
    return [float(low), float(high)]


def _ends(columns: Iterable[Sequence[float | None]]) -> list[float]:
    """Both ends of a log axis; an lr that falls to zero does not stretch it over more than five decades."""
    known = [value for values in columns for value in values if value is not None and np.isfinite(value) and value > 0]
    high = max(known, default=1.0)
    low = max(min(known, default=1.0), high * 1e-5)
    return [low / _ROOM, high * _ROOM]


def column(values: ArrayLike, *, digits: int = 5) -> list[float | None]:
    """For a log axis: five digits are more than a screen can show; what is not positive and finite is a hole."""
    return [_cell(value, digits) for value in np.asarray(values, dtype=np.float64).tolist()]


def _cell(value: float, digits: int) -> float | None:
    shown = np.isfinite(value) and (value > 0 or digits > 5)  # step 0 is a place on the other axis
    return float(f"{value:.{digits}g}") if shown else None
