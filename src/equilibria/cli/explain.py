"""`equilibria explain`: why the layers of two recorded runs turn at different speeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from equilibria.cli._options import PATH, example, json_option, named
from equilibria.cli._output import print_json


@click.command("explain", epilog=example("explain runs/a runs/b --html why.html"))
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option("--html", type=PATH, help="Also write one offline page to this file.")
@json_option
def command(*, a: Path, b: Path, html: Path | None, as_json: bool) -> None:
    """Explain why the layers of run A turn faster or slower than those of run B.

    A and B are directories of recorded runs. Settings, gradients and starts of A take the place of those of B, one
    cause at a time; their effects on the angle per step (the effective learning rate) are ranked, with the smallest
    change to B that gives it the angles of A. Logged numbers such as the loss are shown beside.
    """
    from equilibria.comparing import explain

    result = explain(a, b)
    if html is not None:
        with named({"path": "--html"}):
            result.report(html, title=f"Why {a.resolve().name} (A) and {b.resolve().name} (B) differ")
    if as_json:
        fields = (field.name for field in dataclasses.fields(result) if not field.name.startswith("_"))
        print_json({"headline": result.headline, **{name: getattr(result, name) for name in fields}})
        return
    print(result)
    if html is not None:
        print(f"Page: {html}")
