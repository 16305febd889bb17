"""Samples of a run -> summaries and findings that a person can act on.

- `diagnose`: every check of a run, most serious findings first; `summarise_and_diagnose`: the summaries as well.
- `summary`: one summary per layer, over its last samples.
- `siblings`: layers of one kind across the blocks of a network, and those unlike their siblings.
- `outliers`: findings about tensors unlike their siblings.
- `invariance`: whether a weight looks scale-invariant, without `symmetries`.
- `layers`: the evidence about one layer, with a number for every assumption of the predictions.
- `equilibrium`: findings about layers far from equilibrium, disturbed by a change, or without one.
- `assumptions`: findings about predictions that fail, and why.
- `gradient_size`: whether gradients vary widely in size, for reports and forecasts.
- `noise`: gradient noise scale, curvature along the step and turning over many steps; a finding about the batch size.
- `faults`: findings about faults in training or measuring.
- `spikes`: findings about a loss, a gradient or an lr that jumps, and what came first.
- `divergence`: whether training diverged.
- `identities`: checks of the measurement that hold for any gradients.
- `sharpness`: findings about the queries of a sharpness tracker.
- `run`, `series`, `metadata`: the sample table and the metadata of a run, as the others read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from equilibria.diagnosis import assumptions, equilibrium, faults, noise, spikes
from equilibria.diagnosis.identities import check_run
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.layers import Layer, layers_of
from equilibria.diagnosis.outliers import outliers
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import Series
from equilibria.diagnosis.summary import summarise_run
from equilibria.errors import described
from equilibria.findings import Finding, Findings, warnings_first

__all__ = ["diagnose", "summarise_and_diagnose"]

_Evidence = TypeVar("_Evidence", SampledRun, Series, list[Layer])


def diagnose(samples: pa.Table, *, metadata: Mapping[str, Any], metrics: pa.Table | None = None) -> Findings:
    """Check a run and return its findings, warnings first; layers that share a problem share one finding.

    Args:
        samples: the sample table of a monitor or of a recorded run.
        metadata: the metadata of the run.
        metrics: the numbers that the training logged; None if it logged none.

    Returns:
        The findings; none for a run in which every layer turns as predicted.
    """
    return summarise_and_diagnose(samples, metadata=metadata, metrics=metrics)[1]


def summarise_and_diagnose(
    samples: pa.Table, *, metadata: Mapping[str, Any], metrics: pa.Table | None = None
) -> tuple[tuple[LayerSummary, ...], Findings]:
    """The summaries of `summarise` and the findings of `diagnose`, which need the summaries too."""
    return diagnose_run(sampled_run(samples, metadata=metadata, metrics=metrics))


def diagnose_run(run: SampledRun) -> tuple[tuple[LayerSummary, ...], Findings]:
    """`summarise_and_diagnose` of a run whose samples are sorted already."""
    if not run.series.names:
        return (), Findings()
    series, summaries = run.series, summarise_run(run)
    layers = layers_of(run, summaries)

    def identities_fail(layers: list[Layer]) -> Iterable[Finding]:
        return faults.failed_identities(check_run(run), layers)

    def vanishing_gradient(layers: list[Layer]) -> Iterable[Finding]:
        return assumptions.vanishing_gradient(layers, run.loss)

    def unlike_siblings(run: SampledRun) -> Iterable[Finding]:
        return outliers(run, summaries)

    def varying_gradient(layers: list[Layer]) -> Iterable[Finding]:
        return assumptions.varying_gradient(layers, run.loss)

    jumps = _guarded(spikes.spikes, run)
    not_finite = _guarded(faults.not_finite, series)
    # Of a run that is over nobody wants to read that a layer gets to its equilibrium by itself.
    steady = [] if any(finding.kind in faults.OVER for finding in (*not_finite, *jumps)) else layers
    findings = [
        *not_finite,
        *_guarded(faults.loss_not_finite, run),
        *_guarded(faults.lr_is_zero, series),
        *_guarded(faults.zero_gradient, run),
        *_guarded(faults.skipped, run),
        *_guarded(faults.angle_not_delivered, run),
        *jumps,
        *(_guarded(unlike_siblings, run) if steady else ()),
        *_guarded(equilibrium.decay_missing, steady),
        *_guarded(assumptions.rounded_away, layers),
        *_guarded(vanishing_gradient, steady),
        *_guarded(equilibrium.disturbed, steady),
        *_guarded(equilibrium.out_of_equilibrium, steady),
        *_guarded(assumptions.radial_gradient, steady),
        *_guarded(faults.too_few_samples, steady),
        *_guarded(assumptions.angle_off, steady),
        *_guarded(assumptions.norm_off, steady),
        *_guarded(equilibrium.weights_changed_outside, layers),
        *_guarded(identities_fail, layers),
        *_guarded(assumptions.drifting, steady),
        *_guarded(assumptions.correlated, steady),
        *_guarded(varying_gradient, steady),
        *_guarded(equilibrium.oscillating, steady),
        *(_guarded(noise.batch_size, run) if steady else ()),
        *_guarded(faults.without_gradient, series),
        *_guarded(faults.removed, series),
        *_guarded(faults.without_law, layers),
    ]
    return summaries, warnings_first(findings)


def _guarded(check: Callable[[_Evidence], Iterable[Finding]], evidence: _Evidence) -> tuple[Finding, ...]:
    """The findings of a check; a defect in one check becomes a finding and does not cost the run its report."""
    try:
        findings = tuple(check(evidence))
        return tuple(finding if finding.kind else replace(finding, kind=check.__name__) for finding in findings)
    except Exception as error:
        return (
            Finding(
                "note",
                f"the check {check.__name__!r} failed",
                described(error),
                "nothing to do: all other findings and all numbers are valid. This is a defect of equilibria; please "
                "report it",
                "",
                kind=f"{check.__name__} failed",
            ),
        )
