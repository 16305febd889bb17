"""The causes that are large enough to be claimed, ranked, and a sentence about each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.comparing._differences import (
    ALIGNMENT,
    DECAY,
    LR,
    MOMENTUM,
    OPTIMIZER,
    RESCALING,
    SIZE,
    SKIPPED,
    START,
    Differences,
)
from equilibria.comparing._settings import (
    OF_MOMENTUM,
    SettingDifference,
    clipped_at,
    entry,
    looks_invariant,
    rounds,
)
from equilibria.diagnosis.run import SampledRun
from equilibria.findings import counted, joined, percent, plain, rounded
from equilibria.theory._reals import Array

CLIPPING, ROUNDING, FROZEN = "clipping", "rounding", "frozen"
_MEASURED = (SIZE, ALIGNMENT, START, CLIPPING, ROUNDING)
_WINDOWS = 16  # over whose means the size of a cause is measured
_SCATTERS = 1.2  # times the scatter within the runs that a measured cause must exceed
# Root mean square of a logarithm from which a cause is claimed. 1.5 times what another seed did to a layer in trials,
# scale-invariant or not; what it did to all layers together; the least of any measured cause, and of a setting.
_FLOOR_OF_INVARIANT, _FLOOR, _LEAST_COMMON = 0.075, 0.2, 0.09
_LEAST_MEASURED, _LEAST_SET = 0.05, 0.01
FEWEST_SAMPLES = 20  # of every layer, from which measured causes are claimed
_INITIAL = 5.0  # standard deviations of a random initial norm
_AT_REST = math.log(10)  # what a layer counts that turns in one run only: its logarithm is infinite
_ACTS = 0.5  # share of a cause's largest part from which a stretch counts as one in which it acts


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """One cause of different angles; factors are A over B.

    Attributes:
        name: "lr", "weight decay", "momentum", "optimizer", "gradient size", "alignment", "start norm", "rescaling",
            "skipped steps", "clipping", "rounding" or "frozen".
        is_setting: whether the record holds the setting that differs; otherwise the difference was measured.
        size: root mean square of its part of the log ratio of angles, over layers and time, beyond scatter.
        angle: its factor of the angle per step, geometric mean over layers and time.
        travelled: its factor of the angle travelled, geometric mean over the layers.
        layers: where it acts.
        sentence: what differs and what it does, with numbers.
    """

    name: str
    is_setting: bool
    size: float
    angle: float
    travelled: float
    layers: tuple[str, ...]
    sentence: str


def ranked_causes(
    parts: Differences,
    a: SampledRun,
    b: SampledRun,
    *,
    settings: Sequence[SettingDifference],
    still: Mapping[str, tuple[bool, bool]],
) -> tuple[Cause, ...]:
    """The causes that can be claimed, the largest first.

    Args:
        parts: what each cause explains.
        a: the first run.
        b: the second run.
        settings: recorded settings that differ.
        still: layers that turn in one run only: whether in A, and whether in B.
    """
    count = len(parts.names) + len(still)
    share = math.sqrt(len(parts.names) / count)
    fewest = fewest_samples((a, b), parts.names)
    causes = [_frozen(still, count)] if still else []
    floors = np.where([looks_invariant(b, name) for name in parts.names], _FLOOR_OF_INVARIANT, _FLOOR)
    for row, name in enumerate(parts.causes):
        part = parts.angle_parts[row]
        size = _size(part)
        shown = _renamed(name, parts, a, b)
        if name == START and not _beyond_initial(parts, a):
            continue
        if name in (SIZE, ALIGNMENT) and fewest < FEWEST_SAMPLES:
            continue
        if name in (SIZE, ALIGNMENT):
            size = _beyond_scatter(part, floors)
        if not size >= (_LEAST_MEASURED if shown in _MEASURED else _LEAST_SET):  # NaN claims nothing
            continue
        layers = _affected(part, parts.names)
        words = _sentence(shown, parts, row, layers, a, b, settings)
        angle, travelled = (math.exp(float(values.mean())) for values in (part, parts.travelled_parts[row]))
        causes.append(Cause(shown, shown not in _MEASURED, share * size, angle, travelled, layers, words))
    return tuple(sorted(causes, key=lambda cause: -cause.size))


def fewest_samples(runs: Sequence[SampledRun], names: Sequence[str]) -> int:
    """Samples of the layer that has the fewest."""
    return min(int(run.taken.counts[run.taken.names.index(name)]) for run in runs for name in names)


def windows(part: Array) -> Array:
    """Means over windows of stretches, windows x layers."""
    return np.array([chunk.mean(axis=0) for chunk in np.array_split(part, min(_WINDOWS, len(part)))])


def _size(part: Array) -> float:
    return math.sqrt(float(np.mean(windows(part) ** 2)))


def _beyond_scatter(part: Array, floors: Array) -> float:
    """Root mean square of what exceeds the scatter from stretch to stretch; 0 if another seed may do as much.

    Other seeds change every layer in a way of its own, by up to two thirds of ``floors`` in trial pairs; other data,
    labels or batches change many layers, or all of them together.
    """
    means, course = windows(part), part.mean(axis=1)
    scatter_sq = _scatter_sq(part)
    own_sq = np.maximum(np.mean(means**2, axis=0) - scatter_sq, 0.0)
    size = math.sqrt(float(own_sq.mean()))
    apart = float(np.mean(own_sq / floors**2)) >= 1 and size >= _SCATTERS * math.sqrt(float(scatter_sq.mean()))
    between = float(np.mean(means.var(axis=1, ddof=1))) / len(floors) if len(floors) > 1 else 0.0
    chance_sq = between + float(_scatter_sq(course))
    common = math.sqrt(max(float(np.mean(means.mean(axis=1) ** 2)) - chance_sq, 0.0))
    together = common >= max(_LEAST_COMMON, _SCATTERS * math.sqrt(chance_sq))
    return size if apart or together else 0.0


def _scatter_sq(part: Array) -> Array:
    """Variance of a window's mean by the scatter from stretch to stretch, over time."""
    if len(part) < 3:
        return np.zeros(part.shape[1:])
    return np.asarray(np.mean(np.diff(part, axis=0) ** 2, axis=0) / 2 / max(len(part) / _WINDOWS, 1.0))


def _beyond_initial(parts: Differences, a: SampledRun) -> bool:
    """Whether the norms at the start differ by more than random draws of as many entries do."""
    entries = np.array([float(entry(a, name).get("entries", 1)) for name in parts.names])
    apart = np.abs(parts.inputs[0].start - parts.inputs[1].start) / 2
    return bool((apart > np.maximum(_INITIAL / np.sqrt(entries), _LEAST_MEASURED)).any())


def _renamed(name: str, parts: Differences, a: SampledRun, b: SampledRun) -> str:
    """Gradients that look clipped in one run, or at another length; updates of weights in a format that rounds."""
    if name == SIZE and clipped_at(a) != clipped_at(b) and _limits_differ(clipped_at(a), clipped_at(b)):
        return CLIPPING
    if name == ALIGNMENT and any(rounds(a, layer) != rounds(b, layer) for layer in parts.names):
        return ROUNDING
    return name


def _limits_differ(first: float | None, second: float | None) -> bool:
    return first is None or second is None or abs(math.log(first / second)) > _LEAST_MEASURED


def _affected(part: Array, names: Sequence[str]) -> tuple[str, ...]:
    """The layers in which a cause acts with at least a quarter of its largest root mean square."""
    size = np.sqrt(np.mean(windows(part) ** 2, axis=0))
    return tuple(name for name, value in zip(names, size.tolist(), strict=True) if value >= size.max() / 4)


# ---- sentences

_DOES = {
    LR: "the learning rate",
    DECAY: "the weight decay",
    MOMENTUM: "the momentum",
    OPTIMIZER: "the optimizer with its learning rate",
    SIZE: "the size of the gradients",
    ALIGNMENT: "how gradients line up from step to step and with the weights",
    START: "the norm of the weights at the start",
    RESCALING: "rescaling of the weights between steps",
    SKIPPED: "the share of skipped steps",
    CLIPPING: "clipping of the gradients",
    ROUNDING: "the number format of the weights, which rounds updates",
}
_ELSE = "other data, labels or batches, a course that other seeds do not take, or a consequence of another cause"
_STAND_ALONE = (LR, DECAY, MOMENTUM, OPTIMIZER, "law", "nesterov", "dampening", "controllers", "frozen parameters")


def _sentence(
    name: str,
    parts: Differences,
    row: int,
    layers: Sequence[str],
    a: SampledRun,
    b: SampledRun,
    settings: Sequence[SettingDifference],
) -> str:
    positions = [parts.names.index(layer) for layer in layers]
    part = parts.angle_parts[row][:, positions]
    angle, travelled = math.exp(float(part.mean())), math.exp(float(parts.travelled_parts[row, positions].mean()))
    where = "" if len(layers) == len(parts.names) else f" of {joined(layers)}"
    text = (
        f"{name}: {_DOES[name]} makes the angle per step{where} {plain(angle, digits=3)} times as large in A as in B "
        f"in the mean, the angle travelled {plain(travelled, digits=3)} times"
    )
    return f"{text}{_when(parts, part)} ({_evidence(name, parts, positions, a, b, settings)})"


def _when(parts: Differences, part: Array) -> str:
    """The steps in which it acts most, if they are no more than half of all."""
    course = part.mean(axis=1)
    acts = np.flatnonzero(np.abs(course) >= _ACTS * np.abs(course).max())
    first, last = int(acts[0]), int(acts[-1])
    if last - first + 1 > len(course) / 2:
        return ""
    factor = math.exp(float(course[first : last + 1].mean()))
    begin, end = int(parts.edges[first]), int(parts.edges[last + 1]) - 1
    return f", most of it at steps {begin:,}-{end:,} with a factor of {plain(factor, digits=3)}"


def _evidence(
    name: str,
    parts: Differences,
    positions: Sequence[int],
    a: SampledRun,
    b: SampledRun,
    settings: Sequence[SettingDifference],
) -> str:
    if name in (LR, DECAY, MOMENTUM, OPTIMIZER):
        own = {MOMENTUM: (name, *OF_MOMENTUM), OPTIMIZER: (name, LR, MOMENTUM, *OF_MOMENTUM)}.get(name, (name,))
        return _told(settings, own) or "its values differ from step to step"
    first, second = parts.inputs
    if name == START:
        ratio = np.exp(np.mean((first.start - second.start)[positions]) / 2)
        return f"measured at step {int(parts.edges[0]):,}: {plain(float(ratio), digits=3)} times the norm in A"
    if name == CLIPPING:
        limits = [clipped_at(run) for run in (a, b)]
        words = ["not clipped" if limit is None else f"clipped at {rounded(limit)}" for limit in limits]
        return f"by the length of all watched gradients A looks {words[0]}, B {words[1]}; with all that sets their size"
    if name == ROUNDING:
        formats = [entry(run, parts.names[0]).get("dtype") for run in (a, b)]
        return f"weights are {formats[0]} in A and {formats[1]} in B; includes what else alignment does"
    if name == RESCALING:
        return _told(settings, ("controllers",)) or "norms changed between steps"
    if name == SKIPPED:
        shares = [float(1 - run.taken.mean()) for run in parts.inputs]
        return f"{percent(shares[0])} of the steps in A and {percent(shares[1])} in B"
    if name == SIZE:
        ratio = np.exp(np.mean(np.log(first.size / second.size)[:, positions]) / 2)
        return f"{plain(float(ratio), digits=3)} times the length in A, at equal norms; {_measured(settings)}"
    return _measured(settings)


def _told(settings: Sequence[SettingDifference], names: Sequence[str]) -> str:
    return "; ".join(each.sentence for each in settings if each.name in names)


def _measured(settings: Sequence[SettingDifference]) -> str:
    """What may make other gradients: a recorded setting that no other cause stands for, or something unrecorded."""
    others = [each for each in settings if each.name not in _STAND_ALONE and not each.is_version]
    told = "; ".join(each.sentence for each in others)
    return (
        f"measured; of the recorded settings this may be {told}; or {_ELSE}"
        if told
        else f"measured, and no recorded setting: {_ELSE}"
    )


def _frozen(still: Mapping[str, tuple[bool, bool]], count: int) -> Cause:
    sentences = []
    for place, (word, other) in enumerate((("A", "B"), ("B", "A"))):
        layers = [name for name, turns in still.items() if turns[place]]
        if layers:
            verb = "turns" if len(layers) == 1 else "turn"
            sentences.append(f"{joined(layers)} {verb} in {word} and not in {other}: frozen, or without a gradient")
    size = _AT_REST * math.sqrt(len(still) / count)
    words = f"frozen: {'; '.join(sentences)} ({counted(len(still), 'layer')} of {count:,})"
    return Cause(FROZEN, True, size, math.nan, math.nan, tuple(still), words)
