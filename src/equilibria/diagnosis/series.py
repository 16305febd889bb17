"""The sample table as one series per parameter, and the rows at which its settings change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.records.tables import (
    NO_GRADIENT,
    NOT_FINITE,
    NOTES,
    NUMBERS,
    REMOVED,
    SAMPLE_FIELDS,
    SKIPPED,
    WORDS,
)

Array = NDArray[Any]

SETTINGS = ("lr", "weight_decay", "momentum")
_NO_STEP = [NOTES.index(word) for word in (SKIPPED, NOT_FINITE, NO_GRADIENT, REMOVED)]
_JUMP = 0.1  # relative change of a setting between two samples that ends a window
_ALIKE = 2  # factor between a setting and its last value up to which a sample counts as taken at the present settings
_LASTING = 10  # samples at the end of a run
_LONGER = 1.1  # factor between the steps of two samples
_ROUNDING = 1e-6  # relative, of norms and angles of float32 weights
_HUGE = 1e50  # above it, and below its inverse, squares and ratios of ratios leave the range of float64
_SIGNED = ("cosine", "momentum_unit_grad_sq", "pull", "growth", "gain")
_MAY_VANISH = ("grad_norm", "update_norm")


@dataclass(frozen=True, eq=False)
class Series:
    """Samples sorted by parameter, then step.

    Attributes:
        names: the parameters, in the order of the metadata.
        first: first row of each parameter, and the number of rows as one more entry.
        columns: ``step`` and the numbers, NaN where null; text as positions in its list of WORDS, -1 where null.
    """

    names: tuple[str, ...]
    first: Array
    columns: Mapping[str, Array]

    @property
    def counts(self) -> Array:
        """Rows of each parameter."""
        return np.diff(self.first)

    def where(self, keep: Array) -> Series:
        """The rows for which ``keep`` is true; a parameter without such rows stays, with none."""
        if keep.all():
            return self
        first = np.concatenate([[0], np.cumsum(keep)])[self.first]
        return Series(self.names, first, {name: values[keep] for name, values in self.columns.items()})

    def only(self, **columns: Array) -> Series:
        """The same rows with other columns."""
        return Series(self.names, self.first, columns)

    def of(self, position: int) -> Mapping[str, Array]:
        """The columns of one parameter, without a copy."""
        return _Rows(self.columns, slice(self.first[position], self.first[position + 1]))

    def blocks(self, *names: str) -> Iterator[tuple[Array, list[Array]]]:
        """The parameters with equally many rows together, but not those without rows.

        Most runs sample all parameters at the same steps: then there is one block, and a reduction along its second
        axis takes the place of a loop over the parameters.

        Returns:
            For each such number, the positions of the parameters, and the columns with one line per parameter.
        """
        counts = self.counts
        for count in np.unique(counts[counts > 0]).tolist():
            positions = np.flatnonzero(counts == count)
            if len(positions) * count == self.first[-1]:
                yield positions, [self.columns[name].reshape(-1, count) for name in names]
            else:
                rows = self.first[positions][:, None] + np.arange(count)
                yield positions, [self.columns[name][rows] for name in names]

    def sums(self, values: Array) -> Array:
        """Sum of ``values`` (one per row) over the rows of each parameter; 0 for one without rows."""
        total = np.add.reduceat(np.append(values, 0.0), self.first[:-1])
        return np.where(self.counts > 0, total, 0.0)

    @property
    def no_step(self) -> Array:
        """Flags the rows of steps that were not taken."""
        return np.isin(self.columns["note"], _NO_STEP)

    @property
    def weights(self) -> Array:
        """Steps that each row stands for (`sample_weights`)."""
        return sample_weights(self.columns["step"], self.first)

    @cached_property
    def last_jump(self) -> Array:
        """First row of each parameter since one of its settings last jumped (`setting_jumps`)."""
        return last_true(self, setting_jumps(self))

    @property
    def since_jump(self) -> Array:
        """Rows of each parameter since then."""
        return np.asarray(self.first[1:] - self.last_jump)

    @property
    def is_late(self) -> Array:
        """Flags the rows in the second half of those since then."""
        begin = self.last_jump + self.since_jump // 2
        return np.asarray(np.arange(self.first[-1]) >= np.repeat(begin, self.counts))

    def mean(self, values: Array, weights: Array | None = None) -> Array:
        """Mean of the known ``values`` (one per row) of each parameter, each weighted by the steps it stands for."""
        weights = np.where(np.isfinite(values), self.weights if weights is None else weights, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.sums(np.where(weights > 0, values, 0.0) * weights) / self.sums(weights))

    def last(self, name: str) -> Array:
        """The last value of each parameter, NaN for one without rows."""
        values = np.append(self.columns[name], np.nan)
        return np.where(self.counts > 0, values[self.first[1:] - 1], np.nan)


def sample_weights(step: Array, first: Array) -> Array:
    """The steps that each sample stands for: half the way to the sample before it and half the way to the next.

    Beyond the first and the last sample of a parameter it is half the way to its only neighbour, but not more than half
    the mean distance: evenly spaced samples weigh alike. No sample stands for less than one step, its own.

    Args:
        step: of every sample, sorted by parameter, then step.
        first: first row of each parameter, and the number of rows as one more entry.

    Example:
        >>> sample_weights(np.array([0, 1, 11, 21]), np.array([0, 4])).tolist()
        [1.0, 5.5, 10.0, 8.5]
    """
    if not len(step):
        return np.zeros(0)
    counts = np.diff(first)
    begin, end = first[:-1][counts > 0], first[1:][counts > 0] - 1
    before = np.diff(step, prepend=step[:1]) / 2
    after = np.append(before[1:], 0.0)
    mean = (step[end] - step[begin]) / np.maximum(end - begin, 1) / 2
    before[begin], after[end] = np.minimum(after[begin], mean), np.minimum(before[end], mean)
    return np.asarray(np.maximum(before + after, 1.0))


def effective_count(weights: Array) -> Array:
    """The number of equally weighted samples whose mean scatters as much, along the last axis: (sum w)^2 / sum w^2.

    Example:
        >>> effective_count(np.array([2.0, 2.0, 2.0])).item(), effective_count(np.array([1.0, 0.0])).item()
        (3.0, 1.0)
    """
    return np.asarray(np.sum(weights, axis=-1) ** 2 / np.sum(weights**2, axis=-1))


class _Rows(Mapping[str, Array]):
    """Some rows of some columns, sliced when they are asked for: of thousands of parameters few are looked at."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: Mapping[str, Array], rows: slice) -> None:
        self._columns, self._rows = columns, rows

    def __getitem__(self, name: str) -> Array:
        return np.asarray(self._columns[name][self._rows])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def by_parameter(samples: pa.Table, *, metadata: Mapping[str, Any]) -> Series:
    """Sort the sample table by parameter and step.

    Raises:
        EquilibriaError: if a column of the sample table is missing.
    """
    missing = [name for name in SAMPLE_FIELDS.names if name not in samples.column_names]
    if missing:
        raise EquilibriaError(
            f"got samples without {', '.join(missing)}; expected all columns of the sample table: read the run "
            "without choosing columns"
        )
    codes, words = _coded(samples["param"])
    known = {entry["name"]: position for position, entry in enumerate(metadata.get("params", ()))}
    counts = np.bincount(codes, minlength=len(words))  # a slice of a table keeps the whole dictionary
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda code: known.get(words[code], len(known) + code))
    rank = np.zeros(len(words), dtype=np.int64)
    rank[order] = np.arange(len(order))
    step = samples["step"].to_numpy()
    rows = np.lexsort((step, rank[codes]))
    columns = {name: _plausible(name, samples[name].to_numpy()[rows]) for name in NUMBERS}
    columns["step"] = step[rows]
    columns |= {name: _positions(samples[name], words)[rows] for name, words in WORDS.items()}
    first = np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int64)
    return Series(tuple(words[code] for code in order), first, columns)


def _plausible(name: str, values: Array) -> Array:
    """Replace numbers that a diverged run leaves behind, and that cannot be computed with, by NaN."""
    size = np.abs(values)
    good = (size == 0) | ((size > 1 / _HUGE) & (size < _HUGE))
    if name not in _SIGNED:
        good &= values >= 0
    if "norm" in name and name not in _MAY_VANISH:
        good &= values > 0
    return np.where(good, values, np.nan)


def _coded(column: pa.ChunkedArray) -> tuple[Array, list[str]]:
    """Encode a column of words as positions in a list of words, -1 for null."""
    if pa.types.is_dictionary(column.type):
        coded = column.unify_dictionaries().combine_chunks()
    else:
        coded = column.combine_chunks().dictionary_encode()
    return coded.indices.fill_null(-1).to_numpy(zero_copy_only=False), coded.dictionary.to_pylist()


def _positions(column: pa.ChunkedArray, words: Sequence[str]) -> Array:
    codes, dictionary = _coded(column)
    positions = np.array([*(words.index(word) if word in words else -1 for word in dictionary), -1])
    return np.asarray(positions[codes])


def steps_taken(series: Series) -> Series:
    """The rows of steps that moved the weights and were measured; a step with an lr of 0 moves nothing."""
    taken = ~series.no_step & (series.columns["lr"] != 0)
    return series.where(taken & np.isfinite(series.columns["angle"]) & np.isfinite(series.columns["norm"]))


def setting_changes(series: Series) -> Array:
    """Flag the rows where lr, weight decay or momentum differ from the row before, and each parameter's first row."""
    changed = np.any([_relative_change(series, name) != 0 for name in SETTINGS], axis=0)
    return _with_first_rows(series, changed)


def setting_jumps(series: Series) -> Array:
    """Flag the rows where lr, weight decay or momentum jump, and each parameter's first row.

    A jump is a change by more than a tenth, and by more than three times as much per step as the change in the same
    direction at the neighbouring rows: the end of a cosine or the begin of a warm-up is steep, but no jump. Nor is a
    step of a staircase, such as a cosine that moves every epoch, or a change before the last row that may have taken
    many steps.
    """
    jumped = np.zeros(series.first[-1], dtype=bool)
    gap = np.maximum(np.diff(series.columns["step"], prepend=0), 1)
    known = (gap == 1) | ~np.isin(np.arange(len(gap)), series.first[1:] - 1)
    for name in SETTINGS:
        change = _relative_change(series, name)
        sign, rate = np.sign(change), change / gap
        neighbours = np.append(0.0, rate[:-1]) * sign
        neighbours = np.maximum(neighbours, np.append(rate[1:], 0.0) * sign)
        jumps = (np.abs(change) > _JUMP) & (np.abs(rate) > 3 * neighbours) & known
        jumped |= jumps & ~_of_staircase(series, change) if jumps.any() else jumps
    return _with_first_rows(series, jumped)


def _of_staircase(series: Series, change: Array) -> Array:
    """Flag the changes that continue others in the same direction: the last, or the next, is a third as large at least.

    One of these two, or the one beyond, is by less than a factor of 2: drops by a factor of 10 are jumps however many
    follow each other.
    """
    rows = np.flatnonzero(change)
    own, param, places = change[rows], np.searchsorted(series.first, rows, side="right"), np.arange(len(rows))

    def beside(lag: int) -> Array:
        """The size of the change so many changes later, 0 if there is none or it goes the other way."""
        other = np.clip(places + lag, 0, len(rows) - 1)
        same = (other == places + lag) & (param[other] == param) & (own[other] * own > 0)
        return np.where(same, np.abs(own[other]), 0.0)

    flags = np.zeros(len(change), dtype=bool)
    for side in (-1, 1):
        near, far = beside(side), beside(2 * side)
        small = (near < 1 / _ALIKE) | ((far > 0) & (far < 1 / _ALIKE))
        flags[rows] |= (near > 0) & (3 * near >= np.abs(own)) & small
    return flags


def alike_since(series: Series) -> Array:
    """First row of each parameter since which every setting is within a factor of 2 of its last value."""
    unlike = np.zeros(series.first[-1], dtype=bool)
    for name in SETTINGS:
        values = _strength(series, name)
        last = np.repeat(np.append(values, 0.0)[series.first[1:] - 1], series.counts)
        unlike |= (values > _ALIKE * last) | (values < last / _ALIKE)
    last_unlike = np.where(series.counts > 0, last_true(series, unlike), -1)
    return np.asarray(np.maximum(last_unlike + 1, series.first[:-1]))


def _strength(series: Series, name: str) -> Array:
    """A setting, 0 where unknown; momentum as 1 - momentum, since 0.9 and 0.95 differ by a factor of 2 in effect."""
    values = series.columns[name] if name != "momentum" else 1 - series.columns[name]
    return np.asarray(np.nan_to_num(values))


def _relative_change(series: Series, name: str) -> Array:
    """Change since the row before, over the larger of the two values."""
    values = _strength(series, name)
    change = np.zeros(len(values))
    size = np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    np.divide(np.diff(values), size, out=change[1:], where=size > 0)
    change[series.first[:-1][series.counts > 0]] = 0.0
    return change


def _with_first_rows(series: Series, flags: Array) -> Array:
    flags[series.first[:-1][series.counts > 0]] = True
    return flags


def flagged_since(series: Series, flags: Array, *, moved: Array) -> Array:
    """The step of each parameter since which all its rows are flagged, 10 of them at least; NaN without any.

    Args:
        series: the rows.
        flags: which rows are flagged.
        moved: rows before which something else happened since the row before them: the rows since then count.
    """
    begin = np.maximum(np.maximum(last_true(series, ~flags) + 1, last_true(series, moved)), series.first[:-1])
    lasting = series.first[1:] - begin >= _LASTING
    return np.where(lasting, np.append(series.columns["step"], 0)[np.where(lasting, begin, -1)], np.nan)


def without_gradient_since(series: Series) -> Array:
    """The step of each parameter since which it got no gradient, for 10 samples at least; NaN if it got one.

    A parameter without a gradient does not move: a norm that changed tells of gradients between two samples.
    """
    norm = series.columns["norm"]
    changed = np.abs(norm / _before(series, norm) - 1) > _ROUNDING
    return flagged_since(series, series.columns["note"] == NOTES.index(NO_GRADIENT), moved=changed)


def zero_gradient_since(series: Series) -> Array:
    """The step of each parameter since which its gradient is exactly 0, for 10 samples at least; NaN if it is not.

    Without a gradient momentum makes ever smaller steps: larger ones tell of gradients between two samples.
    """
    angle = series.columns["angle"]
    with np.errstate(invalid="ignore", divide="ignore"):
        length = angle * series.columns["norm"] / series.columns["lr"]
        longer = (length > _LONGER * _before(series, length)) & (angle > _ROUNDING)
    return flagged_since(series, series.columns["grad_norm"] == 0, moved=longer)


def _before(series: Series, values: Array) -> Array:
    """The value in the row before each, NaN in each parameter's first row."""
    before = np.append(np.nan, values[:-1])[: len(values)]
    before[series.first[:-1][series.counts > 0]] = np.nan
    return before


def last_true(series: Series, flags: Array) -> Array:
    """The last flagged row of each parameter, -1 for one without; the first row of one that has no rows."""
    rows = np.where(flags, np.arange(len(flags)), -1)
    return np.where(
        series.counts > 0, np.maximum.reduceat(np.append(rows, -1), series.first[:-1]), series.first[:-1]
    ).astype(np.int64)
