"""A plan as one HTML page that needs no network: charts, phases, findings, and how to read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.findings import percent, rounded
from equilibria.planning._alternatives import AS_TYPED, MEANING
from equilibria.planning._plan import Phase, Plan
from equilibria.views.document import (
    Page,
    column,
    finding_cards,
    html_row,
    html_section,
    legend_entry,
    log_column,
    per_choice,
    scrolling_table,
    toggles,
)
from equilibria.views.words import ratio_cell, ratio_mark, sentence_case, settings_list, text

Array = NDArray[np.float64]

_WORTH_SAYING = 0.005  # a smaller share of the run rounds to 0 %
_RUN_OFF = 5  # a ramp to zero has no lower end on a log axis: its last per cent may run out of the chart


def plan_page(plan: Plan, *, title: str | None = None, alternatives: Mapping[str, Plan] | None = None) -> Page:
    """The page of a plan: written as one file, or filled into the frame of the live server.

    Args:
        plan: the plan to show.
        title: shown above the headline; the optimizer and its settings if not given.
        alternatives: plans to switch to by buttons, by name; see `equilibria.planning.alternatives`.

    Example:
        >>> from equilibria.planning import plan
        >>> from equilibria.theory import SGD
        >>> page = plan_page(plan(SGD(0.1, 5e-4, momentum=0.9), 0.1, steps=1000))
        >>> "for the whole run</h1>" in page.document()
        True
    """
    unit = "step" if plan.situation.steps_per_epoch is None else "epoch"
    plans = {AS_TYPED: plan, **(alternatives or {})}
    texts = _texts(plan, unit=f"{unit}s")
    head = texts.pop("phase_head")
    parts = {
        **texts,
        "headline": text(plan_headline(plan)),
        "settings": _settings(plan),
        "toggles": toggles("What if?", {name: _meaning(name, other) for name, other in plans.items()}),
        "typed_legend": legend_entry("line-typed", "as typed, for comparison") if alternatives else "",
        "compared": _compared(plans) if alternatives else "",
        "angle_label": text(f"Chart of the angle per step over the run. {plan_headline(plan)}"),
        "norm_label": text(_norm_label(plan)),
        "schedule_label": f"Chart of lr ({_from_to(plan.curve.lr)}) and wd ({_from_to(plan.curve.weight_decay)})",
        "phases": per_choice([_phase_table(other, head) for other in plans.values()]),
        "findings": per_choice([finding_cards(other.findings, otherwise=_NOTHING_FOUND) for other in plans.values()]),
        "start": _start_sentence(plan),
        "made": "Predicted",
    }
    shown = _default_title(plan) if title is None else title
    return Page("equilibria.views.plan", shown, page_data(plans), parts)


def plan_headline(plan: Plan) -> str:
    """The effect of the schedule in one sentence.

    Example:
        >>> from equilibria.planning import plan
        >>> from equilibria.theory import SGD
        >>> plan_headline(plan(SGD(0.1, 5e-4, momentum=0.9), lambda step: 0.1 if step < 500 else 0.01, steps=1000))
        'Phase 2 never reaches equilibrium: 50 % of the run turns slower than in equilibrium'
    """
    warning = next((finding.subject for finding in plan.findings if finding.severity == "warning"), None)
    if _is_free(plan) and warning is not None:
        return sentence_case(warning)
    shares = _shares(plan)
    if warning is None:
        return shares[0].upper() + shares[1:]
    return f"{sentence_case(warning.split(':')[0])}: {shares}"


def _shares(plan: Plan) -> str:
    slow, fast, still = _deviations(plan)
    kinds = [(share, word) for share, word in ((slow, "slower"), (fast, "faster")) if share >= _WORTH_SAYING]
    rest = f"; in {percent(still)} of the run lr or wd is 0" if still >= _WORTH_SAYING else ""
    if not kinds:
        return f"the weights turn as in equilibrium{rest or ', for the whole run'}"
    (share, word), *others = kinds
    other = "".join(f" and {percent(share)} {word}" for share, word in others)
    return f"{percent(share)} of the run turns {word}{other} than in equilibrium{rest}"


def _deviations(plan: Plan) -> tuple[float, float, float]:
    """The shares of the run that turn slower than equilibrium, faster, and without any equilibrium."""
    curve, tolerance = plan.curve, plan.situation.tolerance
    moving = curve.angle_equilibrium > 0
    ratio = np.divide(curve.angle, curve.angle_equilibrium, out=np.ones_like(curve.angle), where=moving)
    weight = np.gradient(curve.step.astype(np.float64)) if len(curve.step) > 1 else np.ones(1)
    kinds = ratio < 1 - tolerance, ratio > 1 + tolerance, ~moving
    slow, fast, still = (float(weight[kind].sum() / weight.sum()) for kind in kinds)
    # The curve is thinned; if there is only one kind of deviation, the plan knows its share exactly.
    if max(fast, still) < _WORTH_SAYING:
        slow = 1 - plan.settled_share
    elif max(slow, still) < _WORTH_SAYING:
        fast = 1 - plan.settled_share
    return slow, fast, still


# ---- the settings


def _default_title(plan: Plan) -> str:
    rule = plan.situation.rule
    return f"Plan: {type(rule).__name__}, lr {rounded(rule.lr)}, wd {rounded(rule.weight_decay)}"


def _settings(plan: Plan) -> str:
    situation, curve = plan.situation, plan.curve
    pairs = [("optimizer", type(situation.rule).__name__, "")]
    pairs.append(("learning rate", _from_to(curve.lr), ""))
    pairs.append(("weight decay", _from_to(curve.weight_decay), ""))
    for field in dataclasses.fields(situation.rule):
        value = getattr(situation.rule, field.name)
        if field.name in ("momentum", "betas") or (field.name not in ("lr", "weight_decay") and value != field.default):
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            pairs.append((field.name.replace("_", " "), shown, ""))
    steps = f"{situation.steps:,} steps"
    if situation.steps_per_epoch is None:
        pairs.append(("length", steps, ""))
    else:
        epochs = f"{situation.steps / situation.steps_per_epoch:,.4g} epochs"
        pairs.append(("length", epochs, f"{steps}, {situation.steps_per_epoch:,} per epoch"))
    start = "in equilibrium" if situation.init_norm is None else f"‖w‖ = {rounded(situation.init_norm)}"
    pairs.append(("start", start, ""))
    if not _is_free(plan):
        pairs.append(("settled means", f"within {percent(situation.tolerance)}", ""))
    if situation.dtype != "float32":
        pairs.append(("weights in", situation.dtype, ""))
    return settings_list(pairs)


def _start_sentence(plan: Plan) -> str:
    norm = plan.situation.init_norm
    if norm is not None:
        return f"training <strong>starts</strong> at ‖w‖ = {rounded(norm)}, with an empty optimizer state."
    return (
        f"training <strong>starts in equilibrium</strong> of lr {rounded(plan.situation.start_rule.lr)}; give the "
        "initial norm to see the approach from your own initialisation."
    )


# ---- the alternatives


def _meaning(name: str, plan: Plan) -> str:
    return f"{MEANING.get(name, name)} {plan_headline(plan)}."


def _compared(plans: Mapping[str, Plan]) -> str:
    """All alternatives in one table."""
    head = ("plan", "out of equilibrium", "largest wd", "last angle, rad", "angle travelled, rad", "against as typed")
    rows = [_compared_row(name, other, plans[AS_TYPED]) for name, other in plans.items()]
    caption = "Angle travelled: the sum of the angles of all steps, the distance on the sphere."
    after = f'<p class="caption">{caption}</p>\n'
    return html_section("The alternatives side by side", head, rows, name="compared-heading", after=after)


def _compared_row(name: str, plan: Plan, typed: Plan) -> str:
    last = plan.phases[-1].end
    cells = (
        percent(1 - plan.settled_share),
        rounded(float(plan.curve.weight_decay.max())),
        rounded(last.angle),
        rounded(plan.travelled),
        f"{plan.travelled / typed.travelled:.2f}×",
    )
    return html_row(name, cells)


# ---- the phases


def _phase_table(plan: Plan, head: str) -> str:
    rows = [(_free_row if _is_free(plan) else _row)(phase, plan) for phase in plan.phases]
    return scrolling_table(head, rows, name="phases-heading")


def _row(phase: Phase, plan: Plan) -> str:
    steps = phase.shown_steps
    verdict, good = _verdict(phase)
    cells = [
        f'<th scope="row">{phase.number}</th>',
        f"<td>{_span(phase, plan)}</td>",
        f"<td>{_arrow(phase, 'lr')}</td>",
        f"<td>{_arrow(phase, 'weight_decay')}</td>",
        f"<td>{_arrow(phase, 'angle_equilibrium')}</td>",
        *(ratio_cell(step.angle_ratio, plan.situation.tolerance) for step in steps),
        f"<td>{_needs(phase, plan)}</td>",
        f"<td>{_time(phase.steps, plan)}</td>",
        f'<td class="{"good" if good else "bad"}">{verdict}</td>' if verdict else "<td>–</td>",
    ]
    opening = "<tr>" if good else '<tr class="off">'
    return f"{opening}{''.join(cells)}</tr>"


def _free_row(phase: Phase, plan: Plan) -> str:
    """A phase without weight decay: angles and norms, without an equilibrium to compare them with."""
    steps = phase.shown_steps
    cells = [
        f'<th scope="row">{phase.number}</th>',
        f"<td>{_span(phase, plan)}</td>",
        f"<td>{_arrow(phase, 'lr')}</td>",
        *(f"<td>{rounded(step.angle)}</td>" for step in steps),
        *(f"<td>{rounded(step.norm)}</td>" for step in steps),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _span(phase: Phase, plan: Plan) -> str:
    unit = plan.situation.steps_per_epoch or 1
    first, after = phase.first_step / unit, (phase.first_step + phase.steps) / unit
    shown = "{:,.0f}" if unit == 1 else "{:,.4g}"
    return f"{shown.format(first)}–{shown.format(after)}"


def _arrow(phase: Phase, name: str) -> str:
    first, last = (float(getattr(step, name)) for step in (phase.start, phase.end))
    if np.isclose(first, last, rtol=5e-3, atol=0):
        return rounded(last)
    return f"{rounded(first, digits=2)} →\u00a0{rounded(last, digits=2)}"


def _needs(phase: Phase, plan: Plan) -> str:
    if not phase.flat:
        return "(ramp)"
    if phase.settle_steps is None:
        return "–"
    return "at once" if phase.settle_steps == 0 else _time(phase.settle_steps, plan)


def _time(steps: int, plan: Plan) -> str:
    return plan.situation.time(steps).split(" ")[0]  # the heading of the column has the unit


def _verdict(phase: Phase) -> tuple[str, bool]:
    """The verdict on the end of a phase, and whether it is good."""
    ratio = phase.end.angle_ratio
    if ratio is None:
        return "", True
    if phase.settles:
        return "✓ settled", True
    return f"✕ too {'slow' if ratio < 1 else 'fast'}", False


_NOTHING_FOUND = "Nothing to change", "The weights stay in equilibrium; this schedule needs no change."


# ---- labels of the charts


def _norm_label(plan: Plan) -> str:
    if _is_free(plan):
        return f"Chart of the norm, from {plan.curve.norm[0]:.3g} to {plan.curve.norm[-1]:.3g}"
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = plan.curve.norm / plan.curve.norm_equilibrium
    known = ratio[np.isfinite(ratio) & (ratio > 0)]
    return f"Chart of norm / equilibrium norm, between {known.min():.2f} and {known.max():.2f}"


def _from_to(values: Array) -> str:
    low, high = float(values.min()), float(values.max())
    return rounded(high) if low == high else f"{rounded(low)} to {rounded(high)}"


# ---- texts with and without an equilibrium


def _is_free(plan: Plan) -> bool:
    """Whether there is no weight decay, hence no equilibrium."""
    return plan.situation.start_norm is None


def _texts(plan: Plan, *, unit: str) -> dict[str, str]:
    """HTML for the placeholders of the page that depend on whether there is an equilibrium.

    Args:
        plan: the plan.
        unit: "steps" or "epochs".
    """
    texts = _WITHOUT_DECAY if _is_free(plan) else _WITH_DECAY
    tolerance = text(percent(plan.situation.tolerance))
    return {name: value.format(unit=unit, tolerance=tolerance) for name, value in texts.items()}


_WITH_DECAY = {
    "deck": "Each step turns a normalised weight by an angle. In equilibrium lr × wd sets that angle, but after every "
    "change of lr the norm needs time to get there. This page compares the predicted angle with its equilibrium, "
    "before anything runs.",
    "equilibrium_legend": legend_entry("line-equilibrium", "equilibrium of lr × wd"),
    "gap_legend": legend_entry("area-gap", "the gap", area=True),
    "norm_heading": "Why: the norm against its equilibrium",
    "norm_caption": "Above 1 the weights are too long and turn too slowly; below 1 too short and too fast. Inside the "
    "band the angle is within {tolerance}.",
    "phase_head": '<tr><th scope="col" rowspan="2">phase</th><th scope="col" rowspan="2">{unit}</th>'
    '<th scope="col" rowspan="2">lr</th>\n<th scope="col" rowspan="2">wd</th>'
    '<th scope="col" rowspan="2">equilibrium angle, rad</th>\n'
    '<th scope="colgroup" colspan="3" class="group">predicted angle ÷ equilibrium</th>\n'
    '<th scope="colgroup" colspan="2" class="group">{unit} to settle within {tolerance}</th>'
    '<th scope="col" rowspan="2">at its end</th></tr>\n'
    '<tr><th scope="col">start</th><th scope="col">middle</th><th scope="col">end</th>\n'
    '<th scope="col">needs</th><th scope="col">has</th></tr>',
    "phase_caption": "▼ turns slower, ▲ turns faster than equilibrium by more than {tolerance}. A ramp has no time to "
    "settle: its equilibrium moves.",
    "reading": "<li>Where the <strong>bold</strong> line lies on the <strong>dashed</strong> one, the weights are in "
    "equilibrium. Where it lies\nbelow, they turn slower than in equilibrium; above, faster.</li>\n"
    "<li>The time to settle goes as 1 / (lr × wd): the smaller the lr, the longer it takes.</li>",
}

_WITHOUT_DECAY = {
    "deck": "Each step turns a normalised weight by an angle. Without weight decay nothing limits its norm: every "
    "step lengthens it, and the same lr turns it less and less. This page predicts how much, before anything runs.",
    "equilibrium_legend": "",
    "gap_legend": "",
    "norm_heading": "Why: the norm only grows",
    "norm_caption": "It has no equilibrium to reach.",
    "phase_head": '<tr><th scope="col" rowspan="2">phase</th><th scope="col" rowspan="2">{unit}</th>'
    '<th scope="col" rowspan="2">lr</th>\n'
    '<th scope="colgroup" colspan="3" class="group">predicted angle, rad</th>\n'
    '<th scope="colgroup" colspan="3" class="group">norm</th></tr>\n'
    '<tr><th scope="col">start</th><th scope="col">middle</th><th scope="col">end</th>\n'
    '<th scope="col">start</th><th scope="col">middle</th><th scope="col">end</th></tr>',
    "phase_caption": "Angles per step and norms at the start, in the middle and at the end of each phase.",
    "reading": "<li>Where the <strong>bold</strong> line lies below the <strong>dotted</strong> one, the norm has "
    "grown, and the weights turn less than the lr alone suggests.</li>",
}


# ---- the data of the charts


def chart_data(plan: Plan) -> dict[str, object]:
    """The data of the charts of one plan: its curves, the ends of every axis, and the phases.

    Without weight decay ``band`` is None: there is no equilibrium to draw, and the norm itself is shown.
    """
    curve, situation = plan.curve, plan.situation
    unit = situation.steps_per_epoch or 1
    with np.errstate(divide="ignore", invalid="ignore"):
        angle_ratio, norm_ratio = curve.angle / curve.angle_equilibrium, curve.norm / curve.norm_equilibrium
    band = None if situation.start_norm is None else _norm_band(plan)
    return {
        "unit": "step" if situation.steps_per_epoch is None else "epoch",
        "end": situation.steps / unit,
        "x": column(curve.step / unit),
        "angle": log_column(curve.angle),
        "equilibrium": log_column(curve.angle_equilibrium),
        "by_lr": log_column(curve.angle_by_lr),
        "ratio": column(angle_ratio, digits=6),
        "norm_ratio": log_column(norm_ratio),
        "norm": log_column(curve.norm),
        "lr": log_column(curve.lr),
        "wd": log_column(curve.weight_decay),
        "band": band,
        "angle_range": _widen(_range(plan, curve.angle, curve.angle_equilibrium, curve.angle_by_lr), 4.0),
        "norm_range": _norm_range(plan, norm_ratio, band) if band else _widen(_range(plan, curve.norm), 4.0),
        "schedule_range": _widen(_range(plan, curve.lr, curve.weight_decay), 4.0),
        "phases": [
            {
                "number": phase.number,
                "from": phase.first_step / unit,
                "to": (phase.first_step + phase.steps) / unit,
                "mark": "" if phase.settles else ratio_mark(phase.end.angle_ratio, situation.tolerance),
            }
            for phase in plan.phases
        ],
    }


def page_data(plans: Mapping[str, Plan]) -> dict[str, object]:
    """The first plan and, under "alternatives", the others; all on the same axes, so a button changes only curves."""
    charts: list[dict[str, Any]] = [{**chart_data(plan), "name": name} for name, plan in plans.items()]
    for name in ("angle_range", "norm_range", "schedule_range"):
        lows, highs = zip(*(chart[name] for chart in charts), strict=True)
        for chart in charts:
            chart[name] = [min(lows), max(highs)]
    first, *others = charts
    return {**first, "alternatives": others}


def _norm_band(plan: Plan) -> list[float]:
    """Norm ratios between which the angle is within the tolerance."""
    power, tolerance = plan.situation.norm_power, plan.situation.tolerance
    return [(1 + tolerance) ** (-1 / power), (1 - tolerance) ** (-1 / power)]


def _norm_range(plan: Plan, ratio: Array, band: list[float]) -> list[float]:
    """The ratios that occur, and enough around the band to see it."""
    low, high = _range(plan, ratio)
    return [min(low, band[0] / 1.1), max(high, band[1] * 1.1)]


def _range(plan: Plan, *columns: Array) -> list[float]:
    """Both ends of a log axis: every constant phase in full, but a ramp only until it runs off to zero or infinity."""
    in_flat = np.concatenate([np.full(len(part), phase.flat) for phase, part in _parts(plan)])
    lows, highs = [], []
    for values in columns:
        positive = np.isfinite(values) & (values > 0)
        if not positive.any():
            continue
        shown, flat = values[positive], values[positive & in_flat]
        low, high = np.percentile(shown, [_RUN_OFF, 100 - _RUN_OFF])
        lows.append(max(shown.min(), min(low / 2, flat.min(initial=np.inf))))
        highs.append(min(shown.max(), max(high * 2, flat.max(initial=0))))
    return [float(min(lows)) / 1.25, float(max(highs)) * 1.25]


def _widen(ends: list[float], factor: float) -> list[float]:
    """Ends at least this factor apart: around a flat line small differences must not look large."""
    low, high = ends
    room = max(1.0, (factor * low / high) ** 0.5)
    return [low / room, high * room]


def _parts(plan: Plan) -> list[tuple[Phase, NDArray[np.int64]]]:
    """Every phase with the steps of the curve inside it."""
    edges = np.searchsorted(plan.curve.step, [phase.first_step for phase in plan.phases[1:]])
    return list(zip(plan.phases, np.split(plan.curve.step, edges), strict=True))
