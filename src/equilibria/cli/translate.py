"""`equilibria translate`: the same dynamics somewhere else."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._flags import flag, named
from equilibria.cli._options import NUMBER, build_rule, json_option, numbers, rule_options, scale_options
from equilibria.cli._output import jsonable, print_json
from equilibria.errors import EquilibriaError, one_of, positive
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.theory import Rule
    from equilibria.theory.translation import Translation

_TARGETS = ("sgd", "sgdw", "adamw", "lion")
_READ_BY = {
    "match": _TARGETS,
    "to_momentum": ("sgd", "sgdw"),
    "to_betas": ("adamw", "lion"),
    "unit_grad_sq": _TARGETS,
    "dim": _TARGETS,
}
_WHERE = {"scale_init": "scale", "scale_batch": "batch", "hold_angle_at_wd": "weight_decay", "to": "to"}


@click.command("translate")
@rule_options
@click.option("--scale-init", type=NUMBER, help="Initial weights this many times as large.")
@click.option("--scale-batch", type=NUMBER, help="Batch this many times as large.")
@click.option("--hold-angle-at-wd", type=NUMBER, help="Another weight decay, the same angle.")
@click.option("--to", help="Another optimizer: sgd, sgdw, adamw or lion.")
@click.option("--match", help="with --to: angle (default), diffusion or time_constant.")
@click.option("--to-momentum", type=NUMBER, help="with --to sgd, sgdw: its momentum.")
@click.option("--to-betas", help="with --to adamw, lion: its betas.")
@scale_options
@json_option
def command(**options: Any) -> None:
    """The same dynamics for another initial scale, batch size, weight decay or optimizer."""
    from equilibria.theory.translation import translate

    rule = build_rule(options)
    if options["to"] is not None:
        options["to"] = one_of("--to", options["to"].lower(), _TARGETS)
    where = {name: options[option] for option, name in _WHERE.items() if options[option] is not None}
    if len(where) != 1:
        raise EquilibriaError("expected exactly one of --scale-init, --scale-batch, --hold-angle-at-wd and --to")
    _check_target(options)
    extra = {
        "match": options["match"],
        "momentum": options["to_momentum"],
        "betas": _to_betas(options["to_betas"]),
        "unit_grad_sq": options["unit_grad_sq"],
        "dim": options["dim"],
    }
    with named({"momentum": "--to-momentum", "betas": "--to-betas"}):
        result = translate(rule, **where, **{name: value for name, value in extra.items() if value is not None})
    if options["as_json"]:
        print_json({**jsonable(result), "optimizer": type(result.rule).__name__})
    else:
        _show(rule, result)


def _check_target(options: dict[str, Any]) -> None:
    """The target in the words of the command line, and every option that only some targets read."""
    if options["to"] is None:
        name = next(name for name in _WHERE if options[name] is not None)
        positive(flag(name), options[name])
    for name, readers in _READ_BY.items():
        if options[name] is not None and options["to"] not in readers:
            raise EquilibriaError(f"got {flag(name)}; expected it only with --to: {', '.join(readers)}")


def _to_betas(text: str | None) -> tuple[float, ...] | None:
    return None if text is None else tuple(numbers("--to-betas", text, example="0.9,0.999"))


def _show(old: Rule, new: Translation) -> None:
    rows = [["", type(old).__name__, type(new.rule).__name__]]
    names = [field.name for field in fields(old)] + [field.name for field in fields(new.rule)]
    rows += [[n, _text(getattr(old, n, "")), _text(getattr(new.rule, n, ""))] for n in dict.fromkeys(names)]
    if new.weight != 1:
        rows.append(["initial weights", "1", f"x {new.weight:g}"])
    print()
    print(table(rows, left=1))
    print("\n  Kept")
    for line in new.kept:
        print(wrap(line, indent="    = ", hang="      "))
    print("  Not kept")
    for line in new.changed:
        print(wrap(line, indent="    ~ ", hang="      "))
    print()


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    return f"{value:.6g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
