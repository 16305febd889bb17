"""Measured against predicted: findings a person can act on.

- `layers`: the evidence about one layer, with a number for every assumption of the predictions.
- `balance`: layers that are not where lr and weight decay will take them.
- `changes`: what a change of the settings or of the weights did.
- `assumptions`: predictions that fail, and why.
- `invariance`: weights that are scale-invariant only nearly, partly, or for a part of the run.
- `faults`: what went wrong in training or measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from equilibria.diagnosis import assumptions, balance, changes, faults, invariance
from equilibria.diagnosis.layers import Layer
from equilibria.diagnosis.self_checks import self_checks
from equilibria.diagnosis.series import Series, by_parameter, jumps, last_true, steps_taken
from equilibria.diagnosis.summary import summarise
from equilibria.findings import Finding

__all__ = ["diagnose"]

_Evidence = TypeVar("_Evidence", Series, list[Layer])


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

    def measurement_balances(layers: list[Layer]) -> Iterable[Finding]:
        return faults.failed_checks(self_checks(samples, metadata=metadata), layers)

    found = [
        *_guarded(faults.not_finite, everything),
        *_guarded(faults.skipped, everything),
        *_guarded(balance.decay_missing, layers),
        *_guarded(assumptions.rounded_away, layers),
        *_guarded(assumptions.near_interpolation, layers),
        *_guarded(changes.disturbed, layers),
        *_guarded(balance.out_of_equilibrium, layers),
        *_guarded(invariance.radial_gradient, layers),
        *_guarded(invariance.flipped, layers),
        *_guarded(invariance.partly_invariant, layers),
        *_guarded(faults.too_few_samples, layers),
        *_guarded(assumptions.angle_off, layers),
        *_guarded(assumptions.norm_off, layers),
        *_guarded(changes.changed_outside, layers),
        *_guarded(measurement_balances, layers),
        *_guarded(assumptions.drifting, layers),
        *_guarded(assumptions.correlated, layers),
        *_guarded(balance.oscillating, layers),
        *_guarded(faults.without_gradient, everything),
        *_guarded(faults.without_law, layers),
    ]
    return tuple(sorted(found, key=lambda finding: finding.severity != "warning"))


def _guarded(check: Callable[[_Evidence], Iterable[Finding]], evidence: _Evidence) -> tuple[Finding, ...]:
    """What a check finds; where it fails, that: a defect in one check must not cost a run its report."""
    try:
        return tuple(check(evidence))
    except Exception as error:
        return (
            Finding(
                "note",
                f"the check {check.__name__!r} failed",
                f"{type(error).__name__}: {error}",
                "nothing to do: all other findings and all numbers stand. This is a defect of equilibria; please "
                "report it",
                "",
            ),
        )
