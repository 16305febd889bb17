"""The evidence about one layer, with a number for every assumption of the predictions; and how findings name layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from equilibria.diagnosis.metadata import rule_from_metadata
from equilibria.diagnosis.series import SETTINGS, Array
from equilibria.diagnosis.summary import LayerSummary
from equilibria.errors import EquilibriaError
from equilibria.records.tables import STATES
from equilibria.theory.equilibrium import ROUNDED_AWAY, Equilibrium
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
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

    Attributes:
        summary: over the window of `summarise`.
        entry: its entry in the metadata, {} if there is none.
        rows: its samples of steps that were taken.
        since: first row since lr, weight decay or momentum last jumped; 0 if they never did.
    """

    summary: LayerSummary
    entry: Mapping[str, Any]
    rows: Mapping[str, Array]
    since: int

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.summary.name

    @property
    def entries(self) -> float:
        """The number of its entries."""
        return float(self.entry.get("entries", 0))

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
    def predictable(self) -> bool:
        """Whether it is scale-invariant and has a law."""
        return bool(self.summary.invariant) and self.rule is not None

    def rule_at(self, row: int) -> Rule | None:
        """The rule with the settings of one sample."""
        return rule_from_metadata(self.entry, {name: float(self.rows[name][row]) for name in SETTINGS})

    @cached_property
    def rule(self) -> Rule | None:
        """The rule with the settings of the last sample."""
        return self.rule_at(-1) if len(self.rows["step"]) else None

    @cached_property
    def unit_grad_sq(self) -> float:
        """Mean of ||g||^2 ||w||^2 over the second half of the samples since the last jump; NaN where unknown."""
        samples = self.late("unit_grad_sq")
        known = samples[np.isfinite(samples)]
        return float(np.mean(known)) if len(known) else math.nan

    @cached_property
    def equilibrium(self) -> Equilibrium | None:
        """The equilibrium of the present settings."""
        if self.rule is None:
            return None
        try:
            return self.rule.equilibrium(unit_grad_sq=self.unit_grad_sq, dim=self.entries)
        except EquilibriaError:
            return None

    def late(self, column: str) -> Array:
        """A column over the second half of the samples since the last jump."""
        count = len(self.rows["step"])
        return self.rows[column][self.since + (count - self.since) // 2 :]

    def state_at(self, row: int) -> str | None:
        """The state of one sample."""
        position = int(self.rows["state"][row])
        return STATES[position] if position >= 0 else None

    @cached_property
    def correlation(self) -> float | None:
        """h~ / N if it is surely not 1: the gradients are correlated with the momentum."""
        h, n = self.late("momentum_unit_grad_sq"), self.late("unit_grad_sq")
        known = np.isfinite(h) & np.isfinite(n)
        h, n = h[known], n[known]
        if len(h) < _LEAST_SAMPLES or not np.any(n):
            return None
        ratio = float(np.sum(h) / np.sum(n))
        error = float(np.std(h - ratio * n) / np.mean(n)) / math.sqrt(len(h))
        return ratio if abs(ratio - 1) > max(_CORRELATED, _SURE * error) else None

    @cached_property
    def drift(self) -> float | None:
        """d ln L / dt per time constant, if it is surely not small; under SGD and SGDW L sets the norm.

        None also while lr moves, since the time constant moves with it, and if that is far longer than the run.
        """
        slope, error = _trend(self.late("step"), self.late("unit_grad_sq"))
        if slope == 0 or not isinstance(self.rule, SGD | SGDW) or self.equilibrium is None or self.lr_is_moving:
            return None
        rate = _rate(self.rule)
        if rate * self.length < _OUT_OF_REACH:
            return None
        drift, error = slope / rate, error / rate
        return drift if abs(drift) > max(_DRIFTING, _SURE * error) else None

    @cached_property
    def lr_is_moving(self) -> bool:
        """Whether lr changed at most of the samples in the second half since the last jump."""
        lr = self.late("lr")
        return bool(np.count_nonzero(np.diff(lr)) > len(lr) / 2)

    @cached_property
    def remaining(self) -> float:
        """L in the last tenth of the samples over its highest in the tenths before; NaN with fewer than 10 samples."""
        samples = self.rows["unit_grad_sq"]
        samples = samples[np.isfinite(samples)]
        if len(samples) < _BLOCKS:
            return math.nan
        *earlier, now = _block_means(samples).tolist()
        return float(now / max(earlier)) if max(earlier) > 0 else math.nan

    @cached_property
    def vanishing(self) -> bool:
        """Whether L is small, and the equilibrium falls faster than weight decay can shrink the norm."""
        if not self.remaining < _FALLING:  # also where it is unknown
            return False
        if not isinstance(self.rule, SGD | SGDW) or self.equilibrium is None:
            return False  # under other rules L does not set the norm
        if self.drift is not None and self.drift <= -1:
            return True
        return self.remaining < _VANISHED and (self.summary.norm_vs_equilibrium or 1.0) > _LEFT_BEHIND

    @cached_property
    def radial(self) -> float | None:
        """Mean pull of the gradient along the weight, in units of the weight decay, if it is surely not small."""
        if self.rule is None or self.rule.weight_decay == 0:
            return None
        share = _radial_share(self.rule, self.rows, self.entries)[-len(self.late("step")) :]
        share = share[np.isfinite(share)]
        if len(share) < _LEAST_SAMPLES:
            return None
        mean, error = float(np.mean(share)), float(np.std(share)) / math.sqrt(len(share))
        return mean if abs(mean) > max(_RADIAL, _SURE * error) else None

    @cached_property
    def rounding(self) -> float | None:
        """Relative change of the weight per step, by decay or update, if its type rounds that away; else None."""
        limit = ROUNDED_AWAY.get(str(self.entry.get("dtype")))
        if limit is None or self.rule is None or self.rule.weight_decay == 0:
            return None
        coupled = isinstance(self.rule, SGD | AdamL2)
        change = self.rows["angle_predicted"] if coupled else self.rows["lr"] * self.rows["weight_decay"]
        change = change[np.isfinite(change)]
        if not len(change) or change.min() >= limit:
            return None
        # The median: the end of a schedule that falls to zero is no reason for alarm.
        typical = float(np.median(change))
        return typical if 0 < typical < limit else None

    @property
    def explained(self) -> bool:
        """Whether a broken assumption explains why the angle is not the predicted one."""
        if self.rounding is not None or self.radial is not None or self.vanishing:
            return True
        # Heavy ball's prediction is driven by h~ and holds for correlated gradients too; Nesterov's does not quite.
        return self.correlation is not None and getattr(self.rule, "nesterov", False)


@lru_cache(maxsize=1024)
def _rate(rule: SGD | SGDW) -> float:
    return relaxation(rule).rate


def _trend(step: Array, values: Array) -> tuple[float, float]:
    """Slope of ln(values) per step and its standard error; (0, 0) with too few samples."""
    known = np.isfinite(values)
    if np.count_nonzero(known) < _LEAST_SAMPLES:
        return 0.0, 0.0
    t, y = _block_means(step[known]), _block_means(values[known])
    if np.any(y <= 0):
        return 0.0, 0.0
    t, y = t - np.mean(t), np.log(y) - np.mean(np.log(y))
    slope = float(t @ y / (t @ t))
    residual = y - slope * t
    return slope, math.sqrt(float(residual @ residual) / (_BLOCKS - 2) / float(t @ t))


def _block_means(values: Array) -> Array:
    edges = np.linspace(0, len(values), _BLOCKS + 1).astype(np.int64)
    return np.asarray(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


def _radial_share(rule: Rule, rows: Mapping[str, Array], entries: float) -> Array:
    """The effect of <w, g> on the norm over that of the weight decay; NaN for rules without a closed form."""
    decay = np.where(rows["weight_decay"] > 0, rows["weight_decay"], np.nan) * rows["norm"]
    along = rows["cosine"] * rows["grad_norm"] / decay
    if isinstance(rule, SGD | AdamL2):
        return np.asarray(along)
    if isinstance(rule, SGDW):  # the decay does not pass through the momentum that adds up the gradient
        return np.asarray(along / (1 - rule.momentum))
    if isinstance(rule, AdamW):  # the update has the gradient's direction and the length sqrt(entries)
        return np.asarray(rows["cosine"] * math.sqrt(entries) / decay)
    return np.full_like(along, np.nan)


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


def rescaling(rule: Rule, factor: float) -> str:
    """Tell what to multiply so that the weights change by ``factor`` and nothing else is disturbed."""
    first, second = _factor(1 / factor), _factor(factor**-2)
    if isinstance(rule, SGD | SGDW | Muon):
        state = f", their momentum buffer by {first}" if rule.momentum else ""
    else:
        state = f", their exp_avg by {first}" + ("" if isinstance(rule, Lion) else f", exp_avg_sq by {second}")
    return (
        f"multiply the weights by {_factor(factor)}{state}, and, where a BatchNorm follows, its running mean and "
        f"variance by {_factor(factor)} and {_factor(factor**2)}"
    )


def _factor(value: float) -> str:
    """Three significant digits at least: a factor printed as 0.000 would erase the weights."""
    return f"{value:.3f}" if 0.1 <= value < 1000 else f"{value:.3g}"
