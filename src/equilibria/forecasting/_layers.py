"""The layers of a record that can be forecast, as arrays of samples x layers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.diagnosis.assumptions import failing, predicted_layers
from equilibria.diagnosis.gradient_size import late_from, near_interpolation
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.metadata import rule_from_metadata
from equilibria.diagnosis.run import SampledRun as SortedRun
from equilibria.diagnosis.run import decays, sampled_run
from equilibria.diagnosis.series import SETTINGS
from equilibria.diagnosis.siblings import is_row_kind, kind_of
from equilibria.diagnosis.summary import summarise_run
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import counted
from equilibria.records import read_record
from equilibria.records.tables import CHANGED_OUTSIDE, GAIN_LAW, INVARIANT_LAW, NOT_FINITE, NOTES, RESCALED, SETTLED
from equilibria.theory._reals import Array
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule

Steps = NDArray[np.int64]

_VANISHED = 1e-3  # share of the record's largest ||g||^2 ||w||^2 below which a gradient has vanished
_STOPPED = 5  # sampling gaps without a sample, after which a layer no longer moves
_BETWEEN_STEPS = (NOTES.index(CHANGED_OUTSIDE), NOTES.index(RESCALED))  # samples before which a weight was changed
LEAST_SAMPLES = 20  # of a layer that are fitted; fewer do not show how far its gradients scatter
AFTER_RISE = 450  # steps after the last rise of lr from which a growth gain persists
InvariantRule: TypeAlias = SGD | SGDW | AdamW | AdamL2  # their invariant weights follow L
GainRule: TypeAlias = AdamW | Lion | Muon | Identified  # the length of their updates does not follow the gradient's

_Member: TypeAlias = tuple[str, Mapping[str, Any], Mapping[str, Any]]


class RunWithSamples(Protocol):
    """A watched or recorded run."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The watched parameters and their optimizers."""

    def samples(self) -> pa.Table:
        """The sample table."""


RunLike: TypeAlias = RunWithSamples | str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """Layers with one law, one rule and one parameter group that were sampled at the same steps.

    Attributes:
        names: the layers.
        law: `INVARIANT_LAW`, or `GAIN_LAW` for matrices by their measured growth gain.
        rule: their optimizer with the settings of the last sample.
        entries: numbers in each weight.
        step: the sampled steps.
        lr: learning rate of every sample.
        weight_decay: weight decay of every sample, as torch defines it.
        momentum: momentum of every sample; beta1 for Adam.
        decay: decay in force at every sample, samples x layers, like all below.
        norm_sq: ||w||^2 before the step.
        angle: radians of the step.
        moved_sq: ||w' - w||^2.
        plain_unit_grad_sq: N = ||g||^2 ||w||^2.
        unit_grad_sq: L of the rule: N with the correlation of gradient and momentum if it is recorded.
        changed: whether the weight changed between two steps since the previous sample: a controller rescaled it, or
            something else changed it.
        interpolating: how the logged training loss shows that the network interpolates, in words; "" if it does not,
            None if no loss was logged.
    """

    names: tuple[str, ...]
    law: str
    rule: Rule
    entries: Array
    step: Steps
    lr: Array
    weight_decay: Array
    momentum: Array
    decay: Array
    norm_sq: Array
    angle: Array
    moved_sq: Array
    plain_unit_grad_sq: Array
    unit_grad_sq: Array
    changed: NDArray[np.bool_]
    interpolating: str | None

    def since(self, step: int, *, before: int | None = None) -> Cohort:
        """The samples from a step on, up to another one."""
        end = None if before is None else int(np.searchsorted(self.step, before))
        rows = slice(int(np.searchsorted(self.step, step)), end)
        fixed = ("names", "law", "rule", "entries", "interpolating")
        series = [field.name for field in dataclasses.fields(self) if field.name not in fixed]
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in series})


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLayers:
    """All layers of a run.

    Attributes:
        cohorts: the layers that can be forecast; schedules are for the first cohort's parameter group.
        refused: the other layers, with the reason.
        failing: the assumptions of the laws that the samples of a layer contradict, as a report says them.
        settling: steps to settle at the last lr, weight decay and L, as a report says them; layers without are left
            out.
        last_step: the last sampled step.
        steps_per_epoch: None if the run does not record it.
    """

    cohorts: tuple[Cohort, ...]
    refused: Mapping[str, str]
    failing: Mapping[str, tuple[str, ...]]
    settling: Mapping[str, float]
    last_step: int
    steps_per_epoch: int | None


def read_layers(run: RunLike, *, before: int | None = None) -> RecordedLayers:
    """Read the samples of a run and sort its layers into those that can be forecast and those that cannot.

    Args:
        run: a watched run, a recorded one, or its directory.
        before: use only samples before this step.

    Raises:
        EquilibriaError: not a run, or no layer that can be forecast.
    """
    source = as_run(run)
    metadata, table, metrics = source.metadata, source.samples(), _metrics(source)
    if before is not None:
        limit = whole("start", before, low=1)
        _check_recorded(limit, np.unique(table["step"].to_numpy())[-2:])
        table, metrics = (_before(limit, rows) for rows in (table, metrics))
    if not table.num_rows:
        where = "" if before is None else f" before step {before:,}"
        raise EquilibriaError(
            f"got a run without samples{where}; expected at least {2 * LEAST_SAMPLES} of a layer: watch some hundred "
            "steps"
        )
    last_step = int(table["step"].to_numpy().max())
    sorted_run = sampled_run(table, metadata=metadata, metrics=metrics)
    recorded = _members(sorted_run)
    laws: dict[str, str] = {}
    refused: dict[str, str] = {}
    summaries = summarise_run(sorted_run)
    is_lost = sorted_run.series.last("note") == NOTES.index(NOT_FINITE)
    for (name, entry, columns), layer, lost in zip(recorded, summaries, is_lost.tolist(), strict=True):
        law, reason = ("", "no longer finite") if lost else _law(entry, columns, last_step, layer)
        if reason:
            refused[name] = reason
        else:
            laws[name] = law
    members = [member for member in recorded if member[0] in laws]
    if not members:
        more = "watch longer, or sample every fifth step or each (see eq.watch)" if before is None else "a later start"
        raise EquilibriaError(
            f"got a run in which no layer can be forecast ({by_reason(refused)}); expected a normalised layer under "
            "SGD, SGDW, AdamW or Adam, or a matrix with weight decay under AdamW, Lion or Muon, with "
            f"{LEAST_SAMPLES} samples in the second half of the record"
            + (f": {more}" if any("samples" in reason for reason in refused.values()) else "")
        )
    interpolating = None if sorted_run.loss is None else near_interpolation(sorted_run.loss)
    groups = _same_settings(members, laws)
    cohorts = tuple(_cohort(group, laws[group[0][0]], interpolating) for group in groups)
    judged = predicted_layers(sorted_run)
    return RecordedLayers(
        cohorts,
        refused,
        failing={name: failing(layer) for name, layer in judged.items()},
        settling={
            name: layer.summary.steps_to_settle
            for name, layer in judged.items()
            if layer.summary.state != SETTLED and layer.summary.steps_to_settle
        },
        last_step=last_step,
        steps_per_epoch=metadata.get("steps_per_epoch"),
    )


def _check_recorded(start: int, last: Array) -> None:
    """Raise for a start that is farther behind the last sampled step than that is behind the one before."""
    if len(last) == 2 and start > 2 * last[1] - last[0]:
        raise EquilibriaError(
            f"got start={start:,} for a run whose last sample is of step {last[1]:,}; expected an earlier one",
            argument="start",
        )


def whole_records(run: RunLike, cohorts: Sequence[Cohort]) -> Iterator[tuple[Cohort, Cohort]]:
    """Every cohort, and its layers over the whole record, whatever happened later; split where settings diverge."""
    source = as_run(run)
    recorded = _members(sampled_run(source.samples(), metadata=source.metadata))
    for cohort in cohorts:
        members = [member for member in recorded if member[0] in cohort.names]
        for group in _same_settings(members, dict.fromkeys(cohort.names, cohort.law)):
            yield cohort, _cohort(group, cohort.law, cohort.interpolating, rule=cohort.rule)


def _metrics(source: RunWithSamples) -> pa.Table | None:
    """The numbers that the training logged; None for a run that holds samples only."""
    return source.metrics() if hasattr(source, "metrics") else None


def _before(step: int, rows: pa.Table | None) -> pa.Table | None:
    limit = min(step, np.iinfo(np.int64).max)
    return None if rows is None else rows.filter(pa.compute.less(rows["step"], limit))


def _members(run: SortedRun) -> list[_Member]:
    """Name, metadata and sample columns of every layer, with the decay in force as one more column."""
    taken = run.taken.only(**run.taken.columns, decay=decays(run.taken, run.entries))
    columns = (taken.of(position) for position in range(len(taken.names)))
    return list(zip(taken.names, run.entries, columns, strict=True))


def _same_settings(members: list[_Member], laws: Mapping[str, str]) -> list[list[_Member]]:
    """Layers grouped by law, parameter group, rule, sampled steps and settings."""
    groups: dict[tuple[Any, ...], list[_Member]] = {}
    for member in members:
        name, entry, columns = member
        settings = b"".join(columns[key].tobytes() for key in ("step", *SETTINGS))
        key = (laws[name], entry.get("optimizer"), entry.get("group"), str(entry["rule"]), settings)
        groups.setdefault(key, []).append(member)
    return list(groups.values())


def by_reason(refused: Mapping[str, str]) -> str:
    """Each reason once, with the layers it holds for."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names_by_reason.setdefault(reason, []).append(name)
    named = ((names[0], len(names) - 1, reason) for reason, names in names_by_reason.items())
    return "; ".join(f"{first}{f' and {more} more' if more else ''}: {reason}" for first, more, reason in named)


def as_run(run: RunLike) -> RunWithSamples:
    """The run itself, or the run recorded in a directory."""
    if isinstance(run, str | os.PathLike):
        return read_record(Path(run))
    if not (hasattr(run, "samples") and hasattr(run, "metadata")):
        raise EquilibriaError(
            f"got run={run!r}; expected what equilibria.watch or equilibria.read_run returns, or the directory of a run"
        )
    return run


def _law(entry: Mapping[str, Any], columns: Mapping[str, Any], last_step: int, layer: LayerSummary) -> tuple[str, str]:
    """The law that a layer is forecast by, and why it cannot be; "" if it can."""
    count, step, invariant = len(columns["step"]), columns["step"], layer.invariant
    if not entry.get("rule"):
        return "", str(entry.get("no_law") or "the record does not name its optimizer")
    if not count:
        return "", "no step whose angle was measured"
    if layer.idle is not None:
        return "", layer.idle
    if layer.decay_rounds_away:
        return "", "its type rounds its weight decay away, so that it has no equilibrium"
    fitted = step >= late_from(step[0], step[-1])
    if np.count_nonzero(fitted) < LEAST_SAMPLES:
        soon = "" if invariant else _too_soon(columns)
        few = _too_few(count, int(np.count_nonzero(fitted)))
        return "", f"{soon}; and {few}" if soon else few
    if last_step - step[-1] > _STOPPED * int(np.diff(step)[-_STOPPED:].max()):
        return "", f"it has not moved since step {step[-1]:,}, while others moved until step {last_step:,}"
    rule = rule_from_metadata(entry, {name: float(columns[name][-1]) for name in SETTINGS})
    if rule is None:
        return "", f"no law for its settings at step {step[-1]:,}"
    if invariant and isinstance(rule, InvariantRule):
        return INVARIANT_LAW, _without_l(columns, fitted)
    return GAIN_LAW, _without_gain(entry, columns, rule, invariant=invariant)


def _without_l(columns: Mapping[str, Any], fitted: NDArray[np.bool_]) -> str:
    """Why L of an invariant layer cannot be forecast, "" if it can."""
    usable = fitted & np.isfinite(columns["unit_grad_sq"]) & (columns["unit_grad_sq"] > 0)
    if np.count_nonzero(usable) < LEAST_SAMPLES:
        read = f"its gradient was read at {np.count_nonzero(usable)} samples of the second half of the record"
        return f"{read}, which is fitted; at least {LEAST_SAMPLES} are needed"
    if _vanished(columns["unit_grad_sq"]):
        return "its gradient has vanished, below 0.1 % of its highest level, and no law predicts the rest"
    return ""


def _without_gain(entry: Mapping[str, Any], columns: Mapping[str, Any], rule: Rule, *, invariant: bool | None) -> str:
    """Why a layer cannot be forecast by its growth gain, "" if it can."""
    if entry.get("promised_by"):
        return f"{entry['promised_by']} turns it, not its optimizer alone"
    if not isinstance(rule, GainRule):
        if invariant is None:
            return "undecided whether it is scale-invariant: label it, eq.watch(..., invariant=eq.symmetries(...))"
        looks = "is not" if entry.get("invariant") is not None else "does not look"
        name = "Adam" if isinstance(rule, AdamL2) else type(rule).__name__
        return f"{looks} scale-invariant, and no law gives the size of its gradient, which {name} follows"
    if is_row_kind(kind_of(entry["name"])) and len(entry.get("shape", ())) < 3:
        return "a row of a matrix, whose gradient comes and goes; without granularity= the whole matrix is forecast"
    if len(entry.get("shape", ())) < 2 and not entry.get("matrix"):
        return "it is not known to be a matrix" if "shape" not in entry else "a vector has no steady growth gain"
    if not columns["weight_decay"][-1] > 0:
        return "it is not scale-invariant and has no weight decay: growth gains of such weights were not tested"
    return _too_soon(columns)


def _too_soon(columns: Mapping[str, Any]) -> str:
    """Why a growth gain may still change, "" if it persists."""
    rises = np.flatnonzero(np.diff(columns["lr"]) > 0)
    risen = int(columns["step"][rises[-1] + 1]) if len(rises) else 0
    missing = AFTER_RISE - (int(columns["step"][-1]) + 1 - risen)
    if missing > 0:
        since = f"lr rose until step {risen:,}" if risen else f"the record ends at step {columns['step'][-1]:,}"
        return (
            f"{since}, and its growth gain persists from {AFTER_RISE} steps later on: it needs a sample of step "
            f"{risen + AFTER_RISE - 1:,} or later, {counted(missing, 'step')} more"
        )
    return ""


def _too_few(count: int, fitted: int) -> str:
    """The reason if fewer samples than needed are in the half of the record that is fitted."""
    missing = max(2 * LEAST_SAMPLES - count, LEAST_SAMPLES - fitted)
    return (
        f"{counted(count, 'sample')}, {fitted} of them in the second half of the record, which is fitted; at least "
        f"{LEAST_SAMPLES} are needed there: about {missing} more"
    )


def _vanished(unit_grad_sq: Array) -> bool:
    """Whether the last tenth of the samples has next to no gradient."""
    parts = np.array_split(unit_grad_sq[np.isfinite(unit_grad_sq)], 10)
    means = np.array([part.mean() for part in parts if len(part)])
    return bool(means[-1] < _VANISHED * means.max())


def _cohort(members: list[_Member], law: str, interpolating: str | None, *, rule: Rule | None = None) -> Cohort:
    names, entries, columns = zip(*members, strict=True)
    first = columns[0]
    if rule is None:
        rule = rule_from_metadata(entries[0], {name: float(first[name][-1]) for name in SETTINGS})
    assert rule is not None
    stack = {
        name: np.stack([layer[name] for layer in columns], axis=1)
        for name in ("norm", "angle", "update_norm", "unit_grad_sq", "momentum_unit_grad_sq", "decay")
    }
    plain, with_momentum = stack["unit_grad_sq"], stack["momentum_unit_grad_sq"]
    return Cohort(
        names=tuple(names),
        law=law,
        rule=rule,
        entries=np.array([float(entry["entries"]) for entry in entries]),
        step=first["step"],
        lr=first["lr"],
        weight_decay=first["weight_decay"],
        momentum=first["momentum"],
        decay=stack["decay"],
        norm_sq=stack["norm"] ** 2,
        angle=stack["angle"],
        moved_sq=stack["update_norm"] ** 2,
        plain_unit_grad_sq=plain,
        unit_grad_sq=np.where(np.isfinite(with_momentum), with_momentum, plain),
        changed=np.stack([np.isin(layer["note"], _BETWEEN_STEPS) for layer in columns], axis=1),
        interpolating=interpolating,
    )
