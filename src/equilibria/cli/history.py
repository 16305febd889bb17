"""`equilibria history`: which of many runs left the band of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import PATH, example, json_option, named
from equilibria.cli._output import jsonable, print_json

if TYPE_CHECKING:
    from equilibria.comparing import JudgedRun


@click.command("history", epilog=example("history runs", "history nightly --html history.html"))
@click.argument("runs", type=PATH, nargs=-1, required=True)
@click.option("--html", type=PATH, help="Also write one offline page to this file.")
@json_option
def command(*, runs: tuple[Path, ...], html: Path | None, as_json: bool) -> int:
    """Compare every run in the folders RUNS with the runs before it: angles, update ratios, norms and spikes.

    Exits with 0 if the latest run is in the band of the earlier ones, or there are fewer than three of them; 1 if it
    has left it, or has no samples to compare; 2 if there is no run.
    """
    from equilibria.comparing import history

    result = history(runs)
    if html is not None:
        with named({"path": "--html"}):
            result.report(html)
    if as_json:
        answer = {"regressed": result.regressed, "runs": _runs(result.runs), "findings": list(result.findings)}
        print_json({**answer, "unreadable": result.unreadable})
    else:
        print(result)
        if html is not None:
            print(f"Page: {html}")
    return 1 if result.regressed else 0


def _runs(runs: Sequence[JudgedRun]) -> list[dict[str, Any]]:
    return [{**jsonable(run), "path": str(run.path), "in_band": run.in_band} for run in runs]
