"""The verdict on a run in words: how many layers turn as predicted, and which one is furthest off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equilibria.diagnosis.summary import LEAST_WINDOW, LayerSummary
from equilibria.findings import counted, percent
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, SETTLING
from equilibria.views.words import full_stop

TOLERANCE = 0.05
"""How far measured / predicted may be from 1 to count as predicted."""

STATE_MARKS = {SETTLED: "✓", SETTLING: "→", DISTURBED: "!", NO_EQUILIBRIUM: "–"}
"""A sign for every state, for readers who do not see its colour."""

_NEEDS_INVARIANCE = (
    "The laws are for weights whose size does not matter because a normalisation follows (BatchNorm, LayerNorm or "
    "GroupNorm behind a convolution or linear layer without a bias, QK-norm in attention); equilibria.symmetries shows "
    "how each parameter is invariant, alone or together with others."
)


def worst_first(layers: Sequence[LayerSummary]) -> list[LayerSummary]:
    """Layers sorted by the error of their prediction; those without one last, in their own order."""
    return sorted(layers, key=lambda layer: -1.0 if layer.how_wrong is None else layer.how_wrong, reverse=True)


def as_predicted(layer: LayerSummary) -> bool | None:
    """Whether the measured angle is the predicted one; False only where a finding says so, None if unsure.

    Unsure is a layer without a prediction, with too few samples, or off by more than the tolerance but not by more than
    chance.
    """
    if layer.angle_vs_predicted is None or layer.few:
        return None
    return False if layer.surely_off else True if _is_near(layer) else None


def _is_near(layer: LayerSummary) -> bool:
    return layer.angle_vs_predicted is not None and abs(layer.angle_vs_predicted - 1) <= TOLERANCE


def run_headline(layers: Sequence[LayerSummary]) -> str:
    """How many layers have a prediction and turn as predicted, without a full stop.

    Example:
        >>> run_headline([])
        'Nothing was measured yet'
    """
    if not layers:
        return "Nothing was measured yet"
    compared = [layer for layer in layers if layer.angle_vs_predicted is not None]
    if not compared:
        return _without_prediction(layers)
    verdicts = _verdicts(compared)
    if len(compared) < len(layers):
        verb = "has" if len(compared) == 1 else "have"
        lead = f"{len(compared):,} of {counted(len(layers), 'layer')} {verb} a prediction"
        return f"{lead}; {', '.join(_clause(group, phrase, len(compared)) for group, phrase in verdicts)}"
    (first, phrase), *others = verdicts
    which = _all(len(compared)) if not others else f"{len(first):,} of {len(compared):,} layers"
    rest = [f"{len(group):,} {phrase(group)}" for group, phrase in others]
    verdict = phrase(first) if phrase is not _agree else f"{'turns' if len(first) == 1 else 'turn'} as predicted"
    return "; ".join([f"{which} {verdict}", *rest])


Phrase = Callable[[Sequence[LayerSummary]], str]


def _verdicts(compared: Sequence[LayerSummary]) -> list[tuple[list[LayerSummary], Phrase]]:
    """The layers by verdict, each with a phrase that follows their number; verdicts without layers are left out."""
    few = [layer for layer in compared if layer.few]
    unsure = [layer for layer in compared if as_predicted(layer) is None and not layer.few]
    verdicts: list[tuple[list[LayerSummary], Phrase]] = [
        ([layer for layer in compared if as_predicted(layer)], _agree),
        ([layer for layer in compared if as_predicted(layer) is False], _off),
        (unsure, _maybe_off),
        (few, lambda layers: f"{'has' if len(layers) == 1 else 'have'} too few samples to judge"),
    ]
    return [(layers, phrase) for layers, phrase in verdicts if layers]


def _agree(layers: Sequence[LayerSummary]) -> str:
    return "agrees" if len(layers) == 1 else "agree"


def _off(layers: Sequence[LayerSummary]) -> str:
    distance = _distance(worst_first(layers)[0].angle_vs_predicted or 0.0)
    return f"is {distance}" if len(layers) == 1 else f"are off (worst: {distance})"


def _maybe_off(layers: Sequence[LayerSummary]) -> str:
    off, why = _off(layers), "too few samples to be sure"
    return f"{off[:-1]}; {why})" if off.endswith(")") else f"{off} ({why})"


def _distance(ratio: float) -> str:
    """How far measured / predicted is from 1.

    Example:
        >>> _distance(1.12), _distance(0.8), _distance(2.5), _distance(0.01), _distance(0.0)
        ('12 % fast', '20 % slow', '2.5x too fast', '100x too slow', 'not turning')
    """
    if ratio == 0:
        return "not turning"
    if 0.5 < ratio < 2:
        return f"{percent(abs(ratio - 1))} {'fast' if ratio > 1 else 'slow'}"
    return f"{ratio:.3g}x too fast" if ratio > 1 else f"{1 / ratio:.3g}x too slow"


def _clause(group: Sequence[LayerSummary], phrase: Phrase, compared: int) -> str:
    """One verdict after the number of layers with a prediction."""
    if len(group) < compared:
        return f"{len(group):,} {phrase(group)}"
    which = {1: "it", 2: "both"}.get(compared, "all")
    return f"{which} {phrase(group)}"


def _all(count: int) -> str:
    return {1: "The layer", 2: "Both layers"}.get(count, f"All {count:,} layers")


def _without_prediction(layers: Sequence[LayerSummary]) -> str:
    if all(layer.invariant is False and layer.no_law is None for layer in layers):
        none = "The layer is not" if len(layers) == 1 else f"None of {len(layers):,} layers is"
        return f"{none} scale-invariant, so there is no prediction"
    return f"{counted(len(layers), 'layer')} measured; there is no prediction to compare with"


def worst_layer(layers: Sequence[LayerSummary]) -> str:
    """The sentence of the layer that is furthest off its prediction, or advice if no layer has one."""
    if not layers:
        return "The run has no samples: train a few steps with the monitor on, then make the report again."
    first = worst_first(layers)[0]
    if first.how_wrong is None:
        reasons = sorted({layer.no_law for layer in layers if layer.no_law})[:3]
        advice = [] if reasons or not all(layer.invariant is False for layer in layers) else [_NEEDS_INVARIANCE]
        return " ".join(["Angles and norms are shown as measured.", *map(full_stop, reasons), *advice])
    return f"Furthest off: {first.sentence}" if len(layers) > 1 else first.sentence


def no_findings(layers: Sequence[LayerSummary]) -> tuple[str, str]:
    """Title and sentence of a report without findings; true also where little could be compared."""
    compared = [layer for layer in layers if layer.angle_vs_predicted is not None]
    off = sum(not _is_near(layer) for layer in compared)
    if not compared:
        reasons = "; ".join(dict.fromkeys(map(_why_not_compared, layers)))
        return "Nothing could be compared", full_stop(f"No layer has a prediction: {reasons}")
    if all(layer.few for layer in compared):
        return (
            "Too early to judge",
            f"A verdict takes {LEAST_WINDOW} samples of a layer, or more where its angles scatter.",
        )
    if off:
        return "Nothing is clearly wrong", (
            f"{counted(off, 'layer')} of {len(compared):,} {'is' if off == 1 else 'are'} more than "
            f"{percent(TOLERANCE)} off the prediction, but with so few samples that may be chance."
        )
    return "Nothing to change", "Nothing about this run calls for a change."


def _why_not_compared(layer: LayerSummary) -> str:
    if layer.no_law is not None:
        return layer.no_law
    if layer.angle is None:
        return "no sampled step moved the weights"
    if layer.invariant is False:
        return "the weights are not scale-invariant"
    if layer.invariant is None and layer.mean_cosine is not None:
        return "whether the weights are scale-invariant is undecided"
    return "the samples hold no prediction"
