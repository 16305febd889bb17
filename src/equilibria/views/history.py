"""Many runs over time: a line per run in the terminal, and a page with a picture of every quantity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from equilibria._display import Printable
from equilibria.comparing._history import LEAST_RUNS, QUANTITIES, History, JudgedRun
from equilibria.findings import counted, joined, rounded
from equilibria.views._rich import Text, collected_text, columns_table, text_console
from equilibria.views.document import (
    finding_cards,
    html_row,
    html_section,
    legend_entry,
    still_document,
    write_document,
)
from equilibria.views.findings import print_findings
from equilibria.views.notebook import card
from equilibria.views.svg import log_levels
from equilibria.views.terminal import fitting
from equilibria.views.words import sentence_case, settings_list, text

_HEAD = ("run", "started", "steps", *(name for name in QUANTITIES.values()), "spikes", "loss", "band")
_SPARE = ("relative update", "loss", "steps")
_NOTHING = (
    "Every run is in its band",
    "Angles per step, relative updates, norms and spikes are those of the earlier runs.",
)


def history_table(history: History) -> Printable:
    """One line per run, then the findings."""
    cells = [_cells(run) for run in history.runs]
    columns: dict[str, list[str | Text]] = {
        title: [*column] for title, column in zip(_HEAD, zip(*cells, strict=True), strict=True) if title != "started"
    }
    out = text_console()
    out.print(history_headline(history))
    out.print()
    out.print(columns_table(fitting(columns, spare=_SPARE, width=out.width), words=("run", "band")))
    out.print(f"\n{_legend(history)}")
    for line in (*_bands(history.runs[-1]), *_changes(history)):
        out.print(line)
    if history.findings:
        out.print()
        print_findings(history.findings, out)
    for name, reason in history.unreadable.items():
        out.print(f"left out: {name}: {reason}")
    html = card(
        history_headline(history),
        headings=_HEAD,
        rows=cells,
        notes=[f"{finding.subject}: {finding.evidence}" for finding in history.findings],
    )
    return Printable(collected_text(out), html)


def history_headline(history: History) -> str:
    """How many runs left their band, and whether the latest did."""
    judged = [run for run in history.runs if run.compared_with]
    out = [run for run in judged if not run.in_band]
    latest = history.runs[-1]
    if history.latest_unreadable:
        return f"The latest run, {history.latest_unreadable}, has nothing to compare"
    if not judged:
        return f"{counted(len(history.runs), 'run')}: a band needs {LEAST_RUNS} earlier runs"
    if not out:
        return f"No run has left its band: {len(judged):,} of {counted(len(history.runs), 'run')} judged"
    state = "has left its band" if not latest.in_band else "is in its band"
    return f"The latest run, {latest.name}, {state}; {len(out):,} of {counted(len(judged), 'judged run')} left theirs"


def _legend(history: History) -> str:
    base = counted(min(LEAST_RUNS, len(history.runs)), "run")
    return f"Angle, relative update and norm: the median over layers and quarters, over the mean of the first {base}."


def _bands(latest: JudgedRun) -> Iterator[str]:
    """How far the latest run may be off by chance."""
    if latest.band is not None:
        ranges = (
            f"{name} {rounded(latest.band[q][0])} to {rounded(latest.band[q][1])}" for q, name in QUANTITIES.items()
        )
        yield f"Band of {latest.name}, for that median: {', '.join(ranges)}."


def _changes(history: History) -> Iterator[str]:
    for run in history.runs:
        if run.changes:
            yield f"Unlike the run before it, {run.name}: {joined([str(change) for change in run.changes])}."


def _cells(run: JudgedRun) -> list[str]:
    levels = [rounded(run.level[quantity][1], all_digits=True) for quantity in QUANTITIES]
    loss = "–" if run.last_loss is None else rounded(run.last_loss)
    return [
        run.name,
        run.started[:16].replace("T", " "),
        f"{run.steps:,}",
        *levels,
        f"{run.spikes:,}",
        loss,
        _word(run),
    ]


def _word(run: JudgedRun) -> str:
    if not run.compared_with:
        return "not judged"
    return "in band" if run.in_band else "left it"


# ---- the page

_WIDTH, _HEIGHT = 900, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 26
_CHARACTER = 7.5  # mean width of a letter, rounded up
_STYLE = """
.panel .scroll { direction: rtl; } /* on a phone the latest run is in sight */
.chart-history { display: block; width: 100%; min-width: 640px; height: auto; direction: ltr; }
.chart-history text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.chart-history .grid, .chart-history .changed { stroke: var(--line); }
.chart-history .changed { stroke-dasharray: 3 3; stroke: var(--soft); }
.area-band { fill: var(--band); }
.range { stroke: var(--predicted); stroke-width: 1.5; }
.point { fill: var(--predicted); }
.range.out { stroke: var(--warning); }
.point.out { fill: var(--warning); }
.range.unjudged { stroke: var(--naive); }
.point.unjudged { fill: var(--naive); }
.legend .line-run { stroke: var(--predicted); }
.legend .line-out { stroke: var(--warning); }
.legend .line-changed { stroke: var(--soft); stroke-dasharray: 3 3; }
.legend .area-band { fill: var(--band); stroke: none; }
"""

_BODY = """<p class="deck">$deck</p>
<dl class="settings">
$settings
</dl>
</header>
<section aria-labelledby="pictures"><h2 id="pictures">Run by run</h2>
<ul class="legend">
$legend</ul>
$charts
<p class="caption">$caption</p></section>
<section aria-labelledby="findings-heading"><h2 id="findings-heading">Findings</h2>
$findings
</section>
$tables
<section class="reading" aria-labelledby="reading-heading"><h2 id="reading-heading">How to read this</h2>
<ul>
<li>The <strong>angle per step</strong> is the effective learning rate: how far one step turns a weight. The
<strong>relative update</strong> is the length of a step over the norm.</li>
<li>The <strong>band</strong> says how far a run may differ by chance from the earlier runs with the same settings, or,
where fewer than three have them, from those before. A run outside of it is kept out of later bands, unless its settings
had changed.</li>
<li>Every layer and every quarter of the run is compared with its own band; the pictures show the band of the median
over them. A run whose median lies in it may have left its band with one layer or in one quarter.</li>
<li>What changed is what the runs recorded of their settings: it came at the same time, which does not make it the
cause. The loss is shown, and not judged.</li>
</ul></section>
"""


def write_history(history: History, path: str | Path, *, title: str) -> Path:
    """Write the page of a history; see `write_document`."""
    return write_document(path, history_page(history, title=title))


def history_page(history: History, *, title: str) -> str:
    """The page of a history: pictures, findings, every run, what changed."""
    runs = history.runs
    charts = [_panel(name, "over the mean of the first runs", _level_chart(runs, q)) for q, name in QUANTITIES.items()]
    if any(run.last_loss is not None for run in runs):
        losses = [(math.nan if run.last_loss is None else run.last_loss,) * 3 for run in runs]
        chart = _chart(runs, losses, [None] * len(runs), label="Chart of the loss")
        charts.append(_panel("loss", "mean of the last twentieth of the logged training loss; not judged", chart))
    settings = [
        ("runs", f"{len(runs):,}", f"{runs[0].started[:10]} to {runs[-1].started[:10]}"),
        ("judged", f"{sum(bool(run.compared_with) for run in runs):,}", f"a band needs {LEAST_RUNS} earlier runs"),
        ("out of their band", f"{sum(not run.in_band for run in runs):,}", ""),
    ]
    return still_document(
        _BODY,
        title=title,
        style=_STYLE,
        headline=text(history_headline(history)),
        deck="Each run is compared with the runs before it: how far its weights turn per step, how long its steps and "
        "its weights are, and how often its loss or gradients spike.",
        settings=settings_list(settings),
        legend=legend_entry("line-run", "a run: median and range over layers and quarters")
        + legend_entry("line-out", "out of its band")
        + legend_entry("area-band", "band of the median", area=True)
        + legend_entry("line-changed", "settings changed"),
        charts="\n".join(charts),
        caption=text(_legend(history)),
        findings=finding_cards(history.findings, otherwise=_NOTHING),
        tables=_tables(history),
        made="Compared",
    )


def _tables(history: History) -> str:
    rows = [html_row(cells[0], cells[1:]) for cells in map(_cells, history.runs)]
    parts = [html_section("Every run", _HEAD, rows, name="runs")]
    changed = [
        html_row(run.name, [f"<td>{text('; '.join(map(str, run.changes)))}</td>"])
        for run in history.runs
        if run.changes
    ]
    if changed:
        parts.append(
            html_section("What changed, from run to run", ("run", "settings and versions"), changed, name="changes")
        )
    if history.unreadable:
        left_out = [html_row(name, [reason]) for name, reason in history.unreadable.items()]
        parts.append(html_section("Left out", ("folder", "reason"), left_out, name="left-out"))
    return "\n".join(parts)


def _panel(name: str, remark: str, chart: str) -> str:
    caption = f"{escape(sentence_case(name))}<small>{remark}</small>"
    return f'<figure class="panel"><figcaption>{caption}</figcaption><div class="scroll">{chart}</div></figure>'


def _level_chart(runs: Sequence[JudgedRun], quantity: str) -> str:
    bands = [None if run.band is None else run.band[quantity] for run in runs]
    levels = [run.level[quantity] for run in runs]
    return _chart(runs, levels, bands, label=f"Chart of the {QUANTITIES[quantity]} of every run with its band")


def _chart(
    runs: Sequence[JudgedRun],
    values: Sequence[tuple[float, float, float]],
    bands: Sequence[tuple[float, float] | None],
    *,
    label: str,
) -> str:
    """A point per run, with its range over the layers, over a band, on a logarithmic axis, as SVG."""
    logs = [tuple(math.log(value) if value > 0 else math.nan for value in triple) for triple in values]
    known = [value for triple in logs for value in triple if math.isfinite(value)] or [0.0]
    levels = [math.log(10) * level for level in log_levels(min(known) / math.log(10), max(known) / math.log(10))]
    low, high = levels[0], levels[-1]
    across = (_WIDTH - _LEFT - _RIGHT) / len(runs)

    def x(place: float) -> float:
        return _LEFT + across * (place + 0.5)

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - min(max(value, low), high)) / (high - low)

    parts = []
    for place, band in enumerate(bands):
        if band is not None:
            bottom, top = y(math.log(band[0])), y(math.log(band[1]))
            left, size = x(place - 0.5), f'width="{across:.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="area-band" x="{left:.1f}" y="{top:.1f}" {size}/>')
    for level in levels:
        ends = f'y1="{y(level):.1f}" y2="{y(level):.1f}"'
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {ends}/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{rounded(math.exp(level))}</text>'
        )
    for place, (run, (least, median, largest)) in enumerate(zip(runs, logs, strict=True)):
        at = x(place)
        if any(not change.is_version for change in run.changes):
            edge = x(place - 0.5)
            parts.append(
                f'<line class="changed" x1="{edge:.1f}" x2="{edge:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
            )
        if math.isfinite(median):
            kind = "unjudged" if not run.compared_with else "" if run.in_band else "out"
            range_ends = f'y1="{y(least):.1f}" y2="{y(largest):.1f}"'
            parts.append(f'<line class="range {kind}" x1="{at:.1f}" x2="{at:.1f}" {range_ends}/>')
            words = escape(f"{run.name}: {rounded(math.exp(median))}, {_word(run)}")
            parts.append(
                f'<circle class="point {kind}" cx="{at:.1f}" cy="{y(median):.1f}" r="{5 if kind == "out" else 3.5}">'
                f"<title>{words}</title></circle>"
            )
    all_fit = _CHARACTER * max(len(run.name) for run in runs) < across
    for place in range(len(runs)) if all_fit else sorted({0, len(runs) // 2, len(runs) - 1}):
        anchor = "middle" if all_fit or 0 < place < len(runs) - 1 else "end" if place else "start"
        name = escape(runs[place].name)
        parts.append(f'<text x="{x(place):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{name}</text>')
    return (
        f'<svg class="chart-history" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
