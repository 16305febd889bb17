"""The evidence about one layer, with a number for every assumption of the predictions; and how findings name layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from equilibria.diagnosis.gradient_size import FEWEST, late_from, late_rows, size_variation, varies_widely
from equilibria.diagnosis.layer_summary import ACCURACY, LayerSummary
from equilibria.diagnosis.metadata import rule_from_metadata
from equilibria.diagnosis.run import SampledRun
from equilibria.diagnosis.series import SETTINGS, Array, Series, effective_count
from equilibria.errors import EquilibriaError
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES, STATES
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule
from equilibria.theory.settling import relaxation

_LEAST_SAMPLES = 30  # for a trend or a correlation
_BLOCKS = 10  # a trend is fitted to the means of so many blocks, whose scatter gives its error
_SURE = 4  # standard errors
_CORRELATED = 0.1  # |h~ / N - 1|
_DRIFTING = 0.2  # |d ln L / dt| in time constants: the angle is then 10 % off equilibrium
_OUT_OF_REACH = 0.01  # time constants in the whole run: with fewer, a drift per time constant means nothing
_FALLING, _VANISHED = 0.1, 0.01  # of the earlier L: if it falls faster than the norm can follow, and in any case
_LEFT_BEHIND = 1.25  # norm over its equilibrium, which fell with L: the angle is then 0.64 of equilibrium
_RADIAL = 0.1  # radial part of the gradient, in units of the weight decay: 5 % of the angle


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter and the evidence of its samples.

    "Late" are the samples in the second half since the last jump.

    Attributes:
        summary: over the window of `summarise`.
        entry: its entry in the metadata, {} if there is none.
        rows: its samples of steps that were taken.
        since: first row since lr, weight decay or momentum last jumped; 0 if they never did.
        rule: the rule with the settings of the last sample.
        unit_grad_sq: mean of ||g||^2 ||w||^2 over the late samples; NaN where unknown.
        trend: slope of ln L per step over the late samples, and its standard error; (0, 0) with too few samples.
        lr_is_moving: whether lr changed at most of the late samples.
        remaining: L in the last tenth of the samples over its highest in the tenths before; NaN with fewer than 10
            samples.
        variation: mean of ||g||^4 over the square of the mean of ||g||^2 over the second half of the run, if its
            gradient varies widely in size.
        correlation: h~ / N if it is surely not 1: the gradients are correlated with the momentum.
        radial: mean pull of the gradient along the weight, in units of the weight decay, if it is surely not small.
        changed_outside: share of the samples before which something other than the step changed the weight.
        controlled: what the controllers that act on the run do, such as `RescaleOnDecay`, by name.
        angle_is_scheduled: whether one of them is `AngularSchedule`, which changes lr or weight decay all the time.
    """

    summary: LayerSummary
    entry: Mapping[str, Any]
    rows: Mapping[str, Array]
    since: int
    rule: Rule | None
    unit_grad_sq: float
    trend: tuple[float, float]
    lr_is_moving: bool
    remaining: float
    variation: float | None
    correlation: float | None
    radial: float | None
    changed_outside: float
    controlled: Mapping[str, str]
    angle_is_scheduled: bool

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.summary.name

    @property
    def entries(self) -> float:
        """The number of its entries."""
        return _entries(self.entry)

    @property
    def rounding(self) -> float | None:
        """Relative change of the weight per step, by decay or update, if its type rounds that away; else None."""
        return self.summary.rounding

    @property
    def few(self) -> bool:
        """Whether there are too few samples at the present settings to judge the angle."""
        return self.summary.few

    @property
    def length(self) -> int:
        """Steps from the first sample to the last."""
        steps = self.rows["step"]
        return int(steps[-1] - steps[0]) + 1 if len(steps) else 0

    @property
    def late_steps(self) -> tuple[int, int]:
        """First and last step of the late samples."""
        steps = self.rows["step"]
        return int(steps[self.since + (len(steps) - self.since) // 2]), int(steps[-1])

    @property
    def second_half(self) -> tuple[int, int]:
        """First and last step of the samples in the second half of the run."""
        steps = self.rows["step"]
        return int(steps[np.searchsorted(steps, late_from(steps[0], steps[-1]))]), int(steps[-1])

    @property
    def predictable(self) -> bool:
        """Whether the law of invariant weights predicts it: not while undecided or idle, nor from a measured gain."""
        moves = self.rule is not None and self.summary.idle is None
        return moves and bool(self.summary.invariant) and not self.summary.by_gain

    def rule_at(self, row: int) -> Rule | None:
        """The rule with the settings of one sample."""
        return rule_from_metadata(self.entry, {name: float(self.rows[name][row]) for name in SETTINGS})

    @cached_property
    def monotone(self) -> bool | None:
        """Whether the approach to the equilibrium of the present settings is monotone; None if there is none."""
        return None if self.rule is None else _monotone(self.rule, self.scale_of_grad_sq, self.entries)

    @property
    def scale_of_grad_sq(self) -> float:
        """L for a law that depends on it, else 1, or NaN if unknown: then the layers with one rule share a result."""
        if isinstance(self.rule, AdamL2) or (isinstance(self.rule, Identified) and self.rule.is_coupled):
            return self.unit_grad_sq
        return 1.0 if self.unit_grad_sq > 0 else math.nan

    def state_at(self, row: int) -> str | None:
        """The state of one sample."""
        position = int(self.rows["state"][row])
        return STATES[position] if position >= 0 else None

    @cached_property
    def drift(self) -> float | None:
        """d ln L / dt per time constant, if it is surely not small; under SGD and SGDW L sets the norm.

        None also while lr moves, since the time constant moves with it, and if that is far longer than the run.
        """
        slope, error = self.trend
        if slope == 0 or not isinstance(self.rule, SGD | SGDW) or self.monotone is None or self.lr_is_moving:
            return None
        rate = _rate(self.rule)
        if rate * self.length < _OUT_OF_REACH:
            return None
        drift, error = slope / rate, error / rate
        return drift if abs(drift) > max(_DRIFTING, _SURE * error) else None

    @property
    def fall(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last step of the tenth of the samples with the highest L, and of the last tenth."""
        known = np.isfinite(self.rows["unit_grad_sq"])
        steps, samples = (self.rows[name][known] for name in ("step", "unit_grad_sq"))
        edges = np.linspace(0, len(steps), _BLOCKS + 1).astype(np.int64)
        highest = int(np.argmax(_block_means(samples[np.newaxis])[0, :-1]))
        first, last = ((int(steps[edges[block]]), int(steps[edges[block + 1] - 1])) for block in (highest, _BLOCKS - 1))
        return first, last

    @cached_property
    def vanishing(self) -> bool:
        """Whether L is small, and the equilibrium falls faster than weight decay can shrink the norm."""
        if not self.remaining < _FALLING:  # also where it is unknown
            return False
        if not isinstance(self.rule, SGD | SGDW) or self.monotone is None:
            return False  # under other rules L does not set the norm
        if self.drift is not None and self.drift <= -1:
            return True
        return self.remaining < _VANISHED and (self.summary.norm_vs_equilibrium or 1.0) > _LEFT_BEHIND

    @property
    def is_radial(self) -> bool:
        """Whether its gradient has a component along the weight, and does not turn it the other way.

        What Adam makes of such a gradient may pull to the other side.
        """
        faster = (self.summary.angle_vs_predicted or 1.0) - 1
        return self.radial is not None and (self.radial * faster >= 0 or abs(faster) <= ACCURACY)

    @property
    def explained(self) -> bool:
        """Whether a broken assumption explains why the angle is not the predicted one."""
        if self.rounding is not None or self.is_radial or self.vanishing:
            return True
        # Heavy ball's prediction is driven by h~ and holds for correlated gradients too; Nesterov's does not quite.
        return self.correlation is not None and getattr(self.rule, "nesterov", False)


@lru_cache(maxsize=1024)
def _rate(rule: SGD | SGDW) -> float:
    return relaxation(rule).rate


@lru_cache(maxsize=1024)
def _monotone(rule: Rule, unit_grad_sq: float, dim: float) -> bool | None:
    try:
        return rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim).monotone
    except EquilibriaError:
        return None


def _entries(entry: Mapping[str, Any]) -> float:
    return float(entry.get("entries", 0))


# ---- the evidence of all layers at once


def layers_of(run: SampledRun, summaries: Sequence[LayerSummary]) -> list[Layer]:
    """The layers of a run, with the evidence of their samples."""
    taken = run.taken
    since = taken.last_jump - taken.first[:-1]
    late = taken.only(**{name: taken.columns[name] for name in _LATE}).where(taken.is_late)
    controllers = run.metadata.get("controllers", ())
    outside = (taken.columns["note"] == NOTES.index(CHANGED_OUTSIDE)).astype(np.float64)
    columns = zip(
        *(summaries, run.entries, map(taken.of, range(len(taken.names))), since.tolist(), run.rules),
        _means(late).tolist(),
        _trends(late),
        _lr_is_moving(late).tolist(),
        _remaining(taken).tolist(),
        _or_none(_variations(run, summaries)),
        _or_none(_correlations(late)),
        _or_none(_radials(late, run)),
        (taken.sums(outside) / np.maximum(taken.counts, 1)).tolist(),
        [{one["name"]: one.get("promise") for one in controllers}] * len(taken.names),
        [any("delivered" in controller for controller in controllers)] * len(taken.names),
        strict=True,
    )
    return [Layer(*values) for values in columns]


_LATE = ("step", "unit_grad_sq", "momentum_unit_grad_sq", "cosine", "grad_norm", "norm", *SETTINGS)


def _or_none(values: Array) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _nans(series: Series) -> Array:
    return np.full(len(series.names), np.nan)


def _known(series: Series, **columns: Array) -> Series:
    """These columns, without the rows in which one of them is unknown."""
    return series.only(**columns).where(np.all([np.isfinite(values) for values in columns.values()], axis=0))


def _means(late: Series) -> Array:
    return late.mean(late.columns["unit_grad_sq"])


def _trends(late: Series) -> list[tuple[float, float]]:
    slopes, errors = np.zeros((2, len(late.names)))
    known = _known(late, unit_grad_sq=late.columns["unit_grad_sq"], step=late.columns["step"])
    for layers, (step, samples) in known.blocks("step", "unit_grad_sq"):
        if step.shape[1] < _LEAST_SAMPLES:
            continue
        t, y = _block_means(step), _block_means(samples)
        positive = np.all(y > 0, axis=1)
        layers, t, y = layers[positive], t[positive], np.log(y[positive])
        t, y = (values - np.mean(values, axis=1, keepdims=True) for values in (t, y))
        spread = np.sum(t * t, axis=1)
        slopes[layers] = slope = np.sum(t * y, axis=1) / spread
        residual = y - slope[:, None] * t
        errors[layers] = np.sqrt(np.sum(residual * residual, axis=1) / (_BLOCKS - 2) / spread)
    return list(zip(slopes.tolist(), errors.tolist(), strict=True))


def _block_means(values: Array) -> Array:
    """Means over ten blocks of the second axis."""
    edges = np.linspace(0, values.shape[1], _BLOCKS + 1).astype(np.int64)
    return np.asarray(np.add.reduceat(values, edges[:-1], axis=1) / np.diff(edges))


def _lr_is_moving(late: Series) -> Array:
    moving = np.zeros(len(late.names), dtype=bool)
    for layers, (lr,) in late.blocks("lr"):
        moving[layers] = np.count_nonzero(np.diff(lr, axis=1), axis=1) > lr.shape[1] / 2
    return moving


def _remaining(taken: Series) -> Array:
    shares = _nans(taken)
    for layers, (samples,) in _known(taken, unit_grad_sq=taken.columns["unit_grad_sq"]).blocks("unit_grad_sq"):
        if samples.shape[1] >= _BLOCKS:
            means = _block_means(samples)
            highest = np.max(means[:, :-1], axis=1)
            shares[layers] = means[:, -1] / np.where(highest > 0, highest, np.nan)
    return shares


def _correlations(late: Series) -> Array:
    correlations = _nans(late)
    columns = {"h": late.columns["momentum_unit_grad_sq"], "n": late.columns["unit_grad_sq"], "weight": late.weights}
    for layers, (h, n, weight) in _known(late, **columns).blocks("h", "n", "weight"):
        if h.shape[1] < _LEAST_SAMPLES:
            continue
        some = np.any(n, axis=1)
        layers, h, n, weight = layers[some], h[some], n[some], weight[some]
        ratio = np.sum(weight * h, axis=1) / np.sum(weight * n, axis=1)
        error = np.std(h - ratio[:, None] * n, axis=1) / np.mean(n, axis=1) / np.sqrt(effective_count(weight))
        sure = np.abs(ratio - 1) > np.maximum(_CORRELATED, _SURE * error)
        correlations[layers] = np.where(sure, ratio, np.nan)
    return correlations


def _variations(run: SampledRun, summaries: Sequence[LayerSummary]) -> Array:
    """How much the gradients of predictable layers vary in size, where it is widely; a parameter group is a network."""
    taken, noise = run.taken, run.taken.columns["unit_grad_sq"]
    late = taken.only(noise=noise).where(late_rows(taken) & np.isfinite(noise))
    values = _nans(taken)
    for layers, (samples,) in late.blocks("noise"):
        if samples.shape[1] >= FEWEST:
            values[layers] = size_variation(samples.T)
    groups: dict[tuple[Any, Any], list[int]] = {}
    for position, (summary, rule, entry) in enumerate(zip(summaries, run.rules, run.entries, strict=True)):
        if summary.invariant and rule is not None and math.isfinite(values[position]):
            groups.setdefault((entry.get("optimizer"), entry.get("group")), []).append(position)
    varying = np.zeros(len(values), dtype=bool)
    for positions in groups.values():
        varying[positions] = varies_widely(values[positions])
    return np.where(varying, values, np.nan)


def _radials(late: Series, run: SampledRun) -> Array:
    """The effect of <w, g> on the norm over that of the weight decay; unknown for rules without a closed form."""
    lengths, divisors = (
        np.repeat(values, late.counts) for values in np.transpose([*map(_radial_scale, run.rules, run.entries)])
    )
    columns = late.columns
    decay = np.where(columns["weight_decay"] > 0, columns["weight_decay"], np.nan) * columns["norm"]
    share = columns["cosine"] * np.where(np.isnan(lengths), columns["grad_norm"], lengths) / decay / divisors
    radials = _nans(late)
    for layers, (shares, weight) in _known(late, share=share, weight=late.weights).blocks("share", "weight"):
        if shares.shape[1] >= _LEAST_SAMPLES:
            mean = np.average(shares, axis=1, weights=weight)
            error = np.std(shares, axis=1) / np.sqrt(effective_count(weight))
            radials[layers] = np.where(np.abs(mean) > np.maximum(_RADIAL, _SURE * error), mean, np.nan)
    return radials


def _radial_scale(rule: Rule | None, entry: Mapping[str, Any]) -> tuple[float, float]:
    """Length of the part of the update that has the gradient's direction, NaN if the gradient's; and a divisor."""
    if rule is None or rule.weight_decay == 0:
        return math.nan, math.nan
    if isinstance(rule, SGD | AdamL2):
        return math.nan, 1.0
    if isinstance(rule, SGDW):  # the decay does not pass through the momentum that adds up the gradient
        return math.nan, 1 - rule.momentum
    if isinstance(rule, AdamW):
        return math.sqrt(_entries(entry)), 1.0
    return math.nan, math.nan


# ---- how findings name layers


def which_layers(layers: Sequence[Layer], of: Sequence[Layer], worst: Layer) -> str:
    """The subject of a finding: the name of a single layer, else how many layers there are and the worst of them."""
    if len(layers) == 1:
        return worst.name
    if len(layers) < len(of):
        return f"{len(layers):,} of {len(of):,} layers (worst {worst.name})"
    return f"{'both' if len(of) == 2 else f'all {len(of):,}'} layers (worst {worst.name})"


def verb(layers: Sequence[Layer], one: str = "is", more: str = "are") -> str:
    """The form of a verb that agrees with `which_layers`."""
    return one if len(layers) == 1 else more


def invariant_verb(layers: Sequence[Layer]) -> str:
    """The verb before "scale-invariant": what `symmetries` or the user stated is so, what cosines show looks so."""
    if all(layer.entry.get("invariant") is not None for layer in layers):
        return verb(layers)
    return verb(layers, "looks", "look")


def if_invariant(layers: Sequence[Layer]) -> str:
    """The condition of a sentence that compares with a law; "" where `symmetries` or the user stated the invariance."""
    guessed = [layer for layer in layers if layer.entry.get("invariant") is None]
    if not guessed:
        return ""
    which = ("it" if len(layers) == 1 else "they") if len(guessed) == len(layers) else f"{len(guessed):,} of them"
    return f"; {which} {verb(guessed, 'looks', 'look')} scale-invariant by the cosines of weight and gradient"
