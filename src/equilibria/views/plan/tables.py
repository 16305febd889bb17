"""A plan as tables, one row per phase: in the terminal with as many columns as fit, in notebooks with a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from equilibria._display import Printable
from equilibria.views.notebook import card
from equilibria.views.svg import EQUILIBRIUM, OTHER, PREDICTED, Line, svg_chart
from equilibria.views.terminal import fitting, table, width, wrap

if TYPE_CHECKING:
    from equilibria.planning import Phase, Plan

# Columns to drop in a narrow terminal, in this order: "has" repeats the second column, the others matter least.
_SPARE = ("has", "wd", "norm/norm*", "middle", "angle*")


def plan_table(result: Plan) -> Printable:
    """The phases of a plan, for the terminal and for notebooks."""
    return Printable(text=phase_table(result), html=phase_card(result))


def phase_table(result: Plan) -> str:
    """The phases of a plan as lines of text."""
    unit = "epochs" if result.situation.steps_per_epoch else "steps"
    if result.situation.start_norm is None:
        return _table_without_decay(result, unit)
    head = ["phase", unit, "lr", "wd", "angle*", "start", "middle", "end", "norm/norm*", "needs", "has", ""]
    rows = [_row(result, phase) for phase in result.phases]
    cells = {name: [row[i] for row in rows] for i, name in enumerate(head)}
    spare = [name for name in _SPARE if name != "wd" or len(set(cells["wd"])) == 1]
    if not any(cells["needs"]):  # ramps have no time to settle
        spare.insert(0, "needs")
    if not any(cells[""]):
        del cells[""]
    columns = fitting(cells, spare=spare, width=width())
    lines = _lines(columns)
    return "\n".join([_line_above(lines[0]), *lines, wrap(_note(columns, unit, rows[0][3]), hang="    ")])


def _line_above(head: str) -> str:
    """The line above the headings, which names the ratios and the times."""
    ratios, times = "angle / angle*", "to settle"
    end = head.index("  end") + len("  end")
    line = " " * min(head.index("start") - 1, end - len(ratios)) + ratios
    room = len(head.rstrip()) - len(times)
    return f"{line.ljust(room)}{times}" if "needs" in head and room > len(line) + 1 else line


def _lines(columns: Mapping[str, Sequence[str]]) -> list[str]:
    rows = [list(columns), *(list(row) for row in zip(*columns.values(), strict=True))]
    return table(rows, left=2).splitlines()


def _note(columns: Mapping[str, Sequence[str]], unit: str, decay: str) -> str:
    times = ", ".join(name for name in ("needs", "has") if name in columns)
    parts = [
        "* equilibrium, angle in rad",
        "norm at the end of the phase" if "norm/norm*" in columns else "",
        f"wd {decay} throughout" if "wd" not in columns else "",
        f"{times} in {unit}" if times else "",
    ]
    return "; ".join(filter(None, parts))


def _table_without_decay(result: Plan, unit: str) -> str:
    """Angles and norms: without weight decay they have no equilibrium to be compared with."""
    head = ["phase", unit, "lr", "start", "middle", "end", "start", "middle", "end", ""]
    rows = [
        [
            *_span(result, phase),
            *(f"{step.angle:.3g}" for step in phase.shown_steps),
            *(f"{step.norm:.3g}" for step in phase.shown_steps),
            "no equilibrium",
        ]
        for phase in result.phases
    ]
    lines = table([head, *rows], left=2).splitlines()
    if max(map(len, lines)) > width():
        lines = table([row[:-1] for row in (head, *rows)], left=2).splitlines()
    indent = " " * lines[0].index("start")
    above = f"{indent}angle, rad".ljust(lines[0].rindex("start")) + "norm"
    return "\n".join([above, *lines])


def _span(result: Plan, phase: Phase) -> list[str]:
    """Number, time and lr of a phase."""
    per = result.situation.steps_per_epoch or 1
    first, last = phase.first_step / per, (phase.first_step + phase.steps) / per
    return [
        str(phase.number),
        f"{first:,.4g}-{last:,.4g}" if per > 1 else f"{phase.first_step:,}-{phase.first_step + phase.steps:,}",
        _change(phase.start.lr, phase.end.lr, phase.start.lr == phase.end.lr),
    ]


def _row(result: Plan, phase: Phase) -> list[str]:
    per = result.situation.steps_per_epoch or 1
    angle = _change(phase.start.angle_equilibrium, phase.end.angle_equilibrium, phase.flat)
    needs = "" if phase.settle_steps is None else _time(phase.settle_steps / per) if phase.settle_steps else "at once"
    ratio = phase.end.angle_ratio
    verdict = "" if phase.settles or ratio is None else "too slow" if ratio < 1 else "too fast"
    if verdict and phase.settle_steps is not None:
        verdict = "never"
    if phase.end.lr > 0 and phase.end.weight_decay == 0:
        verdict = "no equilibrium"
    return [
        *_span(result, phase),
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


# ---- notebooks


_HEADINGS = ("phase", "{unit}", "lr", "wd", "equilibrium rad/step", "start", "middle", "end", "settles after")


def plan_card(plan: Plan) -> str:
    """The angles predicted, in equilibrium and suggested by the lr alone; the phases; the findings."""
    unit, name = _unit(plan)
    x = plan.curve.step / unit
    lines = [
        Line("what the lr alone suggests", x, plan.curve.angle_by_lr, OTHER, dashed=True),
        Line("equilibrium of lr x wd", x, plan.curve.angle_equilibrium, EQUILIBRIUM, dashed=True),
        Line("predicted", x, plan.curve.angle, PREDICTED),
    ]
    picture = svg_chart(lines, x=name, y="rad per step", log=True)
    return _card(
        plan, picture, [f"{finding.subject}: {finding.evidence}. {finding.remedy}" for finding in plan.findings]
    )


def phase_card(plan: Plan) -> str:
    """The phases alone."""
    return _card(plan, "", [])


def _card(plan: Plan, picture: str, notes: list[str]) -> str:
    unit, name = _unit(plan)
    return card(
        f"{type(plan.situation.rule).__name__} over {plan.situation.time(plan.situation.steps)}: "
        f"{plan.settled_share:.0%} of the steps turn within {plan.situation.tolerance:.0%} of equilibrium",
        picture=picture,
        headings=[heading.format(unit=name) for heading in _HEADINGS],
        rows=[_card_row(plan, phase, unit) for phase in plan.phases],
        notes=notes,
    )


def _unit(plan: Plan) -> tuple[int, str]:
    """Steps per unit of time, and its name."""
    per_epoch = plan.situation.steps_per_epoch
    return (1, "steps") if per_epoch is None else (per_epoch, "epochs")


def _card_row(plan: Plan, phase: Phase, unit: int) -> list[str]:
    first, last = phase.first_step / unit, (phase.first_step + phase.steps) / unit
    ratios = [step.angle_ratio for step in phase.shown_steps]
    return [
        f"{phase.number}",
        f"{_position(first)}-{_position(last)}",
        f"{phase.end.lr:.3g}",
        f"{phase.end.weight_decay:.3g}",
        f"{phase.end.angle_equilibrium:.3g}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        _settles(plan, phase),
    ]


def _position(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _settles(plan: Plan, phase: Phase) -> str:
    if phase.settle_steps is None:
        return ""
    if phase.settle_steps == 0:
        return "at once"
    return plan.situation.time(phase.settle_steps) + ("" if phase.settles else ", has fewer")
