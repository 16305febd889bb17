"""What the theory says a group of weights should do now, driven by what was measured.

The moment recursion of the group's rule runs from the first sample on, with the settings of every single step and with
the measured L; it is set back to the measured weights only when somebody else changed them. Beside it stands the
equilibrium that the present settings ask for, and how far away that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.monitor.geometry import Step
from equilibria.monitor.recursion import group_equilibrium, remembered, run
from equilibria.theory.adam import adam_settling_steps
from equilibria.theory.moments import angle_from_chord_sq, chord_sq, nesterov_correlation
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.settling import Relaxation, relaxation
from equilibria.theory.states import State, memory_size
from equilibria.theory.unit_gradient import momentum_unit_grad_sq

Array = NDArray[np.float64]


class RunningMean:
    """An exponential mean that begins as the plain mean; what is not finite is passed over.

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
        """Take in one sample per weight; ``window`` is the number of samples that the mean reaches back over."""
        good = np.isfinite(values)
        self.count += good
        share = 1 / np.maximum(1.0, np.minimum(self.count, window))
        before = np.where(np.isnan(self.value), 0.0, self.value)
        self.value = np.where(good, before + share * (np.where(good, values, 0.0) - before), self.value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both arrays, for a checkpoint."""
        return {"count": torch.from_numpy(self.count.copy()), "value": torch.from_numpy(self.value.copy())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.count, self.value = (state[name].cpu().numpy().copy() for name in ("count", "value"))


Flags = NDArray[np.bool_]

_MOST_SAMPLES = 200  # from one working out to the next: that takes as long as several samples
_SOONER = 3  # times the samples so far
_FEWEST_FOR_COUNTDOWN = 20  # from one to the next where a count has run out and the weight does not turn as it should
_JUMP = 0.1  # relative change of lr or weight decay after which a count no longer holds


class Countdown:
    """Counts down the steps of many weights.

    The first counts rest on few samples, so that they are renewed sooner: at the 1st, 5th, 21st, ... sample.

    Example:
        >>> count = Countdown(1)
        >>> def left(step):
        ...     fifty, turns = (lambda: np.array([50.0])), np.array([True])
        ...     return count.left(step, (0.1, 0.01), fifty, anew=False, turns=turns).item()
        >>> [left(step) for step in (0, 10, 20, 30, 40, 90)]
        [50.0, 40.0, 30.0, 20.0, 50.0, 50.0]
    """

    def __init__(self, count: int) -> None:
        self._left = np.full(count, np.nan)
        self._at = self._samples = self._next = self._since = 0
        self._settings = (0.0, 0.0)

    def left(
        self, step: int, settings: tuple[float, float], work_out: Callable[[], Array], *, anew: bool, turns: Flags
    ) -> Array:
        """Steps left at a sample.

        Args:
            step: the optimizer's count of steps.
            settings: lr and weight decay.
            work_out: gives the steps that are left.
            anew: whether some weights begin anew here.
            turns: whether each weight turns about as in equilibrium, which a count of 0 promises.
        """
        self._samples += 1
        self._since += 1
        left: Array = np.maximum(self._left - (step - self._at), 0.0)
        has_run_out = bool(np.any((left == 0) & (self._left > 0)))
        is_wrong = self._since >= _FEWEST_FOR_COUNTDOWN and bool(np.any((left == 0) & ~turns))
        if anew or has_run_out or is_wrong or self._samples >= self._next or self._jumped(settings):
            self._left, self._at, self._settings, self._since = work_out(), step, settings, 0
            self._next = self._samples + 1 + min(_SOONER * self._samples, _MOST_SAMPLES)
            left = self._left
        return left

    def _jumped(self, settings: tuple[float, float]) -> bool:
        pairs = zip(settings, self._settings, strict=True)
        return any(abs(now - before) > _JUMP * max(now, before) for now, before in pairs)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {"at": self._at, "samples": self._samples, "next": self._next, "since": self._since}
        return {"left": torch.from_numpy(self._left.copy()), **counts, "settings": self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._left = state["left"].cpu().numpy().copy()
        names = ("at", "samples", "next", "since")
        self._at, self._samples, self._next, self._since = (int(state[name]) for name in names)
        lr, weight_decay = state["settings"]
        self._settings = float(lr), float(weight_decay)


_MOMENTS = ("norm_sq", "radial", "buffer_sq", "second", "memory")
_MEANS = ("_grad_sq", "_pull", "_pulled", "_update_sq", "_cosine_sq", "_angle_sq", "_recall")


_FEWEST_SAMPLES = 5  # that a mean of L reaches back over: the norm's target is off by a quarter of its error
_FEWEST_PAIRS = 20  # that the correlation with the momentum is taken from: it scatters more, and drifts less
_FEWEST_PULLS = 100  # that Muon's memory is taken from: single updates point anywhere
_MEMORIES = 3  # lengths of the momentum's memory until updates have come to remember as they will
_ENOUGH_SAMPLES = 20  # if they fit into half a time constant
_SHARE_OF_APPROACH = 0.05  # of the time constant, where that is more: L drifts too
_COSINE_WINDOW = 50  # samples
_SMALLEST, _LARGEST = 1e-140, 1e140  # squared norms between which the recursion stays inside float64
_LEAST_SHARE = 0.05  # of L in N that Nesterov's recursion is run with, however much gradients turn back
_NOT_RANDOM = 0.2  # share of a random direction's cosine above which a weight does not count as scale-invariant
TOLERANCE = 0.05  # of the angle, within which a weight is settled
_ANGLES = 20  # whose root mean square is compared with the equilibrium's
_ABOUT = 0.25  # ratio of the two, as a logarithm, up to which a weight may count as settled: single angles scatter
_LEFT = 0.075  # and outside of which it no longer is: the gap keeps noise from flipping the verdict


@dataclass(frozen=True, slots=True)
class Start:
    """The optimizer's memory of a group of weights, measured before a step; one entry per weight.

    Attributes:
        radial: <w, m>.
        buffer_sq: <m, m>.
        second: mean of the second moments.
        steps_done: steps that the optimizer has taken so far.
        here: the weights that begin; the others go on.
    """

    radial: Array
    buffer_sq: Array
    second: Array
    steps_done: float
    here: Flags


@dataclass(frozen=True, slots=True)
class Forecast:
    """Theory beside one sample of a group, one entry per weight; NaN where there is no law.

    Attributes:
        angle: radians that this step turns by the recursion.
        norm: ||w|| before the step by the recursion.
        angle_equilibrium: radians per step once settled.
        norm_equilibrium: ||w|| once settled.
        momentum_unit_grad_sq: L of this one step, with the correlation of gradient and momentum.
        steps_to_settle: until the angle is within 5 % of equilibrium.
        settled: whether it is, with a little hysteresis.
        invariant: whether the weight behaves as a scale-invariant one.
    """

    angle: Array
    norm: Array
    angle_equilibrium: Array
    norm_equilibrium: Array
    momentum_unit_grad_sq: Array
    steps_to_settle: Array
    settled: Flags
    invariant: Flags


class Forecaster:
    """Follows one parameter group from sample to sample.

    Args:
        entries: numbers per weight.
        invariant: 1 for weights that are known to be scale-invariant, 0 for those that are not, NaN for those whose
            cosine with the gradient is to decide; None if it is to decide about all.
    """

    def __init__(self, entries: Array, *, invariant: Array | None = None) -> None:
        count = len(entries)
        self._entries = entries
        self._told = np.full(count, np.nan) if invariant is None else invariant
        self._state: State | None = None
        self._next = 0  # the step before which the state stands
        self._drive = np.full(count, np.nan)  # L at the last sample
        self._grad_sq, self._pull, self._pulled = (RunningMean(count) for _ in range(3))
        self._update_sq, self._cosine_sq, self._angle_sq, self._recall = (RunningMean(count) for _ in range(4))
        self._settled = np.zeros(count, dtype=bool)
        self._countdown = Countdown(count)

    @property
    def next_step(self) -> int:
        """The first step whose settings are still needed."""
        return self._next

    def state_dict(self) -> dict[str, object]:
        """What is needed to go on after a checkpoint: numbers and tensors only."""
        moments = (
            None
            if self._state is None
            else {name: torch.from_numpy(np.array(getattr(self._state, name))) for name in _MOMENTS}
        )
        means = {name: getattr(self, name).state_dict() for name in _MEANS}
        return {
            "next": self._next,
            "drive": torch.from_numpy(self._drive.copy()),
            "settled": torch.from_numpy(self._settled.copy()),
            "moments": moments,
            "steps_done": None if self._state is None else float(self._state.steps_done),
            "means": means,
            "countdown": self._countdown.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._next = int(state["next"])
        self._drive, self._settled = (state[name].cpu().numpy().copy() for name in ("drive", "settled"))
        for name in _MEANS:
            getattr(self, name).load_state_dict(state["means"][name])
        self._countdown.load_state_dict(state["countdown"])
        self._state = None
        if state["moments"] is not None:
            moments = {name: state["moments"][name].cpu().numpy().copy() for name in _MOMENTS}
            self._state = State(**moments, steps_done=state["steps_done"])

    def forecast(
        self, step: int, measured: Step, rules: Sequence[Rule], *, start: Start | None, skipped: bool
    ) -> Forecast:
        """Take in one sample and say what the theory expects of it.

        Args:
            step: the optimizer's own count of steps.
            measured: what the step did.
            rules: the rule at every step since the last sample, the last being this step's.
            start: given where the recursion of some weights is to begin anew from what was measured.
            skipped: whether the step was not carried out, as under automatic mixed precision.
        """
        rule, relax, anew = rules[-1], self._relaxation(rules[-1]), start is not None
        with np.errstate(all="ignore"):  # what is zero or not finite becomes NaN, weight by weight
            unit_grad_sq = measured.gg * measured.ww
            if not skipped:
                self._average(measured, rule, unit_grad_sq, window=_window(relax, spacing=len(rules)))
            correlation = self._correlation(rule)
            if start is not None and (self._state is None or start.here.all()):
                self._begin(rule, measured, start)
                rules, start = rules[-1:], None
            drive = np.maximum(_total(rule, unit_grad_sq, correlation), 0.0)
            norm, angle = self._follow(rules, drive, correlation, measured=measured, start=start, skipped=skipped)
            self._next = step + 1
            mean = np.maximum(_total(rule, self._grad_sq.value, correlation), 0.0)
            angle_goal, norm_goal = group_equilibrium(
                rule, mean, correlation, sizes=self._sizes(rule), recall=self._recalled()
            )
            steps, settled = self._settling(relax, measured.norm / norm_goal)
            turns = self._turns_like(angle_goal)
            if isinstance(rule, AdamW | AdamL2) and relax is not None:  # where the norm alone does not say it
                settings = rule.lr, rule.weight_decay
                work_out = partial(self._adam_steps, rule, measured, norm_goal, mean)
                left = self._countdown.left(step, settings, work_out, anew=anew, turns=turns)
                steps = np.where(np.isfinite(left), left, steps)
                settled = self._settled = np.where(np.isfinite(left), left == 0, settled)
            settled = settled & turns
            own = _total(rule, unit_grad_sq, measured.vg / measured.gg)
            seems = np.sqrt(self._cosine_sq.value * self._entries) < _NOT_RANDOM
            invariant = np.where(np.isnan(self._told), seems, self._told == 1)
        blank = np.where(invariant, 1.0, np.nan)
        return Forecast(
            angle=angle * blank,
            norm=norm * blank,
            angle_equilibrium=angle_goal * blank,
            norm_equilibrium=norm_goal * blank,
            momentum_unit_grad_sq=own,
            steps_to_settle=steps * blank,
            settled=settled & invariant,
            invariant=invariant,
        )

    def _average(self, measured: Step, rule: Rule, unit_grad_sq: Array, *, window: float) -> None:
        self._grad_sq.add(unit_grad_sq, window=window)
        paired = max(window, _FEWEST_PAIRS)
        self._pull.add(measured.vg * measured.ww, window=paired)
        self._pulled.add(np.where(np.isfinite(measured.vg), unit_grad_sq, np.nan), window=paired)
        self._cosine_sq.add(measured.cosine**2, window=_COSINE_WINDOW)
        self._angle_sq.add(measured.angle**2, window=_ANGLES)
        moves = np.where(measured.ee > 0, measured.ee, np.nan)  # a weight without a gradient is no small update
        self._update_sq.add(moves / np.square(rule.lr or np.nan), window=window)
        state = self._state
        if isinstance(rule, Muon) and state is not None and state.steps_done > _MEMORIES / (1 - rule.momentum):
            pull = rule.lr * measured.we / moves  # -<w, u> / ||u||^2
            self._recall.add(pull / remembered(rule, state.memory), window=max(window, _FEWEST_PULLS))

    def _relaxation(self, rule: Rule) -> Relaxation | None:
        """The law of approach; that of Adam with L2 depends on the gradient, so the group's mean stands for all.

        Settings are rounded to half a per cent: under a schedule they differ at every sample, and this is not cheap.
        """
        near = dataclasses.replace(rule, lr=_digits(rule.lr, 3), weight_decay=_digits(rule.weight_decay, 3))
        if not isinstance(rule, AdamL2):
            return _relaxation(near)
        known = self._grad_sq.value[np.isfinite(self._grad_sq.value)]
        if not known.size or not known.min() > 0:
            return None
        return _relaxation(near, _digits(np.exp(np.log(known).mean()), 2), float(np.median(self._entries)))

    def _correlation(self, rule: Rule) -> Array:
        """<v, g> / ||g||^2 as it has been lately; 0 where there is no momentum."""
        ratio: Array = self._pull.value / self._pulled.value
        ratio = np.where(np.isfinite(ratio), ratio, 0.0)
        if isinstance(rule, SGD) and rule.nesterov:  # L / N must stay positive, for the recursion divides by it
            weight = nesterov_correlation(rule.decay_per_step, rule.momentum, 1.0) - 1
            ratio = np.maximum(ratio, np.divide(_LEAST_SHARE - 1, weight))
        return ratio

    def _begin(self, rule: Rule, measured: Step, start: Start) -> None:
        """Set the recursion of the weights that begin to what was measured of them and their optimizer state."""
        buffer_sq, count = start.buffer_sq, len(self._entries)
        memory = np.zeros((memory_size(rule), count))
        if isinstance(rule, Lion):
            # The recursion knows ||m||^2 in units of L, and of the past updates what <w, m> tells.
            typical = np.sqrt(buffer_sq * self._entries * 2 / np.pi)
            memory[0] = np.where(typical > 0, -start.radial / typical, 0.0)
            buffer_sq = np.where(buffer_sq > 0, buffer_sq / self._grad_sq.value, 0.0)
        elif isinstance(rule, Muon) and start.steps_done > 0:
            kept = np.array(rule.memory.decay) * (1 - rule.decay_per_step)
            memory += (rule.lr * (1 - kept**start.steps_done) / (1 - kept))[:, np.newaxis]
        fresh = State(np.full(count, np.nan), start.radial, buffer_sq, start.second, memory, start.steps_done)
        self._state = fresh if self._state is None else _merged(fresh, self._state, start.here)
        self._drive = np.where(start.here, np.nan, self._drive)
        self._set_norms(measured, start.here)

    def _set_norms(self, measured: Step, here: Flags) -> None:
        """Let the recursion of some weights begin at the measured norm, as far as it reaches."""
        assert self._state is not None
        within = here & (measured.ww > _SMALLEST) & (measured.ww < _LARGEST)
        self._state = dataclasses.replace(self._state, norm_sq=np.where(within, measured.ww, self._state.norm_sq))

    def _late(self, measured: Step) -> Flags:
        """Weights that get their first gradient only now: their optimizer state is known to have been 0 until now."""
        assert self._state is not None
        return np.asarray(np.isnan(self._state.norm_sq) & ~_has_memory(self._state) & (measured.gg > 0))

    def _follow(
        self,
        rules: Sequence[Rule],
        drive: Array,
        correlation: Array,
        *,
        measured: Step,
        start: Start | None,
        skipped: bool,
    ) -> tuple[Array, Array]:
        """Norm before the last step and the angle that it turns, the recursion run over all of them."""
        nothing = np.full(len(drive), np.nan)
        if self._state is None:
            return nothing, nothing
        drives = _ramp(self._drive, drive, len(rules))
        self._drive = np.where(np.isfinite(drive), drive, self._drive)
        late = self._late(measured)
        if (skipped or late.any() or start is not None) and len(rules) > 1:
            self._advance(rules[:-1], drives[:-1], correlation)
            rules, drives = rules[-1:], drives[-1:]
        if start is not None:
            self._begin(rules[-1], measured, start)
            drives = np.where(start.here, drive, drives)
            self._drive = np.where(np.isfinite(drive), drive, self._drive)
        if skipped:
            return (nothing if self._state is None else np.sqrt(self._state.norm_sq)), nothing
        if self._state is not None and late.any():
            self._set_norms(measured, late)
        return self._advance(rules, drives, correlation)

    def _advance(self, rules: Sequence[Rule], drives: Array, correlation: Array) -> tuple[Array, Array]:
        """Run the recursion: norm before the last step, and the angle that it turns."""
        state = self._state
        nothing = np.full(len(self._entries), np.nan)
        if state is None:
            return nothing, nothing
        good = np.isfinite(drives).all(axis=0) & (state.norm_sq > 0)
        had_memory = _has_memory(state)
        if not isinstance(rules[-1], SGD | SGDW):  # whose update has its size also from a gradient that is all but 0
            good &= (drives[0] > 0) | had_memory
        # Weights without a recursion ride along as harmless numbers and are put back behind it.
        held = dataclasses.replace(state, norm_sq=np.where(good, state.norm_sq, 1.0))
        try:
            after, (before_sq, after_sq), moved_sq = run(
                rules,
                held,
                np.where(good, drives, 1.0),
                sizes=self._sizes(rules[-1]),
                correlation=correlation,
                recall=self._recalled() if isinstance(rules[-1], Muon) else 1.0,
            )
        except EquilibriaError:  # settings out of reach of the recursion; the next outside change begins a new one
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

    def _recalled(self) -> Array:
        """Share of its momentum's memory that Muon's updates have lately been seen to keep; all of it until then."""
        known = np.isfinite(self._recall.value) & (self._recall.count >= _FEWEST_PAIRS)
        return np.where(known, np.clip(self._recall.value, 0.0, 2.0), 1.0)

    def _sizes(self, rule: Rule) -> Array:
        """What stands for the number of entries: itself, but for Muon the measured size of its update."""
        if not isinstance(rule, Muon):
            return self._entries
        return np.where(self._update_sq.value > 0, self._update_sq.value, 1.0)

    def _turns_like(self, goal: Array) -> Flags:
        """Whether the weight turns about as in equilibrium; when its gradient vanishes, the norm alone may fit."""
        return np.asarray(np.abs(np.log(np.sqrt(self._angle_sq.value) / goal)) < _ABOUT)

    def _settling(self, relax: Relaxation | None, ratio: Array) -> tuple[Array, Flags]:
        """Steps until the angle is within its tolerance, and whether it counts as settled now."""
        if relax is None:
            return np.full(len(ratio), np.nan), np.zeros(len(ratio), dtype=bool)
        steps = relax.steps(ratio, tolerance=TOLERANCE)
        within = relax.steps(ratio, tolerance=_LEFT) == 0
        self._settled = (steps == 0) | (self._settled & within)
        return steps, self._settled.copy()

    def _adam_steps(self, rule: AdamW | AdamL2, measured: Step, norm_goal: Array, drive: Array) -> Array:
        """Steps to settle, with the second moment that the recursion knows; with one that has followed, without."""
        ratio, goal_sq, b2 = measured.norm / norm_goal, norm_goal**2, rule.betas[1]
        second = ratio**-2
        if self._state is not None:
            coupled = rule.weight_decay if isinstance(rule, AdamL2) else 0.0
            settled = (drive / goal_sq + coupled**2 * goal_sq) / self._entries
            held = self._state.second / (1 - b2**self._state.steps_done) / settled
            second = np.where(held > 0, held, second)
        scale = {"norm_sq": goal_sq, "unit_grad_sq": drive, "dim": self._entries}
        return adam_settling_steps(rule, ratio, second_ratio=second, **scale, tolerance=TOLERANCE)


def _merged(fresh: State, held: State, here: Flags) -> State:
    """The fresh state of some weights and the held one of the others; the steps are counted on."""
    parts = {name: np.where(here, getattr(fresh, name), getattr(held, name)) for name in _MOMENTS}
    return State(**parts, steps_done=held.steps_done)


def _has_memory(state: State) -> Flags:
    """Which weights have, or may have, anything in their optimizer state."""
    held = (state.radial != 0) | (state.buffer_sq != 0) | (state.second != 0)
    return np.asarray(held | (state.memory != 0).any(axis=0))


def _window(relax: Relaxation | None, *, spacing: int) -> float:
    """Samples that a mean of L reaches back over: enough to be steady, but well within one time constant."""
    if relax is None:
        return _ENOUGH_SAMPLES
    approach = 1 / relax.rate / spacing  # time constant, in samples
    return max(_FEWEST_SAMPLES, min(_ENOUGH_SAMPLES, approach / 2), _SHARE_OF_APPROACH * approach)


def _ramp(first: Array, last: Array, steps: int) -> Array:
    """From the last sample's value, which is not repeated, to this one's; steps x weights."""
    begin = np.where(np.isfinite(first), first, last)
    end = np.where(np.isfinite(last), last, first)
    share = np.arange(1, steps + 1)[:, np.newaxis] / steps
    ramp: Array = begin + share * (end - begin)
    return ramp


def _total(rule: Rule, grad_sq: Array, correlation: Array) -> Array:
    """L of the rule from N and the correlation of gradient and buffer; NaN where either is."""
    known = np.isfinite(grad_sq) & np.isfinite(correlation)
    n = np.where(known, grad_sq, 0.0)
    total = momentum_unit_grad_sq(rule, n, buffer_dot_grad=np.where(known, correlation, 0.0) * n)
    result: Array = np.where(known, total, np.nan)
    return result


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
