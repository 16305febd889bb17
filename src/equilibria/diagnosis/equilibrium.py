"""Findings about equilibrium: layers far from it, disturbed by a change, or without one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equilibria.diagnosis.layer_summary import how_long, times
from equilibria.diagnosis.layers import Layer, if_invariant, invariant_verb, verb, which_layers
from equilibria.diagnosis.lr_excursions import excursions
from equilibria.diagnosis.metadata import short
from equilibria.diagnosis.series import Array, sample_weights
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted, percent, plain
from equilibria.records.tables import CHANGED_OUTSIDE, DISTURBED, NOTES, RESCALED, SETTLED, SETTLING, STATES
from equilibria.theory.rules import SGD, SGDW, Rule
from equilibria.theory.settling import Relaxation, relaxation
from equilibria.theory.states import rescale_factors

_NEAR = 0.05  # what "settled" allows
_TAIL = 0.05  # of the peak lr: below it a schedule that moves is about to end
_TOO_LONG = 3  # times the run so far: too long to wait for
_FIRST, _SOON = 20, 0.1  # samples right after a jump, within this share of the time that the norm takes to follow
_SAME_CAUSE = math.log(2)  # further apart, measured and expected dip do not have the same cause
_NOTICEABLE = math.log(1.25)
_OFTEN = 0.1  # share of the samples: not a single change but a habit
_CHANGED_OUTSIDE, _RESCALED = NOTES.index(CHANGED_OUTSIDE), NOTES.index(RESCALED)
_RESCALE = "RescaleOnDecay(scheduler, model=model, invariant=sym)"
_START = "start_in_equilibrium(model, optimizer, invariant=sym, loss=loss, batches=batches)"
_START_TRIAL = (
    "in our trial (docs/start-in-equilibrium.md) the slowest layer then turned at 1.06 of equilibrium over its first "
    "50 steps, not at 0.19"
)


# ---- without weight decay, or oscillating


def decay_missing(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Scale-invariant weights without weight decay, whose effective learning rate falls for ever."""
    invariant = [layer for layer in layers if layer.summary.invariant]
    bare = [layer for layer in invariant if layer.summary.weight_decay == 0 and (layer.summary.lr or 0) > 0]
    if not any(abs(math.log(_slowed(layer))) > _NEAR for layer in bare):
        return
    worst = max(bare, key=_slowed)
    first, last = int(worst.rows["step"][0]), int(worst.rows["step"][-1])
    growth, power = _growth(worst), "1/||w||^2" if _falls_with_square(worst) else "1/||w||"
    changed = f"grew by {percent(growth - 1)}" if growth >= 1 else f"fell by {percent(1 - growth)}"
    yield Finding(
        "note",
        f"{which_layers(bare, invariant, worst)} {invariant_verb(bare)} scale-invariant but "
        f"{verb(bare, 'has', 'have')} no weight decay",
        f"the norm of {worst.name} {changed} over steps {first:,}-{last:,}, which {_effect_on_speed(_slowed(worst))}; "
        f"without weight decay the norm never stops growing, and the speed falls as {power} on top of the schedule",
        "nothing needs doing if that is intended. For an angle that lr x wd sets: optimizer = "
        f"{_class_name(worst)}(eq.split_decay(model, weight_decay=..., invariant=sym).groups, lr=...{_own(worst)})",
        "norms.decay_free_norm",
    )


def _effect_on_speed(slowed: float) -> str:
    factor = slowed if slowed >= 1 else 1 / slowed
    return f"{'divides' if slowed >= 1 else 'multiplies'} the speed at which it turns at a given lr by {factor:.3g}"


def _class_name(layer: Layer) -> str:
    return f"torch.optim.{'SGD' if _falls_with_square(layer) else 'AdamW'}"


def _own(layer: Layer) -> str:
    """The setting of the present optimizer to keep besides lr."""
    betas = getattr(layer.rule, "betas", None)
    if betas:
        return f", betas=({', '.join(map(short, betas))})"
    return f", momentum={short(layer.summary.momentum)}" if layer.summary.momentum else ""


def _growth(layer: Layer) -> float:
    return float(layer.rows["norm"][-1] / layer.rows["norm"][0])


def _falls_with_square(layer: Layer) -> bool:
    """The angle of a step goes as step / norm; SGD's step goes as 1/norm too, Adam, Lion and Muon fix its length."""
    return isinstance(layer.rule, SGD | SGDW)


def _slowed(layer: Layer) -> float:
    return _growth(layer) ** (2 if _falls_with_square(layer) else 1)


def oscillating(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers near equilibrium under settings whose approach to it overshoots: a prediction, not a measurement."""
    predictable = [layer for layer in layers if layer.predictable and layer.monotone is not None]
    swinging = [layer for layer in predictable if not layer.monotone and _is_near_in_norm(layer)]
    if not swinging:
        return
    worst = max(swinging, key=lambda layer: layer.rule.decay_per_step if layer.rule else 0.0)
    product = worst.rule.decay_per_step if worst.rule else 0.0
    yield Finding(
        "note",
        f"by the law, the norm of {which_layers(swinging, predictable, worst)} settles in oscillations",
        f"lr x wd = {product:.3g} is above the threshold of this momentum at step {worst.summary.last_step:,}: small "
        "deviations from equilibrium overshoot, and under heavy ball more decay does not end them sooner. This follows "
        f"from the settings and was not measured; the norm of {worst.name} is "
        f"{percent(worst.summary.norm_vs_equilibrium or 1)} of its equilibrium there",
        "nothing needs doing: they die out. For a smooth approach, lower lr x wd: for group in "
        "optimizer.param_groups: group['weight_decay'] /= 2",
        "approach.oscillation_threshold",
    )


def _is_near_in_norm(layer: Layer) -> bool:
    ratio = layer.summary.norm_vs_equilibrium
    return ratio is not None and abs(math.log(ratio)) < _NOTICEABLE


# ---- on the way to equilibrium


def out_of_equilibrium(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers on their way to equilibrium, with the time they still need."""
    predictable = [layer for layer in layers if layer.predictable and layer.summary.angle_vs_equilibrium]
    away = [layer for layer in predictable if not layer.few and _on_its_way(layer)]
    if not away:
        return
    worst = max(away, key=_distance)
    layer = worst.summary
    moving = worst.lr_is_moving
    evidence = (
        f"{layer.name} turns {layer.angle:.3g} rad per step {layer.when} against {layer.angle_equilibrium:.3g} in the "
        "equilibrium of its lr x wd"
    )
    if layer.norm_vs_equilibrium is not None and layer.norm_explains_angle:
        evidence += f"; its norm is {times(layer.norm_vs_equilibrium)} at step {layer.last_step:,}"
    evidence += ("" if moving else _wait(away)) + _not_counted(predictable, away) + if_invariant(away)
    yield Finding(
        "note",
        f"{which_layers(away, predictable, worst)} {verb(away)} out of equilibrium",
        evidence,
        _remedy_on_the_way(worst, moving=moving),
        "settling.settling_steps",
    )


def _on_its_way(layer: Layer) -> bool:
    summary = layer.summary
    if summary.state not in (SETTLING, DISTURBED) or abs((summary.angle_vs_equilibrium or 1) - 1) < _NEAR:
        return False
    if summary.lr_runs_out or (layer.lr_is_moving and (summary.lr or 0.0) < _TAIL * (summary.peak_lr or 0.0)):
        return False  # the end of a schedule: nobody expects the equilibrium of the last lr
    norm_is_near = summary.norm_vs_equilibrium is not None and abs(summary.norm_vs_equilibrium - 1) < _NEAR
    if norm_is_near and (layer.lr_is_moving or not summary.steps_to_settle):
        return False  # the norm is there, and the angle follows the recent gradients
    predicted, equilibrium = summary.angle_predicted, summary.angle_equilibrium
    if predicted and equilibrium and abs(predicted / equilibrium - 1) < _NEAR:
        return False  # by the prediction it has arrived: then the prediction is off
    other_finding = layer.rounding is not None or layer.vanishing or was_changed_outside(layer)
    other_finding = other_finding or disturbance(layer) is not None
    return not other_finding and not _moved_equilibrium_explains(layer)


def _distance(layer: Layer) -> float:
    return abs(math.log(layer.summary.angle_vs_equilibrium or 1.0))


def _moved_equilibrium_explains(layer: Layer) -> bool:
    """Drift of L, or a radial gradient, holds the angle at sqrt(1 + share) of equilibrium; more is still to go."""
    shares = [share for share in (layer.drift, layer.radial) if share is not None]
    return any(share <= -1 or _distance(layer) <= abs(math.log1p(share)) for share in shares)


def _wait(away: Sequence[Layer]) -> str:
    """The time that the slowest layer needs."""
    known = [layer for layer in away if layer.summary.steps_to_settle and layer.summary.norm_explains_angle]
    if not known:
        return ""
    slowest = max(known, key=lambda layer: layer.summary.steps_to_settle or 0.0)
    wait = how_long(slowest.summary.steps_to_settle or 0.0, slowest.summary.epochs_to_settle)
    return f"; it needs {wait}" if len(away) == 1 else f"; they need up to {wait} (worst: {slowest.name})"


def _not_counted(predictable: Sequence[Layer], away: Sequence[Layer]) -> str:
    """The layers that are not settled either, but are not counted: states and findings should add up."""
    more = sum(layer.summary.state in (SETTLING, DISTURBED) for layer in predictable) - len(away)
    if not more:
        return ""
    one = more == 1
    return (
        f"; {more:,} more {'is' if one else 'are'} not settled and not counted here: near equilibrium, with few "
        "samples, or part of another finding"
    )


def _remedy_on_the_way(layer: Layer, *, moving: bool) -> str:
    ratio = layer.summary.norm_vs_equilibrium
    if moving:
        return (
            "nothing needs doing: lr moves, and the norm has not followed it yet. "
            f"{_rescale_for('To make the angle follow lr x wd', layer)}"
        ).strip()
    if ratio is not None and (ratio > 1) == ((layer.summary.angle_vs_equilibrium or 1.0) > 1):
        return (  # a longer weight turns more slowly
            "nothing needs doing: angle and norm are off to the same side, so the norm has moved while these samples "
            "were taken; look again when it has come to rest"
        )
    if not layer.summary.norm_explains_angle:
        return "nothing needs doing: its gradient has changed a lot, and the norm follows in its own time"
    waits = (layer.summary.steps_to_settle or 0.0) <= _TOO_LONG * layer.length
    nothing = f"nothing needs doing{': it gets there by itself' if waits else _IF_FAST_ENOUGH}"
    if layer.since:  # a jump of the settings is behind it, not the start
        if layer.rows["lr"][layer.since] == layer.rows["lr"][layer.since - 1]:
            return f"{nothing}{_rescale_at_once(layer)}"
        return f"{nothing}. {_rescale_for('To be in equilibrium after every change of lr', layer)}".strip()
    return f"{nothing}. To start the next run in equilibrium: {_START}; {_START_TRIAL}"


def _rescale_for(goal: str, layer: Layer) -> str:
    """The call for a goal, with what it did when it was tried; what acts on the weights already is not recommended."""
    return "" if layer.controlled else f"{goal}: {_RESCALE}; {_trial(10)}"


def _rescale_at_once(layer: Layer) -> str:
    """The call that rescales at a jump of the settings, whatever changes them; it was tried for lr only."""
    if layer.controlled:
        return ""
    return (
        ". To be in the new equilibrium at once at such a change: RescaleOnDecay(optimizer, model=model, invariant=sym)"
    )


_IF_FAST_ENOUGH = f" if it turns as fast as you want: settling would take {_TOO_LONG} times the run so far or more"


def _trial(factor: float) -> str:
    """What was measured when lr was divided by 10, rescaled or with less decay; it says nothing about other factors."""
    like = "" if round(factor) == 10 else ", lr / 10 there"
    return (
        f"in our trial (docs/forecast.md, four seeds{like}) test accuracy ended at 93.7 % with it, 93.6 % without, and "
        "96.2 % with weight decay divided along with lr"
    )


# ---- disturbed by a change of the settings


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A settled layer whose lr, weight decay or momentum jumped.

    Attributes:
        layer: the layer.
        before: step of the last sample with the old settings.
        step: step of the first sample with the new settings.
        until: step of the last sample that the dip is measured at.
        change: the change in words.
        drop: lr before over lr after, 1 unless lr alone fell.
        dip: measured angle right after it, over its new equilibrium.
        expected: the same by the relaxation of the norm, at the same steps; where a controller rescaled the weight at
            the change, or an earlier change had disturbed it, by the prediction that continues across them.
        rescaled: whether a controller did.
        again: whether it was disturbed before.
        recovered: steps after which the layer was settled again, None if it is not yet.
    """

    layer: Layer
    before: int
    step: int
    until: int
    change: str
    drop: float
    dip: float
    expected: float
    rescaled: bool
    again: bool
    recovered: int | None

    @property
    def when(self) -> str:
        """When the settings changed, as far as the samples show."""
        apart = self.step - self.before > 1
        return f"between steps {self.before:,} and {self.step:,}" if apart else f"at step {self.step:,}"

    @property
    def as_expected(self) -> bool:
        """Whether the change of the settings explains the dip."""
        return abs(math.log(self.dip / self.expected)) <= _SAME_CAUSE


def disturbance(layer: Layer) -> Disturbance | None:
    """The last jump of the settings, if it threw a settled layer out of equilibrium."""
    if layer.angle_is_scheduled:
        return None  # AngularSchedule sets lr or weight decay at every step, as requested
    if layer.since == 0 or not layer.predictable or layer.state_at(layer.since - 1) not in (SETTLED, DISTURBED):
        return None
    if any(excursion.after == layer.rows["step"][layer.since] for excursion in excursions(layer.rows)):
        return None  # lr came back to its level, which `spikes` reports as one event
    before, after = layer.rule_at(layer.since - 1), layer.rule_at(layer.since)
    just_after = _right_after(layer)
    steps = layer.rows["step"][just_after]
    weights = sample_weights(steps, np.array([0, len(steps)]))
    measured, equilibrium = (_rms(layer.rows[name][just_after], weights) for name in ("angle", "angle_equilibrium"))
    if before is None or after is None or not equilibrium > 0 or measured == 0:
        return None
    move = _move_of_equilibrium(before, after, layer.scale_of_grad_sq, layer.entries)
    if move is None or abs(math.log(measured / equilibrium)) < _NOTICEABLE:
        return None
    rescaled = bool(layer.rows["note"][layer.since] == _RESCALED)
    again = layer.state_at(layer.since - 1) == DISTURBED
    if rescaled or again:
        expected = _rms(layer.rows["angle_predicted"][just_after], weights) / equilibrium
        if not expected > 0 or abs(math.log(expected)) < _NOTICEABLE:
            return None  # something made up for the change, and something else holds the angle off equilibrium
    else:
        weight, approach = move
        expected = _rms(np.asarray(approach.angle_ratio(1 / weight, steps - steps[0])), weights)
    return Disturbance(
        layer,
        before=int(layer.rows["step"][layer.since - 1]),
        step=int(layer.rows["step"][layer.since]),
        until=int(steps[-1]),
        change=_in_words(before, after),
        drop=_drop(before, after),
        dip=measured / equilibrium,
        expected=expected,
        rescaled=rescaled,
        again=again,
        recovered=_steps_to_recover(layer),
    )


@lru_cache(maxsize=1024)
def _move_of_equilibrium(before: Rule, after: Rule, unit_grad_sq: float, dim: float) -> tuple[float, Relaxation] | None:
    """New over old equilibrium norm, and the approach to the new one; None if one of the two has no equilibrium."""
    try:
        weight = rescale_factors(before, after, unit_grad_sq=unit_grad_sq, dim=dim).weight
        return weight, relaxation(after, unit_grad_sq=unit_grad_sq, dim=dim)
    except EquilibriaError:
        return None


def _rms(values: Array, weights: Array) -> float:
    return math.sqrt(float(np.average(values**2, weights=weights)))


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


def _drop(before: Rule, after: Rule) -> float:
    lr_alone = dataclasses.replace(before, lr=after.lr) == after
    return before.lr / after.lr if lr_alone and 0 < after.lr < before.lr else 1.0


def _in_words(before: Rule, after: Rule) -> str:
    changes = []
    for field, name in (("lr", "lr"), ("weight_decay", "weight decay"), ("momentum", "momentum"), ("betas", "betas")):
        old, new = getattr(before, field, None), getattr(after, field, None)
        if old == new:
            continue
        if isinstance(old, float | int) and isinstance(new, float | int) and new > 0 and name == "lr":
            changes.append(
                f"lr was {'divided' if old > new else 'multiplied'} by {plain(max(old / new, new / old), digits=3)}"
            )
        elif isinstance(old, float | int) and isinstance(new, float | int):
            changes.append(f"{name} went from {short(old)} to {short(new)}")
        else:
            changes.append(f"{name} went from {old} to {new}")
    return " and ".join(changes)


def disturbed(layers: Sequence[Layer]) -> Iterator[Finding]:
    """One finding per change that threw layers out of equilibrium."""
    groups: dict[tuple[int, int, str, bool], list[Disturbance]] = {}
    for layer in layers:
        jump = disturbance(layer)
        if jump is not None and layer.rounding is None and not layer.vanishing:
            groups.setdefault((jump.step, jump.before, jump.change, jump.recovered is None), []).append(jump)
    predictable = [layer for layer in layers if layer.predictable]
    for (_, _, change, still), jumps in sorted(groups.items()):
        worst = max(jumps, key=lambda jump: abs(math.log(jump.dip)))
        thrown = [jump.layer for jump in jumps]
        state = f"{verb(thrown)} still" if still else verb(thrown, "was", "were")
        yield Finding(
            "note",
            f"{which_layers(thrown, predictable, worst.layer)} {state} disturbed by a change {worst.when}: {change}",
            _dip_and_recovery(worst, thrown)
            + _not_rescaled(layers, worst)
            + _unsettled_before(predictable, worst)
            + if_invariant(thrown),
            _remedy_for_a_jump(worst),
            "states.rescale_factors",
        )


def _not_rescaled(layers: Sequence[Layer], jump: Disturbance) -> str:
    """That a controller rescaled other layers at the change, but not this one."""
    others = sum(bool(np.any(layer.rows["note"][layer.rows["step"] == jump.step] == _RESCALED)) for layer in layers)
    if jump.rescaled or not others:
        return ""
    return f"; a controller rescaled {counted(others, 'other layer')} at this change, but not {jump.layer.name}"


def _unsettled_before(predictable: Sequence[Layer], jump: Disturbance) -> str:
    """The layers that the same change left out of equilibrium, but which it did not find settled."""
    more = [
        layer
        for layer in predictable
        if layer.since
        and layer.rows["step"][layer.since] == jump.step
        and layer.state_at(layer.since - 1) == SETTLING
        and layer.summary.state == SETTLING
    ]
    if not more:
        return ""
    return (
        f"; {len(more):,} more {verb(more)} out of equilibrium, too, and {verb(more, 'was', 'were')} not settled "
        "before the change"
    )


def _dip_and_recovery(worst: Disturbance, layers: Sequence[Layer]) -> str:
    name, summary = worst.layer.name, worst.layer.summary
    moved = "fell" if worst.dip < 1 else "rose"
    steps = f"at step {worst.step:,}" if worst.until == worst.step else f"over steps {worst.step:,}-{worst.until:,}"
    expected = f"predicted across the controller's rescaling: {worst.expected:.2g}"
    if not worst.rescaled:
        expected = f"expected{' after this change and those before it' if worst.again else ''}: {worst.expected:.2g}"
    text = f"{name} {moved} to {worst.dip:.2g} of its new equilibrium {steps} ({expected})"
    if worst.recovered is not None:
        return f"{text} and was settled again {worst.recovered:,} steps later"
    if summary.angle_vs_equilibrium is not None:
        text += f" and is at {summary.angle_vs_equilibrium:.2g} {summary.when}"
    slowest = max(layers, key=lambda layer: layer.summary.steps_to_settle or 0.0).summary
    if slowest.steps_to_settle is None:
        return text
    wait = how_long(slowest.steps_to_settle, slowest.epochs_to_settle)
    return f"{text}; {f'all are settled after {wait}' if len(layers) > 1 else f'it needs {wait}'}"


def _remedy_for_a_jump(worst: Disturbance) -> str:
    if not worst.as_expected:
        return (
            "nothing needs doing: the change explains only a part of this"
            f"{'' if worst.rescaled else ', and a rescaling would not settle it'}. The layer was not in equilibrium "
            "before, or its gradient changed as well"
        )
    comes_back = "it was settled again" if worst.recovered is not None else "it comes back by itself"
    remedy = f"nothing needs doing: {comes_back}"
    if worst.layer.controlled:
        return remedy
    if worst.drop == 1 or worst.again:
        return remedy + _rescale_at_once(worst.layer)
    remedy += f". To be in the new equilibrium at once at such a change: {_RESCALE}"
    factor = f"{worst.drop:.3g}"
    return (
        f"{remedy}. To keep the smaller angle for good, at the drop: for group in optimizer.param_groups: "
        f"group['weight_decay'] /= {factor}. Of the first, {_trial(worst.drop)}"
    )


# ---- disturbed by a change of the weights


def was_changed_outside(layer: Layer) -> bool:
    """Whether a change of the weights themselves disturbed the layer."""
    return layer.summary.state == DISTURBED and bool(np.any(layer.rows["note"][layer.since :] == _CHANGED_OUTSIDE))


def weights_changed_outside(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights that something other than the optimizer's step or an announced controller changed."""
    affected = [layer for layer in layers if layer.changed_outside]
    if not affected:
        return
    worst = max(affected, key=lambda layer: layer.changed_outside)
    steps = worst.rows["step"][worst.rows["note"] == _CHANGED_OUTSIDE]
    often, summary = worst.changed_outside > _OFTEN, worst.summary
    evidence = f"{worst.name} was changed {counted(len(steps), 'time')}, the last time before step {int(steps[-1]):,}"
    if was_changed_outside(worst) and summary.steps_to_settle is not None:
        evidence += f"; it needs {how_long(summary.steps_to_settle, summary.epochs_to_settle)} to settle again"
    yield Finding(
        "warning" if often else "note",
        f"{which_layers(affected, layers, worst)} {verb(affected, 'was', 'were')} changed outside the optimizer's step",
        evidence,
        "if this happens at every step (clipping, projecting or normalising weights), the laws of the optimizer alone "
        "do not hold: predictions start again at each change"
        if often
        else "nothing to do if intended (a loaded checkpoint, averages in place of the weights, a rescaling by hand): "
        "predictions started again from the new weights",
        "states.rescaled",
    )
