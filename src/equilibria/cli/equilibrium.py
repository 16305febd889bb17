"""`equilibria equilibrium`: the equilibrium of an optimizer's settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import (
    build_rule,
    example,
    json_option,
    refuse_unused_scale,
    rule_options,
    scale_options,
    shape_of,
    shape_option,
)
from equilibria.cli._output import print_json
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.theory import Equilibrium, Rule


@click.command("equilibrium", epilog=example("equilibrium --optimizer adamw --lr 3e-4 --wd 0.1 --dim 1000000"))
@rule_options
@scale_options
@shape_option
@json_option
def command(**options: Any) -> None:
    """Print the equilibrium of an optimizer: norm, angle per step, time constant, and the assumptions."""
    refuse_unused_scale(options)
    rule = build_rule(options)
    result = _solve(rule, options)
    if options["as_json"]:
        print_json(result)
    else:
        _show(rule, result)


def _solve(rule: Rule, options: dict[str, Any]) -> Equilibrium:
    from equilibria.theory import Muon

    if isinstance(rule, Muon):
        return rule.equilibrium(shape=shape_of(options))
    return rule.equilibrium(unit_grad_sq=options["unit_grad_sq"], dim=options["dim"])


def _show(rule: Rule, result: Equilibrium) -> None:
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
        ["time constant", f"{result.time_constant:,.1f} steps"],
        ["approach", "monotone near equilibrium" if result.monotone else "oscillates around equilibrium"],
    ]
    print(f"\n  {rule}\n")
    print(table(rows, left=2))
    print("\n  Holds if")
    for item in result.validity:
        mark = {True: "yes", False: "NO ", None: "?  "}[item.met]
        print(wrap(f"{item.name}: {item.detail}", indent=f"    {mark} ", hang=" " * 8))
    legend = "yes: met by these settings   NO: not met   ?: only a measurement of the run can tell"
    print("\n" + wrap(legend, indent="    ") + "\n")
