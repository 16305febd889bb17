"""Writes what was imported as a run: samples with predictions, metrics, angles between checkpoints, metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria._version import __version__
from equilibria.diagnosis.metadata import OPTIMIZER_UNKNOWN
from equilibria.errors import EquilibriaError
from equilibria.importing._history import Course, History, Series
from equilibria.importing._names import is_vector
from equilibria.importing._predictions import Cohort, predict
from equilibria.importing._sources import Imported, constant
from equilibria.monitor.description import describe_rule
from equilibria.optimizers.rules import rule_text
from equilibria.records import RecordWriter
from equilibria.records.tables import DIFFUSION, METRICS, SAMPLE_FIELDS
from equilibria.theory.rules import AdamL2, AdamW, ClosedRule, Lion

_AT_ONCE = 1 << 17  # rows
_TEXT = ("state", "law")


def settled(imported: Imported, rule: ClosedRule, *, own: bool) -> tuple[Imported, ClosedRule]:
    """What was imported, with lr and weight decay for every parameter, and the rule with the first of them.

    Args:
        imported: what the source gives.
        rule: of the optimizer.
        own: whether its lr and weight decay are the caller's: they count where nothing else says so.
    """
    settings = dict(imported.settings)
    missing = {
        "lr": any(imported.lr_of(history) is None for history in imported.histories.values()),
        "weight_decay": settings["weight_decay"] is None,
    }
    for name in (name for name, unknown in missing.items() if unknown):
        if not own:
            raise EquilibriaError(
                f"got optimizer={type(rule).__name__} without {name}, which the source does not log; expected {name}=, "
                "a number or the name of a metric",
                argument=name,
            )
        settings[name] = constant(getattr(rule, name))
    imported = dataclasses.replace(imported, settings=settings)
    history = next(iter(imported.histories.values()))
    courses = {"lr": imported.lr_of(history), "weight_decay": settings["weight_decay"]}
    first = {name: float(course.at(history.step)[0]) for name, course in courses.items() if course is not None}
    return imported, dataclasses.replace(rule, **first)  # type: ignore[arg-type]


def cohorts_of(imported: Imported, rule: ClosedRule, labels: Mapping[str, bool | None]) -> list[Cohort]:
    """The parameters with one list of steps and one lr."""
    decay, groups, courses = (
        imported.settings["weight_decay"],
        dict[tuple[bytes, bytes], list[str]](),
        dict[str, Course](),
    )
    assert decay is not None
    for name, history in imported.histories.items():
        lr = imported.lr_of(history)
        assert lr is not None
        courses[name] = lr
        groups.setdefault((history.step.tobytes(), lr.at(history.step).tobytes()), []).append(name)
    return [
        Cohort(
            names=tuple(names),
            histories=tuple(imported.histories[name] for name in names),
            lr=courses[names[0]],
            weight_decay=decay,
            rule=rule,
            invariant=tuple(labels[name] for name in names),
            matrix=tuple(_is_matrix(name, imported.histories[name]) for name in names),
        )
        for names in groups.values()
    ]


def _is_matrix(name: str, history: History) -> bool:
    return len(history.shape) > 1 if history.shape is not None else not is_vector(name)


def write_run(
    directory: Path,
    imported: Imported,
    rule: ClosedRule | None,
    labels: Mapping[str, bool | None],
    cohorts: Sequence[Cohort],
    *,
    source: Path,
) -> None:
    samples = _sample_columns(imported, rule, cohorts)
    metadata = _metadata(imported, rule, labels, cohorts, source=source)
    writer = RecordWriter(directory, metadata=metadata)
    with writer:
        for start in range(0, len(samples["step"]), _AT_ONCE):
            writer.append({name: values[start : start + _AT_ONCE] for name, values in samples.items()})
        if any(imported.metrics):
            writer.append(_metric_columns(imported.metrics), table=METRICS)
        if turned := _turned_columns(imported.histories):
            writer.append(turned, table=DIFFUSION)
    if writer.failure is not None:
        raise EquilibriaError(f"cannot write {directory}: {writer.failure}", argument="log_dir")


def _sample_columns(imported: Imported, rule: ClosedRule | None, cohorts: Sequence[Cohort]) -> dict[str, Any]:
    """The rows of all parameters in the order of their steps."""
    parts = [_measured_columns(imported, name, history, rule) for name, history in imported.histories.items()]
    place = dict(zip(imported.histories, parts, strict=True))
    for cohort in cohorts:
        predicted = predict(cohort)
        for position, name in enumerate(cohort.names):
            place[name] |= {column: values[:, position] for column, values in predicted.items()}
    names = [name for name in SAMPLE_FIELDS.names if any(name in part for part in parts)]
    whole = {name: np.concatenate([_column(part, name) for part in parts]) for name in names}
    order = np.argsort(whole["step"], kind="stable")
    return {name: _nullable(name, values[order]) for name, values in whole.items()}


def _column(part: Mapping[str, Any], name: str) -> NDArray[Any]:
    return np.asarray(part[name]) if name in part else np.full(len(part["step"]), None if name in _TEXT else np.nan)


def _nullable(name: str, values: NDArray[Any]) -> Any:
    """Numbers that are not known become null."""
    if values.dtype.kind != "f":
        return values.tolist() if values.dtype.kind in "OU" else values
    nullable = values.astype(object)
    nullable[~np.isfinite(values)] = None
    return nullable


def _measured_columns(imported: Imported, name: str, history: History, rule: ClosedRule | None) -> dict[str, Any]:
    settings = {"lr": imported.lr_of(history), "weight_decay": imported.settings["weight_decay"]}
    columns: dict[str, Any] = {
        setting: course.at(history.step) for setting, course in settings.items() if course is not None
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = (history.after - history.norm) * (history.after + history.norm) / history.norm**2
        columns |= {
            "step": history.step,
            "param": np.array([name] * len(history.step)),
            "norm": history.norm,
            "update_norm": history.moved,
            "angle": np.where(history.stated, history.angle, np.nan),
            "relative_update": history.moved / history.norm,
            "grad_norm": history.grad_norm,
            "unit_grad_sq": history.grad_norm**2 * history.norm**2,
            "growth": np.where(history.interpolated, np.nan, growth),
        }
        if "lr" in columns:
            columns["effective_lr"] = columns["lr"] / history.norm**2
    if rule is not None:
        columns["momentum"] = np.full(len(history.step), _momentum(rule))
    return columns


def _momentum(rule: ClosedRule) -> float:
    return float(rule.betas[0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum)


def _metric_columns(metrics: Mapping[str, Series]) -> dict[str, Any]:
    step = np.concatenate([steps for steps, _ in metrics.values()])
    name = np.repeat(list(metrics), [len(steps) for steps, _ in metrics.values()])
    value = np.concatenate([values for _, values in metrics.values()])
    order = np.argsort(step, kind="stable")
    return {"step": step[order], "name": name[order].tolist(), "value": value[order]}


def _turned_columns(histories: Mapping[str, History]) -> dict[str, Any]:
    """How far weights turned between checkpoints: -ln cos of the angle, null from a right angle on."""
    rows = sorted(
        (step, name, distance, angle) for name, history in histories.items() for step, distance, angle in history.turned
    )
    if not rows:
        return {}
    step, name, distance, angle = zip(*rows, strict=True)
    turned = [-math.log1p(-2 * math.sin(turn / 2) ** 2) if turn < math.pi / 2 else None for turn in angle]
    return {
        "step": np.array(step, dtype=np.int64),
        "param": list(name),
        "distance": np.array(distance, dtype=np.int64),
        "turned": np.array(turned, dtype=object),
    }


def _metadata(
    imported: Imported,
    rule: ClosedRule | None,
    labels: Mapping[str, bool | None],
    cohorts: Sequence[Cohort],
    *,
    source: Path,
) -> dict[str, Any]:
    """The metadata of a watched run, and where this one comes from."""
    described = None if rule is None else describe_rule(rule)
    groups = {name: number for number, cohort in enumerate(cohorts) for name in cohort.names}
    gaps = [int(np.median(np.diff(history.step))) for history in imported.histories.values() if len(history.step) > 1]
    optimizers = [] if rule is None else [{"class": type(rule).__name__, "settings": rule_text(rule)}]
    first, *others = imported.notes
    notes = [f"imported from {source.resolve().name} ({imported.kind}): {first}", *others]
    return {
        "equilibria": __version__,
        "imported": {"source": source.resolve().name, "kind": imported.kind, "notes": notes},
        "every": min(gaps, default=1),
        "granularity": "tensor",
        "steps_per_epoch": None,
        "batch_size": None,
        "optimizers": optimizers,
        "controllers": [],
        "skipped": [],
        "params": [
            _entry(name, history, described, invariant=labels[name], group=groups.get(name, 0))
            for name, history in imported.histories.items()
        ],
    }


def _entry(
    name: str, history: History, rule: dict[str, Any] | None, *, invariant: bool | None, group: int
) -> dict[str, Any]:
    shape = {} if history.shape is None else {"shape": list(history.shape)}
    return {
        "name": name,
        "aliases": list(history.aliases),
        **shape,
        "matrix": _is_matrix(name, history),
        "entries": history.entries,
        "bias": False,
        "how": None,
        "invariant": invariant,
        "dtype": history.dtype,
        "optimizer": 0,
        "group": group,
        "law": None if rule is None else rule["kind"],
        "no_law": OPTIMIZER_UNKNOWN if rule is None else None,
        "rule": rule,
        "promised_by": None,
    }
