"""Weights and optimizer state of all trials, moved in place through one block of steps after the other."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive, within
from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Problem, lengths
from equilibria.theory._reals import positive_reals
from equilibria.theory.rules import SGD

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScalarRMSpropRule:
    """``w' = w - lr g/sqrt(v)``, ``v' = decay v + (1-decay) |g|^2``: one second moment for the whole weight.

    Lyu, Li and Arora (Definition B.1; projected to the sphere: Definition B.3). The old v is used in the step.

    Attributes:
        lr: learning rate.
        decay: of the second moment per step, 0 < decay < 1.
        second_moment: v to start from, one number or one per trial. ``v = (lr sharpness/2)^2`` starts at the edge of
            stability.
    """

    lr: float
    _: KW_ONLY
    decay: float
    second_moment: ArrayLike

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        within("decay", self.decay, above=0, below=1)
        positive_reals("second_moment", self.second_moment)


Rule: TypeAlias = SGD | ScalarRMSpropRule


def loop_settings(rule: Rule, *, projected: bool) -> Array:
    """A rule as the compiled loop reads it."""
    settings = np.zeros(6)
    settings[_loops.PROJECTED] = projected
    if isinstance(rule, ScalarRMSpropRule):
        settings[_loops.ADAPTIVE], settings[_loops.MOMENT_DECAY] = 1.0, rule.decay
        return settings
    if not isinstance(rule, SGD):
        raise EquilibriaError(f"got rule={rule!r}; expected theory.SGD or problems.ScalarRMSpropRule")
    if projected and rule.momentum:
        raise EquilibriaError(f"got projected=True with momentum={rule.momentum:g}; expected momentum = 0")
    settings[_loops.MOMENTUM], settings[_loops.KEPT] = rule.momentum, 1 - rule.dampening
    settings[_loops.NESTEROV] = rule.nesterov
    return settings


def starting_moment(rule: Rule, trials: int) -> Array:
    """The second moment of every trial at the start, (trials, 1); zeros for SGD, which has none."""
    if isinstance(rule, SGD):
        return np.zeros((trials, 1))
    given = positive_reals("second_moment", rule.second_moment)
    if given.shape not in ((), (trials,)):
        raise EquilibriaError(f"got second_moment of shape {given.shape}; expected one number or {trials}")
    return np.array(np.broadcast_to(given, trials)).reshape(trials, 1)


@dataclass(frozen=True, eq=False)
class StepBlock:
    """What a stretch of steps needs to know.

    Attributes:
        first: number of its first step.
        lr: learning rate of each step.
        weight_decay: weight decay of each step.
        draws: (trials, steps, draws) random numbers.
    """

    first: int
    lr: Array
    weight_decay: Array
    draws: Array

    @property
    def last(self) -> int:
        """The step after its last."""
        return self.first + len(self.lr)


@dataclass(frozen=True, eq=False)
class Trials:
    """What moves, and by which problem and optimizer."""

    problem: Problem
    settings: Array
    weights: Array
    buffers: Array
    moments: Array

    @property
    def trials(self) -> int:
        """How many."""
        return len(self.weights)

    @cached_property
    def data(self) -> Array:
        """What the compiled gradient reads."""
        return self.problem.data()

    def part(self, first: int, last: int) -> Self:
        """The trials from ``first`` up to, not including, ``last``; moving them moves these."""
        if (first, last) == (0, self.trials):
            return self
        moving = (self.weights[first:last], self.buffers[first:last], self.moments[first:last])
        return type(self)(self.problem.take(first, last), self.settings, *moving)

    def copy(self) -> Self:
        """The same, at the same place, to be moved by itself."""
        moving = (self.weights.copy(), self.buffers.copy(), self.moments.copy())
        return type(self)(self.problem, self.settings, *moving)

    def advance(self, block: StepBlock, begin: int, end: int) -> None:
        """Take the steps from number ``begin`` up to, not including, ``end``."""
        fresh = begin == 0
        inside = begin - block.first, end - block.first
        if begin == end:
            return
        if self.problem.kind is None:
            for step in range(*inside):
                self._step(block, step, fresh=fresh and step == inside[0])
            return
        moving, rates = (self.weights, self.buffers, self.moments), (block.lr, block.weight_decay)
        _loops.take_steps(
            self.problem.kind, *moving, block.draws, self.data, *rates, *inside, fresh, self.settings, self.problem.room
        )

    def rescale(self, factor: float) -> None:
        """Multiply the weights; buffers hold gradients, which are inverse to them, and moments squares of gradients."""
        self.weights[...] *= factor
        self.buffers[...] /= factor
        self.moments[...] /= factor**2

    def _step(self, block: StepBlock, step: int, *, fresh: bool) -> None:
        draws = block.draws[:, step] if self.problem.draws else None
        with np.errstate(all="ignore"):  # a run that diverges is reported with step and trial
            gradient = self.problem.gradient(self.weights, draws)
            norm = lengths(self.weights)
            if self.settings[_loops.ADAPTIVE]:
                self._adapt(gradient, lr=block.lr[step])
            else:
                self._descend(gradient, lr=block.lr[step], decay=block.weight_decay[step], fresh=fresh)
            if self.settings[_loops.PROJECTED]:
                self.weights[...] *= norm / lengths(self.weights)

    def _adapt(self, gradient: Array, *, lr: float) -> None:
        kept = self.settings[_loops.MOMENT_DECAY]
        self.weights[...] -= lr / np.sqrt(self.moments) * gradient
        self.moments[...] = kept * self.moments + (1 - kept) * lengths(gradient) ** 2

    def _descend(self, gradient: Array, *, lr: float, decay: float, fresh: bool) -> None:
        momentum, kept = self.settings[_loops.MOMENTUM], self.settings[_loops.KEPT]
        gradient = gradient + decay * self.weights
        if momentum:
            self.buffers[...] = gradient if fresh else momentum * self.buffers + kept * gradient
            gradient = gradient + momentum * self.buffers if self.settings[_loops.NESTEROV] else self.buffers
        self.weights[...] -= lr * gradient
