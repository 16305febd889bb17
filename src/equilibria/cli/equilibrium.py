"""`equilibria equilibrium`: the equilibrium of an optimizer's settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import (
    build_rule,
    data_options,
    example,
    in_data,
    json_option,
    refuse_unused_scale,
    rule_options,
    scale_options,
    shape_of,
    shape_option,
    timescale_of,
)
from equilibria.cli._output import jsonable, print_json
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.theory import Equilibrium, Rule


@click.command(
    "equilibrium",
    epilog=example(
        "equilibrium --optimizer adamw --lr 3e-4 --wd 0.1 --dim 1000000",
        "equilibrium --optimizer adamw --lr 3e-4 --wd 0.1 --batch-size 5e5 --data-size 1e10",
    ),
)
@rule_options
@scale_options
@shape_option
@data_options
@json_option
def command(**options: Any) -> None:
    """Print the equilibrium of an optimizer: norm, angle per step, time constant, and the assumptions."""
    refuse_unused_scale(options)
    rule = build_rule(options)
    result = _solve(rule, options)
    timescale = timescale_of(rule, options)
    if options["as_json"]:
        print_json(result if timescale is None else {**jsonable(result), "timescale": jsonable(timescale)})
    else:
        _show(rule, result, options)


def _solve(rule: Rule, options: dict[str, Any]) -> Equilibrium:
    from equilibria.theory import Muon

    if isinstance(rule, Muon):
        return rule.equilibrium(shape=shape_of(options))
    return rule.equilibrium(unit_grad_sq=options["unit_grad_sq"], dim=options["dim"])


def _show(rule: Rule, result: Equilibrium, options: dict[str, Any]) -> None:
    from equilibria.theory import AdamW, Lion, Muon

    angle = float(result.angle)
    needs = {AdamW: "--dim", Lion: "--dim", Muon: "--shape"}.get(type(rule), "--unit-grad-sq")
    norm = f"{float(result.norm):.6g}" if result.norm is not None else f"give {needs} to know it"
    if result.norm is None and isinstance(rule, AdamW | Lion):
        norm = f"{float(rule.equilibrium(dim=1).norm or 0):.6g} x sqrt(entries): the rms of an entry"
    rows = [
        ["angle per step", f"{angle:.6g} rad ({math.degrees(angle):.4g} degrees)"],
        ["relative update", f"{float(result.relative_update):.6g} of the norm"],
        ["norm", norm],
        ["deviation shrinks by", f"{result.rate:.8g} per step"],
        ["time constant", in_data(result.time_constant, options)],
        ["approach", "monotone near equilibrium" if result.monotone else "oscillates around equilibrium"],
    ]
    timescale = timescale_of(rule, options)
    if timescale is not None:
        rows.insert(5, ["weights average over", in_data(timescale.steps, options)])
    print(f"\n  {rule}\n")
    print(table(rows, left=2))
    print("\n  Holds if")
    for item in result.validity:
        mark = {True: "yes", False: "NO ", None: "?  "}[item.met]
        print(wrap(f"{item.name}: {item.detail}", indent=f"    {mark} ", hang=" " * 8))
    legend = "yes: met by these settings   NO: not met   ?: only a measurement of the run can tell"
    print("\n" + wrap(legend, indent="    ") + "\n")
