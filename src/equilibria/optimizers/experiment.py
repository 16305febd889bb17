"""The experiment of `equilibria.identify`: how an optimizer moves a scale-invariant weight.

A copy of the optimizer walks on random gradients (`equilibria.optimizers.walks`). D, the mean of ln(||w'|| / ||w||), is
what steps add less what decay removes, s; so the steps add T = D + s, memory included. Where ln(T / s), as a function
of ln ||w||, is 0, there is the equilibrium: its root is found without a model of the rule. Walks under other settings
then give the powers with which step and decay depend on lr, weight decay, gradient, norm and number of entries, and a
`equilibria.theory.identified.Identified` rule holds them all.

An answer is given only if it survives: the walk is stationary, a walk four times as long with other gradients finds the
same, its clock put forward by 100,000 steps changes nothing, its steps depend on no copy of the weights and it does not
adapt its own settings. Otherwise the result names the class of the optimizer instead.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, overload

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.optimizers.copies import (
    MANY_PROCESSES,
    CannotCopyError,
    Group,
    copies_of,
    decay_key,
    decay_of,
    isolated,
    longest_memory,
    many_processes,
    probe_shape,
    reference_lr,
    tried_shape,
)
from equilibria.optimizers.walks import Conditions, Stretch, Walk
from equilibria.theory.equilibrium import Equilibrium, constant_update_point
from equilibria.theory.identified import Identified, PowerLaw
from equilibria.theory.memory import Memory

Motion: TypeAlias = Literal[
    "equilibrium",
    "no decay",
    "norm held",
    "norm forced",
    "step proportional to norm",
    "own clock",
    "adapts its own settings",
    "keeps a copy of the weights",
    "not stationary",
    "not identified",
]
"""How an optimizer moves a scale-invariant weight; all but the first have no equilibrium that could be named."""

MOST_SECONDS = 15.0  # of CPU
_RMS, _GRADIENT = 0.1, 0.01  # root mean square entries of weight and gradient at the start
_ANCHOR_WORK = 1 << 22  # entries of the real shape times steps on it
_ANCHOR_ENTRIES = 1_200_000  # entries times steps of all its walks, if that is more
_ANCHOR_NOISE = 0.012  # of the logarithm of a ratio of lengths: three times its scatter under AdamW
_LOOK = 30  # steps in which the norm shows whether it is held
_COARSE, _BURN, _LONGEST_BURN = 150, 150, 1500
_FINE, _LONGEST = 600, 3000  # steps
_LONGEST_FILL = 7500  # steps in which memories that no setting declares may fill
_USED = 200  # steps in which a copy of the weights shows whether they depend on it
_ROUNDS = 10
_NEAR = 0.08  # ln(T / s) at which the coarse search ends
_ROUNDING = 1e-13  # of a decay per step
_USUAL_SLOPE = -2.5  # of ln(T / s) against ln ||w||: -2 to -4
_SHALLOW = -0.5  # slope above which the norm has no place to settle
_STATIONARY = 0.05  # largest trend of the mean squared step
_AGREE = 0.03  # largest difference of ln norm or ln angle between two walks, and of ln step at another clock
_SNAP = 0.06  # distance within which a power is taken to be a multiple of a quarter


@dataclass(frozen=True, slots=True)
class Identification:
    """How an optimizer moves a scale-invariant weight.

    Attributes:
        name: class of the optimizer.
        motion: "equilibrium", or why there is none.
        reason: a sentence for people; "" for an equilibrium.
        rule: its law with the group's settings, for `plan`, `watch` and the theory; None without an equilibrium.
    """

    name: str
    motion: Motion
    reason: str
    rule: Identified | None

    @property
    def repeatable(self) -> bool:
        """Whether the same experiment would end the same way: not if it was not made, or ran out of time."""
        return self.motion != "not identified"

    def equilibrium(self, *, unit_grad_sq: float | None = None, dim: float | None = None) -> Equilibrium:
        """Angle, norm and time constant of the law; see `Identified.equilibrium`.

        Raises:
            EquilibriaError: the optimizer has none.
        """
        if self.rule is None:
            raise EquilibriaError(f"{self.name} has no equilibrium: {self.reason}", argument="optimizer")
        return self.rule.equilibrium(unit_grad_sq=unit_grad_sq, dim=dim)

    def __str__(self) -> str:
        if self.rule is None:
            return f"{self.name}: {self.motion}: {self.reason}"
        rule = self.rule
        coupled = "depends on the gradient" if rule.is_coupled else f"{rule.decay_per_step:.3g} per step"
        lines = [
            f"{self.name}(lr={rule.lr:g}, weight_decay={rule.weight_decay:g})",
            f"  decay   {_words(rule.decay)}: {coupled}",
            f"  step    {_words(rule.step)}",
            f"  memory  correlations of a step with all others add up to {rule.memory.total():.3g}",
        ]
        if not rule.is_coupled:
            result = rule.equilibrium()
            lines.append(
                f"  settles at {result.angle:.3g} rad per step, in {result.time_constant:,.0f} steps per factor e"
                + ("" if rule.step.grad else "; more if an average of squared gradients sets its step, as in Adam")
            )
        return "\n".join(lines)


def _words(power_law: PowerLaw) -> str:
    names = {"lr": "lr", "weight_decay": "wd", "grad": "|g|", "norm": "|w|", "entries": "entries"}
    parts = [f"{power_law.factor:.4g}"]
    for field, symbol in names.items():
        power = getattr(power_law, field)
        if power:
            parts.append(symbol if power == 1 else f"{symbol}^{power:g}")
    return " ".join(parts)


def identify_group(
    optimizer: Any, group: Group, *, shape: tuple[int, ...] | None = None, seconds: float = MOST_SECONDS
) -> Identification:
    """Experiment with a copy of an optimizer that has the settings of one parameter group.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: one of its parameter groups.
        shape: of the weight; by default that of the group's largest tensor.
        seconds: CPU time after which the experiment is given up.

    Returns:
        The law, or the class of an optimizer without one.
    """
    name = type(optimizer).__name__
    if many_processes():
        return Identification(name, "not identified", MANY_PROCESSES, None)
    try:
        with isolated():
            return _Experiment(
                optimizer, group, shape=tried_shape(group, shape), deadline=time.process_time() + seconds
            ).run()
    except _NoLawError as stop:
        return Identification(name, stop.motion, stop.reason, None)
    except CannotCopyError as error:
        return Identification(name, "not identified", str(error), None)
    except Exception as error:  # the optimizer is foreign code
        reason = f"a copy of it cannot be tried ({type(error).__name__}: {error})"
        return Identification(name, "not identified", reason, None)


class _NoLawError(Exception):
    """The experiment ends without a law."""

    def __init__(self, motion: Motion, reason: str) -> None:
        super().__init__(reason)
        self.motion: Motion = motion
        self.reason = reason


class _Experiment:
    """The search for one law.

    Args:
        optimizer: the optimizer.
        group: its group.
        shape: of the real weight.
        deadline: CPU time at which it ends.
    """

    def __init__(self, optimizer: Any, group: Group, *, shape: tuple[int, ...], deadline: float) -> None:
        self._name, self._deadline = type(optimizer).__name__, deadline
        self._make = copies_of(optimizer, group)
        self._memory = longest_memory(group)
        self._burst = int(min(max(self._memory / 2, 20), _LONGEST_BURN))  # steps with gradients of triple length
        self._decays = decay_key(group) in group
        self._assigned = _assigned_words(optimizer, group)
        self._real_shape = shape
        shape = probe_shape(shape)
        norm = _RMS * math.sqrt(math.prod(shape))
        lr = reference_lr(group)
        decay = decay_of(group)
        if not lr > 0:
            raise _NoLawError("not identified", f"its lr is {lr:g}, at which nothing moves")
        self._start = Conditions(lr, decay, norm, _GRADIENT * math.sqrt(math.prod(shape)) * norm, shape)

    def run(self) -> Identification:
        """The law."""
        self._look()
        self._check_declared()
        conditions, slow = self._search()
        step, decay = self._powers(conditions)
        slope = 2 * step.radial - 2 - decay.radial
        if decay.norm or slope > _SHALLOW:
            raise _shallow(slope, step.radial - 1)
        again = self._confirm(self._settle(conditions, step, slope, slow), step, decay, slope)
        if self._check_time(again):  # its memory is longer than its settings say
            again = self._confirm(self._settle(conditions, step, slope, slow), step, decay, slope)
        rule = _rule(self._name, again, step, decay)
        rule = replace(rule, step=self._anchored(rule.step, again.balanced(slope)))
        return Identification(self._name, "equilibrium", "", rule)

    def _walk(self, conditions: Conditions, *, burn: int, steps: int, hold: bool = False) -> Stretch:
        """A walk at constant norm for ``burn`` steps, which fill its memories, and then measured."""
        walk = self._advance(Walk(self._make, conditions), burn, hold=True)
        return self._advance(walk, steps, hold=hold).measure(burn=burn)

    def _advance(self, walk: Walk, steps: int, *, hold: bool = False) -> Walk:
        for _ in range(steps):  # one step of a slow optimizer may take a second
            walk.advance(1, hold=hold)
            if not math.isfinite(walk.norm):
                raise _NoLawError("not identified", f"its weights stop being finite after {len(walk)} steps")
            if time.process_time() > self._deadline:
                raise _NoLawError("not identified", "the experiment takes longer than its budget of CPU time")
        return walk

    # ---- classes that show at once

    def _look(self) -> None:
        if self._assigned:
            reason = f"its source assigns {self._assigned[0]!r}, so that it may turn into another rule at any step"
            raise _NoLawError("adapts its own settings", reason)
        near = self._advance(Walk(self._make, self._start, twins=False), _LOOK)
        far = self._advance(Walk(self._make, replace(self._start, norm=3 * self._start.norm), twins=False), _LOOK)
        if not all(walk.measure(burn=0, share=0.0).angle_sq > 0 for walk in (near, far)):
            raise _NoLawError("not identified", "a step with a gradient does not turn the weight")
        first, second = near.norms, far.norms
        if abs(second[1] / first[1] - 1) < 1e-3 and abs(second[-1] / first[-1] - 1) < 1e-3:
            raise _NoLawError("norm forced", f"its first step sets ||w|| to {first[1]:.3g}, whatever it was")
        if all(_is_held(walk) for walk in (near, far)):
            raise _NoLawError("norm held", "its steps leave ||w|| as it was: the angle follows from lr alone")
        for name in near.weight_copies():
            if self._uses(name):
                reason = f"its state {name!r} is a copy of the weights, on which its steps depend"
                raise _NoLawError("keeps a copy of the weights", reason)
        if own := near.own_settings():
            reason = f"its steps change {', '.join(map(repr, own))} of its own settings"
            raise _NoLawError("adapts its own settings", reason)

    def _uses(self, name: str) -> bool:
        """Whether steps change with a tensor of the state; an average kept for evaluation changes nothing."""
        ends, other = [], replace(self._start, weight_decay=self._start.weight_decay / 4)
        for factor in (1.0, 1.5):
            walk = self._advance(Walk(self._make, other, twins=False), _LOOK)
            if name not in walk.weight_copies():  # a momentum full of coupled decay
                return False
            walk.optimizer.state[walk.param][name].mul_(factor)
            ends.append(self._advance(walk, _USED).param.detach().numpy().copy())
        return not np.array_equal(*ends)

    # ---- the equilibrium

    def _search(self) -> tuple[Conditions, Stretch]:
        """Conditions near equilibrium, by the secant method on ln ||w||."""
        at, points = self._start, list[tuple[float, float, float]]()
        for _ in range(_ROUNDS):
            stretch = self._walk(at, burn=_BURN, steps=_COARSE, hold=True)
            self._check_decay(stretch)
            balance = stretch.log_balance
            points.append((stretch.log_norm, balance, math.log(stretch.angle_sq) / 2))
            if abs(balance) < _NEAR:
                return replace(at, norm=math.exp(stretch.log_norm)), stretch
            self._check_slope(points)
            move = min(max(-balance / _secant(points), -4.0), 4.0)
            at = replace(at, norm=math.exp(stretch.log_norm + move), seed=at.seed + 1)
        norms, balances, _ = np.array(points[_ROUNDS // 2 :]).T
        if np.abs(balances).max() < 4 * _NEAR:  # short walks scatter by that; longer ones decide
            return replace(at, norm=float(np.exp(np.mean(norms - balances / _USUAL_SLOPE)))), stretch
        raise _NoLawError(
            "not identified",
            f"in {_ROUNDS} short trials the search came upon no norm that balances growth and decay; there may be one",
        )

    def _check_slope(self, points: list[tuple[float, float, float]]) -> None:
        norms, balances, angles = np.array(points).T
        if len(points) > 2 and np.ptp(norms) > 0.5:
            slope = float(np.polyfit(norms, balances, 1)[0])
            if slope > _SHALLOW:
                raise _shallow(slope, float(np.polyfit(norms, angles, 1)[0]))

    def _check_declared(self) -> None:
        """Whether the weight decays at all, and by its setting; without bringing it back, which may disturb a decay."""
        share = self._advance(Walk(self._make, self._start), _BURN + _COARSE).measure(burn=_BURN).share
        expected = self._start.lr * self._start.weight_decay
        if abs(share) < max(1e-6 * expected, _ROUNDING):
            shown = share if share > _ROUNDING else 0.0
            declared = f"it declares weight_decay={self._start.weight_decay:g} and removes {shown:.2g} of the weight"
            reason = f"{declared} per step" if expected else "without weight decay there is no equilibrium"
            raise _NoLawError("no decay", reason)
        if not expected:
            what = "the setting 'weight_decay' is 0" if self._decays else "it has no setting 'weight_decay'"
            raise _NoLawError("not identified", f"it removes {share:.2g} of the weight per step, but {what}")

    def _check_decay(self, stretch: Stretch) -> None:
        if not stretch.share > _ROUNDING:
            raise _NoLawError(
                "not identified",
                "its decay could not be measured: of two copies that differ a little and get the same gradients, the "
                "difference does not shrink as decay alone would make it",
            )

    def _powers(self, at: Conditions) -> tuple[PowerLaw, PowerLaw]:
        """The powers of step and decay, each with the factor 1.

        The walks have an eighth of the lr: what bringing the weight back to its norm does to momentum falls with it.
        """
        burn = int(min(max(self._memory, 40), _BURN))

        def logs(conditions: Conditions) -> Any:
            stretch = self._walk(conditions, burn=burn, steps=80, hold=True)
            self._check_decay(stretch)
            return np.array([math.log(stretch.step_sq) / 2, math.log(stretch.share)])

        slow = replace(at, lr=at.lr / 8)
        base, two = logs(slow), math.log(2)
        lr = (base - logs(replace(slow, lr=slow.lr / 2))) / two
        weight_decay = (base - logs(replace(slow, weight_decay=at.weight_decay / 2))) / two
        grad = (logs(replace(slow, unit_grad=2 * at.unit_grad)) - base) / two
        norm = (logs(replace(slow, unit_grad=2 * at.unit_grad, norm=2 * at.norm)) - base) / two
        larger = slow.enlarged()  # by entries as large as before, in weight and gradient
        factor = larger.entries / at.entries
        larger = replace(larger, unit_grad=factor * at.unit_grad)
        entries = (logs(larger) - base) / math.log(factor) - (grad + norm) / 2
        powers = {"lr": lr, "weight_decay": weight_decay, "grad": grad, "norm": norm, "entries": entries}
        step, decay = (
            PowerLaw(1.0, **{name: _snapped(values[index]) for name, values in powers.items()}) for index in range(2)
        )
        self._check_range("lr", logs(at)[0] - base[0] - math.log(8) * step.lr)
        for factor in (0.1, 10.0):
            gradient = replace(slow, unit_grad=factor * at.unit_grad)
            self._check_range("the gradient", logs(gradient)[0] - base[0] - math.log(factor) * step.grad)
        return step, decay

    def _check_range(self, name: str, excess: float) -> None:
        if abs(excess) > 2 * _AGREE:
            reason = (
                f"its step does not grow as one power of {name}: over a factor of 10 it becomes {math.exp(excess):.2f} "
                "times as long as that would be"
            )
            raise _NoLawError("not identified", reason)

    def _settle(self, at: Conditions, step: PowerLaw, slope: float, coarse: Stretch) -> _Settled:
        """A longer walk near equilibrium, after its memories are full."""
        burn = int(min(max(6 * self._memory, _BURN), _LONGEST_BURN))
        total = 2 * coarse.growth / coarse.angle_sq
        steps = int(min(max(_FINE, 25 * total), _LONGEST))
        for seed in range(100, 103):
            settled = _Settled(
                replace(at, seed=seed), self._walk(replace(at, seed=seed), burn=burn, steps=steps), burn, steps
            )
            at = settled.balanced(slope)
            if abs(settled.stretch.log_balance) < 4 * _NEAR and abs(settled.stretch.trend) < _STATIONARY:
                return settled
            if abs(settled.stretch.trend) >= _STATIONARY:
                burn = min(2 * burn, 2 * _LONGEST_BURN)
        trend = settled.stretch.trend
        if abs(trend) >= _STATIONARY:
            change = 100 * math.expm1(trend)
            reason = f"its squared step changes by {change:+.0f} % within {steps // 2} steps of a steady walk"
            raise self._not_stationary(at, settled.stretch.share, reason)
        raise _NoLawError("not identified", "its norm does not come to rest")

    def _check_time(self, settled: _Settled) -> bool:
        """The step must be the same much later, and long after a burst of gradients.

        Returns:
            Whether that takes longer than the memories that the settings declare; then the longer one is noted.
        """
        now, at = settled.stretch.step_sq, replace(settled.conditions, norm=math.exp(settled.stretch.log_norm), seed=7)
        for burn in self._burns():
            stop = self._changed(at, settled.stretch.share, now, burn=burn)
            if stop is None:
                break
        if stop is not None:
            raise stop
        declared, self._memory = self._memory, max(self._memory, (burn - _BURN) / 5)
        return self._memory > 1.01 * declared

    def _burns(self) -> Iterator[int]:
        """Steps that fill the memories: those that the settings declare, and longer ones."""
        burn = int(min(5 * self._memory, _LONGEST_FILL)) + _BURN
        yield burn
        while 2 * burn <= _LONGEST_FILL:
            yield (burn := min(4 * burn, _LONGEST_FILL))

    def _changed(self, at: Conditions, share: float, now: float, *, burn: int) -> _NoLawError | None:
        """What is wrong with an optimizer whose squared step is another after so many steps than ``now``."""
        later = self._step_sq(at, share, burn=burn, clock=True)
        if later is not None and abs(math.log(later / now)) > 2 * _AGREE:
            return _NoLawError("own clock", _clock_reason(later, now))
        change = math.log(self._step_sq(at, share, burn=burn, burst=True) / now) / 2
        if abs(change) <= _AGREE:
            return None
        ratio = f"its step is {math.exp(change):.2f} times as long"
        return _NoLawError("not stationary", f"{ratio}, {burn} steps after {self._burst} gradients of triple length")

    def _not_stationary(self, at: Conditions, share: float, reason: str) -> _NoLawError:
        """The class of an optimizer whose steps change: by a clock of its own, or by its memory of the past."""
        clock = _NoLawError("not stationary", reason)
        for burn in self._burns():
            later = self._step_sq(at, share, burn=burn, clock=True)
            now = self._step_sq(at, share, burn=burn)
            if later is None or abs(math.log(later / now)) <= 2 * _AGREE:
                return _NoLawError("not stationary", reason)
            clock = _NoLawError("own clock", _clock_reason(later, now))
        return clock

    @overload
    def _step_sq(self, at: Conditions, share: float, *, burn: int, burst: bool = False) -> float: ...

    @overload
    def _step_sq(self, at: Conditions, share: float, *, burn: int, clock: bool) -> float | None: ...

    def _step_sq(
        self, at: Conditions, share: float, *, burn: int, clock: bool = False, burst: bool = False
    ) -> float | None:
        """Mean squared step at constant norm, where no norm chases a second moment.

        Args:
            at: the conditions.
            share: of the weight that decay removes per step.
            burn: steps before, after the clock was put forward or the burst.
            clock: put the clock forward after the first step; None if there is none.
            burst: begin with a burst of gradients.
        """
        walk = self._advance(Walk(self._make, at, twins=False), 1, hold=True)
        if clock and not walk.put_clock_forward():
            return None
        if burst:
            walk.gradient_factor = 3.0
            self._advance(walk, self._burst, hold=True)
            walk.gradient_factor = 1.0
        burn += len(walk)
        self._advance(walk, burn - len(walk) + _FINE // 2, hold=True)
        return walk.measure(burn=burn, share=share).step_sq

    def _anchored(self, step: PowerLaw, at: Conditions) -> PowerLaw:
        """The law of the step with the factor of the real shape: Newton-Schulz, for one, has no power law in it."""
        real = replace(at, shape=self._real_shape)
        larger = real.entries / at.entries  # of entries as large as before, in weight and gradient
        real = replace(real, norm=at.norm * math.sqrt(larger), unit_grad=at.unit_grad * larger)
        steps = min(max(_ANCHOR_WORK // real.entries, 8), 200)
        ratio = self._relative_length(step, real, steps) / self._relative_length(step, at, steps)
        return replace(step, factor=step.factor * ratio) if abs(math.log(ratio)) > _ANCHOR_NOISE else step

    def _relative_length(self, step: PowerLaw, at: Conditions, steps: int) -> float:
        """Root mean square of the steps' lengths over those of the law; of several walks if there are few numbers."""
        squares = []
        for seed in range(min(math.ceil(_ANCHOR_ENTRIES / (at.entries * steps)), 80)):
            walk = self._advance(Walk(self._make, replace(at, seed=seed), twins=False), steps, hold=True)
            squares.append(walk.measure(burn=steps // 2, share=0.0).step_sq)
        expected = step(**at.settings, grad=at.unit_grad / at.norm, norm=at.norm, entries=at.entries)
        return math.sqrt(float(np.mean(squares))) / float(expected)

    def _confirm(self, settled: _Settled, step: PowerLaw, decay: PowerLaw, slope: float) -> _Settled:
        """A walk four times as long, with other gradients, that must find the same."""
        at = replace(settled.balanced(slope), seed=1000)
        steps = int(min(4 * settled.steps, 2 * _LONGEST))
        again = _Settled(at, self._walk(at, burn=settled.burn, steps=steps), settled.burn, steps)
        moved = again.stretch.log_norm - settled.stretch.log_norm
        change = math.log(again.stretch.share / settled.stretch.share) - decay.radial * moved
        if abs(change) > _AGREE:
            reason = f"its decay scatters: two walks differ by {100 * abs(change):.0f} %"
            raise _NoLawError("not identified", reason)
        first, second = (one.angle_and_norm(step, slope) for one in (settled, again))
        if max(abs(math.log(a / b)) for a, b in zip(first, second, strict=True)) > 2 * _AGREE:
            reason = (
                f"two walks disagree: {first[0]:.3g} and {second[0]:.3g} rad per step at norms {first[1]:.3g} and "
                f"{second[1]:.3g}, after {settled.burn + settled.steps} and {again.burn + again.steps} steps"
            )
            raise self._not_stationary(at, settled.stretch.share, reason)
        return again


_BEFORE_TRAINING = ("__init__", "__setstate__", "add_param_group")


def _assigned_words(optimizer: Any, group: Group) -> list[str]:
    """Words among the settings that the source of a step assigns: SWATS, for one, turns from Adam into SGD.

    What a constructor assigns is a default.
    """
    assigned: list[str] = []
    for name, function in vars(type(optimizer)).items():
        if name not in _BEFORE_TRAINING and callable(function):
            try:
                source = inspect.getsource(inspect.unwrap(function))
            except (OSError, TypeError):
                continue
            assigned += re.findall(r"""group\[["'](\w+)["']\]\s*=[^=]""", source)
    return [name for name in assigned if isinstance(group.get(name), str)]


def _shallow(slope: float, turn: float) -> _NoLawError:
    """The class of an optimizer whose growth over decay goes as ||w||^slope, and whose angle goes as ||w||^turn."""
    if turn > _SHALLOW / 2:
        reason = f"growth over decay goes as ||w||^{slope:.2g}: no norm balances the two"
        return _NoLawError("step proportional to norm", reason)
    reason = f"growth over decay goes as ||w||^{slope:.2g} and the angle as ||w||^{turn:.2g}"
    return _NoLawError("not identified", f"its decay is not proportional to the weight: {reason}")


def _clock_reason(later: float, now: float) -> str:
    return f"its step is {math.sqrt(later / now):.2f} times as long 100,000 steps later, with the same gradients"


@dataclass(frozen=True, slots=True)
class _Settled:
    """A long walk near equilibrium."""

    conditions: Conditions
    stretch: Stretch
    burn: int
    steps: int

    def distance(self, slope: float) -> float:
        """ln(||w*|| / ||w||)."""
        return -self.stretch.log_balance / slope

    def balanced(self, slope: float) -> Conditions:
        """Its conditions, at the norm of equilibrium."""
        return replace(self.conditions, norm=math.exp(self.stretch.log_norm + self.distance(slope)))

    def angle_and_norm(self, step: PowerLaw, slope: float) -> tuple[float, float]:
        """In equilibrium."""
        distance = self.distance(slope)
        angle = math.sqrt(self.stretch.angle_sq) * math.exp((step.radial - 1) * distance)
        return angle, math.exp(self.stretch.log_norm + distance)


def _rule(name: str, settled: _Settled, step: PowerLaw, decay: PowerLaw) -> Identified:
    """The rule that has this equilibrium and these powers."""
    slope = 2 * step.radial - 2 - decay.radial
    distance, stretch, at = settled.distance(slope), settled.stretch, settled.conditions
    norm_sq = stretch.norm_sq * math.exp(2 * distance)
    share = stretch.share * math.exp(decay.radial * distance)
    step_sq = stretch.step_sq * math.exp(2 * step.radial * distance)
    total = norm_sq * share * (2 - share) / step_sq
    memory = _memory(total, stretch.correlation, share)
    model = math.sqrt(2 * constant_update_point(1.0, share, memory).one_minus_cos)
    measured = math.sqrt(stretch.angle_sq) * math.exp((step.radial - 1) * distance)
    if not abs(math.log(model / measured)) < _AGREE:
        reason = f"its steps do not explain its turns: {model:.3g} rad per step expected, {measured:.3g} measured"
        raise _NoLawError("not identified", reason)
    norm = math.sqrt(norm_sq)
    where = {
        "lr": at.lr,
        "weight_decay": at.weight_decay,
        "grad": at.unit_grad / norm,
        "norm": norm,
        "entries": at.entries,
    }
    return Identified(
        at.lr,
        at.weight_decay,
        name=name,
        step=replace(step, factor=math.sqrt(step_sq) / step(**where)),
        decay=replace(decay, factor=share / decay(**where)),
        memory=memory,
    )


def _memory(total: float, correlation: float, share: float) -> Memory:
    """A geometric autocorrelation with this total through the decay, and nearly this first correlation."""
    kept, rest = 1 - share, total - 1
    if rest * correlation <= 0 or abs(rest) < 0.02:
        return Memory((rest / (2 * kept),), (0.0,))
    decay = min(max((1 - 2 * correlation * kept / rest) / kept, 0.0), 0.9999)
    return Memory((rest * (1 - decay * kept) / (2 * kept),), (decay,))


def _is_held(walk: Walk) -> bool:
    """Whether no step changes the norm by more than a small part of what its length would."""
    changes = np.abs(np.diff(np.log(walk.norms)))
    return bool(changes.max() < max(1e-2 * walk.measure(burn=0, share=0.0).angle_sq, 1e-15))


def _secant(points: list[tuple[float, float, float]]) -> float:
    """The slope between the last two points; a usual one without two, or if it cannot be."""
    if len(points) > 1:
        (x0, y0, _), (x1, y1, _) = points[-2:]
        if abs(x1 - x0) > 0.05 and -6 < (y1 - y0) / (x1 - x0) < -0.3:
            return (y1 - y0) / (x1 - x0)
    return _USUAL_SLOPE


def _snapped(power: float) -> float:
    """A measured power: the nearest multiple of a quarter if it is near, else two decimals."""
    nearest = round(4 * power) / 4
    return nearest + 0.0 if abs(power - nearest) < _SNAP else round(float(power), 2)
