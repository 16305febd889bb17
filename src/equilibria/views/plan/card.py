"""A plan as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.views.notebook import GOAL, OTHER, PREDICTED, Line, card, svg_chart

if TYPE_CHECKING:
    from equilibria.planning._planner import Phase, Plan

_HEADINGS = ("phase", "{unit}", "lr", "wd", "equilibrium rad/step", "start", "middle", "end", "settles after")


def plan_card(plan: Plan) -> str:
    """The predicted angle, what lr x wd asks for and what the lr alone suggests; the phases; the findings."""
    unit = plan.situation.steps_per_epoch or 1
    x = plan.curve.step / unit
    name = "epochs" if plan.situation.steps_per_epoch else "steps"
    lines = [
        Line("what the lr alone suggests", x, plan.curve.angle_by_lr, OTHER, dashed=True),
        Line("equilibrium of lr x wd", x, plan.curve.angle_equilibrium, GOAL, dashed=True),
        Line("predicted", x, plan.curve.angle, PREDICTED),
    ]
    rule = type(plan.situation.rule).__name__
    return card(
        f"{rule} over {plan.situation.time(plan.situation.steps)}: {plan.settled_share:.0%} of the steps turn within "
        f"{plan.situation.tolerance:.0%} of equilibrium",
        picture=svg_chart(lines, x=name, y="rad per step", log=True),
        headings=[heading.format(unit=name) for heading in _HEADINGS],
        rows=[_row(plan, phase, unit) for phase in plan.phases],
        notes=[f"{finding.subject}: {finding.evidence}. {finding.remedy}" for finding in plan.findings],
    )


def _row(plan: Plan, phase: Phase, unit: int) -> list[str]:
    first, last = phase.first_step / unit, (phase.first_step + phase.steps) / unit
    ratios = [moment.angle_ratio for moment in (phase.start, phase.middle, phase.end)]
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
