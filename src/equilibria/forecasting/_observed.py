"""What a record says about the layers that can be forecast, as arrays of samples x layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.diagnosis.metadata import invariance_from_metadata, rule_from_metadata
from equilibria.diagnosis.series import SETTINGS, by_parameter, steps_taken
from equilibria.errors import EquilibriaError, whole
from equilibria.records import read_run
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW

Array = NDArray[np.float64]
Steps = NDArray[np.int64]

_VANISHED = 1e-3  # of the highest N of the record
_STOPPED = 5  # sampling gaps without a sample, after which a layer no longer moves
LEAST_SAMPLES = 20  # of a layer; fewer say nothing about how far its gradients scatter
ForecastRule: TypeAlias = SGD | SGDW | AdamW | AdamL2


_Member: TypeAlias = tuple[str, Mapping[str, Any], dict[str, Any]]


class Sampled(Protocol):
    """A run that is being watched, or a recorded one."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was watched."""

    def samples(self) -> pa.Table:
        """The sample table."""


RunLike: TypeAlias = Sampled | str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """Layers with one rule and one parameter group that were sampled at the same steps.

    Attributes:
        names: the layers.
        rule: their optimizer with the settings of the last sample.
        entries: numbers in each weight.
        step: the sampled steps.
        lr: of every sample, like the two below.
        weight_decay: as torch means it.
        momentum: beta1 for Adam.
        norm_sq: ||w||^2 before the step, samples x layers, like all below.
        angle: radians of the step.
        moved_sq: ||w' - w||^2.
        grad_sq: N = ||g||^2 ||w||^2.
        drive: L of the rule: N with the correlation of gradient and momentum where it is recorded.
        changed: whether the weight was changed outside of the optimizer's step since the sample before.
    """

    names: tuple[str, ...]
    rule: ForecastRule
    entries: Array
    step: Steps
    lr: Array
    weight_decay: Array
    momentum: Array
    norm_sq: Array
    angle: Array
    moved_sq: Array
    grad_sq: Array
    drive: Array
    changed: NDArray[np.bool_]

    def since(self, step: int, *, before: int | None = None) -> Cohort:
        """Only the samples from a step on, up to another one."""
        end = None if before is None else int(np.searchsorted(self.step, before))
        rows = slice(int(np.searchsorted(self.step, step)), end)
        series = ("step", *SETTINGS, "norm_sq", "angle", "moved_sq", "grad_sq", "drive", "changed")
        return Cohort(self.names, self.rule, self.entries, *(getattr(self, name)[rows] for name in series))


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """All layers of a run.

    Attributes:
        cohorts: those that can be forecast; the first one's lr is what a schedule is about.
        refused: the others, with the reason.
        last_step: the last sampled step.
        steps_per_epoch: None if the run did not say.
    """

    cohorts: tuple[Cohort, ...]
    refused: Mapping[str, str]
    last_step: int
    steps_per_epoch: int | None


def observe(run: RunLike, *, before: int | None = None) -> Observed:
    """The samples of a run.

    Args:
        run: a run that is watched, a recorded one, or its directory.
        before: look only at samples before this step.

    Raises:
        EquilibriaError: not a run, or nothing in it can be forecast.
    """
    source = as_run(run)
    metadata = source.metadata
    table = source.samples()
    if before is not None:
        limit = whole("start", before, low=1)
        table = table.filter(pa.compute.less(table["step"], limit))
    if not table.num_rows:
        where = "" if before is None else f" before step {before:,}"
        raise EquilibriaError(
            f"got a run without samples{where}; expected at least {LEAST_SAMPLES} of a layer: watch some hundred steps"
        )
    entries = {entry["name"]: entry for entry in metadata.get("params", ())}
    series = steps_taken(by_parameter(table, metadata=metadata))
    last_step = int(table["step"].to_numpy().max())
    members: list[_Member] = []
    refused: dict[str, str] = {}
    for position, name in enumerate(series.names):
        columns, entry = series.of(position), entries.get(name, {})
        reason = _refusal(entry, columns, last_step)
        if reason:
            refused[name] = reason
        else:
            members.append((name, entry, columns))
    if not members:
        more = "watch longer, or sample every fifth step or each (see eq.watch)" if before is None else "a later start"
        raise EquilibriaError(
            f"got a run in which no layer can be forecast ({_grouped(refused)}); expected a normalised layer under "
            f"SGD, SGDW, AdamW or Adam with {LEAST_SAMPLES} samples"
            + (f": {more}" if any("samples" in reason for reason in refused.values()) else "")
        )
    cohorts = tuple(_cohort(together) for together in _together(members))
    return Observed(cohorts, refused, last_step, metadata.get("steps_per_epoch"))


def seen_whole(run: RunLike, cohort: Cohort) -> tuple[Cohort, ...]:
    """The layers of a cohort over the whole record, whatever happened later; apart where settings came apart."""
    source = as_run(run)
    entries = {entry["name"]: entry for entry in source.metadata.get("params", ())}
    series = steps_taken(by_parameter(source.samples(), metadata=source.metadata))
    members = [
        (name, entries[name], series.of(position)) for position, name in enumerate(series.names) if name in cohort.names
    ]
    return tuple(_cohort(together, rule=cohort.rule) for together in _together(members))


def _together(members: list[_Member]) -> list[list[_Member]]:
    """Layers of one parameter group that were sampled at the same steps."""
    found: dict[tuple[Any, ...], list[_Member]] = {}
    for name, entry, columns in members:
        settings = b"".join(columns[key].tobytes() for key in ("step", *SETTINGS))
        key = (entry.get("optimizer"), entry.get("group"), str(entry["rule"]), settings)
        found.setdefault(key, []).append((name, entry, columns))
    return list(found.values())


def _grouped(refused: Mapping[str, str]) -> str:
    """Each reason once, with the layers that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused.items():
        by_reason.setdefault(reason, []).append(name)
    named = ((names[0], len(names) - 1, reason) for reason, names in by_reason.items())
    return "; ".join(f"{first}{f' and {more} more' if more else ''}: {reason}" for first, more, reason in named)


def as_run(run: RunLike) -> Sampled:
    """What has samples and metadata, read from disk if it is a directory."""
    if isinstance(run, str | os.PathLike):
        return read_run(Path(run))
    if not (hasattr(run, "samples") and hasattr(run, "metadata")):
        raise EquilibriaError(
            f"got run={run!r}; expected what equilibria.watch or equilibria.read_run gave, or the directory of a run"
        )
    return run


def _refusal(entry: Mapping[str, Any], columns: Mapping[str, Any], last_step: int) -> str:
    """Why a layer cannot be forecast, "" if it can."""
    count = len(columns["step"])
    if not entry.get("rule"):
        return str(entry.get("no_law") or "the record does not say which optimizer moves it")
    if count < LEAST_SAMPLES:
        return f"{count} samples; at least {LEAST_SAMPLES} are needed"
    step = columns["step"]
    if last_step - step[-1] > _STOPPED * int(np.diff(step)[-_STOPPED:].max()):
        return f"it has not moved since step {step[-1]:,}, while others moved until step {last_step:,}"
    settings = {name: float(columns[name][-1]) for name in SETTINGS}
    rule = rule_from_metadata(entry, settings)
    if rule is None:
        return f"no law for its settings at step {columns['step'][-1]:,}"
    if not isinstance(rule, ForecastRule):
        return f"its optimizer is {type(rule).__name__}; forecasts are made for SGD, SGDW, AdamW and Adam"
    cosine = columns["cosine"][np.isfinite(columns["cosine"])]
    rms = float(np.sqrt(np.mean(cosine**2))) if len(cosine) else float("nan")
    if not invariance_from_metadata(entry, rms):
        return f"not scale-invariant (rms cosine of weight and gradient {rms:.2g}): the laws do not hold for it"
    usable = np.isfinite(columns["unit_grad_sq"]) & (columns["unit_grad_sq"] > 0)
    if np.count_nonzero(usable) < LEAST_SAMPLES:
        return f"its gradient was read at {np.count_nonzero(usable)} samples; at least {LEAST_SAMPLES} are needed"
    if vanished(columns["unit_grad_sq"]):
        return "its gradient has vanished: the training loss is fitted, and no law says what comes next"
    return ""


def vanished(grad_sq: Array) -> bool:
    """Whether the gradient has all but vanished, from all samples of N."""
    parts = np.array_split(grad_sq[np.isfinite(grad_sq)], 10)
    means = np.array([part.mean() for part in parts if len(part)])
    return bool(means[-1] < _VANISHED * means.max())


def _cohort(members: list[_Member], *, rule: ForecastRule | None = None) -> Cohort:
    names, entries, columns = zip(*members, strict=True)
    first = columns[0]
    if rule is None:
        found = rule_from_metadata(entries[0], {name: float(first[name][-1]) for name in SETTINGS})
        assert isinstance(found, ForecastRule)
        rule = found
    stack = {
        name: np.stack([each[name] for each in columns], axis=1)
        for name in ("norm", "angle", "update_norm", "unit_grad_sq", "momentum_unit_grad_sq")
    }
    grad_sq, own = stack["unit_grad_sq"], stack["momentum_unit_grad_sq"]
    return Cohort(
        names=tuple(names),
        rule=rule,
        entries=np.array([float(entry["entries"]) for entry in entries]),
        step=first["step"],
        lr=first["lr"],
        weight_decay=first["weight_decay"],
        momentum=first["momentum"],
        norm_sq=stack["norm"] ** 2,
        angle=stack["angle"],
        moved_sq=stack["update_norm"] ** 2,
        grad_sq=grad_sq,
        drive=np.where(np.isfinite(own), own, grad_sq),
        changed=np.stack([each["note"] == NOTES.index(CHANGED_OUTSIDE) for each in columns], axis=1),
    )
