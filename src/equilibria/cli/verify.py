"""`equilibria verify`: what of a recorded run is whole."""

from __future__ import annotations

from pathlib import Path

import click

from equilibria.cli._options import PATH, example, json_option
from equilibria.cli._output import print_json


@click.command("verify", epilog=example("verify runs/a"))
@click.argument("run", type=PATH)
@json_option
def command(*, run: Path, as_json: bool) -> int:
    """Verify the run recorded in the directory RUN: rows, steps, damage and holes of every session and table.

    Reads every byte and compares it with its checksum. Exits with 0 if the run is whole, 1 if something is damaged or
    missing, 2 if there is no run. Rows that a later session went back over, and the last batch of a run that is being
    recorded, are no damage.
    """
    from equilibria.records import read_record

    result = read_record(run).verify()
    if as_json:
        print_json(result.to_json())
    else:
        print(result)
    return 0 if result.whole else 1
