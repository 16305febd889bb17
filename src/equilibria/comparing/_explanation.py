"""`explain`: why run A turns its layers faster or slower than run B, cause by cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import pyarrow.compute as compute
from numpy.typing import NDArray

from equilibria._display import Printable, renderer
from equilibria.comparing._causes import FEWEST_SAMPLES, Cause, fewest_samples, ranked_causes
from equilibria.comparing._change import AngleCurve, Change, angle_curve, smallest_change
from equilibria.comparing._differences import Differences, differences
from equilibria.comparing._settings import (
    SettingDifference,
    differing_layers,
    frozen_names,
    optimizer_kind,
    setting_differences,
)
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.errors import EquilibriaError
from equilibria.findings import counted, joined, percent, plain, rounded
from equilibria.forecasting._layers import RunLike, as_run
from equilibria.theory._reals import Array

_UNEXPLAINED = 0.05  # of a logarithm, above which the part that the recursion leaves is mentioned
_VALUES, _FEWEST_APART, _MOST_APART = (
    8,
    4,
    16,
)  # logged values in a stretch, or the last ones; stretches: the fewest, the most
_ONE, _ALL = 2.0, 5.0  # standard errors by which they part in the first stretch, and in all together
_LAST = 0.1  # share of the compared steps whose mean is the last value of a logged number


@dataclass(frozen=True, slots=True, eq=False)
class LayerDifference:
    """One layer in A and B; ratios are A over B.

    Attributes:
        name: of the layer.
        angle: ratio of the measured angles per step, one per stretch; NaN where one of them has no sample.
        travelled: ratio of the angles travelled.
        parts: by cause, its factor of ``travelled``; their product is ``travelled`` up to ``unexplained``.
        unexplained: the factor that the recursion leaves.
    """

    name: str
    angle: Array
    travelled: float
    parts: Mapping[str, float]
    unexplained: float


@dataclass(frozen=True, slots=True)
class LoggedDifference:
    """A number that both trainings logged; shown, not explained.

    Attributes:
        name: as it was logged.
        a: mean over the last tenth of the compared steps of A.
        b: the same of B.
        apart_from: the step from which on its mean over every stretch of ``stretch`` steps is lower in the same run, in
            all by five standard errors of the values' scatter; None if there is none.
        stretch: a count of steps.
        error: standard error of ``a - b`` by the scatter of the single values; NaN with fewer than 8 of a run.
    """

    name: str
    a: float
    b: float
    apart_from: int | None = None
    stretch: int = 0
    error: float = math.nan

    @property
    def sentence(self) -> str:
        """The values, whether they differ by more than they scatter, and since when."""
        text = f"{self.name}: {rounded(self.a, digits=4)} in A, {rounded(self.b, digits=4)} in B"
        text += " (mean over the last tenth of the steps)"
        if math.isfinite(self.error):
            apart, room = abs(self.a - self.b), _ONE * self.error
            text += (
                f"; {rounded(apart, digits=2)} apart, {'more than' if apart > room else 'within'} the {plain(room)} "
                "that the scatter of single values explains (two standard errors; other seeds may add to it)"
            )
        if self.apart_from is None:
            return text
        lower = "A" if self.a < self.b else "B"
        since = f"from step {self.apart_from:,} on" if self.apart_from else "from the start"
        return f"{text}; lower in {lower} {since}, in every stretch of {self.stretch:,} steps"


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """The result of `explain`; all ratios are A over B, over the steps that both runs have sampled.

    Attributes:
        first_step: of the compared steps.
        last_step: of the compared steps.
        causes: what makes the angles differ, the largest first; empty if nothing differs by more than runs scatter.
        layers: one per common layer.
        settings: recorded settings that differ, whether or not they changed an angle.
        logged: the numbers that both trainings logged, in the order of A.
        change: the smallest change to the settings of B that gives it A's angles; None without a cause.
        notes: what the comparison leaves out, in sentences.
        step: middle of every stretch.
        angle: geometric mean over the layers of the measured ratio of the angles per step, one per stretch.
        parts: by cause, its factor of ``angle`` by the recursion.
    """

    first_step: int
    last_step: int
    causes: tuple[Cause, ...]
    layers: tuple[LayerDifference, ...]
    settings: tuple[SettingDifference, ...]
    logged: tuple[LoggedDifference, ...]
    change: Change | None
    notes: tuple[str, ...]
    step: Array
    angle: Array
    parts: Mapping[str, Array]
    _curve: AngleCurve

    @property
    def headline(self) -> str:
        """The ratio of the angles travelled and the largest causes, in one sentence."""
        ratio = math.exp(float(np.mean([math.log(layer.travelled) for layer in self.layers]))) if self.layers else 1.0
        where = f"over steps {self.first_step:,}-{self.last_step:,}, mean of {counted(len(self.layers), 'layer')}"
        if not self.causes:
            return (
                "no cause of a difference is larger than the scatter of runs: A turns "
                f"{plain(ratio, digits=3)} times as far as B {where}"
            )
        first, *others = (cause.name for cause in self.causes)
        more = f", then {joined(others, most=3)}" if others else ""
        return f"A turns {plain(ratio, digits=3)} times as far as B {where}; the largest cause is {first}{more}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """The causes, ranked, and what is left."""
        return (*(cause.sentence for cause in self.causes), *self._left())

    def _left(self) -> tuple[str, ...]:
        worst = max(self.layers, key=lambda layer: abs(math.log(layer.unexplained)), default=None)
        if worst is None:
            return ()
        size = abs(math.log(worst.unexplained))
        if size < _UNEXPLAINED:
            return (f"unexplained: at most {percent(math.expm1(size))} of the angle travelled ({worst.name})",)
        return (
            f"unexplained: a factor of {plain(worst.unexplained)} of the angle travelled by {worst.name}, which the "
            "recursion leaves",
        )

    def angles(self) -> AngleCurve:
        """A's angle per step, root mean square over its scale-invariant layers, for `control.AngularSchedule`."""
        return self._curve

    def __repr__(self) -> str:
        shown: Printable = renderer("explanation.explanation_table")(self)
        return shown.text

    def _repr_html_(self) -> str:
        shown: Printable = renderer("explanation.explanation_table")(self)
        return shown.html

    def table(self) -> Printable:
        """Causes, layers, settings and logged numbers."""
        shown: Printable = renderer("explanation.explanation_table")(self)
        return shown

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the explanation as one HTML page that needs no network.

        Args:
            path: the file to write; an existing page is replaced.
            title: shown above the headline.
        """
        written: Path = renderer("explanation.write_explanation")(self, path, title=title)
        return written


def explain(a: RunLike, b: RunLike) -> Explanation:
    """Explain why the layers of run A turn faster or slower than those of run B.

    The angle per step is the effective learning rate. The recursion of norms and angles reproduces both runs from their
    settings, gradients and starts; then one cause at a time gets A's input in place of B's, averaged over the orders of
    switching (Shapley), so that the factors of all causes multiply to the ratio. A recorded setting that differs is
    exact. What is measured (gradients, their alignment, the norm at the start) is claimed only beyond the scatter
    within the runs and between runs of different seeds. Loss and metrics are shown beside, never as caused.

    Args:
        a: what `equilibria.watch` or `equilibria.read_run` returns, or the directory of a run; it may still grow.
        b: the run that A is compared with.

    Returns:
        The explanation, which prints itself.

    Raises:
        EquilibriaError: not a run, a run without samples, or runs without a common layer or common steps.

    Example:
        >>> import torch
        >>> from equilibria.watching import watch
        >>> def run(lr):
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.BatchNorm1d(16))
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-3)
        ...     with watch(model, optimizer, every=1) as monitor:
        ...         for _ in range(200):
        ...             optimizer.zero_grad()
        ...             (model(torch.randn(32, 16)) * torch.randn(32, 16)).mean().backward()
        ...             optimizer.step()
        ...     return monitor
        >>> result = explain(run(lr=2.0), run(lr=1.0))
        >>> result.causes[0].name
        'lr'
    """
    (first, ended), (second, other) = _read(a, "a"), _read(b, "b")
    first, renamed = _with_names_of(first, second)
    names, notes = _common(first, second)
    notes += renamed + ended + other
    compared = [name for name in names if _turns(first, name) and _turns(second, name)]
    at_rest = {name: (_turns(first, name), _turns(second, name)) for name in names if name not in compared}
    if not compared:
        raise EquilibriaError(
            f"got two runs without a layer that turns in both ({joined(names)}); expected at least one that was trained"
        )
    _check_steps(first, second, compared)
    same = all(optimizer_kind(first, name) == optimizer_kind(second, name) for name in compared)
    parts = differences(first, second, compared, same_optimizer=same)
    settings = setting_differences(first, second)
    still = _frozen(first, second) | {name: pair for name, pair in at_rest.items() if pair[0] != pair[1]}
    causes = ranked_causes(parts, first, second, settings=settings, still=still)
    if (fewest := fewest_samples((first, second), compared)) < FEWEST_SAMPLES:
        notes.append(
            f"a layer has {counted(fewest, 'sample')} only: recorded settings are claimed as causes, measured ones "
            f"from {FEWEST_SAMPLES} samples on (watch with every=5)"
        )
    if len(parts.edges) < 3:
        notes.append("few common samples: one stretch of steps is compared, without its course")
    return Explanation(
        first_step=int(parts.edges[0]),
        last_step=int(parts.edges[-1]) - 1,
        causes=causes,
        layers=tuple(_layer(parts, position) for position in range(len(compared))),
        settings=settings,
        logged=_logged(first, second, parts.edges),
        change=smallest_change(parts, causes, first, second),
        notes=tuple(notes),
        step=(parts.edges[1:] + parts.edges[:-1]) / 2,
        angle=np.exp(_mean(parts.measured)),
        parts={name: np.exp(_mean(part)) for name, part in zip(parts.causes, parts.angle_parts, strict=True)},
        _curve=angle_curve(first, compared),
    )


def _read(run: RunLike, argument: str) -> tuple[SampledRun, list[str]]:
    """The run as long as its weights are finite, and a sentence if they are not to its end."""
    try:
        source = as_run(run)
    except EquilibriaError as error:
        error.argument = argument
        raise
    table = source.samples()
    if not table.num_rows:
        raise EquilibriaError(
            f"got {argument}, a run without samples; expected samples of some hundred steps: watch it longer, or with "
            "a smaller every=",
            argument=argument,
        )
    notes = []
    if (end := compute.min(table["step"].filter(compute.is_nan(table["norm"]))).as_py()) is not None:
        table = table.filter(compute.less(table["step"], end))
        if not table.num_rows:
            raise EquilibriaError(
                f"got {argument}, a run whose weights are not finite from its first sample on; expected a run that "
                "trained",
                argument=argument,
            )
        notes.append(f"the weights of {argument.upper()} are not finite from step {end:,} on; the steps before count")
    metrics = source.metrics() if hasattr(source, "metrics") else None
    return sampled_run(table, metadata=source.metadata, metrics=metrics), notes


def _with_names_of(a: SampledRun, b: SampledRun) -> tuple[SampledRun, list[str]]:
    """A with the names of B if they begin differently only, as in a wrapped model, and a sentence about it."""
    if set(a.series.names) & set(b.series.names):
        return a, []
    prefixes = []
    for run in (a, b):
        parts = [name.split(".")[:-1] for name in run.series.names]
        both = takewhile(lambda pair: pair[0] == pair[1], zip(min(parts), max(parts), strict=False))
        prefixes.append("".join(f"{part}." for part, _ in both))
    ends = [
        {name.removeprefix(prefix) for name in run.series.names} for run, prefix in zip((a, b), prefixes, strict=True)
    ]
    if not ends[0] & ends[1]:
        return a, []

    def renamed(name: str) -> str:
        return prefixes[1] + name.removeprefix(prefixes[0])

    names = tuple(renamed(name) for name in a.series.names)
    frozen = [each | {"name": renamed(each["name"])} for each in a.metadata.get("frozen", ())]
    series, taken = (dataclasses.replace(each, names=names) for each in (a.series, a.taken))
    same = dataclasses.replace(a, series=series, taken=taken, metadata={**a.metadata, "frozen": frozen})
    return same, [f'no name is common: those of A count from "{prefixes[0]}" on, those of B from "{prefixes[1]}" on']


def _common(a: SampledRun, b: SampledRun) -> tuple[list[str], list[str]]:
    """The layers that both runs have, and sentences about the others."""
    names = [name for name in a.series.names if name in b.series.names]
    if not names:
        raise EquilibriaError(
            f"got two runs without a common layer: A has {joined(list(a.series.names))}, B has "
            f"{joined(list(b.series.names))}; expected two runs of one network, whose parameters have the same names"
        )
    notes = [
        f"only in {word}, and not compared: {joined(only)}"
        for word, only in (("A", differing_layers(a, b)), ("B", differing_layers(b, a)))
        if only
    ]
    lasts = [int(run.series.columns["step"].max()) for run in (a, b)]
    if lasts[0] != lasts[1]:
        notes.append(
            f"A has samples up to step {lasts[0]:,}, B up to step {lasts[1]:,}; the steps that both have are compared"
        )
    return names, notes


def _turns(run: SampledRun, name: str) -> bool:
    return bool((run.taken.of(run.taken.names.index(name))["angle"] > 0).any())


def _frozen(a: SampledRun, b: SampledRun) -> dict[str, tuple[bool, bool]]:
    """Layers that one run trains and the other one has frozen: whether they turn in A, and in B."""
    in_b = {name: (True, False) for name in frozen_names(b) if name in a.series.names}
    return in_b | {name: (False, True) for name in frozen_names(a) if name in b.series.names}


def _check_steps(a: SampledRun, b: SampledRun, names: list[str]) -> None:
    spans = []
    for run in (a, b):
        steps = [run.series.of(run.series.names.index(name))["step"] for name in names]
        spans.append((max(int(step[0]) for step in steps), min(int(step[-1]) for step in steps)))
    if max(span[0] for span in spans) > min(span[1] for span in spans):
        raise EquilibriaError(
            f"got runs without common steps: A has samples of steps {spans[0][0]:,}-{spans[0][1]:,}, B of "
            f"{spans[1][0]:,}-{spans[1][1]:,}; expected an overlap"
        )


def _mean(values: Array) -> Array:
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis=1)
    return np.asarray(np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan))


def _layer(parts: Differences, position: int) -> LayerDifference:
    factors = np.exp(parts.travelled_parts[:, position])
    return LayerDifference(
        name=parts.names[position],
        angle=np.exp(parts.measured[:, position]),
        travelled=float(np.exp(parts.travelled[position])),
        parts=dict(zip(parts.causes, factors.tolist(), strict=True)),
        unexplained=float(np.exp(parts.unexplained[position])),
    )


def _logged(a: SampledRun, b: SampledRun, edges: NDArray[np.int64]) -> tuple[LoggedDifference, ...]:
    first = edges[-1] - max(1, round(_LAST * (edges[-1] - edges[0])))

    def last(run: SampledRun, name: str) -> tuple[float, float]:
        step, values = run.metrics[name]
        chosen = values[(step >= first) & (step < edges[-1]) & np.isfinite(values)]
        error_sq = float(chosen.var(ddof=1)) / len(chosen) if len(chosen) >= _VALUES else math.nan
        return (float(chosen.mean()) if len(chosen) else math.nan), error_sq

    found = []
    for name in (name for name in a.metrics if name in b.metrics):
        (mean_a, sq_a), (mean_b, sq_b) = last(a, name), last(b, name)
        parted = _parted((a.metrics[name], b.metrics[name]), edges)
        found.append(LoggedDifference(name, mean_a, mean_b, *parted, error=math.sqrt(sq_a + sq_b)))
    return tuple(found)


def _parted(courses: Sequence[tuple[Array, Array]], edges: NDArray[np.int64]) -> tuple[int | None, int]:
    """Since when one course is below the other one, and the length of the stretches whose means are compared."""
    known = [
        (step[inside], values[inside])
        for step, values in courses
        for inside in [(step >= edges[0]) & (step < edges[-1]) & np.isfinite(values)]
    ]
    count = min(_MOST_APART, min(len(step) for step, _ in known) // _VALUES)
    if count < _FEWEST_APART:
        return None, 0
    bounds = np.linspace(edges[0], edges[-1], count + 1).round()
    means, errors_sq = [], []
    for step, values in known:
        place = np.searchsorted(bounds, step, side="right") - 1
        number = np.bincount(place, minlength=count).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.bincount(place, values, minlength=count) / number
            spread = np.bincount(place, (values - mean[place]) ** 2, minlength=count)
            errors_sq.append(spread / (number - 1) / number)
        means.append(mean)
    apart, error_sq = means[0] - means[1], errors_sq[0] + errors_sq[1]
    if not np.isfinite(apart + error_sq).all():  # logged too unevenly
        return None, 0
    begin = int(np.flatnonzero(np.sign(apart) != np.sign(apart[-1])).max(initial=-1)) + 1
    beyond = apart[begin:] ** 2 > _ONE**2 * error_sq[begin:]
    if not beyond.any() or apart[-1] == 0:
        return None, 0
    begin += int(np.argmax(beyond))
    lasting = len(apart) - begin >= _FEWEST_APART and apart[begin:].sum() ** 2 > _ALL**2 * error_sq[begin:].sum()
    return (int(bounds[begin]), round(float(bounds[1] - bounds[0]))) if lasting else (None, 0)
