"""`equilibria plan`: what a schedule does, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equilibria.cli._chart import chart
from equilibria.cli._options import NUMBER, build_rule, check_scale, json_option, rule_options, scale_options
from equilibria.cli._output import jsonable, paint, print_json, table, width, wrap
from equilibria.cli._schedule import build_run, schedule_options
from equilibria.errors import EquilibriaError

if TYPE_CHECKING:
    from equilibria.planning import Moment, Phase, Plan


@click.command("plan")
@rule_options
@schedule_options
@scale_options
@click.option("--init-norm", type=NUMBER, help="||w|| at the start (with --unit-grad-sq or --dim).")
@click.option("--init-std", type=NUMBER, help="adamw, lion: rms of the entries at the start, such as 0.02.")
@click.option("--dtype", default="float32", help="In which the weights are stored: float32, bfloat16 or float16.")
@click.option("--tolerance", type=NUMBER, default=0.05, show_default=True, help="What counts as settled.")
@click.option("--html", type=Path, help="Also write one offline page to this file.")
@json_option
def command(**options: Any) -> None:
    """What a schedule does before it runs: phase by phase, as a curve, and in plain sentences."""
    from equilibria.planning import plan

    check_scale(options)
    run = build_run(options)
    if options["lr"] is None and options["schedule"].lower() == "file":
        options["lr"] = float(run.schedule.values(run.steps).max())
    rule = build_rule(options)
    if options["init_std"] is not None:
        options |= _from_std(options)
    result = plan(
        rule,
        run.schedule,
        steps=run.steps,
        steps_per_epoch=run.steps_per_epoch,
        init_norm=options["init_norm"],
        unit_grad_sq=options["unit_grad_sq"],
        dim=options["dim"],
        dtype=_DTYPES.get(options["dtype"], options["dtype"]),
        tolerance=options["tolerance"],
    )
    if options["html"] is not None:
        from equilibria.planning.page import write_page

        write_page(result, options["html"])
    if options["as_json"]:
        print_json(_contract(result))
        return
    _show(result)
    if options["html"] is not None:
        print(f"  Page: {options['html']}\n")


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def _from_std(options: dict[str, Any]) -> dict[str, Any]:
    """Norms of these optimizers go as the root of the number of entries, so one entry stands for all."""
    if options["optimizer"].lower() not in ("adamw", "lion"):
        raise EquilibriaError("got --init-std; expected it only with --optimizer adamw or lion: use --init-norm")
    if options["init_norm"] is not None or options["dim"] is not None:
        raise EquilibriaError("got --init-std with --init-norm or --dim; expected --init-std alone")
    return {"init_norm": options["init_std"], "dim": 1}


def _contract(result: Plan) -> dict[str, Any]:
    """The plan with the ratios that people compare, spelled out."""
    value: dict[str, Any] = {"optimizer": type(result.situation.rule).__name__, **jsonable(result)}
    for shown, phase in zip(value["phases"], result.phases, strict=True):
        for name in ("start", "middle", "end"):
            moment: Moment = getattr(phase, name)
            shown[name] |= {"angle_ratio": jsonable(moment.angle_ratio), "norm_ratio": jsonable(moment.norm_ratio)}
    return value


def _show(result: Plan) -> None:
    from equilibria.planning.findings import percent

    print()
    print(_table(result))
    print()
    for line in _curve(result):
        print(line.rstrip())
    print()
    near = f"within {percent(result.situation.tolerance)} of equilibrium"
    share = f"{percent(result.settled_share)} of the steps turn {near}."
    print(wrap(f"{share} {_start(result)} For scale-invariant weights and noise-dominated gradients.") + "\n")
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


def _start(result: Plan) -> str:
    from equilibria.theory import AdamW, Lion

    if result.situation.init_norm is not None:
        return f"Start: ||w|| = {result.situation.init_norm:g}."
    needs = "--init-std" if isinstance(result.situation.rule, AdamW | Lion) else "--init-norm"
    return f"Start: in the equilibrium of lr {result.situation.start_rule.lr:g} ({needs} starts from your own weights)."


def _table(result: Plan) -> str:
    unit = "epochs" if result.situation.steps_per_epoch else "steps"
    head = ["phase", unit, "lr", "wd", "angle*", "start", "middle", "end", "norm/norm*", "needs", "has", ""]
    lines = table([head, *(_row(result, phase) for phase in result.phases)], left=2).splitlines()
    at = lines[0].index("start")
    settle = lines[0].index("needs") - len("norm/norm*")
    over = f"{'':<{at - 1}}angle / angle*".ljust(settle) + "to settle"
    return "\n".join(
        [over, *lines, f"  * equilibrium, angle in rad; norm at the end of the phase; needs, has in {unit}"]
    )


def _row(result: Plan, phase: Phase) -> list[str]:
    per = result.situation.steps_per_epoch or 1
    first, last = phase.first_step / per, (phase.first_step + phase.steps) / per
    lr = _change(phase.start.lr, phase.end.lr, phase.start.lr == phase.end.lr)
    angle = _change(phase.start.angle_equilibrium, phase.end.angle_equilibrium, phase.flat)
    needs = "" if phase.settle_steps is None else _time(phase.settle_steps / per) if phase.settle_steps else "at once"
    ratio = phase.end.angle_ratio
    verdict = "" if phase.settles or ratio is None else "too slow" if ratio < 1 else "too fast"
    if verdict and phase.settle_steps is not None:
        verdict = "never"
    return [
        str(phase.number),
        f"{first:,.4g}-{last:,.4g}" if per > 1 else f"{phase.first_step:,}-{phase.first_step + phase.steps:,}",
        lr,
        _change(phase.start.weight_decay, phase.end.weight_decay, phase.start.weight_decay == phase.end.weight_decay),
        angle,
        _ratio(phase.start.angle_ratio),
        _ratio(phase.middle.angle_ratio),
        _ratio(phase.end.angle_ratio),
        _ratio(phase.end.norm_ratio),
        needs,
        _time(phase.steps / per),
        verdict,
    ]


def _change(start: float, end: float, constant: bool) -> str:
    return f"{start:.3g}" if constant else f"{start:.2g}->{end:.2g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else ">99"


def _time(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _curve(result: Plan) -> list[str]:
    per = result.situation.steps_per_epoch or 1
    curve = result.curve
    x = (curve.step / per).tolist()
    series = [("·", curve.angle_by_lr.tolist()), ("-", curve.angle_equilibrium.tolist()), ("█", curve.angle.tolist())]
    unit = "epochs" if per > 1 else "steps"
    legend = "  angle per step (rad):  █ predicted   - equilibrium of lr x wd   · what the lr alone suggests"
    return [legend, *chart(x, series, columns=width() - 26, unit=unit, end=result.situation.steps / per)]
