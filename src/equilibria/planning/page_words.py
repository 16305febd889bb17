"""The words of a plan's page that depend on whether there is an equilibrium to compare with."""

from __future__ import annotations

from equilibria.pages.words import percent, text
from equilibria.planning.planner import Plan

_KEY = '<li><svg viewBox="0 0 34 {height}" aria-hidden="true"><path d="{path}" class="{kind}"/></svg>{words}</li>\n'

_COMPARED = {
    "deck": "Each step turns a normalised weight by an angle. In equilibrium lr × wd sets that angle, but after every "
    "change of lr the norm needs time to get there. This page compares the two, before anything runs.",
    "goal_legend": _KEY.format(height=8, path="M0 4h34", kind="line-goal", words="equilibrium: what lr × wd asks for"),
    "gap_legend": _KEY.format(height=12, path="M0 0h34v12H0z", kind="area-gap", words="the gap"),
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
    "settle: its goal moves.",
    "reading": "<li>Where the <strong>bold</strong> line lies on the <strong>dashed</strong> one, lr × wd describes "
    "the run. Where it lies\nbelow, the weights turn slower than the settings suggest; above, faster.</li>\n"
    "<li>Time to settle goes as 1 / (lr × wd): the smaller the lr, the longer it takes.</li>",
}

_FREE = {
    "deck": "Each step turns a normalised weight by an angle. Without weight decay nothing holds its norm: every step "
    "lengthens it, and the same lr turns it less and less. This page shows how much, before anything runs.",
    "goal_legend": "",
    "gap_legend": "",
    "norm_heading": "Why: the norm only grows",
    "norm_caption": "There is no equilibrium that it could reach.",
    "phase_head": '<tr><th scope="col" rowspan="2">phase</th><th scope="col" rowspan="2">{unit}</th>'
    '<th scope="col" rowspan="2">lr</th>\n'
    '<th scope="colgroup" colspan="3" class="group">predicted angle, rad</th>\n'
    '<th scope="colgroup" colspan="3" class="group">norm</th></tr>\n'
    '<tr><th scope="col">start</th><th scope="col">middle</th><th scope="col">end</th>\n'
    '<th scope="col">start</th><th scope="col">middle</th><th scope="col">end</th></tr>',
    "phase_caption": "Angles per step and norms at the start, in the middle and at the end of each phase.",
    "reading": "<li>Where the <strong>bold</strong> line lies below the <strong>dotted</strong> one, the norm has "
    "grown and the weights turn less than the lr alone suggests.</li>",
}


def is_free(plan: Plan) -> bool:
    """Whether there is no weight decay, and so no equilibrium."""
    return plan.situation.start_norm is None


def words(plan: Plan, *, unit: str) -> dict[str, str]:
    """HTML for the placeholders of the page.

    Args:
        plan: the plan.
        unit: "steps" or "epochs".
    """
    chosen = _FREE if is_free(plan) else _COMPARED
    tolerance = text(percent(plan.situation.tolerance))
    return {name: value.format(unit=unit, tolerance=tolerance) for name, value in chosen.items()}
