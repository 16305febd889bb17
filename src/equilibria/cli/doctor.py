"""`equilibria doctor`: what an optimizer does to every parameter, and what is wrong with it."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

import click

from equilibria.cli._options import json_option
from equilibria.cli._output import print_json
from equilibria.errors import EquilibriaError


@click.command("doctor")
@click.argument("target", required=False)
@click.option("--diff", nargs=2, type=Path, help="Compare two saved outputs of --json instead: OLD NEW.")
@json_option
def command(*, target: str | None, diff: tuple[Path, Path] | None, as_json: bool) -> None:
    """What the optimizer does to every parameter, beside how it is scale-invariant.

    TARGET is package.module:factory, a function without arguments that returns (model, optimizer, batches), or also a
    loss(output, target) as the fourth. Nothing is trained; the model stays as it is.
    """
    if (target is None) == (diff is None):
        raise EquilibriaError(
            "got neither or both of TARGET and --diff; expected package.module:factory, or --diff OLD NEW"
        )
    if diff is not None:
        _compare(*diff, as_json=as_json)
        return
    from equilibria.doctor import examine, load_patient

    with redirect_stdout(sys.stderr):  # what the factory prints is no part of the answer
        found = examine(load_patient(str(target)))
    if as_json:
        symmetries = {"gap": found.symmetries.gap, "basis": found.symmetries.basis, "notes": found.symmetries.notes}
        print_json({"parameters": found.rows, "findings": found.findings, "fix": found.fix, "symmetries": symmetries})
        return
    from equilibria.doctor.terminal import print_examination

    print_examination(found)


def _compare(old: Path, new: Path, *, as_json: bool) -> None:
    from equilibria.doctor.differences import compare_outputs

    changes = compare_outputs(old, new)
    if as_json:
        print_json(changes)
        return
    for change in changes:
        print(f"{change['name']}: {change['field']} {change['old']} -> {change['new']}")
    if not changes:
        print("no differences")
