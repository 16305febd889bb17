"""A run as all checks read it: its samples sorted once, with what the metadata know about every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from equilibria.diagnosis.metadata import entries_by_name, rules_from_metadata
from equilibria.diagnosis.series import SETTINGS, Array, Series, by_parameter, steps_taken
from equilibria.theory.rules import Rule


@dataclass(frozen=True, slots=True, eq=False)
class SampledRun:
    """The samples and the metadata of a run.

    Attributes:
        series: all samples.
        taken: those of steps that were taken.
        entries: for each parameter its entry in the metadata, {} if there is none.
        rules: for each parameter the rule with the settings of its last step, None where there is no law.
        metadata: of the run.
        metrics: the logged numbers by name: their steps, sorted, and their values; {} if there are none.
    """

    series: Series
    taken: Series
    entries: list[Mapping[str, Any]]
    rules: list[Rule | None]
    metadata: Mapping[str, Any]
    metrics: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)


def sampled_run(samples: pa.Table, *, metadata: Mapping[str, Any]) -> SampledRun:
    """Sort the sample table of a run and look up its parameters.

    Raises:
        EquilibriaError: if a column of the sample table is missing.
    """
    series = by_parameter(samples, metadata=metadata)
    if not series.names:
        return SampledRun(series, series, [], [], metadata)
    taken, described = steps_taken(series), entries_by_name(metadata)
    entries = [described.get(name, {}) for name in series.names]
    present = zip(*(taken.last(name).tolist() for name in SETTINGS), strict=True)
    return SampledRun(series, taken, entries, rules_from_metadata(entries, present), metadata)
