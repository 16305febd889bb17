"""A run as all checks read it: its samples sorted once, with what the metadata know about every parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.invariance import decay_in_force, looks_invariant
from equilibria.diagnosis.metadata import entries_by_name, rules_from_metadata
from equilibria.diagnosis.series import SETTINGS, Array, Series, by_parameter, steps_taken
from equilibria.records._metrics import metric_series
from equilibria.theory.rules import Rule

_TRAINING_LOSS = ("loss", "train_loss", "train/loss", "training_loss", "loss/train")


@dataclass(frozen=True, slots=True, eq=False)
class SampledRun:
    """The samples and the metadata of a run.

    Attributes:
        series: all samples.
        taken: those of steps that were taken.
        entries: for each parameter its entry in the metadata, {} if there is none.
        rules: for each parameter the rule with the settings of its last step, None where there is no law.
        invariant: for each parameter whether it is scale-invariant by its label or, without one, looks so; None where
            that is undecided or unknown.
        metadata: of the run.
        metrics: by name, the steps and values of the numbers that the training logged, sorted by step.
    """

    series: Series
    taken: Series
    entries: list[Mapping[str, Any]]
    rules: list[Rule | None]
    invariant: list[bool | None]
    metadata: Mapping[str, Any]
    metrics: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)

    @property
    def loss(self) -> tuple[Array, Array] | None:
        """Steps and values of the training loss, without those that are not finite; None if it was not logged."""
        if self.logged_loss is None:
            return None
        steps, values = self.logged_loss
        finite = np.isfinite(values)
        return steps[finite], values[finite]

    @property
    def logged_loss(self) -> tuple[Array, Array] | None:
        """Steps and values of the training loss as they were logged; None if it was not."""
        return next((self.metrics[name] for name in _TRAINING_LOSS if name in self.metrics), None)


def sampled_run(samples: pa.Table, *, metadata: Mapping[str, Any], metrics: pa.Table | None = None) -> SampledRun:
    """Sort the sample table of a run and look up its parameters.

    Raises:
        EquilibriaError: if a column of the sample table is missing.
    """
    series = by_parameter(samples, metadata=metadata)
    logged = {} if metrics is None else metric_series(metrics)
    if not series.names:
        return SampledRun(series, series, [], [], [], metadata, logged)
    taken, described = steps_taken(series), entries_by_name(metadata)
    entries = [described.get(name, {}) for name in series.names]
    present = zip(*(taken.last(name).tolist() for name in SETTINGS), strict=True)
    rules = rules_from_metadata(entries, present)
    return SampledRun(series, taken, entries, rules, invariance(taken, entries), metadata, logged)


def invariance(taken: Series, entries: Sequence[Mapping[str, Any]]) -> list[bool | None]:
    """Whether each parameter is scale-invariant by its label or, without one, looks so; None where unknown."""
    labels: list[bool | None] = [entry.get("invariant") for entry in entries]
    sizes = np.array([float(entry.get("entries", 0)) for entry in entries])
    unlabelled = [label is None and size > 0 for label, size in zip(labels, sizes.tolist(), strict=True)]
    per_row = {name: taken.columns[name] for name in (*SETTINGS, "grad_norm", "norm")}
    decay = np.full(taken.first[-1], np.nan)
    for described in {_of_decay(entry) for entry in entries}:
        rows = np.repeat([_of_decay(entry) == described for entry in entries], taken.counts)
        columns = {name: values[rows] for name, values in per_row.items()}
        decay[rows] = decay_in_force(dict(described), **columns, entries=np.repeat(sizes, taken.counts)[rows])
    known = taken.only(cosine=taken.columns["cosine"], decay=decay)
    known = known.where(np.isfinite(known.columns["cosine"]) & np.isfinite(decay))
    for positions, (cosine, decays) in known.blocks("cosine", "decay"):
        verdicts = looks_invariant(cosine, decays, entries=sizes[positions])
        for position, verdict in zip(positions.tolist(), verdicts.tolist(), strict=True):
            if unlabelled[position] and verdict == verdict:
                labels[position] = verdict == 1
    return labels


def _of_decay(entry: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What the decay in force depends on beside the settings."""
    rule = entry.get("rule") or {}
    measured = tuple((rule.get("decay") or {}).items())
    return (*((name, rule.get(name)) for name in ("kind", "dampening")), ("decay", measured))
