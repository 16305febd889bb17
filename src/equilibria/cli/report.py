"""`equilibria report`: what a recorded run did, beside what it should have done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._flags import named
from equilibria.cli._options import json_option
from equilibria.cli._output import jsonable, paint, print_json, table, wrap

if TYPE_CHECKING:
    from equilibria.findings import Finding
    from equilibria.measure.summary import LayerSummary

_MOST_ROWS = 40


@click.command("report")
@click.argument("run", type=Path)
@click.option("--html", type=Path, help="Also write one offline page to this file.")
@json_option
def command(*, run: Path, html: Path | None, as_json: bool) -> None:
    """What the run recorded in the directory RUN did, layer by layer, beside what theory predicts."""
    from equilibria.measure.diagnose import diagnose
    from equilibria.measure.summary import summarise
    from equilibria.record import read_run
    from equilibria.report.verdict import worst_first

    recorded = read_run(run)
    samples, metadata, notes = recorded.samples(), recorded.metadata, recorded.notes
    if html is not None:
        from equilibria.report import write_report

        with named({"path": "--html"}):
            write_report(samples, html, metadata=metadata, title=run.resolve().name, notes=notes)
    layers, findings = worst_first(summarise(samples, metadata=metadata)), diagnose(samples, metadata=metadata)
    if as_json:
        print_json({"layers": [_contract(layer) for layer in layers], "findings": findings, "notes": notes})
        return
    _show(layers, findings, notes)
    if html is not None:
        print(f"  Page: {html}\n")


def _contract(layer: LayerSummary) -> dict[str, Any]:
    return {**jsonable(layer), "sentence": layer.sentence}


def _show(layers: Sequence[LayerSummary], findings: Sequence[Finding], notes: Sequence[str]) -> None:
    from equilibria.pages.words import full_stop, sentence_case
    from equilibria.report.verdict import headline, worst

    print(f"\n{wrap(headline(layers) + '.')}\n{wrap(worst(layers))}\n")
    if layers:
        print(_table(layers) + "\n")
    for note in notes:
        print(wrap(full_stop(note), indent=f"  {paint('i', '36')} ", hang="    ") + "\n")
    for finding in findings:
        mark = paint("!", "33;1") if finding.severity == "warning" else paint("i", "36")
        print(
            wrap(f"{sentence_case(finding.subject)}: {full_stop(finding.evidence)}", indent=f"  {mark} ", hang="    ")
        )
        print(wrap(f"-> {full_stop(finding.remedy)}", indent="    ", hang="       ") + "\n")


def _table(layers: Sequence[LayerSummary]) -> str:
    head = ["layer", "angle", "predicted", "ratio", "", "norm/norm*", "settles in", "state"]
    lines = table([head, *(_row(layer) for layer in layers[:_MOST_ROWS])])
    left_out = len(layers) - _MOST_ROWS
    more = f"; {left_out:,} more layers are in --json" if left_out > 0 else ""
    return f"{lines}\n" + wrap(
        "the most wrong first; angle: root mean square, rad per step; < slower, > faster than predicted; norm*: "
        f"equilibrium{more}"
    )


def _row(layer: LayerSummary) -> list[str]:
    from equilibria.report.table import settles_in
    from equilibria.report.verdict import STATE_MARKS, as_predicted

    ratio = layer.angle_vs_predicted
    off = "" if ratio is None or as_predicted(layer) else "<" if ratio < 1 else ">"
    state = f"{STATE_MARKS[layer.state]} {layer.state}" if layer.state else "-"
    return [
        layer.name,
        _number(layer.angle, "#.3g"),
        _number(layer.angle_predicted, "#.3g"),
        _number(ratio, ".2f"),
        off,
        _number(layer.norm_vs_equilibrium, ".2f"),
        settles_in(layer),
        state,
    ]


def _number(value: float | None, shape: str) -> str:
    return "-" if value is None else format(value, shape)
