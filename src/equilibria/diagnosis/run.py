"""A run as all checks read it: its samples sorted once, with what the metadata know about every parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.invariance import decay_in_force, looks_invariant
from equilibria.diagnosis.metadata import entries_by_name, rules_from_metadata
from equilibria.diagnosis.series import SETTINGS, Array, Series, by_parameter, steps_taken
from equilibria.diagnosis.siblings import is_plain_sequence, is_row_kind, kind_key, kind_of
from equilibria.records._metrics import metric_series
from equilibria.theory.rules import Muon, Rule

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
            that is undecided or unknown. Tensors of one kind across blocks are decided together, once each of them is.
        looks: the same of each parameter by itself.
        metadata: of the run.
        metrics: by name, the steps and values of the numbers that the training logged, sorted by step.
    """

    series: Series
    taken: Series
    entries: list[Mapping[str, Any]]
    rules: list[Rule | None]
    invariant: list[bool | None]
    looks: list[bool | None]
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
        """Steps and values of the training loss as they were logged; None if there is none, or one of several."""
        usual = next((self.metrics[name] for name in _TRAINING_LOSS if name in self.metrics), None)
        return usual or (next(iter(self.losses.values())) if len(self.losses) == 1 else None)

    @property
    def losses(self) -> dict[str, tuple[Array, Array]]:
        """The logged numbers whose names say that they are losses of the training."""
        return {name: series for name, series in self.metrics.items() if _is_training_loss(name)}


def _is_training_loss(name: str) -> bool:
    words = re.split(r"[^a-z]+", name.lower())
    of_training = not {"val", "valid", "validation", "test", "eval", "dev"}.intersection(words)
    return of_training and any(word.startswith("loss") or word.endswith("loss") for word in words)


def sampled_run(samples: pa.Table, *, metadata: Mapping[str, Any], metrics: pa.Table | None = None) -> SampledRun:
    """Sort the sample table of a run and look up its parameters.

    Raises:
        EquilibriaError: if a column of the sample table is missing.
    """
    series = by_parameter(samples, metadata=metadata)
    logged = {} if metrics is None else metric_series(metrics)
    if not series.names:
        return SampledRun(series, series, [], [], [], [], metadata, logged)
    taken, described = steps_taken(series), entries_by_name(metadata)
    entries = [described.get(name, {}) for name in series.names]
    present = zip(*(taken.last(name).tolist() for name in SETTINGS), strict=True)
    rules = rules_from_metadata(entries, present)
    looks = invariance(taken, entries)
    return SampledRun(
        series, taken, entries, rules, _with_siblings(looks, series.names, entries), looks, metadata, logged
    )


def invariance(taken: Series, entries: Sequence[Mapping[str, Any]]) -> list[bool | None]:
    """Whether each parameter is scale-invariant by its label or, without one, looks so; None where unknown."""
    labels: list[bool | None] = [entry.get("invariant") for entry in entries]
    sizes = np.array([float(entry.get("entries", 0)) for entry in entries])
    unlabelled = [label is None and size > 0 for label, size in zip(labels, sizes.tolist(), strict=True)]
    decay = decays(taken, entries)
    known = taken.only(cosine=taken.columns["cosine"], decay=decay)
    known = known.where(np.isfinite(known.columns["cosine"]) & np.isfinite(decay))
    for positions, (cosine, in_force) in known.blocks("cosine", "decay"):
        orthogonal = [(entries[position].get("rule") or {}).get("kind") == Muon.__name__ for position in positions]
        in_force = np.where(np.array(orthogonal)[:, np.newaxis], 0.0, in_force)
        verdicts = looks_invariant(cosine, in_force, entries=sizes[positions])
        for position, verdict in zip(positions.tolist(), verdicts.tolist(), strict=True):
            if unlabelled[position] and verdict == verdict:
                labels[position] = verdict == 1
    return labels


def _with_siblings(
    looks: Sequence[bool | None], names: Sequence[str], entries: Sequence[Mapping[str, Any]]
) -> list[bool | None]:
    """The verdicts, but undecided as long as one sibling in another block is: twins get theirs together.

    A verdict once given stays. Siblings that are all decided, and differently, do differ. Labelled tensors, rows and
    the layers of a plain sequence are no siblings.
    """
    kinds = [
        None
        if entry.get("invariant") is not None or is_plain_sequence(kind := kind_of(name)) or is_row_kind(kind)
        else kind_key(name, tuple(entry["shape"]) if "shape" in entry else None)
        for name, entry in zip(names, entries, strict=True)
    ]
    undecided = {kind for kind, verdict in zip(kinds, looks, strict=True) if verdict is None and kind is not None}
    return [None if kind in undecided else verdict for kind, verdict in zip(kinds, looks, strict=True)]


def decays(series: Series, entries: Sequence[Mapping[str, Any]]) -> Array:
    """The decay in force of every row."""
    per_row = {name: series.columns[name] for name in (*SETTINGS, "grad_norm", "norm")}
    per_row["entries"] = np.repeat([float(entry.get("entries", 0)) for entry in entries], series.counts)
    decay = np.full(series.first[-1], np.nan)
    for described in {_of_decay(entry) for entry in entries}:
        rows = np.repeat([_of_decay(entry) == described for entry in entries], series.counts)
        decay[rows] = decay_in_force(dict(described), **{name: values[rows] for name, values in per_row.items()})
    return decay


def _of_decay(entry: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What the decay in force depends on beside the settings."""
    rule = entry.get("rule") or {}
    measured = tuple((rule.get("decay") or {}).items())
    return (*((name, rule.get(name)) for name in ("kind", "dampening")), ("decay", measured))
