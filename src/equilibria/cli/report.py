"""`equilibria report`: a recorded run, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import PATH, example, json_option, named
from equilibria.cli._output import jsonable, print_json

if TYPE_CHECKING:
    from equilibria.diagnosis.layer_summary import LayerSummary

_MOST_ROWS = 40


@click.command("report", epilog=example("report runs/a --html report.html"))
@click.argument("run", type=PATH)
@click.option("--html", type=PATH, help="Also write one offline page to this file.")
@json_option
def command(*, run: Path, html: Path | None, as_json: bool) -> None:
    """Report on the run recorded in the directory RUN: every layer, measured and predicted."""
    from equilibria.diagnosis import summarise_and_diagnose
    from equilibria.diagnosis.noise import gradient_noise
    from equilibria.diagnosis.sharpness import sharpness_findings
    from equilibria.records import read_record
    from equilibria.views.run.checkpoints import checkpoint_table
    from equilibria.views.run.headline import run_headline
    from equilibria.views.run.metrics import metric_summaries
    from equilibria.views.run.sharpness import sharpness_table
    from equilibria.views.run.terminal import run_table

    recorded = read_record(run)
    samples, metadata, notes = recorded.samples(), recorded.metadata, (*recorded.notes, *_later_runs(run))
    metrics = recorded.metrics()
    if html is not None:
        from equilibria.views.run.page import write_report

        with named({"path": "--html"}):
            title, queries = run.resolve().name, recorded.sharpness()
            write_report(
                samples,
                html,
                metadata=metadata,
                title=title,
                notes=notes,
                sharpness=queries,
                metrics=metrics,
                diffusion=recorded.diffusion(),
            )
    layers, findings = summarise_and_diagnose(samples, metadata=metadata, metrics=metrics)
    if as_json:
        every_finding = [*findings, *sharpness_findings(recorded.sharpness(), metadata=metadata)]
        noise = gradient_noise(samples, metadata=metadata, metrics=metrics, diffusion=recorded.diffusion())
        print_json(
            {
                "layers": [_contract(layer) for layer in layers],
                "metrics": metric_summaries(metrics),
                "noise": noise,
                "findings": every_finding,
                "notes": notes,
            }
        )
        return
    if layers:
        print(run_table(layers, findings=findings, notes=notes, most=_MOST_ROWS, metrics=metrics))
        if between := checkpoint_table(samples, recorded.diffusion(), metadata=metadata):
            print(between)
    elif not recorded.sharpness().num_rows:
        print(*(run_headline(layers), *notes), sep="\n")
    if recorded.sharpness().num_rows:
        print(sharpness_table(recorded.sharpness(), metadata=metadata, notes=() if layers else notes))
    if html is not None:
        print(f"Page: {html}")


def _contract(layer: LayerSummary) -> dict[str, Any]:
    return {**jsonable(layer), "sentence": layer.sentence}


def _later_runs(run: Path) -> list[str]:
    """Notes on later runs: a run restarted in the same directory is recorded in a numbered one next to it."""
    later = sorted(run.resolve().parent.glob(f"{run.resolve().name}-[0-9]*/run.json"))
    return [f"a later run lies in {path.parent}" for path in later]
