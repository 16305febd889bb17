"""Findings about predictions that fail, and about the assumptions behind them.

The laws assume gradients that are noise around a slowly changing size, orthogonal to the weight (scale invariance), and
weights kept in a type fine enough for their steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from equilibria.diagnosis.gradient_size import VARIES
from equilibria.diagnosis.layers import InvarianceFlip, Layer, layers_of, verb, which_layers
from equilibria.diagnosis.metadata import INVARIANT
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.summary import ACCURACY, summarise_run
from equilibria.findings import Finding, percent
from equilibria.theory.equilibrium import ROUNDED_AWAY
from equilibria.theory.rules import EQUILIBRIUM_LAWS, SGD, AdamL2, AdamW, Lion, Muon

_FAR_OFF = 0.1  # |ln(measured / predicted angle)|: a warning
_NORM_OFF = 0.1  # |ln(measured / predicted norm)|: unequal entries alone make 6 % under Adam
_LIKELY = 3  # standard errors within which an angle holds; to call it off takes more
_PARTLY = 0.5  # of a random direction's cosine: without normalisation it is about 1, but a head may well have 0.9
_LARGE_EPS = (
    "the eps of its normalisation layer is not small compared with the variance it divides by (shrinking norms make it "
    "worse)"
)
_LOWER_EPS = "lower eps, or raise the norm (lr / wd)"


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
        "warning" if _error(worst) > _FAR_OFF else "note",
        f"{which_layers(off, predictable, worst)} {verb(off, 'turns', 'turn')} {_which_way(off)} than predicted",
        f"{worst.name} turns {summary.angle:.3g} rad per step, {percent(summary.angle_vs_predicted or 0)} of the "
        f"{summary.angle_predicted:.3g} that {summary.settings} predicts; {_suspect(worst)}",
        'watch with granularity="row" if a normalisation layer normalises each output separately; make sure that only '
        "the optimizer moves the weights, and that gradients are not sparse",
        "transient.evolve",
    )


def norm_off(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Layers whose norm is not the predicted one although they turn as predicted."""
    predictable = _predictable(layers)
    judged = [layer for layer in predictable if not layer.few and not layer.explained]
    off = [layer for layer in judged if _norm_error(layer) > _NORM_OFF and _angle_holds(layer)]
    if not off:
        return
    worst = max(off, key=_norm_error)
    summary = worst.summary
    yield Finding(
        "note",
        f"the norm of {which_layers(off, predictable, worst)} is off its prediction, while the angle holds",
        f"||w|| of {worst.name} is {summary.norm:.3g}, {percent(summary.norm_vs_predicted or 0)} of the "
        f"{summary.norm_predicted:.3g} that {summary.settings} predicts; {_suspect(worst)}",
        "nothing to do for the angle; do not rely on the predicted norm or on the time to settle",
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
    """The assumption that the samples point to."""
    if isinstance(layer.rule, Lion | Muon):  # the length of the update is fixed, its correlation is not
        longer = "longer" if (layer.summary.norm_vs_predicted or 1.0) > 1 else "shorter"
        return (
            f"its updates stay correlated for {longer} than momentum makes them: successive gradients are not "
            "independent, or sparse"
        )
    if isinstance(layer.rule, AdamW | AdamL2) and _norm_error(layer) > ACCURACY:
        if (layer.summary.norm_vs_predicted or 1.0) > 1:
            return "successive gradients are correlated, or entries have gradients of very unequal size"
        return "gradients are sparse, or the second moment averages over few steps (beta2)"
    broken = failing(layer)
    if broken:
        return f"{' and '.join(broken)}, which the prediction allows for only in part"
    return "none of the assumptions that samples can check (noise, drift, size, invariance, rounding) fails"


def failing(layer: Layer) -> tuple[str, ...]:
    """The assumptions of the laws that the samples of a layer contradict, in the words of reports and forecasts."""
    return (
        *(("successive gradients are correlated",) if layer.correlation is not None else ()),
        *(("its gradient drifts",) if layer.drift is not None else ()),
        *((VARIES,) if layer.varies else ()),
        *(("its gradient has a component along the weight",) if layer.radial is not None else ()),
        *(("the type of the weight rounds its steps away",) if layer.rounding is not None else ()),
    )


def failing_by_layer(samples: pa.Table, *, metadata: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """`failing` of every layer that has a prediction, by name."""
    run = sampled_run(samples, metadata=metadata)
    return {layer.name: failing(layer) for layer in layers_of(run, summarise_run(run)) if layer.predictable}


def correlated(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients that are correlated with the momentum they meet: signal, not noise."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.correlation is not None]
    if not affected:
        return
    worst = max(affected, key=lambda layer: abs((layer.correlation or 1) - 1))
    ratio, off = worst.correlation or 1.0, [layer for layer in affected if layer.explained and _error(layer) > ACCURACY]
    evidence = f"correlation with the momentum makes ||g||^2 of {worst.name} {ratio:.2f} times as large"
    if off:
        evidence += f"; {worst.name} turns at {percent(worst.summary.angle_vs_predicted or 1)} of the prediction"
    yield Finding(
        "warning" if any(_error(layer) > _FAR_OFF for layer in off) else "note",
        f"successive gradients of {which_layers(affected, predictable, worst)} are correlated",
        evidence
        + ("; they point back: the end of training, or lr too large" if ratio < 1 else "; they point the same way"),
        "nothing to do if the angle is as predicted: norm and one-step angle include the correlation. Angles over many "
        f"steps are {'smaller' if ratio < 1 else 'larger'} than under noise",
        "rules.momentum_unit_grad_sq",
    )


def near_interpolation(layers: Sequence[Layer]) -> Iterator[Finding]:
    """L that falls faster than weight decay can shrink the norm."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.vanishing]
    if not affected:
        return
    worst = min(affected, key=lambda layer: layer.remaining)
    pace = f"falls e-fold {-(worst.drift or 0):.2g} times per time constant of its norm, and weight decay can follow 1"
    yield Finding(
        "warning",
        f"the gradient of {which_layers(affected, predictable, worst)} vanishes faster than the norm can follow: near "
        "interpolation",
        f"||g||^2 ||w||^2 of {worst.name} is down to {percent(worst.remaining)} of its highest level in this "
        f"run{f'; it {pace} time' if (worst.drift or 0) <= -1 else ''}; {_at_equilibrium(worst)}",
        "nothing to do, or stop here: the training loss is nearly fitted, its gradient vanishes, and the equilibrium "
        "falls away from the norm, so lr x wd no longer sets the angle. Only augmentation or label smoothing would "
        "bring the gradient back",
        "settling.tracking_lag",
    )


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
        f"time constant of its norm, which in the long run {effect}; "
        f"{_at_equilibrium(worst)}",
        "compare the angle with the prediction, which follows the measured gradient, not with the equilibrium; a "
        "larger lr x wd follows faster",
        "settling.tracking_lag",
    )


def _by_how_much(drift: float) -> str:
    if abs(drift) > 2:  # a percentage would say little, and overflow soon
        return f"{'grows' if drift > 0 else 'falls'} e-fold {abs(drift):.2g} times"
    return f"{'grows' if drift > 0 else 'falls'} by {percent(abs(math.expm1(drift)))}"


def _at_equilibrium(layer: Layer) -> str:
    ratio = layer.summary.angle_vs_equilibrium
    return "it has no equilibrium angle" if ratio is None else f"it turns at {ratio:.2g} of equilibrium"


def rounded_away(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights in a type too coarse for their decay or their step."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.rounding is not None]
    if not affected:
        return
    worst = min(affected, key=lambda layer: layer.rounding or 0.0)
    dtype, coupled = str(worst.entry["dtype"]), isinstance(worst.rule, SGD | AdamL2)
    change = (
        f"a step should move {worst.name} by {worst.rounding:.3g} of its size"
        if coupled
        else f"lr x wd = {worst.rounding:.3g} per step for {worst.name}"
    )
    yield Finding(
        "warning",
        f"{dtype} rounds {'most of the update' if coupled else 'the weight decay'} of "
        f"{which_layers(affected, predictable, worst)} away",
        f"{change} against half an ulp, {ROUNDED_AWAY[dtype]:.3g}: most entries round back to their old value; its "
        f"norm is at {percent(worst.summary.norm_vs_predicted or 1)} and its angle at "
        f"{percent(worst.summary.angle_vs_predicted or 1)} of the prediction",
        "raise lr x wd: it is too small to act"
        if dtype == "float32"
        else "keep a float32 master copy of the weights, or use stochastic rounding",
        EQUILIBRIUM_LAWS[type(worst.rule)] if worst.rule else "",
    )


# ---- scale invariance


def radial_gradient(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients with a component along the weight that adds to weight decay, or works against it."""
    predictable = _predictable(layers)
    affected = [layer for layer in predictable if layer.radial is not None]
    if not affected:
        return
    worst = max(affected, key=lambda layer: abs(layer.radial or 0.0))
    share = worst.radial or 0.0
    effect = "adds to weight decay" if share > 0 else "works against weight decay"
    yield Finding(
        "warning",
        f"{which_layers(affected, predictable, worst)} {verb(affected)} not quite scale-invariant",
        f"the gradient of {worst.name} has a component along the weight (cosine {worst.summary.cosine:.2g}) that "
        f"{effect}: {percent(abs(share))} of it; it turns at {percent(worst.summary.angle_vs_predicted or 1)} of the "
        "prediction",
        f"{_LARGE_EPS}, or a bias or skip connection bypasses the normalisation: {_LOWER_EPS}",
        "norms.norm_residual",
    )


def partly_invariant(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Gradients less along the weight than a random direction, but too much for the laws to hold."""
    affected = [layer for layer in layers if _is_partly(layer) and layer.flip is None]
    if not affected:
        return
    worst = max(affected, key=_share)
    yield Finding(
        "note",
        f"{which_layers(affected, layers, worst)} {verb(affected)} only partly scale-invariant, and not predicted",
        f"the cosine of {worst.name} with its gradient is {worst.summary.cosine:.2g}, {percent(_share(worst))} of a "
        f"random direction's; the laws hold below {percent(INVARIANT)}, and a weight with no normalisation behind it "
        "has about 100 % or more",
        _likely_cause(worst),
        "norms.norm_residual",
    )


def flipped(layers: Sequence[Layer]) -> Iterator[Finding]:
    """Weights that became or ceased to be scale-invariant during the run."""
    flips = {layer.name: layer.flip for layer in layers if layer.flip is not None}
    for lost in (True, False):
        affected = [layer for layer in layers if layer.name in flips and flips[layer.name].lost is lost]
        if not affected:
            continue
        worst = max(affected, key=lambda layer: abs(math.log(_ratio(flips[layer.name]))))
        flip = flips[worst.name]
        yield Finding(
            "warning" if lost else "note",
            f"{which_layers(affected, layers, worst)} {verb(affected, 'has', 'have')} "
            f"{'ceased to be' if lost else 'become'} scale-invariant",
            f"the cosine of {worst.name} with its gradient went from {percent(flip.before)} to {percent(flip.after)} "
            f"of a random direction's between steps {flip.first:,} and {flip.last:,}; the laws hold below "
            f"{percent(INVARIANT)}",
            _likely_cause(worst) if lost else "nothing to do: there are predictions from then on",
            "norms.norm_residual",
        )


def _ratio(flip: InvarianceFlip) -> float:
    return max(flip.after, 1e-12) / max(flip.before, 1e-12)


def _share(layer: Layer) -> float:
    """rms cosine with the gradient over a random direction's; NaN where unknown."""
    cosine = layer.summary.cosine
    return math.nan if cosine is None else cosine * math.sqrt(layer.entries)


def _is_partly(layer: Layer) -> bool:
    is_labelled = layer.entry.get("invariant") is not None  # then a cosine that is not 0 has a known reason
    return layer.rule is not None and not is_labelled and not layer.few and INVARIANT <= _share(layer) < _PARTLY


def _likely_cause(layer: Layer) -> str:
    causes = f"{_LARGE_EPS}, a skip connection bypasses the normalisation, or none follows this weight: {_LOWER_EPS}"
    if not layer.entry.get("bias"):
        return causes
    return (
        "most likely its bias: before a LayerNorm or GroupNorm weight and bias are scale-invariant only together; "
        f"leave the bias out (bias=False) where a normalisation follows. Otherwise {causes}"
    )
