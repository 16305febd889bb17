"""A plan as a notebook shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria.views.notebook import GOAL, OTHER, PREDICTED, Line, card, svg_chart

if TYPE_CHECKING:
    from equilibria.planning import Phase, Plan

_HEADINGS = ("phase", "{unit}", "lr", "wd", "equilibrium rad/step", "start", "middle", "end", "settles after")


def plan_card(plan: Plan) -> str:
    """The angles predicted, in equilibrium and suggested by the lr alone; the phases; the findings."""
    unit, name = _unit(plan)
    x = plan.curve.step / unit
    lines = [
        Line("what the lr alone suggests", x, plan.curve.angle_by_lr, OTHER, dashed=True),
        Line("equilibrium of lr x wd", x, plan.curve.angle_equilibrium, GOAL, dashed=True),
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
        rows=[_row(plan, phase, unit) for phase in plan.phases],
        notes=notes,
    )


def _unit(plan: Plan) -> tuple[int, str]:
    """Steps per unit of time, and its name."""
    per_epoch = plan.situation.steps_per_epoch
    return (1, "steps") if per_epoch is None else (per_epoch, "epochs")


def _row(plan: Plan, phase: Phase, unit: int) -> list[str]:
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
