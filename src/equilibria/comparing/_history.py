"""Many runs over time: which run left the band of those before it, and what had changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from shlex import quote

import numpy as np
from numpy.typing import NDArray

from equilibria._display import Printable, renderer
from equilibria.comparing._bands import Departures, departures, unusual_count
from equilibria.comparing._settings import SettingDifference, same_settings, setting_differences
from equilibria.diagnosis import faults
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.spikes import spikes
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding, Findings, counted, joined, plain, warnings_first
from equilibria.records import Record, read_record
from equilibria.records._reader import runs_below

Array = NDArray[np.float64]

QUANTITIES = {"angle": "angle per step", "relative_update": "relative update", "norm": "norm"}
"""Columns of the sample table whose root mean squares are compared, and their names in sentences."""

PARTS = 4
"""Equal parts of the common steps, each compared by itself."""

LEAST_RUNS = 3
"""Earlier runs that a band needs."""

_MOST_RUNS = 20  # the latest ones: a band follows what changes slowly
_SHORT = 0.5  # of the median length: a shorter run ended early, and is no reference


@dataclass(frozen=True, slots=True)
class Departure:
    """Some layers of a run outside their band, in one part of the run.

    Attributes:
        quantity: "angle", "relative_update" or "norm".
        layers: the layers; all of them if they moved together.
        together: whether all layers moved together.
        ratio: measured over the mean of the earlier runs; of the layer that is furthest off.
        band: the ratio up to which (and its inverse down to which) that happens by chance.
        first_step: first step of the part.
        last_step: last step of the part.
    """

    quantity: str
    layers: tuple[str, ...]
    together: bool
    ratio: float
    band: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run in its history.

    Attributes:
        name: its folder, below the one that was given.
        path: its folder.
        started: when its first session began, UTC in ISO 8601; "" if unknown.
        steps: how many it took; the last sampled step + 1 if it does not know.
        layers: how many it has.
        level: each quantity over its mean in the first `LEAST_RUNS` runs: least, median, largest over layers and parts.
        band: the lower and upper limit of that median; None if it was not judged.
        spikes: rises of the loss, jumps of gradients and lr excursions.
        last_loss: mean of the last twentieth of the logged training loss; None without one. Shown, not judged.
        changes: settings that differ from the run before.
        unlike: settings that differ from the latest of the runs it is compared with.
        compared_with: the earlier runs that its band comes from, the latest first; empty if there were fewer than
            `LEAST_RUNS`.
        departures: what left the band.
        gone: layers of all the earlier runs that do not turn here: frozen, renamed or removed.
        too_many_spikes: whether there are more of them than in the earlier runs, or it diverged and they did not.
    """

    name: str
    path: Path
    started: str
    steps: int
    layers: int
    level: dict[str, tuple[float, float, float]]
    band: dict[str, tuple[float, float]] | None
    spikes: int
    last_loss: float | None
    changes: tuple[SettingDifference, ...]
    unlike: tuple[SettingDifference, ...]
    compared_with: tuple[str, ...]
    departures: tuple[Departure, ...]
    gone: tuple[str, ...]
    too_many_spikes: bool

    @property
    def in_band(self) -> bool:
        """Whether nothing left its band."""
        return not self.departures and not self.gone and not self.too_many_spikes


@dataclass(frozen=True, slots=True)
class History:
    """What `history` found, the runs in the order in which they started.

    Attributes:
        runs: all of them.
        findings: one for each run that left its band, the latest run's as a warning.
        unreadable: folders that hold a run nobody can read or that has no samples, with the reason.
        latest_unreadable: the name of the latest of all runs if it is one of those; "" if it is not, or nobody can read
            when it began.
    """

    runs: tuple[JudgedRun, ...]
    findings: Findings = field(repr=False)
    unreadable: dict[str, str]
    latest_unreadable: str

    @property
    def regressed(self) -> bool:
        """Whether the latest run is out of its band, or has nothing that can be compared."""
        return bool(self.latest_unreadable) or not self.runs[-1].in_band

    def table(self) -> Printable:
        """One line per run."""
        shown: Printable = renderer("history.history_table")(self)
        return shown

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html

    def report(self, path: str | Path, *, title: str = "History") -> Path:
        """Write a page with a picture of every quantity over the runs; it needs no network."""
        written: Path = renderer("history.write_history")(self, path, title=title)
        return written


def history(runs: Sequence[str | Path | Record]) -> History:
    """Compare every run with those before it.

    For each layer and quarter of the run: angle per step, relative update and norm (root mean squares), against a band
    from the latest 20 earlier runs with the same settings, or, where fewer than three have them, with others; and the
    number of spikes. A run out of its band is kept out of later bands, unless its settings had changed.

    Args:
        runs: folders of runs, folders that hold such folders, or records.

    Raises:
        EquilibriaError: if there is no run.

    Example:
        >>> history(["no/such/folder"])
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got no/such/folder, which is no folder; expected folders of runs, such as
        runs/
    """
    measured, unreadable, latest_unreadable = _measured(runs)
    if not measured:
        reasons = "".join(f" ({name}: {reason})" for name, reason in list(unreadable.items())[:1])
        raise EquilibriaError(
            f"got {counted(len(runs), 'folder')} without a run that has samples{reasons}; expected folders that "
            "watch(..., log_dir=...) wrote",
            argument="runs",
        )
    judged = tuple(_judge(measured))
    return History(judged, _findings(judged), unreadable, latest_unreadable)


# ---- reading


class _Measured:
    """A run with what the comparison reads of it."""

    def __init__(self, record: Record, name: str, started: str) -> None:
        self.name, self.path, self.started = name, record.path, started
        self.run = sampled_run(record.samples(), metadata=record.metadata, metrics=record.metrics())
        if not len(self.run.taken.columns["step"]):
            raise EquilibriaError("no samples of steps that were taken")
        self.layers = self.run.series.names
        self.turning = tuple(
            name for place, name in enumerate(self.layers) if (self.run.taken.of(place)["angle"] > 0).any()
        )
        self.steps = int(self.run.taken.columns["step"].max()) + 1
        events = list(spikes(self.run))
        self.spikes = len(events)
        self.diverged = any(event.kind == "diverged" for event in events) or any(
            True for check in (faults.not_finite(self.run.series), faults.loss_not_finite(self.run)) for _ in check
        )
        self.parts: Callable[[int], dict[str, dict[str, Array]]] = lru_cache(maxsize=4)(self._parts)

    @property
    def last_loss(self) -> float | None:
        if self.run.loss is None or not len(self.run.loss[1]):
            return None
        values = self.run.loss[1]
        return float(values[-max(len(values) // 20, 1) :].mean())

    def _parts(self, steps: int) -> dict[str, dict[str, Array]]:
        """By quantity and layer, ln of the root mean square in every part of the first ``steps`` steps."""
        taken = self.run.taken
        layer = np.repeat(np.arange(len(self.layers)), taken.counts)
        part = taken.columns["step"] * PARTS // steps
        inside = part < PARTS
        place, size = (layer * PARTS + part)[inside], len(self.layers) * PARTS
        parts = {}
        for quantity in QUANTITIES:
            values, weight = taken.columns[quantity][inside], taken.weights[inside]
            weight = np.where(np.isfinite(values), weight, 0.0)
            total = np.bincount(place, weights=weight * np.nan_to_num(values) ** 2, minlength=size)
            count = np.bincount(place, weights=weight, minlength=size)
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(total / count) / 2
            logs[~np.isfinite(logs)] = np.nan
            parts[quantity] = dict(zip(self.layers, logs.reshape(-1, PARTS), strict=True))
        return parts

    def numbers(self, steps: int, layers: Sequence[str]) -> Array:
        """Quantities x parts x layers."""
        parts = self.parts(steps)
        return np.array([[parts[quantity][layer] for layer in layers] for quantity in QUANTITIES]).transpose(0, 2, 1)


def _measured(runs: Sequence[str | Path | Record]) -> tuple[list[_Measured], dict[str, str], str]:
    """The runs in their order, those without numbers, and the latest of all if it is one of these."""
    measured, unreadable, began = [], {}, {}
    given = list(_named(runs))
    often = Counter(name for name, _ in given)
    for short, run in given:
        path = run.path if isinstance(run, Record) else run
        name = short if often[short] == 1 else str(path)  # runs of one name in several folders
        try:
            record = run if isinstance(run, Record) else read_record(run)
            began[name] = min((session.started for session in record.sessions), default="")
            measured.append(_Measured(record, name, began[name]))
        except EquilibriaError as error:
            unreadable[name] = str(error)
    latest = max(began, key=lambda name: (began[name], _by_number(name)), default="")
    ordered = sorted(measured, key=lambda run: (run.started, _by_number(run.name)))
    return ordered, unreadable, latest if latest in unreadable else ""


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts night-9 before night-10: times have whole seconds, and runs of one second go by name."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _named(runs: Iterable[str | Path | Record]) -> Iterator[tuple[str, Path | Record]]:
    seen: set[Path] = set()
    for given in runs:
        if isinstance(given, Record):
            yield given.path.name, given
            continue
        root = Path(given)
        if not root.is_dir():
            raise EquilibriaError(
                f"got {given}, which is no folder; expected folders of runs, such as runs/", argument="runs"
            )
        for path in runs_below(root):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield (root.name if path == root else str(path.relative_to(root))), path


# ---- judging


def _judge(measured: Sequence[_Measured]) -> Iterator[JudgedRun]:
    healthy: list[_Measured] = []
    alike = lru_cache(maxsize=None)(lambda one, other: same_settings(one.run, other.run))
    levels = _levels(measured)
    for number, run in enumerate(measured):
        since = setting_differences(measured[number - 1].run, run.run) if number else ()
        earlier, is_own = _references(run, healthy, alike)
        earlier = _comparable(run, earlier)
        layers = [name for name in run.layers if all(name in other.layers for other in earlier)] if earlier else []
        found: tuple[Departure, ...] = ()
        band = None
        if layers:
            found, band = _compare(run, earlier, layers, levels)
        spiky = bool(earlier) and (
            unusual_count(run.spikes, np.array([float(other.spikes) for other in earlier]))
            or (run.diverged and not any(other.diverged for other in earlier))
        )
        judged = JudgedRun(
            run.name,
            run.path,
            run.started,
            max(run.steps, run.run.metadata.get("steps") or 0),
            len(run.layers),
            levels[run.name],
            band,
            run.spikes,
            run.last_loss,
            since,
            setting_differences(earlier[0].run, run.run) if earlier else (),
            tuple(other.name for other in earlier),
            found,
            _gone(run, earlier),
            spiky,
        )
        if judged.in_band or not is_own:
            healthy.append(run)
        yield judged


def _comparable(run: _Measured, earlier: Sequence[_Measured]) -> list[_Measured]:
    """The earlier runs with numbers of the common steps; none if the run has none of its own, or they are too few."""
    steps = min(other.steps for other in (run, *earlier))
    own, *others = (np.isfinite(each.numbers(steps, each.layers)).any() for each in (run, *earlier))
    kept = [other for other, known in zip(earlier, others, strict=True) if known]
    return kept if own and len(kept) >= LEAST_RUNS else []


def _gone(run: _Measured, earlier: Sequence[_Measured]) -> tuple[str, ...]:
    """The layers that turn in all earlier runs and not in this one."""
    always = [name for name in earlier[0].turning if all(name in other.turning for other in earlier)] if earlier else []
    return tuple(name for name in always if name not in run.turning)


def _references(
    run: _Measured, healthy: Sequence[_Measured], alike: Callable[[_Measured, _Measured], bool]
) -> tuple[list[_Measured], bool]:
    """The earlier runs to compare with, and whether they have the settings of the run."""
    long_enough = [other for other in healthy if other.steps >= _SHORT * np.median([run.steps for run in healthy])]
    recent = long_enough[::-1][: 2 * _MOST_RUNS]
    for model, is_own in ((run, True), *((other, False) for other in recent)):
        group = [other for other in recent if alike(other, model)][:_MOST_RUNS]
        if len(group) >= LEAST_RUNS:
            return group, is_own
    return (recent[:_MOST_RUNS], False) if len(recent) >= LEAST_RUNS else ([], False)


def _compare(
    run: _Measured,
    earlier: Sequence[_Measured],
    layers: Sequence[str],
    levels: dict[str, dict[str, tuple[float, float, float]]],
) -> tuple[tuple[Departure, ...], dict[str, tuple[float, float]]]:
    steps = min(run.steps, *(other.steps for other in earlier))
    own = run.numbers(steps, layers)
    others = np.array([other.numbers(steps, layers) for other in earlier])
    measured = departures(own, others)
    # A layer with a known number here and none in an earlier run, or the reverse, is not compared.
    found = tuple(_found(measured, layers, steps))
    band = {}
    for place, quantity in enumerate(QUANTITIES):
        centre = float(np.mean([np.log(levels[other.name][quantity][1]) for other in earlier]))
        limit = float(np.median(measured.common_limit[place]))
        band[quantity] = (float(np.exp(centre - limit)), float(np.exp(centre + limit)))
    return found, band


def _found(measured: Departures, layers: Sequence[str], steps: int) -> Iterator[Departure]:
    for place, quantity in enumerate(QUANTITIES):
        for part in range(PARTS):
            span = -(-part * steps // PARTS), -(-(part + 1) * steps // PARTS) - 1
            common, limit = measured.common[place, part], measured.common_limit[place, part]
            if abs(common) > limit:
                yield Departure(quantity, tuple(layers), True, float(np.exp(common)), float(np.exp(limit)), *span)
            single, limits = measured.single[place, part], measured.single_limit[place, part]
            with np.errstate(invalid="ignore"):
                # A layer that stays where it was while all others move has not left anything.
                out = np.flatnonzero((np.abs(single) > limits) & (np.abs(common + single) > limits))
            if len(out):
                worst = int(out[np.argmax(np.abs(single[out]))])
                ratio, band = np.exp(common + single[worst]), np.exp(limits[worst])
                names = tuple(layers[position] for position in out.tolist())
                yield Departure(quantity, names, False, float(ratio), float(band), *span)


def _levels(measured: Sequence[_Measured]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """For the picture: each quantity over its mean in the first runs; least, median, largest over layers and parts."""
    base = measured[:LEAST_RUNS]
    return {run.name: _level(run, base) for run in measured}


def _level(run: _Measured, base: Sequence[_Measured]) -> dict[str, tuple[float, float, float]]:
    layers = [name for name in run.layers if all(name in other.layers for other in base)]
    unknown = (float("nan"),) * 3
    if not layers:
        return dict.fromkeys(QUANTITIES, unknown)
    steps = min(run.steps, *(other.steps for other in base))
    offset = run.numbers(steps, layers) - np.mean([other.numbers(steps, layers) for other in base], axis=0)
    known = (part[np.isfinite(part)] for part in offset)
    ranges = ([np.exp(f(part)) for f in (np.min, np.median, np.max)] if len(part) else unknown for part in known)
    return {quantity: tuple(map(float, r)) for quantity, r in zip(QUANTITIES, ranges, strict=True)}  # type: ignore[misc]


# ---- sentences


def _findings(runs: Sequence[JudgedRun]) -> Findings:
    """One finding per run out of its band, the latest first."""
    out = [(number, run) for number, run in enumerate(runs) if not run.in_band][::-1]
    return warnings_first(_finding(runs, number, run) for number, run in out)


def _finding(runs: Sequence[JudgedRun], number: int, run: JudgedRun) -> Finding:
    latest = number == len(runs) - 1
    reference = next(other for other in runs if other.name == run.compared_with[0])
    evidence = "; ".join([*_sentences(run), _cause(run)])
    return Finding(
        "warning" if latest else "note",
        f"{run.name} left the band of {counted(len(run.compared_with), 'earlier run')}",
        evidence,
        _remedy(reference, run),
        "",
        kind=f"left its band: {run.name}",
    )


def _remedy(reference: JudgedRun, run: JudgedRun) -> str:
    if len(run.gone) == reference.layers:
        return "give folders of runs of one network: these two share no layer"
    return f"run equilibria explain {quote(str(reference.path))} {quote(str(run.path))} to compare them cause by cause"


def _sentences(run: JudgedRun) -> Iterator[str]:
    """The departures that are furthest out of their band, at most one for each quantity that says something new."""
    told: set[str] = set()
    ranked = sorted(run.departures, key=lambda part: -abs(np.log(part.ratio)) / np.log(part.band))
    for part in ranked:
        # A step much shorter than the weight turns it by its relative length.
        kind = "norm" if part.quantity == "norm" else "step"
        if kind not in told:
            told.add(kind)
            yield _sentence(run, part)
    if run.gone:
        verb = "turns" if len(run.gone) == 1 else "turn"
        yield f"{joined(list(run.gone), most=3)} no longer {verb}: frozen, renamed or removed"
    if run.too_many_spikes:
        yield f"{counted(run.spikes, 'spike')}, more than in the earlier runs"


def _sentence(run: JudgedRun, part: Departure) -> str:
    who = "all layers" if part.together else joined(list(part.layers), most=3)
    where = " in the median" if part.together else " where it is furthest off" if len(part.layers) > 1 else ""
    band = plain(part.band, digits=3)
    return (
        f"over steps {part.first_step:,}-{part.last_step:,} the {QUANTITIES[part.quantity]} of {who} is "
        f"{plain(part.ratio)}x that of the earlier runs{where} (by chance 1/{band} to {band})"
    )


def _cause(run: JudgedRun) -> str:
    """What differs from the latest run of the band: a coincidence in time, not yet a cause."""
    settings = [str(change) for change in run.unlike if not change.is_version]
    versions = [str(change) for change in run.unlike if change.is_version]
    reference = run.compared_with[0]
    if settings:
        return f"settings unlike {reference}'s: {joined([*settings, *versions])}"
    also = f", other than {joined(versions)}" if versions else ""
    return f"no recorded setting differs from {reference}'s{also}: look at code and data"


__all__ = ["LEAST_RUNS", "PARTS", "QUANTITIES", "Departure", "History", "JudgedRun", "history"]
