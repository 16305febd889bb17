"""A back-test as one HTML page: the forecast and three simpler guesses, compared with the record."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equilibria.forecasting import FORECAST, BackTest, LayerTest, Score
from equilibria.views.document import Page, finding_card, html_row, html_section, legend_entry, toggles
from equilibria.views.forecast.page import backtest_data, layer_options, refused_list, shown_layers
from equilibria.views.words import sentence_case, settings_list, text

_DECK = (
    "A finished run forecast from its first steps, under its recorded lr and wd, compared with its record and with "
    "three common guesses."
)
_READING = (
    "<strong>Errors</strong> are |forecast ÷ measured - 1| over all layers and remaining samples. Angles are "
    "compared as the root mean square of the {} samples around, fewer at the ends; “single steps” compares every "
    "sample alone.",
    "<strong>In band</strong>: share of single measured samples inside the 90&nbsp;% band; 85 to 95&nbsp;% is good.",
)
_GUESSES = (
    "The <strong>guesses</strong> start from the root mean square of up to 50 samples before the forecast, or from the "
    "equilibrium of lr and wd, and have no band."
)


def backtest_page(test: BackTest, *, title: str | None = None) -> Page:
    """The page of a back-test."""
    worst = max(test.layers, key=_median_error).forecast.name
    names = shown_layers(worst, [layer.forecast.name for layer in test.layers])
    sentence = backtest_headline(test)
    parts = {
        "headline": text(sentence_case(sentence)),
        "deck": _DECK,
        "settings": _settings(test),
        "toggles": toggles("Shown", {name: _sentence(name, score) for name, score in test.scores.items()}),
        "layers": layer_options(names),
        "chosen": "forecast or guess",
        "others_legend": legend_entry("line-other", "the others"),
        "angle_label": text(f"Chart of the angle per step of a layer, measured and forecast. {sentence}"),
        "tables": _tables(test),
        "findings": _verdict(test),
        "reading": "\n".join(f"<li>{line.format(test.rms_samples)}</li>" for line in _READING),
        "assumptions": f"<li>{_GUESSES}</li>",
        "made": "Back-tested",
    }
    shown = "Back-test" if title is None else title
    return Page("equilibria.views.forecast", shown, backtest_data(test, names=names), parts)


def backtest_headline(test: BackTest) -> str:
    """The errors of the forecast and of the best guess, in one sentence."""
    own = test.scores[FORECAST]
    others = {name: score.angle for name, score in test.scores.items() if name != FORECAST}
    best = min(others, key=others.__getitem__)
    return (
        f"forecast from step {test.start:,}, the angle was off by {_percent(own.angle)} and the norm by "
        f"{_percent(own.norm)} (median); “{best}” was off by {_percent(others[best])}"
    )


def _median_error(layer: LayerTest) -> float:
    return float(np.nanmedian(np.abs(layer.angle_error)))


def _settings(test: BackTest) -> str:
    pairs = [
        ("fitted", f"steps before {test.start:,}", ""),
        ("compared", f"steps {test.start:,} to {test.steps - 1:,}", ""),
        ("layers", f"{len(test.layers):,}", ""),
        ("angles inside the band", _percent(test.angle_coverage, digits=0), "of 90 % expected"),
        ("norms inside the band", _percent(test.norm_coverage, digits=0), "of 90 % expected"),
    ]
    return settings_list(pairs)


def _percent(share: float, *, digits: int = 1) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def _sentence(name: str, score: Score) -> str:
    off = f"{_percent(score.angle)} (median), {_percent(score.angle_p90)} (90th percentile)"
    return f"{sentence_case(name)}: angle off by {off}."


_HEAD = ("angle, median", "90th percentile", "single steps", "norm, median", "90th percentile")


def _cells(score: Score) -> list[str]:
    errors = (score.angle, score.angle_p90, score.single_angle, score.norm, score.norm_p90)
    return [_percent(error) for error in errors]


def _tables(test: BackTest) -> str:
    scores = [html_row(name, _cells(score)) for name, score in test.scores.items()]
    ends = [*(first - 1 for first, _ in test.horizons[1:]), test.steps - 1]
    horizons = [
        html_row(f"{first:,}–{last:,}", _cells(score)) for (first, score), last in zip(test.horizons, ends, strict=True)
    ]
    layers = [html_row(layer.forecast.name, _layer_cells(layer)) for layer in test.layers]
    head = ("layer", "angle, median", "90th percentile", "norm, median", "angles in band", "norms in band")
    return "\n".join(
        [
            html_section("Errors of the forecast and of three guesses", ("", *_HEAD), scores, name="scores"),
            html_section("The forecast's errors by horizon", ("steps", *_HEAD), horizons, name="horizons"),
            html_section("Layer by layer", head, layers, name="by-layer"),
            refused_list(test.refused),
        ]
    )


def _layer_cells(layer: LayerTest) -> Sequence[str]:
    angle, norm = np.abs(layer.angle_error), np.abs(layer.norm_error)
    return [
        _percent(float(np.nanmedian(angle))),
        _percent(float(np.nanpercentile(angle, 90))),
        _percent(float(np.nanmedian(norm))),
        _percent(layer.angle_coverage, digits=0),
        _percent(layer.norm_coverage, digits=0),
    ]


def _verdict(test: BackTest) -> str:
    own = test.scores[FORECAST].angle
    beaten = [name for name, score in test.scores.items() if name != FORECAST and score.angle > own]
    lost = [name for name, score in test.scores.items() if name != FORECAST and score.angle <= own]
    sentences = [f"Closer than {', '.join(f'“{name}”' for name in beaten)}." if beaten else "No guess was worse."]
    if lost:
        sentences.append(f"No closer than {', '.join(f'“{name}”' for name in lost)}.")
    covered = test.angle_coverage
    verdict = "too narrow" if covered < 0.85 else "wider than necessary" if covered > 0.95 else "as they should"
    sentences.append(f"The 90 % bands hold {_percent(covered, digits=0)} of the measured angles: {verdict}.")
    cards = "\n".join(finding_card(finding) for finding in test.findings)
    kind = "finding" if covered >= 0.85 and not lost else "finding warning"
    return f'<article class="{kind}"><h3>Verdict</h3><p>{text(" ".join(sentences))}</p></article>\n{cards}'
