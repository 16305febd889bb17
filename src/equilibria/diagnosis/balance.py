"""Layers that are not where lr and weight decay will take them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from equilibria.diagnosis.changes import disturbance, was_changed_outside
from equilibria.diagnosis.layers import Layer, are, many, percent, rescaling
from equilibria.diagnosis.summary import how_long, times
from equilibria.findings import Finding
from equilibria.records.tables import DISTURBED, SETTLING
from equilibria.theory.rules import SGD, SGDW

_FAR = math.log(1.25)  # an angle that far from equilibrium is worth a warning
_NEAR = 0.05  # what "settled" allows
_TOO_LONG = 3  # times the run so far: nobody waits for that
_GREW = 1.1  # norm over its first: less slows the turning by less than 20 %


def out_of_equilibrium(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers on their way, with the time they still need."""
    able = [layer for layer in layers if layer.predictable and layer.summary.angle_vs_equilibrium]
    away = [layer for layer in able if not layer.few and _on_its_way(layer)]
    if not away:
        return
    worst = max(away, key=_distance)
    layer = worst.summary
    moving = worst.lr_is_moving
    evidence = f"{layer.name} turns {layer.angle:.3g} rad per step against {layer.angle_equilibrium:.3g} in equilibrium"
    if layer.norm_vs_equilibrium is not None:
        evidence += f"; its norm is {times(layer.norm_vs_equilibrium)}"
    evidence += ("" if moving else _wait(away)) + _others(able, away)
    yield Finding(
        "warning" if _distance(worst) > _FAR and not moving else "note",
        f"{many(away, able, worst)} {are(away)} out of equilibrium",
        evidence,
        _remedy(worst, moving=moving),
        "settling.settling_steps",
    )


def _wait(away: Sequence[Layer]) -> str:
    """How long the slowest takes: the others are there before."""
    slowest = max(away, key=lambda layer: layer.summary.steps_to_settle or 0.0)
    if not slowest.summary.steps_to_settle:
        return ""
    wait = how_long(slowest.summary.steps_to_settle, slowest.summary.epochs_to_settle)
    return f"; it needs {wait}" if len(away) == 1 else f"; they need up to {wait} (worst: {slowest.name})"


def _others(able: Sequence[Layer], away: Sequence[Layer]) -> str:
    """The layers whose state says that they are on their way too, but that are not counted here."""
    more = sum(layer.summary.state in (SETTLING, DISTURBED) for layer in able) - len(away)
    if not more:
        return ""
    one = more == 1
    return (
        f"; {more:,} more {'is' if one else 'are'} not settled, but {'turns' if one else 'turn'} within "
        f"{percent(_NEAR)} of equilibrium, or another finding says why, or {'has' if one else 'have'} too few samples"
    )


def _on_its_way(layer: Layer) -> bool:
    summary = layer.summary
    if summary.state not in (SETTLING, DISTURBED) or abs((summary.angle_vs_equilibrium or 1) - 1) < _NEAR:
        return False
    predicted, equilibrium = summary.angle_predicted, summary.angle_equilibrium
    if predicted and equilibrium and abs(predicted / equilibrium - 1) < _NEAR:
        return False  # by the prediction it has arrived: then it is the prediction that is off
    other_finding = layer.rounding is not None or layer.vanishing or was_changed_outside(layer)
    other_finding = other_finding or disturbance(layer) is not None
    return not other_finding and not _moved_equilibrium_explains(layer)


def _distance(layer: Layer) -> float:
    return abs(math.log(layer.summary.angle_vs_equilibrium or 1.0))


def _moved_equilibrium_explains(layer: Layer) -> bool:
    """Drift of L, or a radial gradient, holds the angle at sqrt(1 + share) of equilibrium; more is still to go."""
    shares = [share for share in (layer.drift, layer.radial) if share is not None]
    return any(share <= -1 or _distance(layer) <= abs(math.log1p(share)) for share in shares)


def _remedy(layer: Layer, *, moving: bool) -> str:
    if moving:
        return (
            "often this is wanted: under a schedule the norm follows late, and the angle follows lr rather than "
            "lr x wd. To turn as lr x wd says, change lr more slowly or rescale the weights along with it"
        )
    ratio = layer.summary.norm_vs_equilibrium
    wait = (layer.summary.steps_to_settle or 0.0) <= _TOO_LONG * layer.length
    if ratio is None or layer.rule is None:
        return f"{'wait; ' if wait else ''}a larger lr x wd settles sooner, at a larger angle"
    if abs(ratio - 1) < _NEAR:
        return (
            "nothing to rescale, since the norm is where it settles: the angle follows the recent gradients and moves "
            "on with them"
        )
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
        f"To turn as lr x wd says, {at_once}"
    )


def decay_missing(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Scale-invariant weights without weight decay, whose effective learning rate falls for ever."""
    able = [layer for layer in layers if layer.summary.invariant]
    bare = [layer for layer in able if layer.summary.weight_decay == 0 and (layer.summary.lr or 0) > 0]
    if not bare:
        return
    worst = max(bare, key=_slowed)
    steps = int(worst.rows["step"][-1] - worst.rows["step"][0])
    power = "1/||w||^2" if _falls_with_square(worst) else "1/||w||"
    yield Finding(
        "warning" if max(map(_growth, bare)) >= _GREW else "note",
        f"{many(bare, able, worst)} {are(bare)} scale-invariant but {are(bare, 'has', 'have')} no weight decay",
        f"the norm of {worst.name} grew {_growth(worst):.3g}x in {steps:,} steps, which divides the speed at which it "
        f"turns at a given lr by {_slowed(worst):.3g}; without decay this never ends",
        f"give {are(bare, 'it', 'them')} weight decay, or mean it: the speed falls as {power} on top of the schedule",
        "norms.decay_free_norm",
    )


def _growth(layer: Layer) -> float:
    return float(layer.rows["norm"][-1] / layer.rows["norm"][0])


def _falls_with_square(layer: Layer) -> bool:
    """A gradient goes as 1/norm, and so does the angle of a step of given length; Adam, Lion and Muon give one."""
    return isinstance(layer.rule, SGD | SGDW)


def _slowed(layer: Layer) -> float:
    return _growth(layer) ** (2 if _falls_with_square(layer) else 1)


def oscillating(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Settings whose approach to equilibrium overshoots."""
    able = [layer for layer in layers if layer.predictable and layer.equilibrium is not None]
    swinging = [layer for layer in able if layer.equilibrium is not None and not layer.equilibrium.monotone]
    if not swinging:
        return
    worst = max(swinging, key=lambda layer: layer.rule.decay_per_step if layer.rule else 0.0)
    product = worst.rule.decay_per_step if worst.rule else 0.0
    yield Finding(
        "note",
        f"the norm of {many(swinging, able, worst)} oscillates around its equilibrium",
        f"lr x wd = {product:.3g} is above the threshold of this momentum: the approach overshoots, and under heavy "
        "ball it settles no faster with more decay",
        "lower lr x wd or the momentum if you want a smooth approach",
        "approach.oscillation_threshold",
    )
