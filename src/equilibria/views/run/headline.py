"""Which layers turn as predicted, in words: for the headline of a page and of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from equilibria.diagnosis.summary import LEAST_WINDOW, LayerSummary
from equilibria.records.tables import DISTURBED, NO_EQUILIBRIUM, SETTLED, SETTLING
from equilibria.views.words import full_stop

TOLERANCE = 0.05
"""How far measured / predicted may be from 1 to count as predicted."""

STATE_MARKS = {SETTLED: "✓", SETTLING: "→", DISTURBED: "!", NO_EQUILIBRIUM: "–"}
"""A sign for every state, for those who do not see its colour."""


_NEEDS_INVARIANCE = (
    "The laws are for weights whose size does not matter because a normalisation follows (BatchNorm, LayerNorm or "
    "GroupNorm behind a convolution or linear layer without a bias, QK-norm in attention); equilibria.symmetries shows "
    "how each parameter is invariant, alone or together with others."
)


def worst_first(layers: Sequence[LayerSummary]) -> list[LayerSummary]:
    """Sorted by how wrong the prediction is; layers without one last, in their own order."""
    return sorted(layers, key=lambda layer: -1.0 if layer.how_wrong is None else layer.how_wrong, reverse=True)


def as_predicted(layer: LayerSummary) -> bool | None:
    """Whether the measured angle is the predicted one: False only where a finding would say so, None if unsure.

    Unsure is a layer without a prediction, with too few samples, or off by more than the tolerance but not by more than
    chance.
    """
    if layer.angle_vs_predicted is None or layer.few:
        return None
    return False if layer.surely_off else True if _is_near(layer) else None


def _is_near(layer: LayerSummary) -> bool:
    return layer.angle_vs_predicted is not None and abs(layer.angle_vs_predicted - 1) <= TOLERANCE


def headline(layers: Sequence[LayerSummary]) -> str:
    """How many layers turn as predicted, without a full stop.

    Example:
        >>> headline([])
        'Nothing was measured yet'
    """
    if not layers:
        return "Nothing was measured yet"
    compared = [layer for layer in layers if layer.angle_vs_predicted is not None]
    if not compared:
        return _without_prediction(layers)
    verdicts = [as_predicted(layer) for layer in compared]
    unsure, without = verdicts.count(None), len(layers) - len(compared)
    few = sum(layer.few for layer in compared)
    rest = f"; for {without:,} more there is no prediction" if without else ""
    if few == len(compared):
        return f"Too few samples to judge {_which(few)}{rest}"
    doubt = f"; for {few:,} there are too few samples to judge" if few else ""
    doubt += f"; {unsure - few:,} may be off by chance" if unsure > few else ""
    return f"{_how_many(verdicts.count(True), verdicts.count(False), len(compared))} as predicted{doubt}{rest}"


def _how_many(good: int, off: int, compared: int) -> str:
    if good == compared:
        which = _which(compared)
        return f"{which[0].upper()}{which[1:]} {_turn(compared)}"
    if good == 0 and off == 0:
        return f"No layer of {compared:,} is sure to turn" if compared > 1 else "The layer is not sure to turn"
    if good == 0 and off < compared:
        return f"{off:,} of {_count(compared)} {'does' if off == 1 else 'do'} not turn"
    if good == 0:
        return "The layer does not turn" if compared == 1 else f"None of {_count(compared)} turns"
    return f"{good:,} of {_count(compared)} {_turn(good)}"


def _which(count: int) -> str:
    return {1: "the layer", 2: "both layers"}.get(count, f"all {count:,} layers")


def _without_prediction(layers: Sequence[LayerSummary]) -> str:
    if all(layer.invariant is False and layer.no_law is None for layer in layers):
        none = "The layer is not" if len(layers) == 1 else f"None of {_count(len(layers))} is"
        return f"{none} scale-invariant, so that no prediction is made"
    return f"{_count(len(layers))} measured; there is no prediction to compare with"


def _turn(count: int) -> str:
    return "turns" if count == 1 else "turn"


def _count(count: int) -> str:
    return "1 layer" if count == 1 else f"{count:,} layers"


def without_findings(layers: Sequence[LayerSummary]) -> tuple[str, str]:
    """What there is to say when nothing was found, as title and sentence: true also where little was compared."""
    judged = [layer for layer in layers if layer.angle_vs_predicted is not None]
    compared, off = len(judged), sum(not _is_near(layer) for layer in judged)
    if compared == 0:
        reasons = "; ".join(dict.fromkeys(map(_why_not_compared, layers)))
        return "Nothing could be compared", full_stop(f"No layer has a prediction: {reasons}")
    if all(layer.few for layer in judged):
        return (
            "Too early to judge",
            f"A verdict takes {LEAST_WINDOW} samples of a layer since its settings last jumped.",
        )
    if off:
        return "Nothing is sure to be wrong", (
            f"{_count(off)} of {compared:,} {'is' if off == 1 else 'are'} more than {100 * TOLERANCE:.0f} % off the "
            "prediction, which so few samples that scatter so much do not tell from chance."
        )
    return "Nothing to change", "Nothing about this run calls for a change."


def _why_not_compared(layer: LayerSummary) -> str:
    if layer.no_law is not None:
        return layer.no_law
    if layer.angle is None:
        return "no sampled step moved the weights"
    if layer.invariant is False:
        return "the weights are not scale-invariant"
    return "the samples hold none"


def worst(layers: Sequence[LayerSummary]) -> str:
    """The sentence of the layer that is most wrong, or what to do if there is none."""
    if not layers:
        return "The run has no samples: train a few steps with the monitor on, then make the report again."
    first = worst_first(layers)[0]
    if first.how_wrong is None:
        reasons = sorted({layer.no_law for layer in layers if layer.no_law})[:3]
        advice = [] if reasons or not all(layer.invariant is False for layer in layers) else [_NEEDS_INVARIANCE]
        return " ".join(["Angles and norms are shown as measured.", *map(full_stop, reasons), *advice])
    lead = "The one that is furthest off: " if len(layers) > 1 else ""
    return f"{lead}{first.sentence}"
