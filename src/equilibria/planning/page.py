"""A plan as one HTML page that needs no network: charts, phases, findings, and how to read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibria.pages.cards import card
from equilibria.pages.document import Page, write_document
from equilibria.pages.toggles import alternatives as choices
from equilibria.pages.toggles import toggles
from equilibria.pages.words import number, percent, ratio_cell, sentence_case, settings_list, text
from equilibria.planning.alternatives import AS_TYPED, MEANING
from equilibria.planning.page_data import page_data
from equilibria.planning.page_words import is_free, words
from equilibria.planning.planner import Phase, Plan

Array = NDArray[np.float64]

_WORTH_SAYING = 0.005  # a smaller share of the run rounds to 0 %


def write_page(
    plan: Plan, path: str | Path, *, title: str | None = None, alternatives: Mapping[str, Plan] | None = None
) -> Path:
    """Write a plan as one offline HTML page.

    The page appears complete or not at all: it is written beside its target and then moved into place.

    Args:
        plan: the plan to show.
        path: the file to write, in a folder that exists; an existing file is replaced.
        title: shown above the headline; the optimizer and its settings without it.
        alternatives: plans to choose instead of it by a button, by name; see `equilibria.planning.alternatives`.

    Returns:
        The path.

    Raises:
        EquilibriaError: the folder does not exist, the path is not a file, or it cannot be written.
    """
    return write_document(path, page_html(plan, title=title, alternatives=alternatives))


def page_html(plan: Plan, *, title: str | None = None, alternatives: Mapping[str, Plan] | None = None) -> str:
    """A plan as the text of one HTML page; its scripts, styles and data are inside.

    Args:
        plan: the plan to show.
        title: shown above the headline; the optimizer and its settings without it.
        alternatives: plans to choose instead of it by a button, by name.

    Returns:
        HTML.

    Example:
        >>> from equilibria.planning import plan
        >>> from equilibria.theory import SGD
        >>> "for the whole run</h1>" in page_html(plan(SGD(0.1, 5e-4, momentum=0.9), 0.1, steps=1000))
        True
    """
    return plan_page(plan, title=title, alternatives=alternatives).document()


def plan_page(plan: Plan, *, title: str | None = None, alternatives: Mapping[str, Plan] | None = None) -> Page:
    """The same in parts."""
    unit = "step" if plan.situation.steps_per_epoch is None else "epoch"
    plans = {AS_TYPED: plan, **(alternatives or {})}
    told = words(plan, unit=f"{unit}s")
    head = told.pop("phase_head")
    parts = {
        **told,
        "headline": text(headline(plan)),
        "settings": _settings(plan),
        "toggles": toggles("What if?", {name: _meaning(name, each) for name, each in plans.items()}),
        "typed_legend": _TYPED_LEGEND if alternatives else "",
        "compared": _compared(plans) if alternatives else "",
        "angle_label": text(f"Chart of the angle per step over the run. {headline(plan)}"),
        "norm_label": text(_norm_label(plan)),
        "schedule_label": f"Chart of lr ({_from_to(plan.curve.lr)}) and wd ({_from_to(plan.curve.weight_decay)})",
        "phases": choices([_phase_table(each, head) for each in plans.values()]),
        "findings": choices([_cards(each) for each in plans.values()]),
        "start": _start_sentence(plan),
    }
    shown = _default_title(plan) if title is None else title
    return Page("equilibria.planning", shown, page_data(plans), parts)


def headline(plan: Plan) -> str:
    """What the schedule does, in one sentence.

    Example:
        >>> from equilibria.planning import plan
        >>> from equilibria.theory import SGD
        >>> headline(plan(SGD(0.1, 5e-4, momentum=0.9), lambda step: 0.1 if step < 500 else 0.01, steps=1000))
        'Phase 2 never reaches equilibrium: 50 % of the run turns slower than lr × wd says'
    """
    warning = next((finding.subject for finding in plan.findings if finding.severity == "warning"), None)
    if is_free(plan) and warning is not None:
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
        return f"the weights turn as lr × wd says{rest or ', for the whole run'}"
    (share, word), *others = kinds
    other = "".join(f" and {percent(share)} {word}" for share, word in others)
    return f"{percent(share)} of the run turns {word}{other} than lr × wd says{rest}"


def _deviations(plan: Plan) -> tuple[float, float, float]:
    """Shares of the run that turn slower than equilibrium, faster, and that have no equilibrium."""
    curve, tolerance = plan.curve, plan.situation.tolerance
    moving = curve.angle_equilibrium > 0
    ratio = np.divide(curve.angle, curve.angle_equilibrium, out=np.ones_like(curve.angle), where=moving)
    weight = np.gradient(curve.step.astype(np.float64)) if len(curve.step) > 1 else np.ones(1)
    kinds = ratio < 1 - tolerance, ratio > 1 + tolerance, ~moving
    slow, fast, still = (float(weight[kind].sum() / weight.sum()) for kind in kinds)
    # The curve is thinned out; where there is only one kind of deviation the plan knows its share exactly.
    if max(fast, still) < _WORTH_SAYING:
        slow = 1 - plan.settled_share
    elif max(slow, still) < _WORTH_SAYING:
        fast = 1 - plan.settled_share
    return slow, fast, still


# ---- the settings


def _default_title(plan: Plan) -> str:
    rule = plan.situation.rule
    return f"Plan: {type(rule).__name__}, lr {number(rule.lr)}, wd {number(rule.weight_decay)}"


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
    start = "in equilibrium" if situation.init_norm is None else f"‖w‖ = {number(situation.init_norm)}"
    pairs.append(("start", start, ""))
    if not is_free(plan):
        pairs.append(("settled means", f"within {percent(situation.tolerance)}", ""))
    if situation.dtype != "float32":
        pairs.append(("weights in", situation.dtype, ""))
    return settings_list(pairs)


def _start_sentence(plan: Plan) -> str:
    norm = plan.situation.init_norm
    if norm is not None:
        return f"training <strong>starts</strong> at ‖w‖ = {number(norm)}, with an empty optimizer state."
    return (
        f"training <strong>starts in equilibrium</strong> of lr {number(plan.situation.start_rule.lr)}; give the "
        "initial norm to see the approach from your own initialisation."
    )


# ---- the alternatives

_TYPED_LEGEND = (
    '<li><svg viewBox="0 0 34 8" aria-hidden="true"><path d="M0 4h34" class="line-typed"/></svg>as typed, for '
    "comparison</li>\n"
)


def _meaning(name: str, plan: Plan) -> str:
    return f"{MEANING.get(name, name)} {headline(plan)}."


def _compared(plans: Mapping[str, Plan]) -> str:
    """All alternatives in one table, which needs no buttons."""
    rows = "\n".join(_compared_row(name, each, plans[AS_TYPED]) for name, each in plans.items())
    return (
        '<section aria-labelledby="compared-heading">\n<h2 id="compared-heading">The alternatives side by side</h2>\n'
        '<div class="scroll" role="region" aria-labelledby="compared-heading" tabindex="0">\n<table>\n<thead><tr>'
        '<th scope="col">plan</th><th scope="col">out of equilibrium</th><th scope="col">largest wd</th>'
        '<th scope="col">last angle, rad</th><th scope="col">angle travelled, rad</th>'
        '<th scope="col">against as typed</th></tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n"
        '<p class="caption">Angle travelled: the sum of the angles of all steps, the distance on the sphere.</p>\n'
        "</section>\n"
    )


def _compared_row(name: str, plan: Plan, typed: Plan) -> str:
    last = plan.phases[-1].end
    cells = (
        percent(1 - plan.settled_share),
        number(float(plan.curve.weight_decay.max())),
        number(last.angle),
        number(plan.travelled),
        f"{plan.travelled / typed.travelled:.2f}×",
    )
    return f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


# ---- the phases


def _phase_table(plan: Plan, head: str) -> str:
    rows = "\n".join((_free_row if is_free(plan) else _row)(phase, plan) for phase in plan.phases)
    return (
        '<div class="scroll" role="region" aria-labelledby="phases-heading" tabindex="0">\n'
        f"<table>\n<thead>\n{head}\n</thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>"
    )


def _row(phase: Phase, plan: Plan) -> str:
    moments = (phase.start, phase.middle, phase.end)
    verdict, good = _verdict(phase)
    cells = [
        f'<th scope="row">{phase.number}</th>',
        f"<td>{_span(phase, plan)}</td>",
        f"<td>{_arrow(phase, 'lr')}</td>",
        f"<td>{_arrow(phase, 'weight_decay')}</td>",
        f"<td>{_arrow(phase, 'angle_equilibrium')}</td>",
        *(ratio_cell(moment.angle_ratio, plan.situation.tolerance) for moment in moments),
        f"<td>{_needs(phase, plan)}</td>",
        f"<td>{_time(phase.steps, plan)}</td>",
        f'<td class="{"good" if good else "bad"}">{verdict}</td>' if verdict else "<td>–</td>",
    ]
    opening = "<tr>" if good else '<tr class="off">'
    return f"{opening}{''.join(cells)}</tr>"


def _free_row(phase: Phase, plan: Plan) -> str:
    """Without weight decay: angles and norms themselves, for there is nothing to compare them with."""
    moments = (phase.start, phase.middle, phase.end)
    cells = [
        f'<th scope="row">{phase.number}</th>',
        f"<td>{_span(phase, plan)}</td>",
        f"<td>{_arrow(phase, 'lr')}</td>",
        *(f"<td>{number(moment.angle)}</td>" for moment in moments),
        *(f"<td>{number(moment.norm)}</td>" for moment in moments),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _span(phase: Phase, plan: Plan) -> str:
    unit = plan.situation.steps_per_epoch or 1
    first, after = phase.first_step / unit, (phase.first_step + phase.steps) / unit
    shown = "{:,.0f}" if unit == 1 else "{:,.4g}"
    return f"{shown.format(first)}–{shown.format(after)}"


def _arrow(phase: Phase, name: str) -> str:
    first, last = (float(getattr(moment, name)) for moment in (phase.start, phase.end))
    if np.isclose(first, last, rtol=5e-3, atol=0):
        return number(last)
    return f"{number(first, digits=2)} →\u00a0{number(last, digits=2)}"


def _needs(phase: Phase, plan: Plan) -> str:
    if not phase.flat:
        return "(ramp)"
    if phase.settle_steps is None:
        return "–"
    return "at once" if phase.settle_steps == 0 else _time(phase.settle_steps, plan)


def _time(steps: int, plan: Plan) -> str:
    return plan.situation.time(steps).split(" ")[0]  # the heading of the column has the unit


def _verdict(phase: Phase) -> tuple[str, bool]:
    """The words for the end of a phase, and whether they are good ones."""
    ratio = phase.end.angle_ratio
    if ratio is None:
        return "", True
    if phase.settles:
        return "✓ settled", True
    return f"✕ too {'slow' if ratio < 1 else 'fast'}", False


# ---- the findings


def _cards(plan: Plan) -> str:
    return "\n".join(card(finding) for finding in plan.findings) or _NOTHING_FOUND


_NOTHING_FOUND = (
    '<article class="finding"><h3>Nothing to change</h3><p>The weights stay in equilibrium, and nothing about '
    "this schedule calls for a change.</p></article>"
)


# ---- words and numbers


def _norm_label(plan: Plan) -> str:
    if is_free(plan):
        return f"Chart of the norm, from {plan.curve.norm[0]:.3g} to {plan.curve.norm[-1]:.3g}"
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = plan.curve.norm / plan.curve.norm_equilibrium
    known = ratio[np.isfinite(ratio) & (ratio > 0)]
    return f"Chart of norm / equilibrium norm, between {known.min():.2f} and {known.max():.2f}"


def _from_to(values: Array) -> str:
    low, high = float(values.min()), float(values.max())
    return number(high) if low == high else f"{number(low)} to {number(high)}"
