"""Findings about equilibrium: layers far from it, disturbed by a change, or without one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from equilibria.diagnosis.layers import Layer, rescaling, verb, which_layers
from equilibria.diagnosis.metadata import short
from equilibria.diagnosis.spikes import excursions
from equilibria.diagnosis.summary import how_long, times
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, counted, percent
from equilibria.records.tables import CHANGED_OUTSIDE, DISTURBED, NOTES, SETTLED, SETTLING, STATES
from equilibria.theory.rules import SGD, SGDW, Rule
from equilibria.theory.settling import Relaxation, relaxation
from equilibria.theory.states import rescale_factors

_FAR = math.log(1.25)  # an angle that far from equilibrium is worth a warning
_NEAR = 0.05  # what "settled" allows
_TOO_LONG = 3  # times the run so far: too long to wait for
_GREW = 1.1  # norm over its first: less slows the turning by less than 20 %
_FIRST, _SOON = 20, 0.1  # samples right after a jump, within this share of the time that the norm takes to follow
_SAME_CAUSE = math.log(2)  # further apart, measured and expected dip do not have the same cause
_NOTICEABLE = math.log(1.25)
_OFTEN = 0.1  # share of the samples: not a single change but a habit
_CHANGED_OUTSIDE = NOTES.index(CHANGED_OUTSIDE)


# ---- without weight decay, or oscillating


def decay_missing(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Scale-invariant weights without weight decay, whose effective learning rate falls for ever."""
    invariant = [layer for layer in layers if layer.summary.invariant]
    bare = [layer for layer in invariant if layer.summary.weight_decay == 0 and (layer.summary.lr or 0) > 0]
    if not bare:
        return
    worst = max(bare, key=_slowed)
    steps = int(worst.rows["step"][-1] - worst.rows["step"][0])
    power = "1/||w||^2" if _falls_with_square(worst) else "1/||w||"
    yield Finding(
        "warning" if max(map(_growth, bare)) >= _GREW else "note",
        f"{which_layers(bare, invariant, worst)} {verb(bare)} scale-invariant but {verb(bare, 'has', 'have')} no "
        "weight decay",
        f"the norm of {worst.name} grew {_growth(worst):.3g}x in {steps:,} steps, which divides the speed at which it "
        f"turns at a given lr by {_slowed(worst):.3g}; without weight decay the norm never stops growing",
        f"give {verb(bare, 'it', 'them')} weight decay, unless this is intended: the speed falls as {power} on top of "
        "the schedule",
        "norms.decay_free_norm",
    )


def _growth(layer: Layer) -> float:
    return float(layer.rows["norm"][-1] / layer.rows["norm"][0])


def _falls_with_square(layer: Layer) -> bool:
    """The angle of a step goes as step / norm; SGD's step goes as 1/norm too, Adam, Lion and Muon fix its length."""
    return isinstance(layer.rule, SGD | SGDW)


def _slowed(layer: Layer) -> float:
    return _growth(layer) ** (2 if _falls_with_square(layer) else 1)


def oscillating(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Settings whose approach to equilibrium overshoots."""
    predictable = [layer for layer in layers if layer.predictable and layer.monotone is not None]
    swinging = [layer for layer in predictable if not layer.monotone]
    if not swinging:
        return
    worst = max(swinging, key=lambda layer: layer.rule.decay_per_step if layer.rule else 0.0)
    product = worst.rule.decay_per_step if worst.rule else 0.0
    yield Finding(
        "note",
        f"the norm of {which_layers(swinging, predictable, worst)} oscillates around its equilibrium",
        f"lr x wd = {product:.3g} is above the threshold of this momentum: the approach overshoots, and under heavy "
        "ball more decay does not make it faster",
        "lower lr x wd or the momentum for a smooth approach",
        "approach.oscillation_threshold",
    )


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
    evidence = f"{layer.name} turns {layer.angle:.3g} rad per step against {layer.angle_equilibrium:.3g} in equilibrium"
    if layer.norm_vs_equilibrium is not None:
        evidence += f"; its norm is {times(layer.norm_vs_equilibrium)}"
    evidence += ("" if moving else _wait(away)) + _not_counted(predictable, away)
    yield Finding(
        "warning" if _distance(worst) > _FAR and not moving else "note",
        f"{which_layers(away, predictable, worst)} {verb(away)} out of equilibrium",
        evidence,
        _remedy_on_the_way(worst, moving=moving),
        "settling.settling_steps",
    )


def _on_its_way(layer: Layer) -> bool:
    summary = layer.summary
    if summary.state not in (SETTLING, DISTURBED) or abs((summary.angle_vs_equilibrium or 1) - 1) < _NEAR:
        return False
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
    slowest = max(away, key=lambda layer: layer.summary.steps_to_settle or 0.0)
    if not slowest.summary.steps_to_settle:
        return ""
    wait = how_long(slowest.summary.steps_to_settle, slowest.summary.epochs_to_settle)
    return f"; it needs {wait}" if len(away) == 1 else f"; they need up to {wait} (worst: {slowest.name})"


def _not_counted(predictable: Sequence[Layer], away: Sequence[Layer]) -> str:
    """The layers that are not settled either, but are not counted: states and findings should add up."""
    more = sum(layer.summary.state in (SETTLING, DISTURBED) for layer in predictable) - len(away)
    if not more:
        return ""
    one = more == 1
    return (
        f"; {more:,} more {'is' if one else 'are'} not settled, but {'turns' if one else 'turn'} within "
        f"{percent(_NEAR)} of equilibrium, {'has' if one else 'have'} too few samples, or another finding explains "
        f"{'it' if one else 'them'}"
    )


def _remedy_on_the_way(layer: Layer, *, moving: bool) -> str:
    if moving:
        return (
            "often intended: under a schedule the norm lags behind, and the angle follows lr rather than lr x wd. For "
            "the angle of lr x wd, change lr more slowly or rescale the weights along with it"
        )
    ratio = layer.summary.norm_vs_equilibrium
    wait = (layer.summary.steps_to_settle or 0.0) <= _TOO_LONG * layer.length
    if ratio is None or layer.rule is None:
        return f"{'wait; ' if wait else ''}a larger lr x wd settles sooner, at a larger angle"
    if abs(ratio - 1) < _NEAR:
        return "nothing to rescale: the norm is in equilibrium, and the angle follows the recent gradients"
    if (ratio > 1) == ((layer.summary.angle_vs_equilibrium or 1.0) > 1):  # a longer weight turns more slowly
        return (
            "nothing to rescale: angle and norm are off to the same side, so the norm has moved while these samples "
            "were taken; look again when it has come to rest"
        )
    at_once = f"for {layer.name} at once: {rescaling(layer.rule, 1 / ratio)}"
    if wait:
        return f"wait, or {at_once}"
    return (
        f"nothing to do if it turns as fast as you want: settling would take {_TOO_LONG} times the run so far or more. "
        f"For the angle of lr x wd, {at_once}"
    )


# ---- disturbed by a change of the settings


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A settled layer whose lr, weight decay or momentum jumped.

    Attributes:
        layer: the layer.
        before: step of the last sample with the old settings.
        step: step of the first sample with the new settings.
        change: the change in words.
        dip: measured angle right after it, over its new equilibrium.
        expected: the same by the relaxation of the norm, at the same steps.
        weight: factor on the weights that would have settled them at once.
        recovered: steps after which the layer was settled again, None if it is not yet.
    """

    layer: Layer
    before: int
    step: int
    change: str
    dip: float
    expected: float
    weight: float
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
    if layer.since == 0 or not layer.predictable or layer.state_at(layer.since - 1) not in (SETTLED, DISTURBED):
        return None
    if any(excursion.after == layer.rows["step"][layer.since] for excursion in excursions(layer.rows)):
        return None  # lr came back to its level, which `spikes` reports as one event
    before, after = layer.rule_at(layer.since - 1), layer.rule_at(layer.since)
    just_after = _right_after(layer)
    squares = (layer.rows[name][just_after] ** 2 for name in ("angle", "angle_equilibrium"))
    measured, equilibrium = (math.sqrt(float(np.mean(values))) for values in squares)
    if before is None or after is None or not equilibrium > 0 or measured == 0:
        return None
    move = _move_of_equilibrium(before, after, layer.scale_of_grad_sq, layer.entries)
    if move is None or abs(math.log(measured / equilibrium)) < _NOTICEABLE:
        return None
    weight, approach = move
    later = layer.rows["step"][just_after] - layer.rows["step"][layer.since]
    ratios = approach.angle_ratio(1 / weight, later)
    return Disturbance(
        layer,
        before=int(layer.rows["step"][layer.since - 1]),
        step=int(layer.rows["step"][layer.since]),
        change=_in_words(before, after),
        dip=measured / equilibrium,
        expected=math.sqrt(float(np.mean(np.square(ratios)))),
        weight=weight,
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
    changes = []
    for field, name in (("lr", "lr"), ("weight_decay", "weight decay"), ("momentum", "momentum"), ("betas", "betas")):
        old, new = getattr(before, field, None), getattr(after, field, None)
        if old == new:
            continue
        if isinstance(old, float | int) and isinstance(new, float | int) and new > 0 and name == "lr":
            changes.append(f"lr was {'divided' if old > new else 'multiplied'} by {max(old / new, new / old):.3g}")
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
            "warning" if still else "note",
            f"{which_layers(thrown, predictable, worst.layer)} {state} disturbed by a change {worst.when}: {change}",
            _dip_and_recovery(worst, thrown),
            _remedy_for_a_jump(worst),
            "states.rescale_factors",
        )


def _dip_and_recovery(worst: Disturbance, layers: Sequence[Layer]) -> str:
    name, summary = worst.layer.name, worst.layer.summary
    moved = "fell" if worst.dip < 1 else "rose"
    text = f"{name} {moved} to {worst.dip:.2g} of its new equilibrium at once (expected: {worst.expected:.2g})"
    if worst.recovered is not None:
        return f"{text} and was settled again {worst.recovered:,} steps later"
    if summary.angle_vs_equilibrium is not None:
        text += f" and is at {summary.angle_vs_equilibrium:.2g} now"
    slowest = max(layers, key=lambda layer: layer.summary.steps_to_settle or 0.0).summary
    if slowest.steps_to_settle is None:
        return text
    wait = how_long(slowest.steps_to_settle, slowest.epochs_to_settle)
    return f"{text}; {f'all are settled after {wait}' if len(layers) > 1 else f'it needs {wait}'}"


def _remedy_for_a_jump(worst: Disturbance) -> str:
    rule = worst.layer.rule_at(worst.layer.since)
    if rule is None or not worst.as_expected:
        return (
            "do not rescale: the change explains only a part of this, and a rescaling would not settle it. The layer "
            "was not in equilibrium before, or its gradient changed as well"
        )
    return f"to settle at once at such a change, {rescaling(rule, worst.weight)}"


# ---- disturbed by a change of the weights


def was_changed_outside(layer: Layer) -> bool:
    """Whether a change of the weights themselves disturbed the layer."""
    return layer.summary.state == DISTURBED and bool(np.any(layer.rows["note"][layer.since :] == _CHANGED_OUTSIDE))


def weights_changed_outside(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights that something other than the optimizer's step changed."""
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
        else "nothing to do if intended (a rescaling, a loaded checkpoint, swapped averages): predictions started "
        "again from the new weights",
        "states.rescaled",
    )
