"""Predictor: what the theory says a group of weights does at a sampled step, from what was measured so far.

The prediction comes from the moment recursion of the group's update rule (`equilibria.monitor.recursion`). Its state is
the expected squared norm of each weight and what the optimizer remembers of it: <w, m> and ||m||^2 of the momentum m,
the mean second moment under Adam, traces of past updates under Lion and Muon.

Start. At the first sampled step with a gradient the state is set to the measured norm and to the measured optimizer
state, all read before the step. From then on the recursion runs by itself: measured norms never correct it, or the
prediction would only repeat the measurement. It starts again from measured values when somebody else changed the weight
(loading, projecting), because no law of the optimizer covers that. Where a controller of this package rescaled the
weight, it announced the factor, and the state is rescaled by it.

Input. The settings of every single step since the last sample, sampled or not, and one number per weight that only
training knows: L, the squared gradient on the unit sphere including its correlation with the momentum. L is measured at
every sample and interpolated linearly between two of them. It changes slowly; single gradients scatter.

Equilibrium. Separately from the recursion, the present settings and the running mean of L give the angle and the norm
at which the weight would settle, and the law of approach gives the steps until then.

Settled. A weight is settled if its norm implies an angle within 5 % of equilibrium (it stays so up to 7.5 %), and if
the root mean square of its last 20 measured angles is within a factor of 1.28 of equilibrium.

Validity. The laws hold for scale-invariant weights, whose gradient is orthogonal to the weight. Without labels from
`equilibria.symmetries`, the mean cosine of weight and gradient decides once (`equilibria.diagnosis.invariance`). Until
then a weight whose cosines have stayed well below those of two random directions gets provisional predictions. Other
weights are left to `equilibria.monitor.gain`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.diagnosis.invariance import NEARLY_RANDOM, InvarianceTest, decay_in_force
from equilibria.errors import EquilibriaError
from equilibria.monitor.countdown import Countdown
from equilibria.monitor.reading import MeasuredStep
from equilibria.monitor.recursion import group_equilibrium, recall_of_shape, remembered, run_recursion
from equilibria.theory.adam import adam_settling_steps
from equilibria.theory.identified import Identified
from equilibria.theory.moments import angle_from_chord_sq, chord_sq, nesterov_correlation
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, momentum_unit_grad_sq
from equilibria.theory.settling import Relaxation, relaxation
from equilibria.theory.states import State, memory_size, rescaled

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

TOLERANCE = 0.05  # of the angle, within which a weight is settled
LEFT = 0.075  # and outside of which it no longer is: the gap keeps noise from flipping the state
_ANGLES = 20  # samples whose root mean square angle is compared with the equilibrium's
_ABOUT = 0.25  # log ratio of the two up to which a weight may count as settled: single angles scatter

_FEWEST_SAMPLES = 5  # in a mean of L: the equilibrium norm is off by a quarter of its error
_ENOUGH_SAMPLES = 20  # in it, if they fit into half a time constant
_SHARE_OF_APPROACH = 0.05  # of the time constant, if that is more: L drifts too
_FEWEST_PAIRS = 20  # in the mean correlation with the momentum: it scatters more and drifts less
_FEWEST_PULLS = 100  # in the mean memory of Muon's updates: single updates point anywhere
_COSINE_WINDOW = 50  # samples in the mean squared cosine
_MEMORIES = 3  # lengths of the momentum's memory until the updates remember as much as they ever will

_SMALLEST, _LARGEST = 1e-140, 1e140  # squared norms for which the recursion stays inside float64
_LEAST_SHARE = 0.05  # of N that L keeps under Nesterov momentum, however strongly gradients turn back

_MOMENTS = ("norm_sq", "radial", "buffer_sq", "second", "memory")
_MEANS = ("_grad_sq", "_pull", "_pulled", "_update_sq", "_cosine_sq", "_angle_sq", "_recall")


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """The optimizer's state of a group of weights, measured before a step; one entry per weight.

    Attributes:
        radial: <w, m>.
        buffer_sq: <m, m>.
        second: mean of the second moments.
        steps_done: steps that the optimizer has taken so far.
        starts: the weights whose recursion starts here; the others continue.
    """

    radial: Array
    buffer_sq: Array
    second: Array
    steps_done: float
    starts: Flags


@dataclass(frozen=True, slots=True)
class Prediction:
    """Theory for one sampled step of a group, one entry per weight; NaN where there is no law.

    Attributes:
        angle: predicted turn of this step, in radians.
        norm: predicted ||w|| before the step.
        angle_equilibrium: radians per step in equilibrium.
        norm_equilibrium: ||w|| in equilibrium.
        momentum_unit_grad_sq: L of this step, with the correlation of gradient and momentum.
        steps_to_settle: until the angle is within 5 % of equilibrium.
        settled: whether it is, with a little hysteresis.
        invariant: whether the weight is scale-invariant by its label, looks so, or may be so while that is undecided.
        undecided: whether it is.
    """

    angle: Array
    norm: Array
    angle_equilibrium: Array
    norm_equilibrium: Array
    momentum_unit_grad_sq: Array
    steps_to_settle: Array
    settled: Flags
    invariant: Flags
    undecided: Flags


class Predictor:
    """Predicts one parameter group from sample to sample.

    Args:
        entries: numbers per weight.
        invariant: 1 for scale-invariant weights, 0 for others, NaN for those whose cosines with the gradient decide;
            None if they decide for all.
        shapes: (rows, columns) of the matrix that each weight is, or is a row of; without them Muon's updates count as
            keeping all of their momentum's memory until their share is measured.

    Attributes:
        next_step: the first step whose settings the next prediction needs; the recursion's state precedes it.
    """

    def __init__(
        self, entries: Array, *, invariant: Array | None = None, shapes: Sequence[tuple[int, int]] | None = None
    ) -> None:
        count = len(entries)
        self._entries, self._shapes = entries, shapes
        self._labels = np.full(count, np.nan) if invariant is None else invariant
        self._state: State | None = None
        self.next_step = 0
        self._momentum_grad_sq = np.full(count, np.nan)  # L at the last sample
        self._grad_sq, self._pull, self._pulled = (RunningMean(count) for _ in range(3))
        self._update_sq, self._cosine_sq, self._angle_sq, self._recall = (RunningMean(count) for _ in range(4))
        self._invariance = InvarianceTest(entries)
        self._may_be_invariant = np.ones(count, dtype=bool)
        self._settled = np.zeros(count, dtype=bool)
        self._countdown = Countdown(count)

    def state_dict(self) -> dict[str, object]:
        """Numbers and tensors for a checkpoint."""
        moments = (
            None
            if self._state is None
            else {name: torch.from_numpy(np.array(getattr(self._state, name))) for name in _MOMENTS}
        )
        return {
            "next": self.next_step,
            "momentum_grad_sq": torch.from_numpy(self._momentum_grad_sq.copy()),
            "settled": torch.from_numpy(self._settled.copy()),
            "moments": moments,
            "steps_done": None if self._state is None else float(self._state.steps_done),
            "means": {name: getattr(self, name).state_dict() for name in _MEANS},
            "countdown": self._countdown.state_dict(),
            "invariance": {name: torch.from_numpy(values) for name, values in self._invariance.state_dict().items()},
            "may_be_invariant": torch.from_numpy(self._may_be_invariant.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.next_step = int(state["next"])
        arrays = (state[name].cpu().numpy().copy() for name in ("momentum_grad_sq", "settled"))
        self._momentum_grad_sq, self._settled = arrays
        for name in _MEANS:
            getattr(self, name).load_state_dict(state["means"][name])
        self._countdown.load_state_dict(state["countdown"])
        self._invariance.load_state_dict({name: values.cpu().numpy() for name, values in state["invariance"].items()})
        self._may_be_invariant = state["may_be_invariant"].cpu().numpy().copy()
        self._state = None
        if state["moments"] is not None:
            moments = {name: state["moments"][name].cpu().numpy().copy() for name in _MOMENTS}
            self._state = State(**moments, steps_done=state["steps_done"])

    def predict(
        self,
        step: int,
        measured: MeasuredStep,
        rules: Sequence[Rule],
        *,
        memory: OptimizerMemory | None,
        skipped: bool,
        rescalings: Sequence[tuple[int, Array]] = (),
    ) -> Prediction:
        """Take in one sample and predict it.

        Args:
            step: the optimizer's own count of steps.
            measured: what the step did.
            rules: the rule at every step since the last sample, this step's last.
            memory: the measured optimizer state, if the recursion of some weights starts here.
            skipped: whether the step was not carried out, as mixed precision does after an overflow.
            rescalings: what controllers multiplied the weights by, each before the step with this index in ``rules``.
        """
        rule, relax, starting = rules[-1], self._relaxation(rules[-1]), memory is not None
        with np.errstate(all="ignore"):  # zeros and values that are not finite become NaN, weight by weight
            unit_grad_sq = measured.gg * measured.ww
            if not skipped:
                self._average(measured, rule, unit_grad_sq, window=_window(relax, spacing=len(rules)))
            correlation = self._correlation(rule)
            if memory is not None and (self._state is None or memory.starts.all()):
                self._start(rule, measured, memory)
                rules, memory, rescalings = rules[-1:], None, ()
            now = np.maximum(_with_momentum(rule, unit_grad_sq, correlation), 0.0)
            norm, angle = self._follow(
                rules, now, correlation, measured=measured, memory=memory, skipped=skipped, rescalings=rescalings
            )
            self.next_step = step + 1
            mean = np.maximum(_with_momentum(rule, self._grad_sq.value, correlation), 0.0)
            angle_equilibrium, norm_equilibrium = group_equilibrium(
                rule, mean, correlation, sizes=self._sizes(rule), entries=self._entries, recall=self._recalled(rule)
            )
            steps, settled = np.full(len(mean), np.nan), np.zeros(len(mean), dtype=bool)
            if relax is not None:
                ratio = measured.norm / norm_equilibrium
                steps = relax.steps(ratio, tolerance=TOLERANCE)
                within = relax.steps(ratio, tolerance=LEFT) == 0
                settled = self._settled = (steps == 0) | (self._settled & within)
            # With a vanishing gradient the norm alone may fit: it must also turn about as in equilibrium.
            turns = np.abs(np.log(np.sqrt(self._angle_sq.value) / angle_equilibrium)) < _ABOUT
            if isinstance(rule, AdamW | AdamL2) and relax is not None:
                # The second moment lags behind the norm, so that the norm alone does not tell the steps left.
                settings = rule.lr, rule.weight_decay
                count_steps = partial(self._adam_steps, rule, measured, norm_equilibrium, mean)
                left = self._countdown.left(step, settings, count_steps, restart=starting, turns=turns)
                steps = np.where(np.isfinite(left), left, steps)
                settled = self._settled = np.where(np.isfinite(left), left == 0, settled)
            settled = settled & turns
            own = _with_momentum(rule, unit_grad_sq, measured.vg / measured.gg)
            invariant = self._is_invariant()
        blank = np.where(invariant, 1.0, np.nan)
        return Prediction(
            angle=angle * blank,
            norm=norm * blank,
            angle_equilibrium=angle_equilibrium * blank,
            norm_equilibrium=norm_equilibrium * blank,
            momentum_unit_grad_sq=own,
            steps_to_settle=steps * blank,
            settled=settled & invariant,
            invariant=invariant,
            undecided=np.isnan(self._labels) & np.isnan(self._invariance.verdict),
        )

    # ---- what training tells the predictor

    def _average(self, measured: MeasuredStep, rule: Rule, unit_grad_sq: Array, *, window: float) -> None:
        self._grad_sq.add(unit_grad_sq, window=window)
        paired = max(window, _FEWEST_PAIRS)
        self._pull.add(measured.vg * measured.ww, window=paired)
        self._pulled.add(np.where(np.isfinite(measured.vg), unit_grad_sq, np.nan), window=paired)
        self._judge_invariance(measured, rule)
        self._angle_sq.add(measured.angle**2, window=_ANGLES)
        moves = np.where(measured.ee > 0, measured.ee, np.nan)  # a weight without a gradient makes no small update
        self._update_sq.add(moves / np.square(self._unit_length(rule, measured)), window=window)
        state = self._state
        if isinstance(rule, Muon) and state is not None and state.steps_done > _MEMORIES / (1 - rule.momentum):
            pull = rule.lr * measured.we / moves  # -<w, u> / ||u||^2
            self._recall.add(pull / remembered(rule, state.memory), window=max(window, _FEWEST_PULLS))

    def _unit_length(self, rule: Rule, measured: MeasuredStep) -> Array | float:
        """The length of an update per unit of `_sizes`: lr, or what a measured law says."""
        if isinstance(rule, Identified):
            length: Array = rule.motion(measured.ww, unit_grad_sq=measured.gg * measured.ww, dim=self._entries)[0]
            return length
        return rule.lr or np.nan

    def _judge_invariance(self, measured: MeasuredStep, rule: Rule) -> None:
        if isinstance(rule, Identified):
            _, decay = rule.motion(measured.ww, unit_grad_sq=measured.gg * measured.ww, dim=self._entries)
        elif isinstance(rule, Muon):
            decay = np.zeros(1)  # its updates do not go with the raw gradient: only a cosine of 0 decides
        else:
            decay = decay_in_force(
                {"kind": type(rule).__name__, "dampening": getattr(rule, "dampening", 0.0)},
                lr=rule.lr,
                weight_decay=rule.weight_decay,
                momentum=rule.betas[0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum,
                grad_norm=np.sqrt(measured.gg),
                norm=measured.norm,
                entries=self._entries,
            )
        self._invariance.add(measured.cosine, np.broadcast_to(decay, measured.cosine.shape))
        self._cosine_sq.add(measured.cosine**2, window=_COSINE_WINDOW)
        self._may_be_invariant &= ~(np.sqrt(self._cosine_sq.value * self._entries) >= NEARLY_RANDOM)

    def _is_invariant(self) -> Flags:
        """By the label, else by the decision, else provisionally: never on again once it is off."""
        verdict = self._invariance.verdict
        may_be = self._may_be_invariant & np.isfinite(self._cosine_sq.value)
        seems = np.where(np.isnan(verdict), may_be, verdict == 1)
        invariant: Flags = np.where(np.isnan(self._labels), seems, self._labels == 1)
        return invariant

    def _correlation(self, rule: Rule) -> Array:
        """Recent mean of <v, g> / ||g||^2; 0 where there is no momentum."""
        ratio: Array = self._pull.value / self._pulled.value
        ratio = np.where(np.isfinite(ratio), ratio, 0.0)
        if isinstance(rule, SGD) and rule.nesterov:  # the recursion divides by L / N, which must stay positive
            weight = nesterov_correlation(rule.decay_per_step, rule.momentum, 1.0) - 1
            ratio = np.maximum(ratio, np.divide(_LEAST_SHARE - 1, weight))
        return ratio

    def _recalled(self, rule: Rule) -> Array | float:
        """Measured share of its momentum's memory that Muon's updates keep; that of the shape until there are samples.

        Other rules keep all of it.
        """
        if not isinstance(rule, Muon):
            return 1.0
        known = np.isfinite(self._recall.value) & (self._recall.count >= _FEWEST_PAIRS)
        by_shape: Array | float = 1.0
        if self._shapes is not None and not known.all():
            by_shape = np.array([recall_of_shape(rule.momentum, rule.nesterov, shape) for shape in self._shapes])
        return np.where(known, np.clip(self._recall.value, 0.0, 2.0), by_shape)

    def _sizes(self, rule: Rule) -> Array:
        """Squared length of an update per lr^2: the number of entries, but for Muon the measured one.

        Under a measured law, the squared length over that of the law: a network's gradients are no white noise.
        """
        if not isinstance(rule, Muon | Identified):
            return self._entries
        return np.where(self._update_sq.value > 0, self._update_sq.value, 1.0)

    # ---- the recursion

    def _start(self, rule: Rule, measured: MeasuredStep, memory: OptimizerMemory) -> None:
        """Set the recursion of the weights that start to their measured norm and optimizer state."""
        buffer_sq, count = memory.buffer_sq, len(self._entries)
        traces = np.zeros((memory_size(rule), count))
        if isinstance(rule, Lion):
            # The recursion knows ||m||^2 in units of L, and about past updates only what <w, m> tells.
            typical = np.sqrt(buffer_sq * self._entries * 2 / np.pi)
            traces[0] = np.where(typical > 0, -memory.radial / typical, 0.0)
            buffer_sq = np.where(buffer_sq > 0, buffer_sq / self._grad_sq.value, 0.0)
        elif isinstance(rule, Identified) and memory.steps_done > 0:
            length, share = rule.motion(measured.ww, unit_grad_sq=measured.gg * measured.ww, dim=self._entries)
            length = np.nan_to_num(length * np.sqrt(self._sizes(rule)))
            kept = np.reshape(rule.memory.decay, (-1, 1)) * (1 - np.nan_to_num(share))
            traces += length * (1 - kept**memory.steps_done) / (1 - kept)
        elif isinstance(rule, Muon) and memory.steps_done > 0:
            kept = np.array(rule.memory.decay) * (1 - rule.decay_per_step)
            traces += (rule.lr * (1 - kept**memory.steps_done) / (1 - kept))[:, np.newaxis]
        fresh = State(np.full(count, np.nan), memory.radial, buffer_sq, memory.second, traces, memory.steps_done)
        self._state = fresh if self._state is None else _merged(fresh, self._state, memory.starts)
        self._momentum_grad_sq = np.where(memory.starts, np.nan, self._momentum_grad_sq)
        self._set_norms(measured, memory.starts)

    def _set_norms(self, measured: MeasuredStep, where: Flags) -> None:
        """Start the recursion of some weights at the measured norm, if float64 can hold it."""
        assert self._state is not None
        within = where & (measured.ww > _SMALLEST) & (measured.ww < _LARGEST)
        self._state = dataclasses.replace(self._state, norm_sq=np.where(within, measured.ww, self._state.norm_sq))

    def _follow(
        self,
        rules: Sequence[Rule],
        momentum_grad_sq: Array,
        correlation: Array,
        *,
        measured: MeasuredStep,
        memory: OptimizerMemory | None,
        skipped: bool,
        rescalings: Sequence[tuple[int, Array]],
    ) -> tuple[Array, Array]:
        """Run the recursion over all steps since the last sample: norm before the last step, and its angle."""
        nothing = np.full(len(momentum_grad_sq), np.nan)
        if self._state is None:
            return nothing, nothing
        # L from the last sample's value, exclusive, to this one's, inclusive; steps x weights.
        begin = np.where(np.isfinite(self._momentum_grad_sq), self._momentum_grad_sq, momentum_grad_sq)
        end = np.where(np.isfinite(momentum_grad_sq), momentum_grad_sq, self._momentum_grad_sq)
        ramp = begin + np.arange(1, len(rules) + 1)[:, np.newaxis] / len(rules) * (end - begin)
        self._momentum_grad_sq = end
        # Weights that get their first gradient at this step: until now their optimizer state was 0.
        late = np.isnan(self._state.norm_sq) & ~_has_memory(self._state) & (measured.gg > 0)
        if skipped or late.any() or memory is not None:
            # The last step is special for some weights: bring all of them up to it first.
            last = len(rules) - 1
            if last:
                self._advance_rescaled(rules[:-1], ramp[:-1], correlation, [x for x in rescalings if x[0] < last])
            self._rescale([factors for index, factors in rescalings if index == last])
            rules, ramp, rescalings = rules[-1:], ramp[-1:], ()
        if memory is not None:
            self._start(rules[-1], measured, memory)
            ramp = np.where(memory.starts, momentum_grad_sq, ramp)
            known = np.isfinite(momentum_grad_sq)
            self._momentum_grad_sq = np.where(known, momentum_grad_sq, self._momentum_grad_sq)
        if skipped:
            return (nothing if self._state is None else np.sqrt(self._state.norm_sq)), nothing
        if self._state is not None and late.any():
            self._set_norms(measured, late)
        return self._advance_rescaled(rules, ramp, correlation, rescalings)

    def _advance_rescaled(
        self,
        rules: Sequence[Rule],
        momentum_grad_sq: Array,
        correlation: Array,
        rescalings: Sequence[tuple[int, Array]],
    ) -> tuple[Array, Array]:
        """Run the recursion over some steps, rescaled before some of them: norm before the last one, and its angle."""
        begin = 0
        for index, factors in rescalings:
            if index > begin:
                self._advance(rules[begin:index], momentum_grad_sq[begin:index], correlation)
            self._rescale([factors])
            begin = max(index, 0)
        return self._advance(rules[begin:], momentum_grad_sq[begin:], correlation)

    def _rescale(self, several: Sequence[Array]) -> None:
        for factors in several:
            if self._state is not None:
                self._state = rescaled(self._state, factors)

    def _advance(self, rules: Sequence[Rule], momentum_grad_sq: Array, correlation: Array) -> tuple[Array, Array]:
        """Run the recursion over some steps: norm before the last of them, and its angle."""
        state = self._state
        nothing = np.full(len(self._entries), np.nan)
        if state is None:
            return nothing, nothing
        good = np.isfinite(momentum_grad_sq).all(axis=0) & (state.norm_sq > 0)
        had_memory = _has_memory(state)
        if not isinstance(rules[-1], SGD | SGDW):  # their updates keep their length however small the gradient is
            good &= (momentum_grad_sq[0] > 0) | had_memory
        # The recursion runs on whole arrays: weights without one take part with harmless numbers and get NaN after it.
        harmless = dataclasses.replace(state, norm_sq=np.where(good, state.norm_sq, 1.0))
        try:
            after, (before_sq, after_sq), moved_sq = run_recursion(
                rules,
                harmless,
                np.where(good, momentum_grad_sq, 1.0),
                sizes=self._sizes(rules[-1]),
                entries=self._entries,
                correlation=correlation,
                recall=self._recalled(rules[-1]),
            )
        except EquilibriaError:  # the recursion rejects these settings; the next change from outside starts another
            self._state = None
            return nothing, nothing
        good &= np.isfinite(after_sq) & (after_sq > 0)
        self._state = State(
            norm_sq=np.where(good, after_sq, np.nan),
            radial=np.where(good, after.radial, state.radial),
            buffer_sq=np.where(good, after.buffer_sq, state.buffer_sq),
            second=np.where(good, after.second, state.second),
            memory=np.where(good, after.memory, np.where(had_memory, np.nan, 0.0)),
            steps_done=after.steps_done,
        )
        angle = angle_from_chord_sq(chord_sq(before_sq, after_sq, moved_sq))
        return np.where(good, np.sqrt(before_sq), np.nan), np.where(good, angle, np.nan)

    # ---- settling

    def _relaxation(self, rule: Rule) -> Relaxation | None:
        """The law of approach. Under Adam with L2 it depends on the gradient: the group's mean serves for all.

        Settings are rounded to half a per cent, so that the cache also helps under a schedule: computing this is slow.
        """
        near = _rounded(rule)
        if not (isinstance(rule, AdamL2) or (isinstance(rule, Identified) and rule.is_coupled)):
            return _relaxation(near)
        known = self._grad_sq.value[np.isfinite(self._grad_sq.value)]
        if not known.size or not known.min() > 0:
            return None
        return _relaxation(near, _digits(np.exp(np.log(known).mean()), 2), float(np.median(self._entries)))

    def _adam_steps(
        self, rule: AdamW | AdamL2, measured: MeasuredStep, norm_equilibrium: Array, momentum_grad_sq: Array
    ) -> Array:
        """Steps to settle from the second moment of the recursion, or from one that has followed the norm."""
        ratio, norm_sq, b2 = measured.norm / norm_equilibrium, norm_equilibrium**2, rule.betas[1]
        second = ratio**-2
        if self._state is not None:
            coupled = rule.weight_decay if isinstance(rule, AdamL2) else 0.0
            settled = (momentum_grad_sq / norm_sq + coupled**2 * norm_sq) / self._entries
            present = self._state.second / (1 - b2**self._state.steps_done) / settled
            second = np.where(present > 0, present, second)
        scale = {"norm_sq": norm_sq, "unit_grad_sq": momentum_grad_sq, "dim": self._entries}
        return adam_settling_steps(rule, ratio, second_ratio=second, **scale, tolerance=TOLERANCE)


def _merged(fresh: State, old: State, starts: Flags) -> State:
    """The fresh state of the weights that start and the old one of the others; steps are counted on."""
    parts = {name: np.where(starts, getattr(fresh, name), getattr(old, name)) for name in _MOMENTS}
    return State(**parts, steps_done=old.steps_done)


def _has_memory(state: State) -> Flags:
    """Weights that have, or may have, anything in their optimizer state."""
    filled = (state.radial != 0) | (state.buffer_sq != 0) | (state.second != 0)
    return np.asarray(filled | (state.memory != 0).any(axis=0))


def _window(relax: Relaxation | None, *, spacing: int) -> float:
    """Samples in a mean of L: enough to be steady, but well within one time constant."""
    if relax is None:
        return _ENOUGH_SAMPLES
    approach = 1 / relax.rate / spacing  # time constant, in samples
    return max(_FEWEST_SAMPLES, min(_ENOUGH_SAMPLES, approach / 2), _SHARE_OF_APPROACH * approach)


def _with_momentum(rule: Rule, unit_grad_sq: Array, correlation: Array) -> Array:
    """L of the rule from N = ||g||^2 ||w||^2 and the correlation of gradient and buffer; NaN where either is."""
    known = np.isfinite(unit_grad_sq) & np.isfinite(correlation)
    n = np.where(known, unit_grad_sq, 0.0)
    total = momentum_unit_grad_sq(rule, n, buffer_dot_grad=np.where(known, correlation, 0.0) * n)
    result: Array = np.where(known, total, np.nan)
    return result


@lru_cache(maxsize=1024)
def _rounded(rule: Rule) -> Rule:
    return dataclasses.replace(rule, lr=_digits(rule.lr, 3), weight_decay=_digits(rule.weight_decay, 3))


def _digits(value: float, count: int) -> float:
    return float(f"{value:.{count}g}")


@lru_cache(maxsize=1024)
def _relaxation(rule: Rule, unit_grad_sq: float | None = None, dim: float | None = None) -> Relaxation | None:
    if rule.decay_per_step == 0:
        return None
    try:
        return relaxation(rule, unit_grad_sq=unit_grad_sq, dim=dim)
    except (EquilibriaError, ArithmeticError):  # ArithmeticError: settings at the edge of what a float holds
        return None


# ---- averages


class RunningMean:
    """An exponential mean that begins as the plain mean and ignores values that are not finite.

    Example:
        >>> mean = RunningMean(1)
        >>> for value in (1.0, np.nan, 3.0):
        ...     mean.add(np.array([value]), window=10.0)
        >>> mean.value
        array([2.])
    """

    def __init__(self, size: int) -> None:
        self.count = np.zeros(size)
        self.value = np.full(size, np.nan)

    def add(self, values: Array, *, window: Array | float) -> None:
        """Add one sample per weight; ``window`` is the number of samples that the mean spans."""
        good = np.isfinite(values)
        self.count += good
        share = 1 / np.maximum(1.0, np.minimum(self.count, window))
        before = np.where(np.isnan(self.value), 0.0, self.value)
        self.value = np.where(good, before + share * (np.where(good, values, 0.0) - before), self.value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both arrays, for a checkpoint."""
        return {"count": torch.from_numpy(self.count.copy()), "value": torch.from_numpy(self.value.copy())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore both arrays from a checkpoint."""
        self.count, self.value = (state[name].cpu().numpy().copy() for name in ("count", "value"))
