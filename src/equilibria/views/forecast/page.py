"""Forecasts as one HTML page that needs no network: charts with their bands, tables, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted, number
from equilibria.forecasting._backtest import FORECAST, BackTest, LayerTest
from equilibria.forecasting._forecast import Forecast, LayerForecast, Measured, Total
from equilibria.forecasting._suggest import Suggestion
from equilibria.forecasting._trust import NEAR_INTERPOLATION
from equilibria.forecasting._what_if import Outcome, WhatIf
from equilibria.views.document import MOST_CHOICES, Page, finding_card, per_choice, toggles, write_document
from equilibria.views.words import full_stop, ratio_cell, sentence_case, settings_list, text

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


TOLERANCE = 0.05
_OTHERS = (
    '<li><svg viewBox="0 0 34 8" aria-hidden="true"><path d="M0 4h34" class="line-other"/></svg>the other {what}</li>\n'
)
_READING = (
    "The <strong>angle</strong> is the learning rate you really train with: how far the direction of a weight moves in "
    "one step. The length of a normalised weight does not change what the network computes.",
    "<strong>Out of equilibrium</strong>: steps whose angle is further than 5&nbsp;% from what lr × wd asks for.",
    "<strong>Angle travelled</strong>: the sum of the angles of all remaining steps, the distance on the sphere.",
    "The <strong>band</strong> is where 90&nbsp;% of single measured steps are expected; in brackets, its two ends.",
)


def write_page(
    result: WhatIf | Forecast | BackTest,
    path: str | Path,
    *,
    title: str | None = None,
    suggestion: Suggestion | None = None,
) -> Path:
    """Write a forecast, several side by side, or a back-test as one offline HTML page.

    The page appears complete or not at all: it is written beside its target and then moved into place.

    Args:
        result: what to show.
        path: the file to write, in a folder that exists; an existing file is replaced.
        title: shown above the headline.
        suggestion: shown as a table too, if there is one.

    Returns:
        The path.

    Raises:
        EquilibriaError: more scenarios than a page has buttons for, the folder does not exist, the path is not a file,
            or it cannot be written.
    """
    if isinstance(result, BackTest):
        from equilibria.views.forecast.backtest import backtest_html

        return write_document(path, backtest_html(result, title=title))
    if isinstance(result, Forecast):
        result = WhatIf({result.scenario.name or "forecast": result})
    return write_document(path, page_html(result, title=title, suggestion=suggestion))


def page_html(result: WhatIf, *, title: str | None = None, suggestion: Suggestion | None = None) -> str:
    """Forecasts as the text of one HTML page; its scripts, styles and data are inside."""
    return forecast_page(result, title=title, suggestion=suggestion).document()


def forecast_page(result: WhatIf, *, title: str | None = None, suggestion: Suggestion | None = None) -> Page:
    """The same in parts."""
    forecasts = result.forecasts
    if len(forecasts) > MOST_CHOICES:
        raise EquilibriaError(f"got {len(forecasts)} scenarios for one page; expected at most {MOST_CHOICES}")
    base = next(iter(forecasts))
    names = shown_layers(result.worst(base).layer, [layer.name for layer in forecasts[base].layers])
    several = len(forecasts) > 1
    parts = {
        "headline": text(sentence_case(headline(result))),
        "deck": _DECK,
        "settings": _settings(forecasts[base]),
        "toggles": toggles("Scenario", {name: _sentence(result, name) for name in forecasts}),
        "layers": layer_options(names),
        "chosen": "forecast",
        "others_legend": _OTHERS.format(what="scenarios") if several else "",
        "angle_label": text(f"Chart of the angle per step of a layer, measured and forecast. {headline(result)}"),
        "tables": _tables(result, suggestion),
        "findings": per_choice([_findings(each.findings) for each in forecasts.values()]),
        "reading": "\n".join(f"<li>{line}</li>" for line in _READING),
        "assumptions": "\n".join(f"<li>{text(full_stop(each))}</li>" for each in forecasts[base].assumptions),
        "made": "Forecast",
    }
    shown = "Forecast" if title is None else title
    return Page("equilibria.views.forecast", shown, forecast_data(forecasts, names=names), parts)


_DECK = (
    "What every normalised layer will do over the rest of the run, from what was measured so far: the laws of its "
    "optimizer with the gradients that this network really had."
)


def headline(result: WhatIf) -> str:
    """What the first scenario does to its worst layer, and which other one does better.

    A layer without weight decay has no equilibrium to be out of.
    """
    base, *others = result.forecasts
    worst, left = result.worst(base), _left(result.forecasts[base])
    if math.isnan(worst.steps_out.value):
        return f"{worst.layer} turns by {number(worst.final_angle.value)} rad in the last step"
    said = f"{worst.layer} is out of equilibrium for {_share(worst.steps_out.value, left)} of the remaining steps"
    if worst.steps_out.value < TOLERANCE * left:
        said = "every layer stays near its equilibrium for the rest of the run"
    better = min(others, key=lambda name: result.worst(name).steps_out.value, default=None)
    if better is not None and result.worst(better).steps_out.value < 0.8 * worst.steps_out.value:
        found = _share(result.worst(better).steps_out.value, left)
        said += f"; with “{better}” the worst layer is out for {found}"
    if any(NEAR_INTERPOLATION in layer.validity for layer in result.forecasts[base].layers):
        said += " (near interpolation: the direction is worth more than the numbers)"
    return said


def shown_layers(worst: str, names: Sequence[str]) -> list[str]:
    """The layers with curves, the worst first."""
    return [worst, *(name for name in names if name != worst)][:MOST_LAYERS]


def layer_options(names: Sequence[str]) -> str:
    """The layers to choose from."""
    return "\n".join(f'<option value="{at}">{text(name)}</option>' for at, name in enumerate(names))


def interval(total: Total) -> str:
    """A number with the ends of its band."""
    low, high = number(total.low, digits=2), number(total.high, digits=2)
    if low == high:  # a band narrower than two digits show
        low, high = number(total.low), number(total.high)
    return number(total.value) if low == high else f"{number(total.value)} ({low}–{high})"


def html_section(heading: str, head: Sequence[str], rows: Sequence[str], *, name: str) -> str:
    """A table under a heading of its own."""
    shown = html_table(head, rows, name=name)
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{text(heading)}</h2>\n{shown}\n</section>\n'


def html_table(head: Sequence[str], rows: Sequence[str], *, name: str) -> str:
    """A table that scrolls sideways where the screen is narrow; ``name`` is the id of the heading above it."""
    cells = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    return (
        f'<div class="scroll" role="region" aria-labelledby="{name}" tabindex="0">\n<table>\n'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>\n</div>"
    )


def html_row(first: str, cells: Sequence[str]) -> str:
    """One row; cells that are HTML already begin with <td."""
    shown = "".join(cell if cell.startswith("<td") else f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{text(first)}</th>{shown}</tr>'


def words_cell(words: str) -> str:
    """A cell of words, which begin where those above do."""
    return f'<td class="words">{text(words)}</td>'


def refused_list(refused: Mapping[str, str]) -> str:
    """The layers that have no forecast, with the reason."""
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
        f"Worst layer: {worst.layer}, {out}, {number(worst.final_angle.value)} rad in the last step, "
        f"{number(worst.integrated_angle.value)} rad travelled."
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
    found = []
    if len(result.forecasts) > 1:
        rows = [
            html_row(name, [words_cell(result.worst(name).layer), *_cells(result.worst(name), forecast)])
            for name, forecast in result.forecasts.items()
        ]
        found.append(
            html_section("Side by side: the worst layer", ("scenario", "layer", *_HEAD), rows, name="compared")
        )
    if suggestion is not None:
        found.append(_suggestion(suggestion))
    per_layer = per_choice([_layer_table(result, name) for name in result.forecasts])
    refused = refused_list(next(iter(result.forecasts.values())).refused)
    heading = '<section aria-labelledby="layers-heading">\n<h2 id="layers-heading">Layer by layer</h2>'
    found.append(f"{heading}\n{per_layer}\n{refused}\n</section>\n")
    return "\n".join(found)


def _layer_table(result: WhatIf, name: str) -> str:
    forecast = result.forecasts[name]
    rows = [html_row(each.layer, _cells(each, forecast)) for each in result.outcomes(name)]
    widened = "".join(
        f"<li>{text(layer.name)}: {text(reason)}</li>" for layer in forecast.layers for reason in layer.validity
    )
    return html_table(("layer", *_HEAD), rows, name="layers-heading") + (
        f'<ul class="widened">{widened}</ul>' if widened else ""
    )


def _cells(found: Outcome, forecast: Forecast) -> list[str]:
    return [
        _time(found.steps_out.value, forecast),
        interval(found.final_angle),
        ratio_cell(found.final_ratio, TOLERANCE),
        interval(found.final_norm),
        interval(found.integrated_angle),
    ]


def _suggestion(suggestion: Suggestion) -> str:
    head = ("changes", "what", "off by, worst layer", "off by, median", "angle travelled, rad", "steps out")
    rows = [
        html_row(
            str(len(each.changes)),
            [
                words_cell("; ".join(each.changes) or "the plan as given"),
                f"{each.off:.2f}×",
                f"{each.median_off:.2f}×",
                number(each.integrated_angle),
                f"{each.steps_out:,.0f}",
            ],
        )
        for each in suggestion.proposals
    ]
    heading = f"Suggested so that {suggestion.target}"
    rests = "".join(f"<li>{text(full_stop(each))}</li>" for each in suggestion.assumptions)
    shown = html_table(head, rows, name="suggested")
    return (
        f'<section aria-labelledby="suggested">\n<h2 id="suggested">{text(heading)}</h2>\n{shown}\n'
        f'<ul class="caption widened">{rests}</ul>\n</section>\n'
    )


def _findings(findings: Sequence[Finding]) -> str:
    if findings:
        return "\n".join(finding_card(finding) for finding in findings)
    return (
        '<article class="finding"><h3>Nothing stands out</h3><p>No layer of this scenario calls for a remark.</p>'
        "</article>"
    )
