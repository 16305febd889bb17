"""Which layers turn as predicted, in words: for the headline of a page and of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from equilibria.measure.samples import APPROACHING, DISTURBED, NO_EQUILIBRIUM, SETTLED
from equilibria.measure.summary import LayerSummary
from equilibria.pages.words import full_stop

TOLERANCE = 0.05
"""How far measured / predicted may be from 1 to count as predicted."""

STATE_MARKS = {SETTLED: "✓", APPROACHING: "→", DISTURBED: "!", NO_EQUILIBRIUM: "–"}
"""A sign for every state, for those who do not see its colour."""


def worst_first(layers: Sequence[LayerSummary]) -> list[LayerSummary]:
    """Sorted by how wrong the prediction is; layers without one last, in their own order."""
    return sorted(layers, key=lambda layer: -1.0 if layer.how_wrong is None else layer.how_wrong, reverse=True)


def as_predicted(layer: LayerSummary) -> bool | None:
    """Whether the measured angle is within the tolerance of the predicted one; None where nothing is predicted."""
    ratio = layer.angle_vs_predicted
    return None if ratio is None else abs(ratio - 1) <= TOLERANCE


def headline(layers: Sequence[LayerSummary]) -> str:
    """How many layers turn as predicted, without a full stop.

    Example:
        >>> headline([])
        'Nothing was measured yet'
    """
    if not layers:
        return "Nothing was measured yet"
    verdicts = [as_predicted(layer) for layer in layers]
    compared, good = sum(verdict is not None for verdict in verdicts), sum(verdict is True for verdict in verdicts)
    if compared == 0:
        return f"{_count(len(layers))} measured; there is no prediction to compare with"
    without = len(layers) - compared
    rest = f"; for {without:,} there is no prediction" if without else ""
    if good == compared:
        which = {1: "The layer", 2: "Both layers"}.get(compared, f"All {compared:,} layers")
        return f"{which} {_turn(compared)} as predicted{rest}"
    return f"{good} of {_count(compared)} {_turn(good)} as predicted{rest}"


def _turn(count: int) -> str:
    return "turns" if count == 1 else "turn"


def _count(count: int) -> str:
    return "1 layer" if count == 1 else f"{count:,} layers"


def without_findings(layers: Sequence[LayerSummary]) -> tuple[str, str]:
    """What there is to say when nothing was found, as title and sentence: true also where little was compared."""
    verdicts = [as_predicted(layer) for layer in layers]
    compared, off = sum(verdict is not None for verdict in verdicts), verdicts.count(False)
    if compared == 0:
        reasons = "; ".join(dict.fromkeys(map(_why_not_compared, layers)))
        return "Nothing could be compared", full_stop(f"No layer has a prediction: {reasons}")
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
        return " ".join(["Angles and norms are shown as measured.", *map(full_stop, reasons)])
    lead = "The one that is furthest off: " if len(layers) > 1 else ""
    return f"{lead}{first.sentence}"
