"""Forecasts as one HTML page that needs no network: charts with their bands, tables, what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted
from equilibria.forecasting.backtest import BackTest
from equilibria.forecasting.doubts import NEAR_INTERPOLATION
from equilibria.forecasting.forecast import Forecast, Total
from equilibria.forecasting.page_data import MOST_LAYERS, forecast_data
from equilibria.forecasting.suggest import Suggestion
from equilibria.forecasting.what_if import Outcome, WhatIf
from equilibria.pages.cards import card
from equilibria.pages.document import Page, write_document
from equilibria.pages.toggles import MOST_CHOICES, alternatives, toggles
from equilibria.pages.words import full_stop, number, ratio_cell, sentence_case, settings_list, text

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
        from equilibria.forecasting.backtest_page import backtest_html

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
        "findings": alternatives([_findings(each.findings) for each in forecasts.values()]),
        "reading": "\n".join(f"<li>{line}</li>" for line in _READING),
        "assumptions": "\n".join(f"<li>{text(full_stop(each))}</li>" for each in forecasts[base].assumptions),
        "made": "Forecast",
    }
    shown = "Forecast" if title is None else title
    return Page("equilibria.forecasting", shown, forecast_data(forecasts, names=names), parts)


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
    per_layer = alternatives([_layer_table(result, name) for name in result.forecasts])
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
        return "\n".join(card(finding) for finding in findings)
    return (
        '<article class="finding"><h3>Nothing stands out</h3><p>No layer of this scenario calls for a remark.</p>'
        "</article>"
    )
