"""`import_run`: a run from somebody else's log, or from checkpoints."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria._version import __version__
from equilibria.diagnosis.metadata import OPTIMIZER_UNKNOWN
from equilibria.errors import EquilibriaError, one_of, within
from equilibria.findings import counted, percent
from equilibria.importing._checkpoints import has_checkpoints, read_checkpoints
from equilibria.importing._history import Course, History, Series, history_from_checkpoints, history_from_log
from equilibria.importing._logs import SOURCES, Log, has_events, is_log, read_log
from equilibria.importing._names import Named, is_vector, sorted_names
from equilibria.importing._predictions import Cohort, predict
from equilibria.monitor.description import describe_rule
from equilibria.optimizers.rules import rule_text
from equilibria.records import RecordWriter
from equilibria.records._manifest import RUN_FILE
from equilibria.records.tables import DIFFUSION, METRICS, SAMPLE_FIELDS
from equilibria.tensors.parameters import select_patterns
from equilibria.theory.rules import RULES, AdamL2, AdamW, ClosedRule, Lion
from equilibria.watching._recorded import RecordedRun, read_run

Array = NDArray[np.float64]

_MOST_METRICS = 100  # other numbers of a log that are kept, as `monitor.log` allows
_AT_ONCE = 1 << 17  # rows
_OFTEN = 0.01  # of the steps
_TEXT = ("state", "law")


def import_run(
    source: str | Path,
    *,
    log_dir: str | Path,
    optimizer: str | ClosedRule | None = None,
    lr: float | str | None = None,
    weight_decay: float | str | None = None,
    invariant: Iterable[str] | None = None,
    select: Iterable[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> RecordedRun:
    r"""Make a run from a log of norms that another tool wrote, or from a folder of checkpoints.

    The run is like a watched one: `read_run`, `forecast`, reports and pages take it. What the source cannot tell is
    null, and ``run.notes`` says so. The angle of a step comes from the norms before and after it and the length of the
    update; one that the rounding of the logged numbers could hide is not stated. Checkpoints give norms, and angles
    over the steps between them, in ``run.diffusion()``.

    Args:
        source: a CSV or Parquet file, the folder of a Weights & Biases, TensorBoard or MLflow run, or a folder of
            checkpoints (safetensors or torch files with the step in their names).
        log_dir: the directory to write the run into; new, or empty.
        optimizer: for predictions: one of "sgd", "sgdw", "adamw", "adam", "lion" and "muon", or a rule of
            `equilibria.theory` if its betas or momentum are not the usual ones.
        lr: a number, or the name of a logged metric; None for the metric that is called so.
        weight_decay: likewise; None also for the logged configuration.
        invariant: names or patterns of the scale-invariant weights, which their law predicts where the source has what
            it needs; the measured gain predicts the others.
        select: names or patterns of the parameters; by default all but biases and scales of normalisations.
        columns: names of metrics where they are not known, such as ``{"norm": "weights/{param}/l2"}``.

    Returns:
        The run, as `read_run` gives it.

    Raises:
        EquilibriaError: if the source cannot be read or names no norm, ``log_dir`` holds files, or an argument does not
            fit. Nothing is written then.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = Path(folder.name, "history.csv")
        >>> lines = ["_step,norm/fc.weight,update_norm/fc.weight", "0,3.0412381,0.0412311", "1,3.0415202,0.0412307"]
        >>> _ = table.write_text("\n".join(lines))
        >>> run = import_run(table, log_dir=f"{folder.name}/run")
        >>> [round(angle, 6) for angle in run.samples()["angle"].to_pylist()]
        [0.013556, 0.013555]
        >>> folder.cleanup()
    """
    return imported_run(
        source,
        log_dir=log_dir,
        rule=_rule(optimizer),
        own=not isinstance(optimizer, str),
        settings={"lr": lr, "weight_decay": weight_decay},
        invariant=invariant,
        select=select,
        columns=columns,
    )


def imported_run(
    source: str | Path,
    *,
    log_dir: str | Path,
    rule: ClosedRule | None,
    own: bool,
    settings: Mapping[str, float | str | None],
    invariant: Iterable[str] | None,
    select: Iterable[str] | None,
    columns: Mapping[str, str] | None,
) -> RecordedRun:
    """`import_run` with a rule, whose own lr and weight decay count if ``own``."""
    path, directory = _source(source), _target(log_dir)
    chosen = None if select is None else select_patterns(select)
    if is_log(path):
        imported = _from_log(path, columns, chosen, settings)
    elif path.is_dir() and has_checkpoints(path):
        imported = _from_checkpoints(path, chosen, settings)
    elif has_events(path):
        imported = _from_log(path, columns, chosen, settings)
    else:
        raise EquilibriaError(f"got source={source}; expected {SOURCES}", argument="source")
    if rule is not None:
        imported, rule = _settled(imported, rule, own=own)
    labels = _labels(invariant, list(imported.histories))
    cohorts = [] if rule is None else _cohorts(imported, rule, labels)
    _write(directory, imported, rule, labels, cohorts, source=path)
    return read_run(directory)


@dataclass(frozen=True)
class _Imported:
    """What a source gives.

    Attributes:
        kind: of the source, in words.
        histories: by parameter.
        settings: courses of lr and weight decay, None where unknown; a parameter's own lr goes before.
        metrics: other logged numbers, by name.
        notes: sentences about what the source leaves out.
    """

    kind: str
    histories: Mapping[str, History]
    settings: Mapping[str, Course | None]
    metrics: Mapping[str, Series]
    notes: tuple[str, ...]

    def lr_of(self, history: History) -> Course | None:
        own = self.settings["lr"]
        return Course(history.lr) if own is None and history.lr is not None else own


# ---- arguments


def _source(source: str | Path) -> Path:
    if not isinstance(source, str | os.PathLike):
        raise EquilibriaError(f"got source={source!r}; expected {SOURCES}", argument="source")
    path = Path(source)
    if not path.exists():
        raise EquilibriaError(f"got source={source}, which does not exist; expected {SOURCES}", argument="source")
    if (path / RUN_FILE).is_file():
        raise EquilibriaError(
            f"got source={source}, a recorded run already: eq.read_run({str(source)!r})", argument="source"
        )
    return path


def _target(log_dir: str | Path) -> Path:
    """The directory, before the work of reading; the writer looks again."""
    if not isinstance(log_dir, str | os.PathLike):
        raise EquilibriaError(f"got log_dir={log_dir!r}; expected the path of a directory", argument="log_dir")
    directory = Path(log_dir)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        what = "a run" if (directory / RUN_FILE).is_file() else "other files"
        raise EquilibriaError(f"got log_dir={log_dir}, which holds {what}; choose a new directory", argument="log_dir")
    return directory


def _rule(optimizer: str | ClosedRule | None) -> ClosedRule | None:
    if optimizer is None or isinstance(optimizer, tuple(RULES.values())):
        return optimizer  # type: ignore[return-value]
    if not isinstance(optimizer, str):
        raise EquilibriaError(
            f"got optimizer={optimizer!r}; expected one of: {', '.join(RULES)}, or one of their rules such as "
            "equilibria.theory.AdamW(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))",
            argument="optimizer",
        )
    return RULES[one_of("optimizer", optimizer.lower(), RULES)](1.0, 0.0)  # its settings come from elsewhere


def _labels(invariant: Iterable[str] | None, names: Sequence[str]) -> dict[str, bool | None]:
    if invariant is None:
        return dict.fromkeys(names)
    wanted = _matching(select_patterns(invariant), names, argument="invariant")
    return {name: name in wanted for name in names}


def _matching(patterns: Sequence[str], names: Sequence[str], *, argument: str) -> set[str]:
    """The names that match a pattern; raises if a pattern matches none."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise EquilibriaError(
                f"got {argument} {pattern!r}, which matches no parameter; there are: {', '.join(list(names)[:6])}",
                argument=argument,
            )
    return {name for name in names if any(_matches(name, pattern) for pattern in patterns)}


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


# ---- sources


def _from_log(
    path: Path,
    columns: Mapping[str, str] | None,
    select: Sequence[str] | None,
    settings: Mapping[str, float | str | None],
) -> _Imported:
    log = read_log(path)
    named = sorted_names(log.series, columns)
    names = list(named.numbers)
    wanted = (
        {name for name in names if not is_vector(name)}
        if select is None
        else _matching(select, names, argument="select")
    )
    if not wanted:
        raise EquilibriaError(
            f"got a log of biases and scales only ({', '.join(names[:6])}); expected norms of matrices, or select= "
            "names",
            argument="source",
        )
    histories = {name: history_from_log(log, metrics) for name, metrics in named.numbers.items() if name in wanted}
    courses = {name: _course(name, value, log, named) for name, value in settings.items()}
    return _Imported(
        log.kind, histories, courses, _metrics(log, named), (_cannot(histories), *_precision(histories), *log.notes)
    )


def _from_checkpoints(
    path: Path, select: Sequence[str] | None, settings: Mapping[str, float | str | None]
) -> _Imported:
    seen: list[str] = []

    def choose(name: str, shape: tuple[int, ...]) -> bool:
        seen.append(name)
        return len(shape) >= 2 if select is None else any(_matches(name, pattern) for pattern in select)

    try:
        found = read_checkpoints(path, choose)
    finally:  # a pattern that matches nothing explains that no weight was found
        if select is not None and seen:
            _matching(select, list(dict.fromkeys(seen)), argument="select")
    histories = {name: history_from_checkpoints(stored) for name, stored in found.weights.items()}
    courses = {name: _course(name, value, None, None) for name, value in settings.items()}
    gaps = np.diff(found.steps)
    spaced = f"{gaps.min():,}" if gaps.min() == gaps.max() else f"{gaps.min():,} to {gaps.max():,}"
    hidden = sum(len(history.step) - 1 - len(history.turned) for history in histories.values())
    notes = [
        f"{len(found.steps)} checkpoints give norms, and angles over {spaced} steps (run.diffusion()), no gradients "
        "and no angle of one step: momentum lets successive steps add up and later steps pull back, so that it cannot "
        "be worked out from an angle over many (docs/concepts/pull-back.md)",
        *found.notes,
    ]
    if settings["lr"] is not None:
        notes.append("lr and weight decay count as constant over all checkpoints")
    if hidden:
        notes.append(f"{counted(hidden, 'angle')} between checkpoints, too small for the stored digits, left out")
    return _Imported("checkpoints", histories, courses, {}, tuple(notes))


def _course(name: str, value: float | str | None, log: Log | None, named: Named | None) -> Course | None:
    """A setting from a number, from the metric of a name, or from the metric that is called so."""
    if isinstance(value, str):
        if log is None or value not in log.series:
            known = (
                "checkpoints have no metrics"
                if log is None
                else f"metrics: {', '.join(map(repr, sorted(log.series)[:12]))}"
            )
            raise EquilibriaError(
                f"got {name}={value!r}; expected a number or a logged metric ({known})", argument=name
            )
        return Course(log.series[value])
    if value is not None:
        return _constant(within(name, value, low=0))
    if log is None or named is None:
        return None
    metrics = named.settings[name]
    if metrics:
        first, *others = [log.series[metric] for metric in metrics]
        if any(len(first[0]) != len(other[0]) or np.any(first[1] != other[1]) for other in others):
            raise EquilibriaError(
                f"got {len(metrics)} metrics of {name} that differ ({', '.join(metrics[:5])}); expected {name}= one of "
                "them, and select= its parameters",
                argument=name,
            )
        return Course(first)
    return None if name == "lr" or log.weight_decay is None else _constant(log.weight_decay)


def _constant(value: float) -> Course:
    return Course((np.zeros(1, dtype=np.int64), np.array([value])))


def _metrics(log: Log, named: Named) -> dict[str, Series]:
    """The other numbers of the log, losses first."""
    ordered = sorted(named.others, key=lambda name: ("loss" not in name.lower(), name))
    kept = [name for name in ordered if len(name) <= _MOST_METRICS and name.isprintable()]
    return {name: log.series[name] for name in kept[:_MOST_METRICS]}


# ---- what a log cannot tell


def _cannot(histories: Mapping[str, History]) -> str:
    """What the log leaves open, in a sentence or two."""
    several = histories.values()
    gradients = any(np.isfinite(history.grad_norm).any() for history in several)
    text = (
        f"no {'directions of gradients' if gradients else 'gradients'} were logged: scale invariance, gradient noise, "
        "skipped steps and weights changed outside a step cannot be seen. Nor were shapes: parameters count as "
        "matrices unless their names say bias or normalisation; norms count as those before the step"
    )
    if any(np.isfinite(history.angle).any() for history in several):
        return text
    return f"{text}. No angle is known: that takes the norm of each update (update_norm)"


def _precision(histories: Mapping[str, History]) -> Iterator[str]:
    """Sentences about the errors of the angles."""
    relative, hidden, wrong, steps, angles, between = [], 0, 0, 0, 0, 0
    for history in histories.values():
        known = np.isfinite(history.angle)
        with np.errstate(invalid="ignore", divide="ignore"):
            stated = known & (history.error < history.angle)
            relative += (history.error / history.angle)[stated].tolist()
        hidden += int(np.count_nonzero(known & ~stated & ~history.impossible))
        wrong += int(np.count_nonzero(history.impossible))
        between += int(np.count_nonzero(known & history.interpolated))
        angles, steps = angles + int(np.count_nonzero(known)), steps + len(history.step)
    if relative:
        yield (
            f"angles are known to {percent(median(relative))} in the median and {percent(max(relative))} at worst"
            + (f"; {hidden:,} of {angles:,} left out: the error is as large as the angle" if hidden else "")
        )
    elif hidden:
        yield f"no angle is stated: the errors of all {hidden:,} are as large as the angles"
    if between > _OFTEN * angles:
        yield (
            "norms after single steps were not logged: they are read off those of later steps, and the stated errors "
            "hold if an update points at most half along the weight"
        )
    if wrong > _OFTEN * steps:
        yield (
            f"at {wrong:,} of {steps:,} samples the norm changes by more than the update is long: the two were not "
            "logged at the same steps, or the update is another one"
        )


# ---- the run


def _settled(imported: _Imported, rule: ClosedRule, *, own: bool) -> tuple[_Imported, ClosedRule]:
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
        settings[name] = _constant(getattr(rule, name))
    imported = dataclasses.replace(imported, settings=settings)
    history = next(iter(imported.histories.values()))
    courses = {"lr": imported.lr_of(history), "weight_decay": settings["weight_decay"]}
    first = {name: float(course.at(history.step)[0]) for name, course in courses.items() if course is not None}
    return imported, dataclasses.replace(rule, **first)  # type: ignore[arg-type]


def _cohorts(imported: _Imported, rule: ClosedRule, labels: Mapping[str, bool | None]) -> list[Cohort]:
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


def _write(
    directory: Path,
    imported: _Imported,
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


def _sample_columns(imported: _Imported, rule: ClosedRule | None, cohorts: Sequence[Cohort]) -> dict[str, Any]:
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


def _measured_columns(imported: _Imported, name: str, history: History, rule: ClosedRule | None) -> dict[str, Any]:
    settings = {"lr": imported.lr_of(history), "weight_decay": imported.settings["weight_decay"]}
    columns: dict[str, Any] = {
        setting: course.at(history.step) for setting, course in settings.items() if course is not None
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        stated = np.isfinite(history.angle) & (history.error < history.angle)
        growth = (history.after - history.norm) * (history.after + history.norm) / history.norm**2
        columns |= {
            "step": history.step,
            "param": np.array([name] * len(history.step)),
            "norm": history.norm,
            "update_norm": history.moved,
            "angle": np.where(stated, history.angle, np.nan),
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
    imported: _Imported,
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
