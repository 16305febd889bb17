"""GainPredictor: what matrices that are not scale-invariant do at a sampled step, from their measured growth gain.

Nearly every matrix obeys ``change of ln ||w||^2 = -2 eps + G angle^2`` per step, with eps the decay in force and one
number of its own, the growth gain G (`equilibria.theory.gain`).

Gain. Between two samples the norm, the settings of every step and the angles at both ends are known: an angle goes as
lr, so the angles of the steps between follow. Eight batches of such stretches give G with its standard error. They span
the last 6 % of the steps so far, and each at least 10 steps and 3 samples.

Prediction. A step turns by ``angle = lr u / ||w||^p``, p = 1 for updates whose length does not depend on the gradient's
(Adam, Lion, Muon) and p = 2 for SGD, with u the mean over the last samples. Then ``||w||^(2p)`` obeys a linear
recursion, which starts at the measured norm when G is known, when somebody else changed the weight, and whenever eight
new batches have replaced those that G came from: G is that of the steps before, and its errors would add up for ever.
In between the recursion runs by itself: measured norms do not correct it. Every sample is predicted with G and u of
earlier samples, from a norm that is up to eight batches old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.diagnosis.budget import BATCHES, KNOWN, LEAST_SAMPLES, LEAST_STEPS
from equilibria.diagnosis.invariance import decay_in_force
from equilibria.monitor.predictor import LEFT, TOLERANCE, RunningMean
from equilibria.monitor.reading import MeasuredStep
from equilibria.theory.identified import Identified
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import AdamL2, AdamW, Lion, Rule

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

_SHARE = 0.06  # of the steps so far, which the batches span
_ANGLES = 5  # samples in the mean of u^2, which changes by 10 % within 100 steps of a small transformer
_SMALLEST, _LARGEST = 1e-70, 1e70  # squared norms whose squares stay inside float64
_ARRAYS = ("gain", "error", "_sums", "_batch", "_state", "_log_norm_sq", "_turn_sq", "_settled")
_COUNTS = ("next_step", "_steps", "_samples", "_closed")


@dataclass(frozen=True, slots=True)
class GainPrediction:
    """One sampled step of a group by the law of the measured gain, one entry per weight; NaN where it says nothing.

    Attributes:
        angle: predicted turn of this step, in radians.
        norm: predicted ||w|| before the step.
        angle_equilibrium: radians per step in equilibrium; NaN unless the gain is positive by two standard errors.
        norm_equilibrium: ||w|| in equilibrium.
        steps_to_settle: until the angle is within 5 % of equilibrium.
        settled: whether it is, with a little hysteresis.
        gain: G.
        gain_error: its standard error.
    """

    angle: Array
    norm: Array
    angle_equilibrium: Array
    norm_equilibrium: Array
    steps_to_settle: Array
    settled: Flags
    gain: Array
    gain_error: Array


class _Stretch(NamedTuple):
    """Some steps: their decay in force and lr^2, both summed, and their number."""

    decay: Any
    lr_sq: float
    steps: int


class GainPredictor:
    """Measures the gains of one parameter group from sample to sample, and predicts the weights with them.

    Args:
        entries: numbers per weight.

    Attributes:
        gain: G of every weight, NaN while unknown.
        error: its standard error.
        next_step: the step after the last sample.
    """

    def __init__(self, entries: Array) -> None:
        count = len(entries)
        self._entries = entries
        self.gain, self.error = np.full((2, count), np.nan)
        self.next_step = 0
        self._sums = np.zeros((2, BATCHES, count))  # growth and squared angles of every batch, the oldest first
        self._batch = np.zeros((2, count))  # the same of the batch that is not full yet
        self._steps = self._samples = 0  # in that batch
        self._closed = 0  # batches so far
        self._state = np.full(count, np.nan)  # ||w||^(2p) by the recursion, before the next step
        self._log_norm_sq = np.full(count, np.nan)  # measured, before the next step
        self._turn_sq = np.full(count, np.nan)  # (angle / lr)^2 of the last sample
        self._settled = np.zeros(count, dtype=bool)
        self._speed_sq = RunningMean(count)  # u^2

    def predict(
        self,
        step: int,
        measured: MeasuredStep,
        rules: Sequence[Rule],
        *,
        changed: Flags,
        skipped: bool,
        rescalings: Sequence[tuple[int, Array]] = (),
    ) -> GainPrediction:
        """Predict one sample, then learn from it.

        Args:
            step: the optimizer's own count of steps.
            measured: what the step did.
            rules: the rule at every step since the last sample, this step's last.
            changed: whether something else changed each weight since then.
            skipped: whether the step was not carried out.
            rescalings: what controllers multiplied the weights by, each before the step with this index in ``rules``.
        """
        rule, power, earlier = rules[-1], norm_power(rules[-1]), rules[:-1]
        with np.errstate(all="ignore"):  # zeros and values that are not finite become NaN, weight by weight
            scale_sq = np.prod([factors for _, factors in rescalings], axis=0) ** 2 if rescalings else 1.0
            broken = changed | (len(rules) != step + 1 - self.next_step)
            restarts = broken | (self._samples == 0 and self._closed % BATCHES == 0)
            in_force = self._in_force(rule, measured)
            between, last = _stretch(earlier, in_force), _stretch(rules[-1:], in_force)
            within = (measured.ww > _SMALLEST) & (measured.ww < _LARGEST)
            here = np.where(within & np.isfinite(self.gain), measured.ww, np.nan) ** power
            before = self._advanced(self._state * scale_sq**power, between, power)
            before = np.where(restarts | np.isnan(before), here, before)
            angle = rule.lr * np.sqrt(self._speed_sq.value / before)
            self._state = before if skipped else self._advanced(before, last, power)
            taken = between if skipped else _Stretch(*(a + b for a, b in zip(between, last, strict=True)))
            after = np.log((measured.ww if skipped else measured.norm_sq_after) / scale_sq)
            turn_sq = np.square(measured.angle / (np.nan if skipped else rule.lr))
            turn_sq = np.where(np.isfinite(turn_sq), turn_sq, np.nan)
            self._learn(taken, growth=after - self._log_norm_sq + 2 * taken.decay, turn_sq=turn_sq, broken=broken)
            self._speed_sq.add(turn_sq * measured.ww**power, window=_ANGLES)
            self._log_norm_sq = after + np.log(scale_sq)
            self._turn_sq = np.where(np.isnan(turn_sq) & ~broken, self._turn_sq, turn_sq)
            self.next_step = step + 1
            if self._steps >= max(LEAST_STEPS, _SHARE * (step + 1) / BATCHES) and self._samples >= LEAST_SAMPLES:
                self._close_batch()
            return self._with_equilibrium(rule, measured, last.decay, angle, before ** (0.5 / power), power)

    def _advanced(self, state: Array, stretch: _Stretch, power: int) -> Array:
        """The recursion over some steps: y = ||w||^(2p) changes by -2p eps y + p G (lr u)^2 per step."""
        if not stretch.steps:
            return state
        rate = 2 * power * stretch.decay
        fed = power * self.gain * self._speed_sq.value * stretch.lr_sq
        after = state * np.exp(-rate) + fed * np.where(rate > 0, -np.expm1(-rate) / rate, 1.0)
        return np.where(after > 0, after, np.nan)

    def _in_force(self, rule: Rule, measured: MeasuredStep) -> Array:
        """The decay in force over lr x wd."""
        if isinstance(rule, Identified):
            _, share = rule.motion(measured.ww, unit_grad_sq=measured.gg * measured.ww, dim=self._entries)
            return np.asarray(share / (rule.lr * rule.weight_decay or np.nan))
        unit = rule.weight_decay or 1.0
        return decay_in_force(
            {"kind": type(rule).__name__, "dampening": getattr(rule, "dampening", 0.0)},
            lr=1 / unit,
            weight_decay=unit,
            momentum=rule.betas[0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum,
            grad_norm=np.sqrt(measured.gg),
            norm=measured.norm,
            entries=self._entries,
        )

    # ---- the gain

    def _learn(self, taken: _Stretch, *, growth: Array, turn_sq: Array, broken: Flags) -> None:
        """Add the steps since the last sample to the batch: angles go as lr between the two samples."""
        ends = np.stack([turn_sq, self._turn_sq])
        known = np.isfinite(ends)
        turned = np.where(known, ends, 0.0).sum(axis=0) / known.sum(axis=0) * taken.lr_sq
        good = np.isfinite(growth) & np.isfinite(turned) & ~broken
        self._batch += np.where(good, [growth, turned], 0.0)
        self._steps += taken.steps
        self._samples += 1

    def _close_batch(self) -> None:
        self._sums = np.concatenate([self._sums[:, 1:], self._batch[:, np.newaxis]], axis=1)
        self._batch, self._steps, self._samples = np.zeros_like(self._batch), 0, 0
        self._closed += 1
        self._measure()

    def _measure(self) -> None:
        """G = sum of growth over sum of squared angles, with the error of a ratio of batch sums."""
        growth, turned = self._sums
        total = np.where((turned > 0).all(axis=0), turned.sum(axis=0), np.nan)
        self.gain = growth.sum(axis=0) / total
        residuals = growth - self.gain * turned
        self.error = np.sqrt(BATCHES / (BATCHES - 1) * np.sum(residuals * residuals, axis=0)) / total

    # ---- equilibrium

    def _with_equilibrium(
        self, rule: Rule, measured: MeasuredStep, decay: Array, angle: Array, norm: Array, power: int
    ) -> GainPrediction:
        """The prediction with angle*^2 = 2 eps / G (`theory.gain.equilibrium_from_gain`) and the way there."""
        balanced = (self.gain > KNOWN * self.error) & (decay > 0)
        star_sq = np.where(balanced, 2 * decay / self.gain, np.nan)
        rest = rule.lr**2 * self._speed_sq.value / star_sq  # ||w||^(2p) in equilibrium
        apart = measured.ww**power / rest
        steps = _steps_within(TOLERANCE, apart, 2 * power * decay)
        self._settled = (steps == 0) | (self._settled & (_steps_within(LEFT, apart, 1.0) == 0))
        return GainPrediction(
            angle=angle,
            norm=norm,
            angle_equilibrium=np.sqrt(star_sq),
            norm_equilibrium=rest ** (0.5 / power),
            steps_to_settle=steps,
            settled=self._settled.copy(),
            gain=self.gain,
            gain_error=self.error,
        )

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Numbers and tensors for a checkpoint."""
        arrays = {name: torch.from_numpy(np.array(getattr(self, name))) for name in _ARRAYS}
        return {**arrays, **{name: getattr(self, name) for name in _COUNTS}, "speed": self._speed_sq.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        for name in _ARRAYS:
            setattr(self, name, state[name].cpu().numpy().copy())
        for name in _COUNTS:
            setattr(self, name, int(state[name]))
        self._speed_sq.load_state_dict(state["speed"])


def _stretch(rules: Sequence[Rule], in_force: Array) -> _Stretch:
    decay = sum(rule.lr * rule.weight_decay for rule in rules)
    return _Stretch(in_force * decay, sum(rule.lr * rule.lr for rule in rules), len(rules))


def _steps_within(tolerance: float, apart: Array, rate: Array | float) -> Array:
    """Steps until y/y* - 1, which decays at a rate, leaves the angle, (y*/y)^(1/2), within a tolerance of 1."""
    allowed = np.where(apart > 1, (1 - tolerance) ** -2 - 1, 1 - (1 + tolerance) ** -2)
    return np.asarray(np.maximum(np.log(np.abs(apart - 1) / allowed), 0.0) / rate)
