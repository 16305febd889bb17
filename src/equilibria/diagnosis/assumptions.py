"""Findings about predictions that fail, and about the assumptions behind them.

The laws assume gradients that are noise around a slowly changing size, orthogonal to the weight (scale invariance), and
weights kept in a type fine enough for their steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from equilibria.diagnosis.gradient_size import INTERPOLATES, VARIES, near_interpolation
from equilibria.diagnosis.layer_summary import ACCURACY
from equilibria.diagnosis.layers import Layer, if_invariant, layers_of, verb, which_layers
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import Array
from equilibria.diagnosis.summary import summarise_run
from equilibria.findings import Finding, percent
from equilibria.theory.equilibrium import ROUNDED_AWAY
from equilibria.theory.identified import Identified
from equilibria.theory.rules import EQUILIBRIUM_LAWS, SGD, SGDW, AdamL2, AdamW, Lion, Muon

_EXPLAINS = 0.5  # share of the logarithm of measured / predicted
_NORM_OFF = 0.1  # |ln(measured / predicted norm)|: unequal entries alone make 6 % under Adam
_SYMMETRIES = "print(eq.symmetries(eq.objective(model, loss), batches))"


def _predictable(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.predictable]


def angle_off(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers that turn faster or slower than predicted, unless another finding explains it."""
    predictable = _predictable(layers)
    off = [layer for layer in predictable if _is_off(layer)]
    if not off:
        return
    worst = max(off, key=_error)
    summary = worst.summary
    yield Finding(
        "note",
        f"{which_layers(off, predictable, worst)} {verb(off, 'turns', 'turn')} {_which_way(off)} than predicted",
        f"{worst.name} turns {summary.angle:.3g} rad per step {summary.when}, "
        f"{percent(summary.angle_vs_predicted or 0)} of the {summary.angle_predicted:.3g} that {summary.settings} "
        f"predicts for the same steps; {_suspect(worst)}{if_invariant(off)}",
        "nothing needs doing: the measured angle is right, the prediction is not. To see whether single output "
        'channels are to blame: eq.watch(model, optimizer, granularity="row")',
        "transient.evolve",
    )


def norm_off(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers whose norm is not the predicted one although they turn as predicted."""
    predictable = _predictable(layers)
    judged = [layer for layer in predictable if not layer.few and not layer.explained]
    off = [layer for layer in judged if _norm_error(layer) > _NORM_OFF and layer.summary.is_near]
    if not off:
        return
    worst = max(off, key=_norm_error)
    summary = worst.summary
    yield Finding(
        "note",
        f"the norm of {which_layers(off, predictable, worst)} is off its prediction, while the angle is within "
        f"{percent(ACCURACY)} of its own",
        f"||w|| of {worst.name} is {summary.norm:.3g} at step {summary.last_step:,}, "
        f"{percent(summary.norm_vs_predicted or 0)} of the {summary.norm_predicted:.3g} that {summary.settings} "
        f"predicts; {_suspect(worst)}{if_invariant(off)}",
        "nothing needs doing for the angle; do not rely on the predicted norm or on the time to settle",
        "transient.evolve",
    )


def _error(layer: Layer) -> float:
    return layer.summary.how_wrong or 0.0


def _norm_error(layer: Layer) -> float:
    return abs(math.log(layer.summary.norm_vs_predicted or 1.0))


def _is_off(layer: Layer) -> bool:
    return layer.summary.surely_off and not layer.explained


def _which_way(off: Sequence[Layer]) -> str:
    faster = [(layer.summary.angle_vs_predicted or 0) > 1 for layer in off]
    return "faster" if all(faster) else "faster or slower" if any(faster) else "slower"


def _suspect(layer: Layer) -> str:
    """The assumption that the samples point to."""
    if (limits := layer.controlled.get("RelativeUpdateLimits")) is not None:
        return f"the prediction is for steps of any size, and RelativeUpdateLimits {limits}"
    if isinstance(layer.rule, Lion | Muon):  # the length of the update is fixed, its correlation is not
        longer = "longer" if (layer.summary.norm_vs_predicted or 1.0) > 1 else "shorter"
        return (
            f"its updates stay correlated for {longer} than momentum makes them: successive gradients are not "
            "independent, or sparse"
        )
    if (length := _update_length(layer)) is not None:
        how = "point the same way" if length > 1 else "turn back, or are sparse"
        return (
            f"its updates are {length:.2g} times as long as those of independent gradients: successive gradients {how}"
        )
    if (pull := _scaled_pull(layer)) is not None:
        return (
            f"its Adam-scaled gradient pulls {'inward' if pull > 0 else 'outward'} by {percent(abs(pull))} of the "
            "weight decay, as where entries have gradients of very unequal size"
        )
    if isinstance(layer.rule, AdamW | AdamL2) and _norm_error(layer) > ACCURACY:
        if (layer.summary.norm_vs_predicted or 1.0) > 1:
            return "successive gradients are correlated"
        return "gradients are sparse, or the second moment averages over few steps (beta2)"
    broken = failing(layer)
    if broken:
        return f"{' and '.join(broken)}, which the prediction allows for only in part"
    of_sgd = "noise, drift, " if isinstance(layer.rule, SGD | SGDW) else ""
    return f"none of the assumptions that samples can check ({of_sgd}size, invariance, rounding) fails"


def _update_length(layer: Layer) -> float | None:
    """AdamW's updates in the window over those of independent gradients, where that explains half of the angle's error.

    The prediction takes gradients for independent.
    """
    gains = layer.rows["update_gain"][layer.rows["step"] >= (layer.summary.first_step or 0)]
    known, ratio = gains[np.isfinite(gains)], layer.summary.angle_vs_predicted or 0.0
    if not isinstance(layer.rule, AdamW) or not known.any() or not ratio > 0:
        return None
    length = math.sqrt(float(np.mean(known)))
    return length if math.log(length) / math.log(ratio) > _EXPLAINS else None


def _scaled_pull(layer: Layer) -> float | None:
    """The pull of Adam's scaled gradient over that of the weight decay, where it moves the angle that way."""
    budget, faster = layer.summary.budget, (layer.summary.angle_vs_predicted or 1.0) - 1
    if not isinstance(layer.rule, AdamW | AdamL2) or budget is None or not budget.decay < 0 or abs(faster) <= ACCURACY:
        return None
    pull = budget.pull / budget.decay
    return pull if pull * faster > 0 else None


def failing(layer: Layer) -> tuple[str, ...]:
    """The assumptions of the laws that the samples of a layer contradict, in the words of reports and forecasts."""
    return (
        *(("successive gradients are correlated",) if layer.correlation is not None else ()),
        *(("its gradient drifts",) if layer.drift is not None else ()),
        *((VARIES,) if layer.variation is not None else ()),
        *(("its gradient has a component along the weight",) if layer.is_radial else ()),
        *(("the type of the weight rounds its steps away",) if layer.rounding is not None else ()),
    )


def predicted_layers(run: SampledRun) -> dict[str, Layer]:
    """The layers that have a prediction, by name, as a report judges them."""
    return {layer.name: layer for layer in _predictable(layers_of(run, summarise_run(run)))}


def correlated(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients that are correlated with the momentum they meet: signal, not noise."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.correlation is not None]
    if not affected:
        return
    worst = max(affected, key=lambda layer: abs((layer.correlation or 1) - 1))
    ratio, off = worst.correlation or 1.0, [layer for layer in affected if layer.explained and _error(layer) > ACCURACY]
    evidence = (
        f"correlation with the momentum makes L, the ||g||^2 ||w||^2 of the norm law, of {worst.name} {ratio:.2f} "
        "times as large over steps "
        f"{worst.late_steps[0]:,}-{worst.late_steps[1]:,}"
    )
    if off:
        evidence += f"; {worst.name} turns at {percent(worst.summary.angle_vs_predicted or 1)} of the prediction"
        evidence += f" {worst.summary.when}"
    yield Finding(
        "note",
        f"successive gradients of {which_layers(affected, predictable, worst)} are correlated",
        f"{evidence}; they point {'back' if ratio < 1 else 'the same way'}",
        "nothing needs doing: norm and one-step angle include the correlation. Angles over many steps are "
        f"{'smaller' if ratio < 1 else 'larger'} than under noise",
        "rules.momentum_unit_grad_sq",
    )


def vanishing_gradient(layers: Sequence[Layer], loss: tuple[Array, Array] | None) -> Iterator[Finding]:
    """L that falls faster than weight decay can shrink the norm; of the loss only what was logged.

    Args:
        layers: the layers.
        loss: steps and values of the training loss, None if it was not logged.
    """
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.vanishing]
    if not affected:
        return
    worst = min(affected, key=lambda layer: layer.remaining)
    (first, second), (third, last) = worst.fall
    pace = ""
    if (worst.drift or 0) <= -1:
        pace = f"; it falls e-fold {-(worst.drift or 0):.2g} times per time constant of its norm, which can follow once"
    yield Finding(
        "note",
        f"the gradient of {which_layers(affected, predictable, worst)} falls faster than the norm can follow",
        f"||g||^2 ||w||^2 of {worst.name} is down to {percent(max(worst.remaining, 1e-5))} "
        f"{_over(third, last)} of its level {_over(first, second)}{pace}; {_at_equilibrium(worst)}"
        f"{if_invariant(affected)}{_in_a_sentence(near_interpolation(loss))}",
        "nothing needs doing: the equilibrium falls with the gradient, and until the norm has followed lr x wd does "
        "not set the angle",
        "settling.tracking_lag",
    )


def varying_gradient(layers: Sequence[Layer], loss: tuple[Array, Array] | None) -> Iterator[Finding]:
    """Gradients that vary widely in size, and a loss near interpolation: for both a forecast widens its bands.

    Args:
        layers: the layers.
        loss: steps and values of the training loss, None if it was not logged.
    """
    predictable = _predictable(layers)
    if any(layer.vanishing for layer in predictable):
        return  # `vanishing_gradient` says it
    near = near_interpolation(loss)
    affected = [layer for layer in predictable if layer.variation is not None and layer.drift is None]
    wider = "nothing needs doing: single steps scatter more than under steady gradients"
    wider += ", and a forecast of this run has wider bands" if near or loss is None else ""
    if affected:
        worst = max(affected, key=lambda layer: layer.variation or 0.0)
        known = "; to see whether the network interpolates, and for narrower bands if not: monitor.log(loss=loss)"
        yield Finding(
            "note",
            f"the gradient of {which_layers(affected, predictable, worst)} varies widely in size",
            f"the mean of ||g||^4 of {worst.name} is {worst.variation:.2g} times the square of the mean of ||g||^2 "
            f"{_over(*worst.second_half)}{if_invariant(affected)}{_in_a_sentence(near)}",
            f"{wider}{known if loss is None else ''}",
            "",
        )
    elif near and predictable:
        yield Finding(
            "note", "the training loss is small against its start", near.removesuffix(INTERPOLATES), wider, ""
        )


def _in_a_sentence(text: str) -> str:
    return f". {text[0].upper()}{text[1:]}" if text else ""


def _over(first: int, last: int) -> str:
    return f"at step {first:,}" if first == last else f"over steps {first:,}-{last:,}"


def drifting(layers: Sequence[Layer]) -> Iterator[Finding]:
    """L that changes within a time constant, so that the equilibrium moves."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.drift is not None and not layer.vanishing]
    if not affected:
        return
    worst = max(affected, key=lambda layer: abs(layer.drift or 0.0))
    drift = worst.drift or 0.0
    effect = f"holds its angle at {math.sqrt(1 + drift):.2g} of equilibrium" if drift > -1 else "it cannot follow"
    yield Finding(
        "note",
        f"the gradient of {which_layers(affected, predictable, worst)} drifts: the equilibrium itself moves",
        f"||g||^2 ||w||^2 of {worst.name} {_by_how_much(drift)} per "
        f"time constant of its norm over steps {worst.late_steps[0]:,}-{worst.late_steps[1]:,}, which in the long run "
        f"{effect}; {_at_equilibrium(worst)}{if_invariant(affected)}"
        f"{f'; {VARIES}, too' if worst.variation is not None else ''}",
        "nothing needs doing: compare the angle with the prediction, which follows the measured gradient, not with the "
        "equilibrium",
        "settling.tracking_lag",
    )


def _by_how_much(drift: float) -> str:
    if abs(drift) > 2:  # a percentage would say little, and overflow soon
        return f"{'grows' if drift > 0 else 'falls'} e-fold {abs(drift):.2g} times"
    return f"{'grows' if drift > 0 else 'falls'} by {percent(abs(math.expm1(drift)))}"


def _at_equilibrium(layer: Layer) -> str:
    ratio = layer.summary.angle_vs_equilibrium
    return (
        "it has no equilibrium angle"
        if ratio is None
        else f"it turns at {ratio:.2g} of equilibrium {layer.summary.when}"
    )


def rounded_away(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights in a type too coarse for their decay or their step; for decoupled decay, scale-invariant or not."""
    possible = [
        layer for layer in layers if layer.predictable or not isinstance(layer.rule, SGD | AdamL2 | Identified | None)
    ]
    affected = [layer for layer in possible if layer.rounding is not None]
    if not affected:
        return
    worst = min(affected, key=lambda layer: layer.rounding or 0.0)
    dtype, coupled = str(worst.entry["dtype"]), isinstance(worst.rule, SGD | AdamL2 | Identified)
    change = (
        f"a step should move {worst.name} by {worst.rounding:.3g} of its size"
        if coupled
        else f"lr x wd = {worst.rounding:.3g} per step for {worst.name}"
    )
    yield Finding(
        "warning",
        f"{dtype} rounds {'most of the update' if coupled else 'the weight decay'} of "
        f"{which_layers(affected, possible, worst)} away",
        f"{change} (median of the run) against half an ulp, {ROUNDED_AWAY[dtype]:.3g}: most entries round back to "
        f"their old value{_against_prediction(worst)}",
        "for a decay that acts, raise lr x wd: for group in optimizer.param_groups: group['weight_decay'] *= 10"
        if dtype == "float32"
        else "for a decay that acts, keep the weights in float32 (model.float()) and compute in 16 bits: with "
        f"torch.autocast('cuda', torch.{dtype}):",
        EQUILIBRIUM_LAWS[type(worst.rule)] if worst.rule else "",
    )


def _against_prediction(layer: Layer) -> str:
    summary = layer.summary
    if summary.norm_vs_predicted is None or summary.angle_vs_predicted is None:
        return ""
    return (
        f"; its angle is at {percent(summary.angle_vs_predicted)} of the prediction {summary.when}, its norm at "
        f"{percent(summary.norm_vs_predicted)}"
    )


# ---- scale invariance


def radial_gradient(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients with a component along the weight that adds to weight decay, or works against it."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.is_radial]
    if not affected:
        return
    worst = max(affected, key=lambda layer: abs(layer.radial or 0.0))
    share = worst.radial or 0.0
    effect = "adds to weight decay" if share > 0 else "works against weight decay"
    yield Finding(
        "note",
        f"{which_layers(affected, predictable, worst)} {verb(affected)} not quite scale-invariant",
        f"the gradient of {worst.name} has a mean component along the weight that {effect}: {percent(abs(share))} of "
        f"it over steps {worst.late_steps[0]:,}-{worst.late_steps[1]:,}; it turns at "
        f"{percent(worst.summary.angle_vs_predicted or 1)} of the prediction {worst.summary.when}",
        "nothing needs doing: the prediction leaves this out, the measurement does not. A large eps of its "
        "normalisation layer, a bias or a skip connection does this; to see which weights are scale-invariant, and "
        f"together with what: {_SYMMETRIES}",
        "norms.norm_residual",
    )
