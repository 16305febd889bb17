"""`equilibria fold`: weight decay as an exponentially growing learning rate."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import build_rule, example, json_option, optimizer_of, setting_options
from equilibria.cli._output import print_json
from equilibria.cli._schedule import build_run, schedule_options
from equilibria.errors import EquilibriaError
from equilibria.views.terminal import table, wrap

if TYPE_CHECKING:
    from equilibria.theory.folding import Folded

_ROWS = 12


@click.command("fold", epilog=example("fold --lr 0.1 --momentum 0.9 --wd 5e-4 --steps 78200 --csv > lr.csv"))
@click.option("--optimizer", default="sgd", help="sgd (the default), the only one whose decay can be folded.")
@setting_options
@schedule_options
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print step, original_lr, lr, log_scale for every step.")
def command(**options: Any) -> None:
    """Print the learning-rate schedule that trains the same network without weight decay."""
    from equilibria.theory.folding import fold

    if options["as_json"] and options["as_csv"]:
        raise EquilibriaError("got --json and --csv; expected at most one of them")
    optimizer = optimizer_of(options)
    if optimizer != "sgd":
        decay = "decoupled weight decay" if optimizer != "adam" else "an update that is not linear in the gradient"
        raise EquilibriaError(
            f"got --optimizer {optimizer}; expected sgd: with {decay} no learning rate alone replaces weight decay. "
            "For the same angles at another weight decay, use: equilibria translate --hold-angle-at-wd",
            argument="--optimizer",
        )
    run = build_run(options)
    build_rule({**options, "lr": run.lr})  # checks the settings
    original = run.schedule.values(run.steps)
    folded = fold(
        original,
        options["wd"],
        momentum=options["momentum"] or 0.0,
        nesterov=options["nesterov"],
        dampening=options["dampening"] or 0.0,
    )
    if options["as_json"]:
        print_json(_contract(folded))
    elif options["as_csv"]:
        _print_csv(original, folded)
    else:
        _show(original, folded, run.steps_per_epoch)


def _contract(folded: Folded) -> dict[str, Any]:
    """The schedule as JSON; lr beyond the range of float64 is null, log_lr never is."""
    return {
        "lr": folded.lr,
        "log_lr": folded.log_lr,
        "log_scale": folded.log_scale,
        "growth_per_step": folded.growth_per_step,
        "overflow": folded.overflow,
    }


def _print_csv(original: Any, folded: Folded) -> None:
    rows = zip(original.tolist(), folded.lr.tolist(), folded.log_scale.tolist(), strict=False)
    sys.stdout.write("step,original_lr,lr,log_scale\n")
    sys.stdout.writelines(f"{t},{a!r},{b!r},{c!r}\n" for t, (a, b, c) in enumerate(rows))


def _show(original: Any, folded: Folded, steps_per_epoch: int | None) -> None:
    import numpy as np

    from equilibria.planning._phases import thinned

    steps = len(original)
    shown = thinned(steps, most=_ROWS).tolist()
    rows = [["step", "lr with wd", "lr without wd", "weights larger by"]]
    rows += [[f"{t:,}", f"{original[t]:.6g}", _power(folded.log_lr[t]), _power(folded.log_scale[t])] for t in shown]
    print()
    print(table(rows, left=0))
    constant = bool(np.all(original == original[0]))
    growth = f"Growth{'' if constant else ' at the end'}: x {folded.growth_per_step:.10g} per step"
    if steps_per_epoch:
        growth += f", x {folded.growth_per_epoch(steps_per_epoch):.6g} per epoch"
    print(f"\n  {growth}.")
    late = {name: step for name, step in folded.overflow.items() if step is not None}
    if late:
        first = ", ".join(f"{name} at step {step:,}" for name, step in sorted(late.items(), key=lambda item: item[1]))
        print(
            wrap(
                f"Without renormalisation it overflows: {first}. Divide the weights by a power of two now and then, "
                "multiply the momentum buffer by it and divide the lr by its square: the network does not change."
            )
        )
    else:
        print("  No overflow within these steps in float16, bfloat16, float32 or float64.")
    print(
        wrap("Apply it to scale-invariant weights only, with weight decay 0; everything else keeps its lr and wd.")
        + "\n"
    )


def _power(log_value: float) -> str:
    """exp(log_value), also where that is beyond the range of a float."""
    if log_value == -math.inf:
        return "0"
    exponent = math.floor(log_value / math.log(10))
    if -5 <= exponent < 6:
        return f"{math.exp(log_value):.6g}"
    return f"{10 ** (log_value / math.log(10) - exponent):.5f}e{exponent:+d}"
