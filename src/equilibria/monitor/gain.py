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
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.diagnosis.budget import BATCHES, KNOWN, LEAST_SAMPLES, LEAST_STEPS
from equilibria.diagnosis.invariance import decay_in_force
from equilibria.monitor.predictor import LEFT, TOLERANCE, RunningMean
from equilibria.monitor.reading import MeasuredStep
from equilibria.theory.gain import advance_by_gain
from equilibria.theory.identified import Identified
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import AdamL2, AdamW, Lion, Rule

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

_SHARE = 0.06  # of the steps so far, which the batches span
_ANGLES = 5  # samples in the mean of u^2, which changes by 10 % within 100 steps of a small transformer
_SMALLEST, _LARGEST = 1e-70, 1e70  # squared norms whose squares stay inside float64
# Range of ||w||^(2p) over its equilibrium within which an angle, which goes as its inverse root, is settled.
_NEAR, _STILL_NEAR = (((1 + tolerance) ** -2, (1 - tolerance) ** -2) for tolerance in (TOLERANCE, LEFT))
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

    decay: Array | float
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
        self._derive()

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
        rule, power = rules[-1], norm_power(rules[-1])
        follows = len(rules) == step + 1 - self.next_step
        with np.errstate(all="ignore"):  # zeros and values that are not finite become NaN, weight by weight
            scale_sq = np.prod([factors for _, factors in rescalings], axis=0) ** 2 if rescalings else 1.0
            if not follows:  # nothing is known about the steps between
                self._forget(...)
            elif changed.any():
                self._forget(changed)
            in_force = self._in_force(rule, measured)
            between, last = _stretch(rules[:-1], in_force), _stretch(rules[-1:], in_force)
            here = _to_power(measured.ww, power)
            fed = self.gain * self._speed_sq.value
            before = _advanced(self._state * scale_sq**power, fed, between, power)
            kept = before > 0
            if self._samples == 0 and self._closed % BATCHES == 0:
                kept[:] = False
            if not kept.all():
                within = (measured.ww > _SMALLEST) & (measured.ww < _LARGEST)
                before = np.where(kept, before, np.where(within, here + self._unknown, np.nan))
            angle = rule.lr * np.sqrt(self._speed_sq.value / before)
            self._state = before if skipped else _advanced(before, fed, last, power)
            taken = between
            if not skipped:
                steps = between.steps + last.steps
                taken = _Stretch(between.decay + last.decay, between.lr_sq + last.lr_sq, steps)
            after = np.log(measured.ww if skipped else measured.norm_sq_after)
            turn_sq = np.square(measured.angle / (np.nan if skipped or not rule.lr else rule.lr))
            growth = after - self._log_norm_sq + 2 * taken.decay
            self._learn(taken, growth=growth - np.log(scale_sq) if rescalings else growth, turn_sq=turn_sq)
            self._speed_sq.add(turn_sq * here, window=_ANGLES)
            self._log_norm_sq = after
            self._turn_sq = np.where(np.isnan(turn_sq), self._turn_sq, turn_sq)
            self.next_step = step + 1
            if self._steps >= max(LEAST_STEPS, _SHARE * (step + 1) / BATCHES) and self._samples >= LEAST_SAMPLES:
                self._close_batch()
            return self._with_equilibrium(rule, here, last.decay, angle, _from_power(before, power), power)

    def _forget(self, rows: Any) -> None:
        """Drop what connects some weights with their last sample."""
        self._state[rows] = self._log_norm_sq[rows] = self._turn_sq[rows] = np.nan

    def _in_force(self, rule: Rule, measured: MeasuredStep) -> Array | float:
        """The decay in force over lr x wd; one number for all weights unless it depends on their gradients."""
        if isinstance(rule, Identified):
            _, share = rule.motion(measured.ww, unit_grad_sq=measured.gg * measured.ww, dim=self._entries)
            return np.asarray(share / (rule.lr * rule.weight_decay or np.nan))
        momentum = rule.betas[0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum
        if not isinstance(rule, AdamL2):
            return _constant_in_force(type(rule).__name__, getattr(rule, "dampening", 0.0), momentum)
        unit = rule.weight_decay or 1.0
        return decay_in_force(
            {"kind": type(rule).__name__},
            lr=1 / unit,
            weight_decay=unit,
            momentum=momentum,
            grad_norm=np.sqrt(measured.gg),
            norm=measured.norm,
            entries=self._entries,
        )

    # ---- the gain

    def _learn(self, taken: _Stretch, *, growth: Array, turn_sq: Array) -> None:
        """Add the steps since the last sample to the batch: angles go as lr between the two samples."""
        ends = np.fmin(turn_sq, self._turn_sq), np.fmax(turn_sq, self._turn_sq)  # both are the other if one is NaN
        turned = (ends[0] + ends[1]) * (taken.lr_sq / 2)
        good = np.isfinite(growth + turned)
        self._batch[0] += np.where(good, growth, 0.0)
        self._batch[1] += np.where(good, turned, 0.0)
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
        self._derive()

    def _derive(self) -> None:
        """What follows from gain and error alone."""
        self._unknown = np.where(np.isfinite(self.gain), 0.0, np.nan)
        self._positive = np.where(self.gain > KNOWN * self.error, self.gain, np.nan)

    # ---- equilibrium

    def _with_equilibrium(
        self, rule: Rule, here: Array, decay: Array | float, angle: Array, norm: Array, power: int
    ) -> GainPrediction:
        """The prediction with angle*^2 = 2 eps / G (`theory.gain.equilibrium_from_gain`) and the way there."""
        decay = (decay or np.nan) if isinstance(decay, float) else np.where(decay > 0, decay, np.nan)
        star_sq = 2 * decay / self._positive
        rest = rule.lr**2 * self._speed_sq.value / star_sq  # ||w||^(2p) in equilibrium
        apart = here / rest
        is_near = (apart >= _NEAR[0]) & (apart <= _NEAR[1])
        self._settled = is_near | (self._settled & (apart >= _STILL_NEAR[0]) & (apart <= _STILL_NEAR[1]))
        # y/y* - 1 decays at the rate 2p eps, until the angle, (y*/y)^(1/2), is within the tolerance of 1
        allowed = np.where(apart > 1, _NEAR[1] - 1, 1 - _NEAR[0])
        steps = np.log(np.abs(apart - 1) / allowed) / (2 * power * decay)
        return GainPrediction(
            angle=angle,
            norm=norm,
            angle_equilibrium=np.sqrt(star_sq),
            norm_equilibrium=_from_power(rest, power),
            steps_to_settle=np.where(is_near, 0.0, steps),
            settled=self._settled,
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
        self._derive()


def _advanced(state: Array, fed: Array, stretch: _Stretch, power: int) -> Array:
    return (
        advance_by_gain(state, fed, decay=stretch.decay, lr_sq=stretch.lr_sq, power=power) if stretch.steps else state
    )


def _stretch(rules: Sequence[Rule], in_force: Array | float) -> _Stretch:
    decay = lr_sq = 0.0
    for rule in rules:
        lr = rule.lr
        decay += lr * rule.weight_decay
        lr_sq += lr * lr
    return _Stretch(in_force * decay, lr_sq, len(rules))


@lru_cache(maxsize=128)
def _constant_in_force(kind: str, dampening: float, momentum: float) -> float:
    settings = {"lr": 1.0, "weight_decay": 1.0, "momentum": momentum}
    rule = {"kind": kind, "dampening": dampening}
    return float(decay_in_force(rule, **settings, grad_norm=np.nan, norm=np.nan, entries=np.nan))


def _to_power(norm_sq: Array, power: int) -> Array:
    """||w||^(2p)."""
    return norm_sq if power == 1 else norm_sq * norm_sq


def _from_power(state: Array, power: int) -> Array:
    """||w||."""
    return np.sqrt(state) if power == 1 else np.sqrt(np.sqrt(state))
