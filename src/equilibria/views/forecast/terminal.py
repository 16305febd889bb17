"""Forecasts in the terminal: tables, and sentences below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from equilibria.findings import Finding, counted
from equilibria.forecasting._backtest import RMS_SAMPLES, BackTest, LayerTest, Score
from equilibria.forecasting._forecast import Forecast, Total
from equilibria.forecasting._suggest import Suggestion
from equilibria.forecasting._what_if import Outcome, WhatIf, outcome
from equilibria.views._rich import Console, Table, Text

_MOST_ROWS = 40
_NARROW = 100  # columns of a terminal below which bands and norms are left out
_LEFT_OUT = f"bands and norms are shown from {_NARROW} columns on"
_LEGEND = "out: further than 5 % from angle*, the equilibrium; travelled: sum of the angles; all in rad"


def print_forecast(forecast: Forecast, *, console: Console | None = None) -> None:
    """One line per layer, the findings, and what it rests on."""
    out = Console() if console is None else console
    out.print(Text(_what(forecast)), end="\n\n")
    _layer_rows([outcome("", layer) for layer in forecast.layers], forecast, out)
    print_notes(forecast, out)


def print_what_if(found: WhatIf, *, console: Console | None = None) -> None:
    """The scenarios side by side, every layer's last angle under each, and the notes of the first."""
    out = Console() if console is None else console
    first = next(iter(found.forecasts.values()))
    out.print(Text(_what(first)), end="\n\n")
    table = _table("scenario", "worst layer", *_columns(first, out), left=2)
    for name in found.forecasts:
        table.add_row(Text(name), Text(_short(found.worst(name).layer)), *_cells(found.worst(name), first, out))
    out.print(table)
    out.print(Text(_LEGEND if out.width >= _NARROW else f"{_LEGEND}; {_LEFT_OUT}", style="dim"))
    out.print()
    layers = _table("last angle, rad", *found.forecasts)
    columns = [found.outcomes(name) for name in found.forecasts]
    for row in list(zip(*columns, strict=True))[:_MOST_ROWS]:
        layers.add_row(Text(_short(row[0].layer)), *(_angle(each) for each in row))
    out.print(layers)
    out.print(Text("in brackets: over the equilibrium angle of lr x wd at the end", style="dim"))
    out.print()
    out.print(Text(f"Of “{next(iter(found.forecasts))}”; the others' are on the page and in --json:", style="bold"))
    print_notes(first, out)


def print_suggestion(suggestion: Suggestion, *, unit: int = 1, console: Console | None = None) -> None:
    """Closeness against changes, the flags of the closest plan (positions in ``unit`` steps), and what it assumes."""
    out = Console() if console is None else console
    out.print(Text(f"Suggested so that {suggestion.target} ({counted(suggestion.searched, 'plan')} tried)"), end="\n\n")
    table = _table("changes", "what", "off by", "median", "rad travelled", "steps out", left=2)
    for each in suggestion.proposals:
        table.add_row(
            str(len(each.changes)),
            Text("; ".join(each.changes) or "the plan as given"),
            f"{each.off:.2f}x",
            f"{each.median_off:.2f}x",
            f"{each.integrated_angle:.3g}",
            f"{each.steps_out:,.0f}",
        )
    out.print(table)
    legend = "off by: typical factor between angle and target, in the worst layer and in the median one"
    out.print(Text(legend, style="dim"))
    flags = suggestion.best.flags(unit=unit)
    if flags:
        out.print(Text(f"the last one: --what-if 'suggested={flags}', in Python best.scenario", style="dim"))
    out.print()
    _bullets(suggestion.assumptions, out)


def print_backtest(test: BackTest, *, console: Console | None = None) -> None:
    """Errors beside the guesses, by horizon and by layer; coverage of the bands."""
    out = Console() if console is None else console
    what = f"forecast from step {test.start:,}, compared to step {test.steps - 1:,}"
    out.print(Text(f"{counted(len(test.layers), 'layer')} {what}"), end="\n\n")
    scores = _table("error", *_ERRORS)
    for name, score in test.scores.items():
        scores.add_row(name, *_errors(score))
    scores.add_section()
    ends = [*(first - 1 for first, _ in test.horizons[1:]), test.steps - 1]
    for (first, score), last in zip(test.horizons, ends, strict=True):
        scores.add_row(f"its steps {first:,}-{last:,}", *_errors(score))
    out.print(scores)
    out.print()
    layers = _table("layer", "angle", "p90", "norm", "angles in band", "norms in band")
    for each in sorted(test.layers, key=_median_error, reverse=True)[:_MOST_ROWS]:
        layers.add_row(Text(_short(each.forecast.name)), *_layer_errors(each))
    out.print(layers)
    legend = f"median of |forecast / measured - 1|, angles as the rms of {rms_window(test)}; 1 step: single samples"
    out.print(Text(legend, style="dim"))
    out.print()
    for finding in test.findings:
        _finding(finding, out)
    covers = f"{test.angle_coverage:.0%} of the single measured angles and {test.norm_coverage:.0%} of the norms"
    _bullets([f"the 90 % bands hold {covers}", *_refused(test.refused)], out)


def print_notes(forecast: Forecast, out: Console) -> None:
    """Findings and assumptions."""
    out.print()
    for finding in forecast.findings:
        _finding(finding, out)
    out.print(Text("Assumed", style="bold"))
    _bullets(forecast.assumptions, out)


_ERRORS = ("angle", "p90", "1 step", "norm", "p90")


def _errors(score: Score) -> list[str]:
    return [_percent(each) for each in (score.angle, score.angle_p90, score.single_angle, score.norm, score.norm_p90)]


def _layer_errors(layer: LayerTest) -> list[str]:
    angle = np.abs(layer.angle_error)
    return [
        _percent(float(np.nanmedian(angle))),
        _percent(float(np.nanpercentile(angle, 90))),
        _percent(float(np.nanmedian(np.abs(layer.norm_error)))),
        f"{layer.angle_coverage:.0%}",
        f"{layer.norm_coverage:.0%}",
    ]


def _median_error(layer: LayerTest) -> float:
    return float(np.nanmedian(np.abs(layer.angle_error)))


def rms_window(test: BackTest) -> str:
    """How long the root mean squares are that are compared."""
    gap = int(np.median(np.diff(test.layers[0].forecast.step)))
    return f"{RMS_SAMPLES} samples" + (f" ({RMS_SAMPLES * gap:,} steps)" if gap > 1 else "")


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.1%}"


def _what(forecast: Forecast) -> str:
    left = counted(forecast.steps - forecast.first, "step")
    return f"{counted(len(forecast.layers), 'layer')}, {left} from {forecast.first:,} to {forecast.steps - 1:,}"


def _layer_rows(found: Sequence[Outcome], forecast: Forecast, out: Console) -> None:
    table = _table("layer", *_columns(forecast, out))
    for each in found[:_MOST_ROWS]:
        table.add_row(Text(_short(each.layer)), *_cells(each, forecast, out))
    out.print(table)
    more = f"; {len(found) - _MOST_ROWS:,} more layers are in --json" if len(found) > _MOST_ROWS else ""
    bands = "; in brackets: the 90 % band of single steps" if out.width >= _NARROW else f"; {_LEFT_OUT}"
    out.print(Text(f"{_LEGEND}{bands}{more}", style="dim"))


def _columns(forecast: Forecast, out: Console) -> list[str]:
    unit = "steps" if forecast.steps_per_epoch is None else "epochs"
    norm = ["last norm"] if out.width >= _NARROW else []
    return [f"{unit} out", "last angle", "/ angle*", *norm, "travelled"]


def _cells(found: Outcome, forecast: Forecast, out: Console) -> list[str]:
    shown = _interval if out.width >= _NARROW else _plain
    steps = found.steps_out.value / (forecast.steps_per_epoch or 1)
    time = "-" if math.isnan(steps) else f"{steps:,.0f}" if steps >= 100 else f"{steps:.3g}"
    ratio = "-" if found.final_ratio is None else f"{found.final_ratio:.2f}"
    norm = [_interval(found.final_norm)] if out.width >= _NARROW else []
    return [time, shown(found.final_angle), ratio, *norm, _plain(found.integrated_angle)]


def _angle(found: Outcome) -> str:
    ratio = "" if found.final_ratio is None else f" ({found.final_ratio:.2f})"
    return f"{found.final_angle.value:.3g}{ratio}"


def _interval(total: Total) -> str:
    low, high = f"{total.low:.2g}", f"{total.high:.2g}"
    if low == high:  # a band narrower than two digits show
        low, high = f"{total.low:.3g}", f"{total.high:.3g}"
    return f"{total.value:.3g} ({low}-{high})"


def _plain(total: Total) -> str:
    return f"{total.value:.3g}"


def _short(layer: str) -> str:
    return layer.removesuffix(".weight")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _refused(refused: Mapping[str, str]) -> list[str]:
    """Names by reason: those that differ in a number only are one."""
    if not refused:
        return []
    first, *others = refused.items()
    return [f"without a forecast: {first[0]} ({first[1]})" + (f" and {len(others)} more" if others else "")]


def _table(*titles: str, left: int = 1) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place < left else "right", overflow="fold")
    return table


def _finding(finding: Finding, out: Console) -> None:
    mark = "!" if finding.severity == "warning" else "-"
    _bullets([f"{finding.subject}: {finding.evidence}"], out, mark=mark)
    if finding.remedy:
        _bullets([finding.remedy], out, mark=" ")


def _bullets(sentences: Sequence[str], out: Console, *, mark: str = "-") -> None:
    for sentence in sentences:
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text(mark), Text(sentence))
        out.print(grid)
