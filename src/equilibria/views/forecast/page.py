"""Forecasts as one HTML page that needs no network: charts with their bands, tables, findings and assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.findings import counted, plain, rounded
from equilibria.forecasting import (
    FORECAST,
    BackTest,
    Estimate,
    Forecast,
    LayerForecast,
    LayerOutcome,
    LayerSamples,
    LayerTest,
    Suggestion,
    WhatIf,
)
from equilibria.forecasting._fit import VARYING_GRADIENT
from equilibria.forecasting._layers import Steps
from equilibria.forecasting._paths import TOLERANCE
from equilibria.planning._phases import thinned
from equilibria.views.document import (
    MOST_CHOICES,
    Page,
    column,
    finding_cards,
    html_row,
    html_section,
    html_table,
    legend_entry,
    log_column,
    per_choice,
    toggles,
)
from equilibria.views.words import full_stop, ratio_cell, sentence_case, settings_list, text

MOST_LAYERS = 60  # with curves; more would take megabytes
_POINTS, _SAMPLES, _DIGITS, _X_DIGITS = 160, 150, 5, 9  # of a curve; five digits fill a screen
_JUMP = 0.05  # relative change of lr or weight decay of which both sides are shown
_ROOM = 1.3  # factor left free above and below on an axis
_OUTLIERS = 0.5  # per cent of the measured samples at each end that may lie outside the chart
_NO_FINDINGS = "No findings", "No layer of this scenario stands out."
_READING = (
    "The <strong>angle</strong> is the effective learning rate: how far one step turns the direction of a weight. The "
    "length of a normalised weight does not change the network's output.",
    "<strong>Out of equilibrium</strong>: steps whose angle is more than 5&nbsp;% from the equilibrium of lr × wd.",
    "<strong>Angle travelled</strong>: the sum of the angles of all remaining steps, the distance on the sphere.",
    "The <strong>band</strong> is expected to hold 90&nbsp;% of single measured steps; in brackets, its two ends.",
)


def forecast_page(result: WhatIf | Forecast, *, title: str | None = None, suggestion: Suggestion | None = None) -> Page:
    """The page of a forecast, or of several side by side: one file, or filled into the frame of the live server.

    Args:
        result: the forecast, or several.
        title: shown above the headline.
        suggestion: shown as a table too, if there is one.

    Raises:
        EquilibriaError: more scenarios than a page has buttons for.
    """
    if isinstance(result, Forecast):
        result = WhatIf({result.scenario.name or "forecast": result})
    forecasts = result.forecasts
    if len(forecasts) > MOST_CHOICES:
        raise EquilibriaError(f"got {len(forecasts)} scenarios for one page; expected at most {MOST_CHOICES}")
    base = next(iter(forecasts))
    names = shown_layers(result.worst(base).layer, [layer.name for layer in forecasts[base].layers])
    several, sentence = len(forecasts) > 1, forecast_headline(result)
    parts = {
        "headline": text(sentence_case(sentence)),
        "deck": _DECK,
        "settings": _settings(forecasts[base]),
        "toggles": toggles("Scenario", {name: _sentence(result, name) for name in forecasts}),
        "layers": layer_options(names),
        "chosen": "forecast",
        "others_legend": legend_entry("line-other", "the other scenarios") if several else "",
        "angle_label": text(f"Chart of the angle per step of a layer, measured and forecast. {sentence}"),
        "tables": _tables(result, suggestion),
        "findings": per_choice(
            [finding_cards(forecast.findings, otherwise=_NO_FINDINGS) for forecast in forecasts.values()]
        ),
        "reading": "\n".join(f"<li>{line}</li>" for line in _READING),
        "assumptions": "\n".join(f"<li>{text(full_stop(sentence))}</li>" for sentence in forecasts[base].assumptions),
        "made": "Forecast",
    }
    shown = "Forecast" if title is None else title
    return Page("equilibria.views.forecast", shown, forecast_data(forecasts, names=names), parts)


_DECK = (
    "A forecast of normalised layers and of other matrices with weight decay over the rest of the run, from the "
    "samples so far: the laws of the optimizer, with the gradients and growth gains measured in this network."
)


def forecast_headline(result: WhatIf) -> str:
    """The effect of the first scenario on its worst layer, and the scenario that does better, if there is one."""
    base, *others = result.forecasts
    worst, left = result.worst(base), _left(result.forecasts[base])
    if math.isnan(worst.steps_out.value):  # without weight decay there is no equilibrium
        return f"{worst.layer} turns by {rounded(worst.final_angle.value)} rad in the last step"
    sentence = f"{worst.layer} is out of equilibrium for {_share(worst.steps_out.value, left)} of the remaining steps"
    if worst.steps_out.value < TOLERANCE * left:
        sentence = "every layer stays near its equilibrium for the rest of the run"
    elif _share(worst.steps_out.value, left) == _share(left, left):
        sentence = _slowing(result.forecasts[base])
    better = min(others, key=lambda name: result.worst(name).steps_out.value, default=None)
    if better is not None and result.worst(better).steps_out.value < 0.8 * worst.steps_out.value:
        share = _share(result.worst(better).steps_out.value, left)
        sentence += f"; with “{better}” the worst layer is out of it for {share}"
    if any(VARYING_GRADIENT in layer.validity for layer in result.forecasts[base].layers):
        sentence += " (gradients vary widely in size: trust the direction more than the numbers)"
    return sentence


def _slowing(forecast: Forecast) -> str:
    """How angles change until the end of a run in which a layer stays out of equilibrium: there that is no news."""
    layers, left = forecast.layers, _left(forecast)
    out = sum(_share(layer.steps_out.value, left) == _share(left, left) for layer in layers)
    factor = float(np.median([layer.angle.value[-1] / layer.angle.value[0] for layer in layers]))
    return (
        f"in the last step layers turn {plain(factor)} times as far as in step {forecast.first:,} (median of "
        f"{len(layers):,}); {out:,} of {counted(len(layers), 'layer')} {'stays' if out == 1 else 'stay'} out of "
        "equilibrium until then"
    )


def shown_layers(worst: str, names: Sequence[str]) -> list[str]:
    """The layers with curves, the worst first."""
    return [worst, *(name for name in names if name != worst)][:MOST_LAYERS]


def layer_options(names: Sequence[str]) -> str:
    """The layers to choose from."""
    return "\n".join(f'<option value="{position}">{text(name)}</option>' for position, name in enumerate(names))


def _interval(estimate: Estimate) -> str:
    """A number with the ends of its band."""
    low, high = rounded(estimate.low, digits=2), rounded(estimate.high, digits=2)
    if low == high:  # a band narrower than two digits show
        low, high = rounded(estimate.low), rounded(estimate.high)
    return rounded(estimate.value) if low == high else f"{rounded(estimate.value)} ({low}–{high})"


def _words_cell(words: str) -> str:
    """A cell of left-aligned words."""
    return f'<td class="words">{text(words)}</td>'


def refused_list(refused: Mapping[str, str]) -> str:
    """The layers without a forecast, with the reason."""
    if not refused:
        return ""
    rows = "".join(f"<li>{text(name)}: {text(reason)}</li>" for name, reason in refused.items())
    return (
        f"<details><summary>{counted(len(refused), 'parameter')} without a forecast</summary><ul>{rows}</ul></details>"
    )


def _left(forecast: Forecast) -> int:
    return forecast.steps - forecast.first


def _share(steps: float, left: int) -> str:
    return f"{100 * steps / left:.0f} %"


def _sentence(result: WhatIf, name: str) -> str:
    forecast, worst = result.forecasts[name], result.worst(name)
    out = (
        "there is no equilibrium"
        if math.isnan(worst.steps_out.value)
        else f"out of equilibrium for {_time(worst.steps_out.value, forecast)}"
    )
    return (
        f"Worst layer: {worst.layer}, {out}, {rounded(worst.final_angle.value)} rad in the last step, "
        f"{rounded(worst.integrated_angle.value)} rad travelled."
    )


def _time(steps: float, forecast: Forecast) -> str:
    if math.isnan(steps):
        return "–"
    if forecast.steps_per_epoch is None:
        return f"{steps:,.0f} steps"
    return f"{steps / forecast.steps_per_epoch:,.3g} epochs"


def _settings(forecast: Forecast) -> str:
    rules = sorted({type(layer.rule).__name__ for layer in forecast.layers})
    pairs = [("optimizer", ", ".join(rules), ""), ("layers", f"{len(forecast.layers):,}", "")]
    if forecast.refused:
        pairs.append(
            ("without a forecast", counted(len(forecast.refused), "parameter"), "not scale-invariant, or few samples")
        )
    pairs.append(("measured until", f"step {forecast.first - 1:,}", ""))
    per = forecast.steps_per_epoch
    epochs = "" if per is None else f"epoch {forecast.steps / per:,.4g}"
    pairs.append(("forecast until", f"step {forecast.steps - 1:,}", epochs))
    return settings_list(pairs)


_HEAD = ("out of equilibrium", "last angle, rad", "÷ equilibrium", "last norm", "angle travelled, rad")


def _tables(result: WhatIf, suggestion: Suggestion | None) -> str:
    sections = []
    if len(result.forecasts) > 1:
        rows = [
            html_row(name, [_words_cell(result.worst(name).layer), *_cells(result.worst(name), forecast)])
            for name, forecast in result.forecasts.items()
        ]
        sections.append(
            html_section("Side by side: the worst layer", ("scenario", "layer", *_HEAD), rows, name="compared")
        )
    if suggestion is not None:
        sections.append(_suggestion(suggestion))
    per_layer = per_choice([_layer_table(result, name) for name in result.forecasts])
    refused = refused_list(next(iter(result.forecasts.values())).refused)
    heading = '<section aria-labelledby="layers-heading">\n<h2 id="layers-heading">Layer by layer</h2>'
    sections.append(f"{heading}\n{per_layer}\n{refused}\n</section>\n")
    return "\n".join(sections)


def _layer_table(result: WhatIf, name: str) -> str:
    forecast = result.forecasts[name]
    rows = [html_row(outcome.layer, _cells(outcome, forecast)) for outcome in result.outcomes(name)]
    widened = "".join(
        f"<li>{text(layer.name)}: {text(reason)}</li>" for layer in forecast.layers for reason in layer.validity
    )
    return html_table(("layer", *_HEAD), rows, name="layers-heading") + (
        f'<ul class="widened">{widened}</ul>' if widened else ""
    )


def _cells(outcome: LayerOutcome, forecast: Forecast) -> list[str]:
    return [
        _time(outcome.steps_out.value, forecast),
        _interval(outcome.final_angle),
        ratio_cell(outcome.final_ratio, TOLERANCE),
        _interval(outcome.final_norm),
        _interval(outcome.integrated_angle),
    ]


def _suggestion(suggestion: Suggestion) -> str:
    head = ("changes", "what", "off by, worst layer", "off by, median", "angle travelled, rad", "steps out")
    rows = [
        html_row(
            str(len(proposal.changes)),
            [
                _words_cell("; ".join(proposal.changes) or "the plan as given"),
                f"{proposal.off:.2f}×",
                f"{proposal.median_off:.2f}×",
                rounded(proposal.integrated_angle),
                f"{proposal.steps_out:,.0f}",
            ],
        )
        for proposal in suggestion.proposals
    ]
    assumptions = "".join(f"<li>{text(full_stop(sentence))}</li>" for sentence in suggestion.assumptions)
    after = f'<ul class="caption widened">{assumptions}</ul>\n'
    return html_section(f"Suggested so that {suggestion.target}", head, rows, name="suggested", after=after)


# ---- the data of the charts


def forecast_data(forecasts: Mapping[str, Forecast], *, names: Sequence[str]) -> dict[str, object]:
    """The curves of `what_if`: every layer of ``names`` under every scenario, and the samples before."""
    first = next(iter(forecasts.values()))
    unit = first.steps_per_epoch or 1
    samples = [_samples(first.measured(name), unit) for name in names]
    scenarios = [
        _scenario(scenario, [forecast[name] for name in names], unit) for scenario, forecast in forecasts.items()
    ]
    return _charts(samples, scenarios, names, first=first.first, steps=first.steps, per_epoch=first.steps_per_epoch)


def backtest_data(test: BackTest, *, names: Sequence[str]) -> dict[str, object]:
    """The curves of a back-test: the forecast, each baseline, and the samples."""
    tests = {layer.forecast.name: layer for layer in test.layers}
    layers = [tests[name] for name in names]
    samples = [
        _samples(LayerSamples(layer.forecast.step, layer.angle, layer.norm, layer.forecast.lr), 1) for layer in layers
    ]
    scenarios = [_scenario(FORECAST, [layer.forecast for layer in layers], 1)]
    scenarios += [_guess(name, layers) for name in layers[0].guesses]
    return _charts(samples, scenarios, names, first=test.start, steps=test.steps, per_epoch=None)


def _charts(
    samples: list[dict[str, Any]],
    scenarios: list[dict[str, Any]],
    names: Sequence[str],
    *,
    first: int,
    steps: int,
    per_epoch: int | None,
) -> dict[str, object]:
    """All that page.js draws. Scenarios share the axes of a layer, so a button changes only the curves."""
    unit = per_epoch or 1
    schedules = [schedule for scenario in scenarios for schedule in scenario["schedules"]]
    return {
        "unit": "step" if per_epoch is None else "epoch",
        "end": steps / unit,
        "first": first / unit,
        "names": list(names),
        "measured": samples,
        "scenarios": scenarios,
        "ranges": [
            _ranges(measured, [scenario["layers"][layer] for scenario in scenarios])
            for layer, measured in enumerate(samples)
        ],
        "schedule_range": _ends(schedule[name] for schedule in schedules for name in ("lr", "wd")),
    }


def _samples(samples: LayerSamples, unit: int) -> dict[str, Any]:
    rows = thinned(len(samples.step), most=_SAMPLES)
    columns = {"angle": samples.angle, "norm": samples.norm, "elr": samples.lr / samples.norm**2}
    shown = {name: log_column(values[rows], digits=_DIGITS) for name, values in columns.items()}
    return {"x": column(samples.step[rows] / unit, digits=_X_DIGITS), **shown}


def _scenario(name: str, layers: Sequence[LayerForecast], unit: int) -> dict[str, Any]:
    """The curves of a scenario; layers of one parameter group share one schedule: steps, lr and weight decay."""
    known: dict[bytes, int] = {}
    schedules: list[dict[str, Any]] = []
    curves = []
    for layer in layers:
        key = layer.step.tobytes() + layer.lr.tobytes() + layer.weight_decay.tobytes()
        points = _points(layer)
        if key not in known:
            known[key] = len(schedules)
            x = column(layer.step[points] / unit, digits=_X_DIGITS)
            settings = {"lr": layer.lr, "wd": layer.weight_decay}
            shown = {kind: log_column(values[points], digits=_DIGITS) for kind, values in settings.items()}
            schedules.append({"x": x, **shown})
        columns = {"equilibrium": layer.angle_equilibrium}
        for kind, band in (("angle", layer.angle), ("norm", layer.norm), ("elr", layer.effective_lr)):
            columns |= {kind: band.value, f"{kind}_low": band.low, f"{kind}_high": band.high}
        shown = {kind: log_column(values[points], digits=_DIGITS) for kind, values in columns.items()}
        curves.append({"schedule": known[key], **shown})
    return {"name": name, "schedules": schedules, "layers": curves}


def _guess(name: str, layers: Sequence[LayerTest]) -> dict[str, Any]:
    """The curves of a baseline, which has only an angle, without a band."""
    scenario = _scenario(name, [layer.forecast for layer in layers], 1)
    for curves, layer in zip(scenario["layers"], layers, strict=True):
        curves |= {kind: None for kind in curves if kind not in ("schedule", "equilibrium")}
        curves["angle"] = log_column(layer.guesses[name][_points(layer.forecast)], digits=_DIGITS)
    return scenario


def _points(layer: LayerForecast) -> Steps:
    """Evenly spread points, and both sides of every jump unless there are too many."""
    jumps = np.concatenate(
        [
            np.flatnonzero(np.abs(np.diff(values)) > _JUMP * np.maximum(values[1:], values[:-1])) + 1
            for values in (layer.lr, layer.weight_decay)
        ]
    )
    return thinned(len(layer.step), most=_POINTS, boundaries=jumps.tolist() if len(jumps) <= _POINTS // 2 else ())


def _ranges(measured: dict[str, Any], curves: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    ranges = {}
    for kind in ("angle", "norm", "elr"):
        keys = (kind, f"{kind}_low", f"{kind}_high", *(("equilibrium",) if kind == "angle" else ()))
        shown = [layer[key] for layer in curves for key in keys if layer[key] is not None]
        ranges[kind] = _ends([_without_outliers(measured[kind]), *shown])
    return ranges


def _without_outliers(values: Sequence[float | None]) -> list[float]:
    known = np.array([value for value in values if value is not None])
    low, high = np.percentile(known, [_OUTLIERS, 100 - _OUTLIERS]) if len(known) else (np.nan, np.nan)
    return [float(low), float(high)]


def _ends(columns: Iterable[Sequence[float | None]]) -> list[float]:
    """Both ends of a log axis; an lr that falls to zero does not stretch it over more than five decades."""
    shown = [value for values in columns for value in values if value is not None and np.isfinite(value) and value > 0]
    high = max(shown, default=1.0)
    low = max(min(shown, default=1.0), high * 1e-5)
    return [low / _ROOM, high * _ROOM]
