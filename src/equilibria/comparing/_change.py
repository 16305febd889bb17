"""The smallest change to the settings of B that gives it A's angles, as code to paste."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.comparing._causes import CLIPPING, ROUNDING, Cause, windows
from equilibria.comparing._differences import ALIGNMENT, DECAY, LR, MOMENTUM, OPTIMIZER, SIZE, START, Differences
from equilibria.comparing._settings import entry, looks_invariant
from equilibria.diagnosis.metadata import short, three_digits
from equilibria.diagnosis.run import SampledRun
from equilibria.findings import joined, percent
from equilibria.theory._reals import Array

_SETTABLE = (LR, DECAY, MOMENTUM, START)
_ABOUT_AS_GOOD = 0.1  # of the gap without a change: what a larger change must gain
_WORTH_IT = 0.3  # share of the gap that a change must close
_POINTS, _SAMPLES = 100, 4  # of the curve of angles, and samples in a point
_CLOSE, _MOST_CORNERS = 0.05, 32  # relative error and number of the points of a printed curve


@dataclass(frozen=True, slots=True, eq=False)
class AngleCurve:
    """An angle per step as a function of the step, linear between its points: what `control.AngularSchedule` takes.

    Attributes:
        step: of the points, ascending.
        angle: radians per step at the points.
        layers: whose root mean square it is.
    """

    step: Array
    angle: Array
    layers: tuple[str, ...]

    def __call__(self, step: int) -> float:
        return float(np.interp(step, self.step, self.angle))

    @property
    def code(self) -> str:
        """A function of the step, close to these points, as text."""
        return _function(self.step, self.angle)


@dataclass(frozen=True, slots=True)
class Change:
    """What to change in B.

    Attributes:
        causes: the causes that it removes; empty if no setting does it and the angle itself is scheduled.
        closes: share of what all claimed causes make (root mean square of logarithms, over layers and time) that the
            recursion says it closes; NaN for a schedule of the angle and for another optimizer.
        code: the settings, in lines to paste into B's script after its optimizer is made.
        schedule: the call that gives the scale-invariant layers A's angles, whatever the cause; "" without such layers.
    """

    causes: tuple[str, ...]
    closes: float
    code: str
    schedule: str

    @property
    def sentence(self) -> str:
        """What it does."""
        if self.causes == (OPTIMIZER,):
            return "the optimizer of A with its settings; or, where it is shown, a schedule of the angle with that of B"
        if not self.causes:
            return (
                "no setting of the optimizer gives B the angles of A; a schedule of the angle does, where it is shown"
            )
        more = "; what was measured may be a consequence of it" if self.closes < _WORTH_IT else ""
        return (
            f"{joined(list(self.causes))} of A in B: by the recursion this closes {percent(max(self.closes, 0.0))} of "
            f"what the causes above make{more}"
        )


def smallest_change(parts: Differences, causes: Sequence[Cause], a: SampledRun, b: SampledRun) -> Change | None:
    """The fewest settings that close about as much of the difference as all settings do; None without a cause."""
    if not causes:
        return None
    claimed = {cause.name for cause in causes}
    stands_for = {CLIPPING: SIZE, ROUNDING: ALIGNMENT}
    claimed |= {stands_for[name] for name in claimed if name in stands_for}
    target = [row for row, name in enumerate(parts.causes) if name in claimed]
    free = [row for row in target if parts.causes[row] in _SETTABLE]
    gaps = {chosen: _gap(parts, chosen, target) for size in range(len(free) + 1) for chosen in combinations(free, size)}
    best, without = min(gaps.values()), gaps[()]
    enough = best + _ABOUT_AS_GOOD * without
    chosen = min((each for each in gaps if gaps[each] <= enough), key=lambda each: (len(each), gaps[each]))
    closes = 1 - gaps[chosen] / without if without > 0 else math.nan
    schedule = _schedule(a, parts.names)
    if OPTIMIZER in claimed:
        return Change((OPTIMIZER,), math.nan, "", schedule)
    if not chosen or closes < _WORTH_IT:  # what is recorded to differ may have made what was measured
        chosen = tuple(row for row in free if parts.causes[row] != START)
        closes = 1 - gaps[chosen] / without if without > 0 else math.nan
    if not chosen:
        return Change((), math.nan, "", schedule)
    names = tuple(parts.causes[row] for row in chosen)
    lines = [line for name in names for line in _WRITERS[name](parts, a, b)]
    if any("numpy" in line for line in lines):
        lines.insert(0, "import numpy")
    return Change(names, closes, "\n".join(lines), schedule)


def _gap(parts: Differences, chosen: Sequence[int], target: Sequence[int]) -> float:
    """Root mean square of the log ratio that is left between two coalitions."""
    first, second = (sum(2**row for row in rows) for rows in (chosen, target))
    return math.sqrt(float(np.mean(windows(parts.played.angle[second] - parts.played.angle[first]) ** 2)))


# ---- settings as code


def _groups(names: Sequence[str], run: SampledRun) -> dict[tuple[int, int], list[str]]:
    """The layers of every parameter group of B, by optimizer and group."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name in names:
        described = entry(run, name)
        groups.setdefault((int(described.get("optimizer") or 0), int(described.get("group") or 0)), []).append(name)
    return groups


def _per_group(
    parts: Differences, a: SampledRun, b: SampledRun, settings: Callable[[SampledRun, str], list[str]]
) -> list[str]:
    """The settings of A for every parameter group of B, as far as B has others."""
    lines = []
    for (optimizer, group), layers in _groups(parts.names, b).items():
        which = "optimizer" if optimizer == 0 else f"optimizers[{optimizer}]"
        mine, other = (settings(run, layers[0]) for run in (a, b))
        lines += [f"{which}.param_groups[{group}]{each}" for each in mine if each not in other]
    return lines


def _lr_lines(parts: Differences, a: SampledRun, b: SampledRun) -> list[str]:
    """A constant, a factor of B's schedule, or A's schedule."""
    first, second = parts.inputs
    ratio = first.lr / np.where(second.lr > 0, second.lr, np.nan)
    step, rates = _lr_course(a, parts.names[0])
    if np.ptp(rates) <= 1e-9 * rates.max():
        return _per_group(parts, a, b, lambda run, layer: [f'["lr"] = {three_digits(_peak(run, layer))}'])
    factor = float(np.nanmedian(ratio))
    if np.nanmax(np.abs(ratio / factor - 1)) < 1e-6:
        times = f'["lr"] *= {short(factor)}  # before its scheduler is made'
        return _per_group(parts, a, b, lambda run, _: [times] if run is a else [])
    scheduler = f"scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, {_function(step, rates / rates.max())})"
    peaks = _per_group(parts, a, b, lambda run, layer: [f'["lr"] = {three_digits(_peak(run, layer))}'])
    return [*peaks, scheduler]


def _peak(run: SampledRun, name: str) -> float:
    return float(_lr_course(run, name)[1].max())


def _lr_course(run: SampledRun, name: str) -> tuple[NDArray[np.int64], Array]:
    rows = run.series.of(run.series.names.index(name))
    known = np.isfinite(rows["lr"])
    return rows["step"][known], np.asarray(rows["lr"][known])


def _decay_lines(parts: Differences, a: SampledRun, b: SampledRun) -> list[str]:
    def settings(run: SampledRun, layer: str) -> list[str]:
        rows = run.series.of(run.series.names.index(layer))
        values = rows["weight_decay"][np.isfinite(rows["weight_decay"])]
        moves = "" if np.ptp(values) == 0 else "  # the median: A changes it"
        return [f'["weight_decay"] = {three_digits(float(np.median(values)))}{moves}']

    return _per_group(parts, a, b, settings)


def _momentum_lines(parts: Differences, a: SampledRun, b: SampledRun) -> list[str]:
    def settings(run: SampledRun, layer: str) -> list[str]:
        value = short(float(np.nanmedian(run.series.of(run.series.names.index(layer))["momentum"])))
        rule: dict[str, Any] = dict(entry(run, layer).get("rule") or {})
        if rule.get("betas"):
            return [f'["betas"] = ({value}, {short(rule["betas"][1])})']
        others = [f'["{name}"] = {rule[name]}' for name in ("dampening", "nesterov") if name in rule]
        return [f'["momentum"] = {value}', *others]

    return _per_group(parts, a, b, settings)


def _start_lines(parts: Differences, a: SampledRun, b: SampledRun) -> list[str]:
    apart = (parts.inputs[0].start - parts.inputs[1].start) / 2
    factors: dict[str, list[str]] = {}
    for name, factor in zip(parts.names, np.exp(apart).tolist(), strict=True):
        factors.setdefault(f"{factor:.2g}", []).append(name)
    lines = ["with torch.no_grad():  # before the first step"]
    for factor, names in factors.items():
        if factor != "1":
            listed = ", ".join(f'"{name}"' for name in names)
            lines += [f"    for name in [{listed}]:", f"        model.get_parameter(name).mul_({factor})"]
    return lines


_WRITERS: dict[str, Callable[[Differences, SampledRun, SampledRun], list[str]]] = {
    LR: _lr_lines,
    DECAY: _decay_lines,
    MOMENTUM: _momentum_lines,
    START: _start_lines,
}


# ---- the angle itself


def angle_curve(run: SampledRun, names: Sequence[str]) -> AngleCurve:
    """The angle per step of a run, root mean square over those of the layers that are scale-invariant, else all."""
    invariant = [name for name in names if looks_invariant(run, name)]
    layers = invariant or list(names)
    rows = [run.taken.of(run.taken.names.index(name)) for name in layers]
    step, angle = (np.concatenate([each[key] for each in rows]) for key in ("step", "angle"))
    fewest = min(len(each["step"]) for each in rows)
    edges = np.linspace(step.min(), step.max() + 1, max(1, min(_POINTS, fewest // _SAMPLES)) + 1)
    place = np.searchsorted(edges, step, side="right") - 1
    counts = np.maximum(np.bincount(place), 1)
    seen = np.bincount(place) > 0
    middle, mean_sq = np.bincount(place, step) / counts, np.bincount(place, angle**2) / counts
    return AngleCurve(middle[seen], np.sqrt(mean_sq[seen]), tuple(layers))


def _schedule(run: SampledRun, names: Sequence[str]) -> str:
    invariant = [name for name in names if looks_invariant(run, name)]
    if not invariant:
        return ""
    curve, listed = angle_curve(run, names), ", ".join(f'"{name}"' for name in invariant)
    return (
        "import numpy\n"
        "from equilibria.control import AngularSchedule\n"
        f"angle = {curve.code}\n"
        f"scheduler = AngularSchedule(optimizer, angle, model=model, invariant=[{listed}])"
    )


def _function(step: Array | NDArray[np.int64], values: Array) -> str:
    """A piecewise linear function of the step as code, with few points."""
    kept = _corners(np.asarray(step, dtype=np.float64), values)
    steps = ", ".join(f"{step[row]:.0f}" for row in kept)
    heights = ", ".join(short(float(f"{values[row]:.3g}")) for row in kept)
    return f"lambda step: numpy.interp(step, [{steps}], [{heights}])"


def _corners(x: Array, y: Array) -> list[int]:
    """Rows of the points through which straight lines follow the curve, the worst one added until all are close."""
    kept = [0, len(x) - 1] if len(x) > 1 else [0]
    while len(kept) < min(_MOST_CORNERS, len(x)):
        off = np.abs(np.interp(x, x[kept], y[kept]) - y) / np.maximum(np.abs(y), 1e-3 * np.abs(y).max())
        worst = int(np.argmax(off))
        if off[worst] <= _CLOSE:
            break
        kept = sorted({*kept, worst})
    return kept
