"""What a log or a folder of checkpoints gives: histories, settings, metrics, and sentences about what it leaves out."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from equilibria.errors import EquilibriaError, within
from equilibria.findings import counted, percent
from equilibria.importing._checkpoints import read_checkpoints
from equilibria.importing._history import Course, History, Series, history_from_checkpoints, history_from_log
from equilibria.importing._logs import Log, read_log
from equilibria.importing._names import Named, is_vector, sorted_names

_MOST_METRICS = 100  # other numbers of a log that are kept, as `monitor.log` allows
_OFTEN = 0.01  # of the steps


@dataclass(frozen=True)
class Imported:
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


def matching(patterns: Sequence[str], names: Sequence[str], *, argument: str) -> set[str]:
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


def from_log(
    path: Path,
    columns: Mapping[str, str] | None,
    select: Sequence[str] | None,
    settings: Mapping[str, float | str | None],
) -> Imported:
    log = read_log(path)
    named = sorted_names(log.series, columns)
    names = list(named.numbers)
    wanted = (
        {name for name in names if not is_vector(name)}
        if select is None
        else matching(select, names, argument="select")
    )
    if not wanted:
        raise EquilibriaError(
            f"got a log of biases and scales only ({', '.join(names[:6])}); expected norms of matrices, or select= "
            "names",
            argument="source",
        )
    histories = {name: history_from_log(log, metrics) for name, metrics in named.numbers.items() if name in wanted}
    courses = {name: _course(name, value, log, named) for name, value in settings.items()}
    return Imported(
        log.kind, histories, courses, _metrics(log, named), (_cannot(histories), *_precision(histories), *log.notes)
    )


def from_checkpoints(path: Path, select: Sequence[str] | None, settings: Mapping[str, float | str | None]) -> Imported:
    seen: list[str] = []

    def choose(name: str, shape: tuple[int, ...]) -> bool:
        seen.append(name)
        return len(shape) >= 2 if select is None else any(_matches(name, pattern) for pattern in select)

    try:
        found = read_checkpoints(path, choose)
    finally:  # a pattern that matches nothing explains that no weight was found
        if select is not None and seen:
            matching(select, list(dict.fromkeys(seen)), argument="select")
    histories = {name: history_from_checkpoints(stored) for name, stored in found.weights.items()}
    courses = {name: _course(name, value, None, None) for name, value in settings.items()}
    gaps = np.diff(found.steps)
    spaced = f"{gaps.min():,}" if gaps.min() == gaps.max() else f"{gaps.min():,} to {gaps.max():,}"
    known = {name: np.isfinite(history.norm) for name, history in histories.items()}
    pairs = sum(int(np.count_nonzero(finite[1:] & finite[:-1])) for finite in known.values())
    hidden = pairs - sum(len(history.turned) for history in histories.values())
    broken = {name: int(history.step[~known[name]][0]) for name, history in histories.items() if not known[name].all()}
    notes = [
        f"{len(found.steps)} checkpoints give norms, and angles over {spaced} steps (run.diffusion()), no gradients "
        "and no angle of one step: momentum lets successive steps add up and later steps pull back, so that it cannot "
        "be worked out from an angle over many (docs/concepts/pull-back.md)",
        *found.notes,
    ]
    if settings["lr"] is not None:
        notes.append("lr and weight decay count as constant over all checkpoints")
    if broken:
        first, step = min(broken.items(), key=lambda item: item[1])
        notes.append(
            f"{counted(len(broken), 'weight')} not finite in some checkpoints, which have no norm and no angle there: "
            f"{first} at step {step:,}"
        )
    if hidden:
        notes.append(f"{counted(hidden, 'angle')} between checkpoints, too small for the stored digits, left out")
    return Imported("checkpoints", histories, courses, {}, tuple(notes))


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
        return constant(within(name, value, low=0))
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
    return None if name == "lr" or log.weight_decay is None else constant(log.weight_decay)


def constant(value: float) -> Course:
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
            stated = history.stated
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
        yield f"no angle is stated: at all {counted(hidden, 'sample')} the error is as large as the angle"
    if between > _OFTEN * angles:
        yield (
            "norms after single steps were not logged: they are read off those of later steps; the error of "
            "these angles is an estimate (one standard error) from how updates along the weight differ between samples"
        )
    if wrong > _OFTEN * steps:
        yield (
            f"at {wrong:,} of {steps:,} samples the norm changes by more than the update is long, or the update is "
            "longer than both norms: they were not logged at the same steps, or the update in other units (squared, or "
            "without the learning rate)"
        )
