"""Forecasts as tables: in the terminal with sentences below them, in notebooks with a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from equilibria._display import Printable
from equilibria.findings import counted
from equilibria.forecasting import (
    BackTest,
    Estimate,
    Forecast,
    LayerOutcome,
    LayerTest,
    Score,
    Suggestion,
    WhatIf,
)
from equilibria.forecasting._findings import NO_EFFECT
from equilibria.forecasting._forecast import layer_outcome, worst_of
from equilibria.views._rich import Console, Table, Text, collected_text, columns_table, marked, text_console
from equilibria.views.findings import print_findings
from equilibria.views.notebook import card
from equilibria.views.svg import EQUILIBRIUM, MEASURED, PREDICTED, Line, svg_chart
from equilibria.views.terminal import fitting

_MOST_ROWS = 40
_SPARE = ("last norm", "travelled")  # left out first where the terminal is narrow; bands of the angle stay
_LEGEND = (
    "out: more than 5 % from angle*, the equilibrium; travelled: sum of the angles; all in rad; in brackets: the 90 % "
    "band of single steps"
)

Rows = Sequence[Sequence[str]]


def forecast_table(forecast: Forecast) -> Printable:
    """One line per layer, the findings, and the assumptions."""
    outcomes = [layer_outcome("", layer) for layer in forecast.layers]
    columns = {"layer": [_short(outcome.layer) for outcome in outcomes], **_columns(outcomes, forecast)}

    def draw(out: Console) -> None:
        out.print(Text(_extent(forecast)), end="\n\n")
        left_out = _print_fitting({title: cells[:_MOST_ROWS] for title, cells in columns.items()}, out)
        more = f"; {len(outcomes) - _MOST_ROWS:,} more layers are in --json" if len(outcomes) > _MOST_ROWS else ""
        out.print(Text(f"{_LEGEND}{left_out}{more}", style="dim"))
        _print_notes(forecast, out)

    return Printable(_rendered(draw), _columns_card(_extent(forecast), columns))


def what_if_table(result: WhatIf) -> Printable:
    """The scenarios side by side, every layer's last angle under each, and the notes of the first scenario."""
    base, first = next(iter(result.forecasts.items()))
    worst = {name: result.worst(name) for name in result.forecasts}
    columns = {
        "scenario": list(worst),
        "worst layer": [_short(outcome.layer) for outcome in worst.values()],
        **_columns(list(worst.values()), first),
    }

    def draw(out: Console) -> None:
        out.print(Text(_extent(first)), end="\n\n")
        left_out = _print_fitting(columns, out)
        out.print(Text(f"{_LEGEND}{left_out}", style="dim"), end="\n\n")
        by_layer = list(zip(*(result.outcomes(name) for name in result.forecasts), strict=True))[:_MOST_ROWS]
        angles = [[_short(layer[0].layer), *map(_last_angle, layer)] for layer in by_layer]
        out.print(_table(["last angle, rad", *result.forecasts], angles))
        out.print(Text("in brackets: over the equilibrium angle at the end", style="dim"), end="\n\n")
        idle = [
            f"{name}: {finding.subject}: {finding.evidence}"
            for name, forecast in result.forecasts.items()
            for finding in forecast.findings
            if finding.kind == NO_EFFECT and name != base
        ]
        _print_bullets(idle, out)
        out.print(Text(f"Of “{base}”; the page and --json have those of the others:", style="bold"))
        _print_notes(first, out)

    return Printable(_rendered(draw), _columns_card(_extent(first), columns))


def suggestion_table(suggestion: Suggestion, *, unit: int = 1) -> Printable:
    """Closeness against changes, the flags of the closest plan (positions in ``unit`` steps), and the assumptions."""
    title = f"Suggested so that {suggestion.target} ({counted(suggestion.searched, 'plan')} tried)"
    headings = ["changes", "what", "off by", "median", "rad travelled", "steps out"]
    rows = [
        [
            str(len(proposal.changes)),
            "; ".join(proposal.changes) or "the plan as given",
            f"{proposal.off:.2f}x",
            f"{proposal.median_off:.2f}x",
            f"{proposal.integrated_angle:.3g}",
            f"{proposal.steps_out:,.0f}",
        ]
        for proposal in suggestion.proposals
    ]

    def draw(out: Console) -> None:
        out.print(Text(title), end="\n\n")
        out.print(_table(headings, rows, left=2))
        legend = "off by: typical factor between angle and target, in the worst and in the median layer"
        out.print(Text(legend, style="dim"))
        flags = suggestion.best.flags(unit=unit)
        if flags:
            out.print(Text(f"the last one: --what-if 'suggested={flags}', in Python best.scenario", style="dim"))
        out.print()
        _print_bullets(suggestion.assumptions, out)

    return Printable(_rendered(draw), card(title, headings=headings, rows=rows))


def backtest_table(test: BackTest) -> Printable:
    """Errors of the forecast and the guesses, by horizon and by layer; coverage of the bands; the findings."""
    layers = counted(len(test.layers), "layer")
    title = f"{layers} forecast from step {test.start:,}, compared to step {test.steps - 1:,}"
    headings = ["error", "angle", "p90", "1 step", "norm", "p90"]
    scores = [[name, *_errors(score)] for name, score in test.scores.items()]
    ends = [*(first - 1 for first, _ in test.horizons[1:]), test.steps - 1]
    for (first, score), last in zip(test.horizons, ends, strict=True):
        scores.append([f"its steps {first:,}-{last:,}", *_errors(score)])

    def draw(out: Console) -> None:
        out.print(Text(title), end="\n\n")
        out.print(_table(headings, scores), end="\n\n")
        worst_first = sorted(test.layers, key=lambda layer: _median(layer.angle_error), reverse=True)[:_MOST_ROWS]
        by_layer = [[_short(layer.forecast.name), *_layer_errors(layer)] for layer in worst_first]
        out.print(_table(["layer", "angle", "p90", "norm", "angles in band", "norms in band"], by_layer))
        compared = f"angles as the rms of {_rms_window(test)}, fewer at the ends; 1 step: single samples"
        out.print(Text(f"median of |forecast / measured - 1|, {compared}", style="dim"), end="\n\n")
        print_findings(test.findings, out)
        covers = f"{test.angle_coverage:.0%} of the single measured angles and {test.norm_coverage:.0%} of the norms"
        _print_bullets([f"the 90 % bands hold {covers}", *_refused(test.refused)], out)

    return Printable(_rendered(draw), card(title, headings=headings, rows=scores))


# ---- cells


def _extent(forecast: Forecast) -> str:
    left = counted(forecast.steps - forecast.first, "step")
    return f"{counted(len(forecast.layers), 'layer')}, {left} from {forecast.first:,} to {forecast.steps - 1:,}"


def _columns(outcomes: Sequence[LayerOutcome], forecast: Forecast) -> dict[str, list[str]]:
    """The cells of some outcomes by title."""
    unit, per = ("steps", 1) if forecast.steps_per_epoch is None else ("epochs", forecast.steps_per_epoch)
    return {
        f"{unit} out": [_time(outcome.steps_out.value / per) for outcome in outcomes],
        "last angle": [_interval(outcome.final_angle) for outcome in outcomes],
        "/ angle*": ["-" if outcome.final_ratio is None else f"{outcome.final_ratio:.2f}" for outcome in outcomes],
        "last norm": [_interval(outcome.final_norm) for outcome in outcomes],
        "travelled": [f"{outcome.integrated_angle.value:.3g}" for outcome in outcomes],
    }


def _time(steps: float) -> str:
    return "-" if math.isnan(steps) else f"{steps:,.0f}" if steps >= 100 else f"{steps:.3g}"


def _last_angle(outcome: LayerOutcome) -> str:
    ratio = "" if outcome.final_ratio is None else f" ({outcome.final_ratio:.2f})"
    return f"{outcome.final_angle.value:.3g}{ratio}"


def _interval(estimate: Estimate) -> str:
    low, high = f"{estimate.low:.2g}", f"{estimate.high:.2g}"
    if low == high:  # a band narrower than two digits show
        low, high = f"{estimate.low:.3g}", f"{estimate.high:.3g}"
    return f"{estimate.value:.3g} ({low}-{high})"


def _errors(score: Score) -> list[str]:
    errors = (score.angle, score.angle_p90, score.single_angle, score.norm, score.norm_p90)
    return ["" if math.isnan(error) else f"{error:.1%}" for error in errors]


def _layer_errors(layer: LayerTest) -> list[str]:
    p90 = float(np.nanpercentile(np.abs(layer.angle_error), 90))
    errors = (_median(layer.angle_error), p90, _median(layer.norm_error))
    return [*(f"{error:.1%}" for error in errors), f"{layer.angle_coverage:.0%}", f"{layer.norm_coverage:.0%}"]


def _median(error: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    return float(np.nanmedian(np.abs(error)))


def _rms_window(test: BackTest) -> str:
    """The samples, and the steps if they are more, over which root mean squares are compared."""
    gap = int(np.median(np.diff(test.layers[0].forecast.step)))
    return f"the {test.rms_samples} samples around" + (f" ({test.rms_samples * gap:,} steps)" if gap > 1 else "")


def _short(layer: str) -> str:
    return layer.removesuffix(".weight")


def _refused(refused: Mapping[str, str]) -> list[str]:
    if not refused:
        return []
    (name, reason), *others = refused.items()
    return [f"without a forecast: {name} ({reason})" + (f" and {len(others)} more" if others else "")]


# ---- output


def _rendered(draw: Callable[[Console], None]) -> str:
    """The text that ``draw`` prints, as wide as the terminal and with its colours."""
    console = text_console()
    draw(console)
    return collected_text(console)


def _print_fitting(columns: Mapping[str, Sequence[str]], out: Console) -> str:
    """Print the columns that fit; the clause that names those left out, "" if all fit."""
    kept = fitting(columns, spare=_SPARE, width=out.width)
    words = ("scenario", "layer", "worst layer")
    out.print(columns_table(kept, words=words, folded="layer" if "layer" in kept else "worst layer"))
    missing = [title for title in columns if title not in kept]
    return f"; {' and '.join(missing)}: in a wider terminal, and in --json" if missing else ""


def _columns_card(title: str, columns: Mapping[str, Sequence[str]]) -> str:
    return card(title, headings=list(columns), rows=[list(row) for row in zip(*columns.values(), strict=True)])


def _table(titles: Iterable[str], rows: Rows, *, left: int = 1) -> Table:
    """A table whose first ``left`` columns are words, the others numbers."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for position, title in enumerate(titles):
        table.add_column(title, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _print_notes(forecast: Forecast, out: Console) -> None:
    out.print()
    print_findings(forecast.findings, out)
    out.print(Text("Assumed", style="bold"))
    _print_bullets(forecast.assumptions, out)


def _print_bullets(sentences: Sequence[str], out: Console) -> None:
    for sentence in sentences:
        out.print(marked("-", sentence))


# ---- notebooks


_HEADINGS = ("layer", "last rad/step", "over equilibrium", "last norm", "rad travelled", "steps out of equilibrium")


def forecast_card(forecast: Forecast) -> str:
    """The worst layer measured and forecast, with its band; a row per layer; the findings."""
    outcomes = [layer_outcome("", layer) for layer in forecast.layers]
    title = f"Forecast of {len(outcomes)} layers, steps {forecast.first:,} to {forecast.steps - 1:,}"
    refused = [f"{name} cannot be forecast: {reason}" for name, reason in forecast.refused.items()]
    if not outcomes:
        return card(title, notes=refused)
    worst = worst_of(outcomes)
    longest = "" if math.isnan(worst.steps_out.value) else ", the longest out of equilibrium"
    findings = [f"{finding.subject}: {finding.evidence}. {finding.remedy}" for finding in forecast.findings]
    return card(
        f"{title}; shown: {worst.layer}{longest}",
        picture=_picture(forecast, worst.layer),
        headings=_HEADINGS,
        rows=[_row(outcome) for outcome in outcomes],
        notes=[*findings, *refused],
    )


def _picture(forecast: Forecast, name: str) -> str:
    unit = forecast.steps_per_epoch or 1
    layer, before = forecast[name], forecast.measured(name)
    x = layer.step / unit
    lines = [
        Line("measured", before.step / unit, before.angle, MEASURED),
        Line("band", x, layer.angle.low, PREDICTED, dashed=True),
        Line("band", x, layer.angle.high, PREDICTED, dashed=True),
        Line("equilibrium", x, layer.angle_equilibrium, EQUILIBRIUM, dashed=True),
        Line("forecast", x, layer.angle.value, PREDICTED),
    ]
    return svg_chart(lines, x="epochs" if forecast.steps_per_epoch else "steps", y="rad per step", log=True)


def _row(outcome: LayerOutcome) -> list[str]:
    return [
        outcome.layer,
        f"{outcome.final_angle.value:.3g}",
        "" if outcome.final_ratio is None else f"{outcome.final_ratio:.2f}",
        f"{outcome.final_norm.value:.3g}",
        f"{outcome.integrated_angle.value:.3g}",
        _time(outcome.steps_out.value),
    ]
