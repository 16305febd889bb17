"""What a change of the settings, or of the weights themselves, did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.diagnosis.layers import Layer, are, many, rescaling
from equilibria.diagnosis.summary import how_long, short
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted
from equilibria.records.tables import CHANGED_OUTSIDE, DISTURBED, NOTES, SETTLED, STATES
from equilibria.theory.rescale import rescale_factors
from equilibria.theory.rules import Rule
from equilibria.theory.settling import relaxation

_FIRST, _SOON = 20, 0.1  # samples right after a jump, within this share of the time that the norm takes to follow
_ALIKE = math.log(2)  # further apart, measured and theoretical dip are not of the same cause
_NOTICEABLE = math.log(1.25)
_OFTEN = 0.1  # share of the samples: not a single change but a habit


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A settled layer whose lr, weight decay or momentum jumped.

    Attributes:
        layer: the layer.
        before: step of the last sample with the old settings.
        step: step of the first sample with the new settings.
        what: the change in words.
        dip: angle right after it over its new equilibrium, measured.
        expected: the same by theory, at the same steps.
        weight: factor on the weights that would have settled them at once.
        recovered: steps after which it was settled again, None if it is not yet.
    """

    layer: Layer
    before: int
    step: int
    what: str
    dip: float
    expected: float
    weight: float
    recovered: int | None

    @property
    def when(self) -> str:
        """When the settings changed, as far as samples tell."""
        apart = self.step - self.before > 1
        return f"between steps {self.before:,} and {self.step:,}" if apart else f"at step {self.step:,}"

    @property
    def as_expected(self) -> bool:
        """Whether the change of the settings explains the dip."""
        return abs(math.log(self.dip / self.expected)) <= _ALIKE


def disturbance(layer: Layer) -> Disturbance | None:
    """The last jump of the settings, if it threw a settled layer out of equilibrium."""
    if layer.since == 0 or not layer.predictable or layer.state_at(layer.since - 1) not in (SETTLED, DISTURBED):
        return None
    before, after = layer.rule_at(layer.since - 1), layer.rule_at(layer.since)
    just_after = _right_after(layer)
    squares = (layer.rows[name][just_after] ** 2 for name in ("angle", "angle_equilibrium"))
    measured, equilibrium = (math.sqrt(float(np.mean(values))) for values in squares)
    if before is None or after is None or not equilibrium > 0 or measured == 0:
        return None
    scale = {"unit_grad_sq": layer.unit_grad_sq, "dim": layer.entries}
    try:
        weight = rescale_factors(before, after, **scale).weight
        later = layer.rows["step"][just_after] - layer.rows["step"][layer.since]
        ratios = [float(relaxation(after, **scale).angle_ratio(1 / weight, int(steps))) for steps in later]
    except EquilibriaError:
        return None  # one of the two has no equilibrium
    if abs(math.log(measured / equilibrium)) < _NOTICEABLE:
        return None
    return Disturbance(
        layer,
        before=int(layer.rows["step"][layer.since - 1]),
        step=int(layer.rows["step"][layer.since]),
        what=_in_words(before, after),
        dip=measured / equilibrium,
        expected=math.sqrt(float(np.mean(np.square(ratios)))),
        weight=weight,
        recovered=_steps_to_recover(layer),
    )


def _right_after(layer: Layer) -> slice:
    """The first rows after the jump: enough for a mean, before the norm has followed."""
    steps = layer.rows["step"][layer.since : layer.since + _FIRST]
    recovery = float(np.nan_to_num(layer.rows["steps_to_settle"][layer.since]))
    return slice(layer.since, layer.since + max(int(np.sum(steps - steps[0] <= _SOON * recovery)), 1))


def _steps_to_recover(layer: Layer) -> int | None:
    if layer.summary.state != SETTLED:
        return None
    settled = layer.rows["state"][layer.since :] == STATES.index(SETTLED)
    steps = layer.rows["step"][layer.since :]
    return int(steps[np.argmax(settled)] - steps[0])


def _in_words(before: Rule, after: Rule) -> str:
    words = []
    for name, told in (("lr", "lr"), ("weight_decay", "weight decay"), ("momentum", "momentum"), ("betas", "betas")):
        old, new = getattr(before, name, None), getattr(after, name, None)
        if old == new:
            continue
        if isinstance(old, float | int) and isinstance(new, float | int) and new > 0 and name == "lr":
            words.append(f"lr was {'divided' if old > new else 'multiplied'} by {max(old / new, new / old):.3g}")
        elif isinstance(old, float | int) and isinstance(new, float | int):
            words.append(f"{told} went from {short(old)} to {short(new)}")
        else:
            words.append(f"{told} went from {old} to {new}")
    return " and ".join(words)


def disturbed(layers: Sequence[Layer]) -> Iterator[Finding]:
    """One finding per change that threw layers out of equilibrium."""
    groups: dict[tuple[int, int, str, bool], list[Disturbance]] = {}
    for layer in layers:
        one = disturbance(layer)
        if one is not None and layer.rounding is None and not layer.vanishing:
            groups.setdefault((one.step, one.before, one.what, one.recovered is None), []).append(one)
    able = [layer for layer in layers if layer.predictable]
    for (_, _, what, still), hit in sorted(groups.items()):
        worst = max(hit, key=lambda one: abs(math.log(one.dip)))
        who = [one.layer for one in hit]
        yield Finding(
            "warning" if still else "note",
            f"{many(who, able, worst.layer)} "
            + (f"{are(who)} still" if still else are(who, "was", "were"))
            + f" disturbed by a change {worst.when}: {what}",
            _course(worst, who),
            _remedy(worst),
            "rescale.rescale_factors",
        )


def _remedy(worst: Disturbance) -> str:
    rule = worst.layer.rule_at(worst.layer.since)
    if rule is None or not worst.as_expected:
        return (
            "the change explains only a part of this, and a rescaling would not settle it: the layer was not in "
            "equilibrium before, or its gradient changed as well"
        )
    return f"at such a change, to be settled at once, {rescaling(rule, worst.weight)}"


def _course(worst: Disturbance, layers: Sequence[Layer]) -> str:
    name, summary = worst.layer.name, worst.layer.summary
    jumped = "fell" if worst.dip < 1 else "rose"
    text = f"{name} {jumped} to {worst.dip:.2g} of its new equilibrium at once (theory: {worst.expected:.2g})"
    if worst.recovered is not None:
        return f"{text} and was settled again {worst.recovered:,} steps later"
    if summary.angle_vs_equilibrium is not None:
        text += f" and is at {summary.angle_vs_equilibrium:.2g} now"
    slowest = max(layers, key=lambda layer: layer.summary.steps_to_settle or 0.0).summary
    if slowest.steps_to_settle is None:
        return text
    wait = how_long(slowest.steps_to_settle, slowest.epochs_to_settle)
    return f"{text}; {f'all are settled after {wait}' if len(layers) > 1 else f'it needs {wait}'}"


def was_changed_outside(layer: Layer) -> bool:
    """Whether a change of the weights themselves is why the layer is disturbed."""
    code = NOTES.index(CHANGED_OUTSIDE)
    return layer.summary.state == DISTURBED and bool(np.any(layer.rows["note"][layer.since :] == code))


def changed_outside(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights that something other than the optimizer's step changed."""
    code = NOTES.index(CHANGED_OUTSIDE)
    share = {layer.name: float(np.mean(layer.rows["note"] == code)) for layer in layers if len(layer.rows["note"])}
    hit = [layer for layer in layers if share.get(layer.name, 0) > 0]
    if not hit:
        return
    worst = max(hit, key=lambda layer: share[layer.name])
    steps = worst.rows["step"][worst.rows["note"] == code]
    often = share[worst.name] > _OFTEN
    last = f"the last time before step {int(steps[-1]):,}"
    summary = worst.summary
    evidence = f"{worst.name} was changed {counted(len(steps), 'time')}, {last}"
    if was_changed_outside(worst) and summary.steps_to_settle is not None:
        evidence += f"; it needs {how_long(summary.steps_to_settle, summary.epochs_to_settle)} to settle again"
    yield Finding(
        "warning" if often else "note",
        f"{many(hit, layers, worst)} {are(hit, 'was', 'were')} changed outside the optimizer's step",
        evidence,
        "if this is done at every step (clipping, projecting or normalising weights), the laws of the optimizer alone "
        "do not hold: predictions start again at each change"
        if often
        else "nothing to do if it was meant (a rescaling, a loaded checkpoint, swapped averages): predictions started "
        "again from the new weights",
        "states.rescaled",
    )
