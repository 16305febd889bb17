"""`equilibria plan`: the course of a schedule before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._options import (
    NUMBER,
    PATH,
    build_rule,
    data_options,
    example,
    in_data,
    json_option,
    named,
    optimizer_of,
    refuse_unused_scale,
    rule_options,
    scale_options,
    shape_of,
    shape_option,
    timescale_of,
)
from equilibria.cli._output import jsonable, print_json
from equilibria.cli._schedule import ScheduledRun, build_run, schedule_options
from equilibria.errors import EquilibriaError
from equilibria.findings import percent
from equilibria.views.plan.tables import phase_table
from equilibria.views.terminal import chart, paint, width, wrap

if TYPE_CHECKING:
    from equilibria.planning import Plan, PlannedStep


@click.command(
    "plan",
    epilog=example("plan --optimizer sgd --lr 0.1 --momentum 0.9 --wd 5e-4 --schedule cosine --steps 20000"),
)
@rule_options
@schedule_options
@scale_options
@shape_option
@click.option("--init-norm", type=NUMBER, help="||w|| at the start (with the scale above); needed at --wd 0.")
@click.option("--init-std", type=NUMBER, help="adamw, lion: rms of the entries at the start, such as 0.02.")
@click.option("--dtype", default="float32", help="Type of the stored weights: float32, bfloat16 or float16.")
@click.option(
    "--tolerance", type=NUMBER, default=0.05, show_default=True, help="Relative deviation that counts as settled."
)
@data_options
@click.option("--html", type=PATH, help="Also write one offline page to this file.")
@json_option
def command(**options: Any) -> None:
    """Show what a schedule will do before it runs: phase by phase, as a curve, and in sentences."""
    from equilibria.planning import alternatives, plan

    refuse_unused_scale(options)
    run = build_run(options)
    rule = build_rule({**options, "lr": run.lr})
    settings = plan_settings(options, run)
    with named({"norm": "--init-norm"}):
        result = plan(rule, run.schedule, **settings)
    if options["html"] is not None:
        from equilibria.views.plan.page import plan_page

        with named({"path": "--html"}):
            plan_page(result, alternatives=alternatives(rule, run.schedule, **settings)).write(options["html"])
    has_decay = result.situation.start_norm is not None
    timescale = timescale_of(result.situation.rule, options) if has_decay else None
    if options["as_json"]:
        print_json(_contract(result) | ({} if timescale is None else {"timescale": jsonable(timescale)}))
        return
    _show(result, "" if timescale is None else _data_time(result, timescale.steps, options))
    if options["html"] is not None:
        print(f"  Page: {options['html']}\n")


def plan_settings(options: dict[str, Any], run: ScheduledRun) -> dict[str, Any]:
    """The keyword arguments of `equilibria.plan`."""
    if options["init_std"] is not None:
        options = options | _from_std(options)
    return {
        "steps": run.steps,
        "steps_per_epoch": run.steps_per_epoch,
        "init_norm": options["init_norm"],
        "unit_grad_sq": options["unit_grad_sq"],
        "dim": options["dim"],
        "shape": shape_of(options),
        "dtype": _DTYPES.get(options["dtype"].lower(), options["dtype"].lower()),
        "tolerance": options["tolerance"],
    }


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _from_std(options: dict[str, Any]) -> dict[str, Any]:
    """The norm and size of a single entry: norms of these optimizers grow as the root of the number of entries."""
    if optimizer_of(options) not in ("adamw", "lion"):
        raise EquilibriaError("got --init-std; expected it only with --optimizer adamw or lion: use --init-norm")
    if options["init_norm"] is not None or options["dim"] is not None:
        raise EquilibriaError("got --init-std with --init-norm or --dim; expected --init-std alone")
    return {"init_norm": options["init_std"], "dim": 1}


def _contract(result: Plan) -> dict[str, Any]:
    """The plan as JSON, with the ratios to equilibrium."""
    value: dict[str, Any] = {"optimizer": type(result.situation.rule).__name__, **jsonable(result)}
    for shown, phase in zip(value["phases"], result.phases, strict=True):
        for name in ("start", "middle", "end"):
            moment: PlannedStep = getattr(phase, name)
            shown[name] |= {"angle_ratio": jsonable(moment.angle_ratio), "norm_ratio": jsonable(moment.norm_ratio)}
    return value


def _data_time(result: Plan, steps: float, options: dict[str, Any]) -> str:
    """How long the weights remember at the largest lr x wd, in data, and how much of the data the run sees."""
    whole_run = in_data(result.situation.steps, options)
    return (
        f"At lr {result.situation.rule.lr:g} the weights average over the last {in_data(steps, options)}; the run has "
        f"{whole_run}."
    )


def _show(result: Plan, data_time: str) -> None:
    print()
    print(phase_table(result))
    print()
    for line in _curve(result):
        print(line.rstrip())
    print()
    near = f"within {percent(result.situation.tolerance)} of equilibrium"
    share = f"{percent(result.settled_share)} of the steps turn {near}."
    if _without_decay(result):
        share = "No equilibrium without weight decay."
    print(wrap(f"{share} {_start(result)} For scale-invariant weights and noise-dominated gradients.") + "\n")
    if data_time:
        print(wrap(data_time) + "\n")
    for finding in result.findings:
        mark = paint("!", "33;1") if finding.severity == "warning" else paint("i", "36")
        print(
            wrap(
                f"{finding.subject[0].upper()}{finding.subject[1:]}: {finding.evidence}.",
                indent=f"  {mark} ",
                hang="    ",
            )
        )
        print(wrap(f"-> {finding.remedy}.", indent="    ", hang="       ") + "\n")


def _without_decay(result: Plan) -> bool:
    return result.situation.start_norm is None


def _start(result: Plan) -> str:
    from equilibria.theory import AdamW, Lion

    if result.situation.init_norm is not None:
        return f"Start: {result.situation.norm_name} = {result.situation.init_norm:g}."
    needs = "--init-std" if isinstance(result.situation.rule, AdamW | Lion) else "--init-norm"
    return f"Start: in the equilibrium of lr {result.situation.start_rule.lr:g} ({needs} starts from your own weights)."


def _curve(result: Plan) -> list[str]:
    per = result.situation.steps_per_epoch or 1
    curve = result.curve
    x = (curve.step / per).tolist()
    series = [("·", curve.angle_by_lr.tolist()), ("-", curve.angle_equilibrium.tolist()), ("█", curve.angle.tolist())]
    unit = "epochs" if per > 1 else "steps"
    equilibrium = "" if _without_decay(result) else "- equilibrium of lr x wd   "
    legend = f"angle per step (rad):  █ predicted   {equilibrium}· what the lr alone suggests"
    return [*_legend(legend), *chart(x, series, columns=width() - 26, unit=unit, end=result.situation.steps / per)]


def _legend(text: str) -> list[str]:
    """The legend on one line if it fits, else its last entry below."""
    if len(text) + 2 <= width():
        return [f"  {text}"]
    first, last = text.rsplit("   ", 1)
    return [f"  {first}", f"  {'':<23}{last}"]
