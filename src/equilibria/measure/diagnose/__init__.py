"""Measured against predicted: findings a person can act on.

- `layers`: the evidence about one layer, with a number for every assumption of the predictions.
- `balance`: layers that are not where lr and weight decay will take them.
- `changes`: what a change of the settings or of the weights did.
- `assumptions`: predictions that fail, and why.
- `invariance`: weights that are scale-invariant only nearly, partly, or for a part of the run.
- `faults`: what went wrong in training or measuring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from equilibria.findings import Finding
from equilibria.measure.diagnose import assumptions, balance, changes, faults, invariance
from equilibria.measure.diagnose.layers import Layer
from equilibria.measure.selfcheck import self_checks
from equilibria.measure.series import by_parameter, jumps, last_true, steps_taken
from equilibria.measure.summary import summarise

__all__ = ["diagnose"]


def diagnose(samples: pa.Table, *, metadata: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What is worth knowing about a run, most serious first; many layers with one trouble make one finding.

    Args:
        samples: the sample table, of a monitor or of a recorded run.
        metadata: the metadata of the run.

    Returns:
        The findings; none for a run in which every layer does as predicted.
    """
    everything = by_parameter(samples, metadata=metadata)
    if not everything.names:
        return ()
    taken = steps_taken(everything)
    entries = {entry["name"]: entry for entry in metadata.get("params", ())}
    since = last_true(taken, jumps(taken)) - taken.first[:-1]
    layers = [
        Layer(summary, entries.get(summary.name, {}), taken.of(position), int(since[position]))
        for position, summary in enumerate(summarise(samples, metadata=metadata))
    ]
    found = [
        *faults.not_finite(everything),
        *faults.skipped(everything),
        *balance.decay_missing(layers),
        *assumptions.rounded_away(layers),
        *assumptions.near_interpolation(layers),
        *changes.disturbed(layers),
        *balance.out_of_equilibrium(layers),
        *invariance.radial_gradient(layers),
        *invariance.flipped(layers),
        *invariance.partly_invariant(layers),
        *faults.too_few_samples(layers),
        *assumptions.angle_off(layers),
        *assumptions.norm_off(layers),
        *changes.changed_outside(layers),
        *faults.failed_checks(self_checks(samples, metadata=metadata), layers),
        *assumptions.drifting(layers),
        *assumptions.correlated(layers),
        *balance.oscillating(layers),
        *faults.without_gradient(everything),
        *faults.without_law(layers),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))
