"""Predictions that fail, and the assumption that fails with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from equilibria.diagnosis.layers import Layer, are, many, percent
from equilibria.diagnosis.summary import ACCURACY
from equilibria.findings import Finding
from equilibria.theory.rules import EQUILIBRIUM_LAWS, SGD, AdamL2, AdamW, Lion, Muon
from equilibria.theory.validity import ROUNDED_AWAY

_FAR_OFF = 0.1  # |ln(measured / predicted angle)|: a warning
_NORM_OFF = 0.1  # |ln(measured / predicted norm)|: unequal entries alone make 6 % under Adam
_LIKELY = 3  # standard errors within which an angle holds; to call it off takes more


def _able(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.predictable]


def angle_off(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers that turn faster or slower than predicted, unless another finding says why."""
    able = _able(layers)
    off = [layer for layer in able if _is_off(layer)]
    if not off:
        return
    worst = max(off, key=_error)
    summary = worst.summary
    yield Finding(
        "warning" if _error(worst) > _FAR_OFF else "note",
        f"{many(off, able, worst)} {are(off, 'turns', 'turn')} {_which_way(off)} than predicted",
        f"{worst.name} turns {summary.angle:.3g} rad per step, {percent(summary.angle_vs_predicted or 0)} of the "
        f"{summary.angle_predicted:.3g} that {summary.settings} predicts; {_suspect(worst)}",
        'watch with granularity="row" if a normalisation layer treats each output by itself; make sure that nothing '
        "but the optimizer moves the weights, and that gradients are not sparse",
        "transient.evolve",
    )


def norm_off(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers whose norm is not the predicted one although they turn as predicted."""
    able = _able(layers)
    judged = [layer for layer in able if not layer.few and not layer.explained]
    off = [layer for layer in judged if _norm_error(layer) > _NORM_OFF and _angle_holds(layer)]
    if not off:
        return
    worst = max(off, key=_norm_error)
    summary = worst.summary
    yield Finding(
        "note",
        f"the norm of {many(off, able, worst)} is off its prediction, while the angle holds",
        f"||w|| of {worst.name} is {summary.norm:.3g}, {percent(summary.norm_vs_predicted or 0)} of the "
        f"{summary.norm_predicted:.3g} that {summary.settings} predicts; {_suspect(worst)}",
        "nothing to do for the angle; do not rely on the predicted norm, or on how long it takes to settle",
        "transient.evolve",
    )


def _error(layer: Layer) -> float:
    return layer.summary.how_wrong or 0.0


def _norm_error(layer: Layer) -> float:
    return abs(math.log(layer.summary.norm_vs_predicted or 1.0))


def _is_off(layer: Layer) -> bool:
    return layer.summary.surely_off and not layer.explained


def _angle_holds(layer: Layer) -> bool:
    error = layer.summary.angle_error
    return error is not None and _error(layer) <= max(ACCURACY, _LIKELY * error)


def _which_way(off: Sequence[Layer]) -> str:
    faster = [(layer.summary.angle_vs_predicted or 0) > 1 for layer in off]
    return "faster" if all(faster) else "faster or slower" if any(faster) else "slower"


def _suspect(layer: Layer) -> str:
    """Which assumption the samples point to."""
    if isinstance(layer.rule, Lion | Muon):  # the length of the update is given: only its memory can differ
        longer = "longer" if (layer.summary.norm_vs_predicted or 1.0) > 1 else "shorter"
        return (
            f"its updates stay alike for {longer} than momentum makes them: successive gradients are not independent, "
            "or sparse"
        )
    if isinstance(layer.rule, AdamW | AdamL2) and _norm_error(layer) > ACCURACY:
        if (layer.summary.norm_vs_predicted or 1.0) > 1:
            return "successive gradients are correlated, or entries have gradients of very unequal size"
        return "gradients are sparse, or the second moment averages over few steps (beta2)"
    broken = [
        *(["successive gradients are correlated"] if layer.correlation is not None else []),
        *(["its gradient drifts"] if layer.drift is not None else []),
    ]
    if broken:
        return f"{' and '.join(broken)}, which the prediction allows for only in part"
    return "none of the assumptions that samples can check (noise, drift, invariance, rounding) is seen to fail"


def correlated(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients that are correlated with the momentum they meet: signal, not noise."""
    able = _able(layers)
    hit = [layer for layer in able if layer.correlation is not None]
    if not hit:
        return
    worst = max(hit, key=lambda layer: abs((layer.correlation or 1) - 1))
    ratio, off = worst.correlation or 1.0, [layer for layer in hit if layer.explained and _error(layer) > ACCURACY]
    evidence = f"for {worst.name} ||g||^2 with its correlation to the momentum is {ratio:.2f} of that without"
    if off:
        evidence += f"; {worst.name} turns at {percent(worst.summary.angle_vs_predicted or 1)} of the prediction"
    yield Finding(
        "warning" if any(_error(layer) > _FAR_OFF for layer in off) else "note",
        f"successive gradients of {many(hit, able, worst)} are correlated",
        evidence + ("; they point back: the end of training, or lr too large" if ratio < 1 else "; they point alike"),
        "nothing to do if the angle is as predicted: norm and one-step angle are computed with the correlation. Angles "
        "over many steps will be " + ("smaller" if ratio < 1 else "larger") + " than noise would make them",
        "unit_gradient.momentum_unit_grad_sq",
    )


def near_interpolation(layers: Sequence[Layer]) -> Iterator[Finding]:
    """L that falls away faster than weight decay can shrink the norm."""
    able = _able(layers)
    hit = [layer for layer in able if layer.vanishing]
    if not hit:
        return
    worst = min(hit, key=lambda layer: layer.remaining)
    pace = f"falls e-fold {-(worst.drift or 0):.2g} times per time constant of its norm, and weight decay can follow 1"
    yield Finding(
        "warning",
        f"the gradient of {many(hit, able, worst)} vanishes faster than the norm can follow: near interpolation",
        f"||g||^2 ||w||^2 of {worst.name} is down to {percent(worst.remaining)} of its highest level in this "
        f"run{f'; it {pace} time' if (worst.drift or 0) <= -1 else ''}; {_at_equilibrium(worst)}",
        "nothing to do, or stop here: the training loss is nearly fitted, its gradient vanishes, and the equilibrium "
        "runs away from the norm, so that lr x wd no longer sets the angle. Only augmentation or label smoothing would "
        "bring the gradient back",
        "settling.tracking_lag",
    )


def drifting(layers: Sequence[Layer]) -> Iterator[Finding]:
    """L that changes within a time constant, so that the equilibrium moves."""
    able = _able(layers)
    hit = [layer for layer in able if layer.drift is not None and not layer.vanishing]
    if not hit:
        return
    worst = max(hit, key=lambda layer: abs(layer.drift or 0.0))
    drift = worst.drift or 0.0
    effect = f"holds its angle at {math.sqrt(1 + drift):.2g} of equilibrium" if drift > -1 else "it cannot follow"
    yield Finding(
        "note",
        f"the gradient of {many(hit, able, worst)} drifts: the equilibrium itself moves",
        f"||g||^2 ||w||^2 of {worst.name} {_by_how_much(drift)} per "
        f"time constant of its norm, which in the long run {effect}; "
        f"{_at_equilibrium(worst)}",
        "compare with the prediction, which follows the measured gradient, not with the equilibrium; a larger lr x wd "
        "follows faster",
        "settling.tracking_lag",
    )


def _by_how_much(drift: float) -> str:
    if abs(drift) > 2:  # beyond it a percentage says little, and soon it is no number any more
        return f"{'grows' if drift > 0 else 'falls'} e-fold {abs(drift):.2g} times"
    return f"{'grows' if drift > 0 else 'falls'} by {percent(abs(math.expm1(drift)))}"


def _at_equilibrium(layer: Layer) -> str:
    ratio = layer.summary.angle_vs_equilibrium
    return "its angle was not compared" if ratio is None else f"it turns at {ratio:.2g} of equilibrium"


def rounded_away(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights in a type too coarse for their decay or their step."""
    able = _able(layers)
    hit = [layer for layer in able if layer.rounding is not None]
    if not hit:
        return
    worst = min(hit, key=lambda layer: layer.rounding or 0.0)
    dtype, coupled = str(worst.entry["dtype"]), isinstance(worst.rule, SGD | AdamL2)
    yield Finding(
        "warning",
        f"{dtype} rounds {'most of the update' if coupled else 'the weight decay'} of {many(hit, able, worst)} away",
        (f"a step should move {worst.name} by {worst.rounding:.3g} of itself" if coupled else "")
        + ("" if coupled else f"lr x wd = {worst.rounding:.3g} per step for {worst.name}")
        + f" against half an ulp, {ROUNDED_AWAY[dtype]:.3g}: most entries round back to what they were; its norm is at "
        f"{percent(worst.summary.norm_vs_predicted or 1)} and its angle at "
        f"{percent(worst.summary.angle_vs_predicted or 1)} of the prediction",
        "raise lr x wd: it is too small to act"
        if dtype == "float32"
        else "keep a float32 master copy of the weights, or use stochastic rounding",
        EQUILIBRIUM_LAWS[type(worst.rule)] if worst.rule else "",
    )
