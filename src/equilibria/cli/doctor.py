"""`equilibria doctor`: what an optimizer does to every parameter, and what is wrong with that."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import PATH, example, json_option, named
from equilibria.cli._output import jsonable, print_json
from equilibria.errors import EquilibriaError

if TYPE_CHECKING:
    from equilibria.doctor import Examination


@click.command("doctor", epilog=example("doctor train:make --save before.json", "doctor --diff before.json after.json"))
@click.argument("target", required=False)
@click.option("--save", type=PATH, help="Also write the --json output to this file, for --diff.")
@click.option("--diff", nargs=2, type=PATH, help="Compare two saved outputs instead: OLD NEW.")
@json_option
def command(*, target: str | None, save: Path | None, diff: tuple[Path, Path] | None, as_json: bool) -> None:
    """Check what an optimizer does to every parameter against how the parameter is scale-invariant.

    TARGET is package.module:factory, a function without arguments that returns (model, optimizer, batches), and
    optionally a loss(output, target) as the fourth value, None if the model returns its loss. Nothing is trained; the
    model stays as it is. optimizer may be a list of several.

    The exit status is 0, also where something is found to be wrong: --json lists the findings, for scripts that decide.
    """
    if (target is None) == (diff is None):
        raise EquilibriaError(
            "got neither or both of TARGET and --diff; expected package.module:factory, or --diff OLD NEW"
        )
    if diff is not None and save is not None:
        raise EquilibriaError("got --save with --diff; expected it with TARGET only: --diff compares saved outputs")
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise EquilibriaError(f"got --save {save}; expected the name of a file in a folder that exists")
    if save is not None:
        from equilibria.records._files import check_outside_runs, write_whole

        with named({"path": "--save"}):
            check_outside_runs(save)
    if diff is not None:
        _compare(*diff, as_json=as_json)
        return
    from equilibria.doctor import examine, load_setup

    with redirect_stdout(sys.stderr):  # stdout is for the answer; a factory may print, too
        examination = examine(load_setup(str(target)))
    if save is not None:
        write_whole(save, json.dumps(jsonable(_contract(examination)), allow_nan=False, indent=1).encode())
    if as_json:
        print_json(_contract(examination))
        return
    from equilibria.views.examination import print_examination

    print_examination(examination)


def _contract(examination: Examination) -> dict[str, Any]:
    sym = examination.symmetries
    return {
        "parameters": examination.rows,
        "findings": examination.findings,
        "fix": examination.fix,
        "symmetries": {"gap": sym.gap, "basis": sym.basis, "notes": sym.notes},
    }


def _compare(old: Path, new: Path, *, as_json: bool) -> None:
    from equilibria.doctor._differences import compare_outputs

    changes = compare_outputs(old, new)
    if as_json:
        print_json(changes)
        return
    for change in changes:
        print(f"{change['name']}: {change['field']} {_shown(change['old'])} -> {_shown(change['new'])}")
    if not changes:
        print("no differences")


def _shown(value: Any) -> Any:
    return "none" if value in ("", None) else value
