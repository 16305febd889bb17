"""`equilibria translate`: settings with the same dynamics elsewhere."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import (
    NUMBER,
    build_rule,
    example,
    flag,
    json_option,
    named,
    numbers,
    rule_options,
    scale_options,
)
from equilibria.cli._output import jsonable, print_json
from equilibria.errors import EquilibriaError, one_of, positive
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.theory import Rule
    from equilibria.theory.translation import Translation

_TARGETS = ("sgd", "sgdw", "adamw", "lion")
_USED_BY = {
    "match": _TARGETS,
    "to_momentum": ("sgd", "sgdw"),
    "to_betas": ("adamw", "lion"),
    "unit_grad_sq": _TARGETS,
    "dim": _TARGETS,
}
_ARGUMENTS = {"scale_init": "scale", "scale_batch": "batch", "hold_angle_at_wd": "weight_decay", "to": "to"}


@click.command(
    "translate", epilog=example("translate --optimizer adamw --lr 1e-3 --wd 0.1 --to lion --to-betas 0.9,0.99")
)
@rule_options
@click.option("--scale-init", type=NUMBER, help="Factor of the initial weights.")
@click.option("--scale-batch", type=NUMBER, help="Factor of the batch size.")
@click.option("--hold-angle-at-wd", type=NUMBER, help="Another weight decay, at the same angle.")
@click.option("--to", help="Another optimizer: sgd, sgdw, adamw or lion.")
@click.option("--match", help="with --to: angle (default), diffusion or time_constant.")
@click.option("--to-momentum", type=NUMBER, help="with --to sgd, sgdw: its momentum.")
@click.option("--to-betas", help="with --to adamw, lion: its betas.")
@scale_options
@json_option
def command(**options: Any) -> None:
    """Translate settings to another initial scale, batch size, weight decay or optimizer with the same dynamics."""
    from equilibria.theory.translation import translate

    rule = build_rule(options)
    if options["to"] is not None:
        options["to"] = _checked_target(options["to"].lower())
    target = {name: options[option] for option, name in _ARGUMENTS.items() if options[option] is not None}
    if len(target) != 1:
        typed = [flag(option) for option in _ARGUMENTS if options[option] is not None]
        raise EquilibriaError(
            f"got {' and '.join(typed) or 'none of them'}; expected exactly one of --scale-init, --scale-batch, "
            "--hold-angle-at-wd and --to"
        )
    _check_target(options)
    extra = {
        "match": options["match"],
        "momentum": options["to_momentum"],
        "betas": _to_betas(options["to_betas"]),
        "unit_grad_sq": options["unit_grad_sq"],
        "dim": options["dim"],
    }
    with named({"momentum": "--to-momentum", "betas": "--to-betas"}):
        result = translate(rule, **target, **{name: value for name, value in extra.items() if value is not None})
    if options["as_json"]:
        print_json({**jsonable(result), "optimizer": type(result.rule).__name__})
    else:
        _show(rule, result)


def _checked_target(to: str) -> str:
    """The optimizer to translate to, in lower case."""
    if to == "muon":
        raise EquilibriaError(
            f"got --to muon; expected one of: {', '.join(_TARGETS)}: the size of Muon's update depends on the shape of "
            "each matrix, so that one lr and weight decay cannot match a whole network. Compare one matrix instead: "
            "equilibria equilibrium --optimizer muon --lr LR --wd WD --shape ROWS,COLUMNS",
            argument="--to",
        )
    return one_of("--to", to, _TARGETS)


def _check_target(options: dict[str, Any]) -> None:
    """Raise for a factor that is not positive, and for an option that the target does not use."""
    if options["to"] is None:
        name = next(name for name in _ARGUMENTS if options[name] is not None)
        positive(flag(name), options[name])
    for name, targets in _USED_BY.items():
        if options[name] is not None and options["to"] not in targets:
            raise EquilibriaError(
                f"got {flag(name)}; expected it only with --to: {', '.join(targets)}", argument=flag(name)
            )


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
    if new.alternative:
        print("  Alternative")
        print(wrap(new.alternative, indent="    ? ", hang="      "))
    print()


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    return f"{value:.6g}" if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
