"""The engine: an optimizer on a problem, over many trials at once, recorded, resumable, and splittable over workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Self, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab.problems._trials import Rule, StepBlock, Trials, loop_settings, starting_moment
from equilibria.lab.problems.problem import Problem
from equilibria.lab.problems.recorders import Moment, Recorder, recorders_of
from equilibria.lab.problems.state import SimulationState, fill, generators, joined_states, positions, restored
from equilibria.theory.rules import SGD
from equilibria.theory.schedules import ScheduleLike, as_schedule

Array = NDArray[np.float64]
Progress: TypeAlias = Callable[[int, int], None]

_NUMBERS = 1 << 18  # random numbers drawn at a time, all trials together: two megabytes, which stay in the cache
_STEPS = 1024  # steps between two looks at the clock and at the weights
_LEAST_STEPS = 16  # random numbers are drawn for, because each trial's drawing is a call; also where they fill no cache
_TOGETHER = 256  # trials that go through a stretch side by side, where no record needs all of them at every step


class DivergenceError(EquilibriaError):
    """Weights that are no longer finite.

    Attributes:
        step: number of the step that did it.
        trial: number of the first trial to which it happened.
    """

    def __init__(self, message: str, *, step: int, trial: int) -> None:
        super().__init__(message)
        self.step, self.trial = step, trial


@dataclass(frozen=True, eq=False)
class SimulationRun:
    """What was recorded.

    Attributes:
        steps: numbers of the recorded steps, (records,).
        values: name -> (records, trials), or (records, trials, size) for vectors.
        state: where the simulation stands after its last step.
    """

    steps: NDArray[np.int64]
    values: Mapping[str, Array]
    state: SimulationState

    def __getitem__(self, name: str) -> Array:
        if name not in self.values:
            raise EquilibriaError(f"got {name!r}; expected one of what was recorded: {', '.join(self.values)}")
        return self.values[name]

    @classmethod
    def in_time(cls, runs: Iterable[SimulationRun]) -> Self:
        """Stretches of one simulation, one after the other."""
        parts = list(runs)
        filled = [part for part in parts if part.steps.size] or parts[:1]  # an empty one knows no shapes
        values = {name: np.concatenate([part.values[name] for part in filled]) for name in parts[0].values}
        return cls(np.concatenate([part.steps for part in filled]), values, parts[-1].state)

    @classmethod
    def side_by_side(cls, runs: Iterable[SimulationRun]) -> Self:
        """Parts of the trials, in the order of `Simulation.parts`."""
        parts = list(runs)
        values = {name: np.concatenate([part.values[name] for part in parts], axis=1) for name in parts[0].values}
        return cls(parts[0].steps, values, joined_states([part.state for part in parts]))


@dataclass(frozen=True, eq=False)
class Simulation:
    """An optimizer on a problem from given weights; `run` does it.

    The random numbers of a trial come from the seed and the trial's number alone: `parts`, run anywhere and put side
    by side again, give the same numbers as the whole, bit for bit, and so does a run that goes on from a saved state.

    Attributes:
        problem: what is trained.
        start: weights to start from, (trials, size), or one vector.
        rule: the optimizer; its lr and weight decay hold where no schedule is given.
        steps: how many, counted from the start of the simulation.
        lr: learning rates: an array with one value per step (the last one holds), a schedule, a function of the step.
        weight_decay: weight decays likewise.
        projected: whether every step is projected back to the sphere of the norm before it.
        rescale: step -> factor of the weights just before that step. Momentum buffers are divided by it, second
            moments by its square, as gradients of a scale-invariant loss are. One at or after ``steps`` waits for the
            longer run that goes on from this one's state.
        record: names of `RECORDERS`, or name -> function of a `Moment`.
        every: steps between two records, the first at step 0.
        seed: of the random numbers of a stochastic problem.
        first_trial: number of the first trial, for parts of a larger simulation.

    Raises:
        EquilibriaError: settings that cannot be run.

    Example:
        >>> from equilibria.lab.problems import RandomWalk
        >>> walk = RandomWalk(100, unit_grad_sq=10.0)
        >>> rule = SGD(lr=0.1, weight_decay=0.1)
        >>> start = walk.start(8, norm_sq=rule.equilibrium(unit_grad_sq=10.0).norm ** 2)
        >>> run = Simulation(walk, start, rule=rule, steps=1000, record=["norm", "angle"]).run()
        >>> run["angle"].shape
        (1000, 8)
        >>> round(float(np.sqrt(np.mean(run["angle"] ** 2)) / rule.equilibrium().angle), 2)
        1.0
    """

    problem: Problem
    start: ArrayLike
    _: KW_ONLY
    rule: Rule
    steps: int
    lr: ScheduleLike | None = None
    weight_decay: ScheduleLike | None = None
    projected: bool = False
    rescale: Mapping[int, float] = field(default_factory=dict)
    record: Iterable[str] | Mapping[str, str | Recorder] = ("norm",)
    every: int = 1
    seed: int = 0
    first_trial: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self.problem.weights(self.start))
        object.__setattr__(self, "record", recorders_of(self.record))
        for name, low in (("steps", 1), ("every", 1), ("seed", 0), ("first_trial", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), low=low))
        loop_settings(self.rule, projected=self.projected)
        starting_moment(self.rule, self.trials)
        if self.lr is None:
            positive("lr", self.rule.lr)
        if not isinstance(self.rule, SGD) and self.weight_decay is not None:
            raise EquilibriaError(f"got weight_decay for {type(self.rule).__name__}; expected one only for SGD")
        as_schedule(self._lr, name="lr").values(self.steps)
        as_schedule(self._weight_decay, name="weight_decay").values(self.steps)
        for step, factor in self.rescale.items():
            whole("step of a rescale", step)
            positive("factor of a rescale", factor)

    @property
    def trials(self) -> int:
        """How many."""
        return len(np.asarray(self.start))

    def run(self, *, state: SimulationState | None = None, progress: Progress | None = None) -> SimulationRun:
        """Take all steps.

        Args:
            state: where to go on; None for the start.
            progress: called with steps taken and steps in all.

        Returns:
            The records from there on, and the state after the last step.

        Raises:
            EquilibriaError: the state is another simulation's, or is past the last step.
            DivergenceError: the weights are no longer finite.
        """
        return SimulationRun.in_time(self.stream(state=state, progress=progress))

    def stream(
        self, *, state: SimulationState | None = None, progress: Progress | None = None, chunk: int = 10_000
    ) -> Iterator[SimulationRun]:
        """The same in stretches of ``chunk`` steps, each with the state after it: for runs too long for memory."""
        length = whole("chunk", chunk, low=1)
        drawn = self._generators() if state is None else restored(self._checked(state).streams)
        return self._stretches(state or self._first_state(drawn), drawn, length, progress)

    def parts(self, count: int) -> list[Simulation]:
        """The trials in ``count`` parts (or fewer, if there are fewer trials), to be run anywhere."""
        number = min(whole("count", count, low=1), self.trials)
        edges = [self.trials * k // number for k in range(number + 1)]
        return [self._part(first, last) for first, last in pairwise(edges)]

    def _part(self, first: int, last: int) -> Simulation:
        rule = self.rule
        if not isinstance(rule, SGD):
            rule = replace(rule, second_moment=starting_moment(rule, self.trials)[first:last, 0])
        return replace(
            self,
            problem=self.problem.take(first, last),
            start=np.asarray(self.start)[first:last],
            rule=rule,
            first_trial=self.first_trial + first,
        )

    @property
    def _lr(self) -> ScheduleLike:
        return self.rule.lr if self.lr is None else self.lr

    @property
    def _weight_decay(self) -> ScheduleLike:
        if self.weight_decay is not None:
            return self.weight_decay
        return self.rule.weight_decay if isinstance(self.rule, SGD) else 0.0

    def _generators(self) -> list[Generator]:
        return generators(self.seed, self.first_trial, self.trials if self.problem.draws else 0)

    def _first_state(self, drawn: list[Generator]) -> SimulationState:
        weights = np.array(self.start, np.float64)
        return SimulationState(
            0,
            weights,
            np.zeros_like(weights),
            starting_moment(self.rule, self.trials),
            positions(drawn),
            self.seed,
            self.first_trial,
        )

    def _checked(self, state: SimulationState) -> SimulationState:
        mine = (np.shape(self.start), self.seed, self.first_trial)
        theirs = (state.weights.shape, state.seed, state.first_trial)
        if mine != theirs:
            raise EquilibriaError(
                f"got a state of weights {theirs[0]}, seed {theirs[1]}, first trial {theirs[2]}; "
                f"expected {mine[0]}, {mine[1]}, {mine[2]}: that of this simulation"
            )
        there = (state.buffers.shape, state.moments.shape, state.streams.shape)
        fits = (mine[0], (self.trials, 1), (self.trials if self.problem.draws else 0, 4))
        if there != fits:
            raise EquilibriaError(f"got a state with parts of shapes {there}; expected {fits}: that of this simulation")
        if state.step >= self.steps:
            raise EquilibriaError(f"got a state after {state.step} steps; expected less than steps={self.steps}")
        return state

    def _stretches(
        self, state: SimulationState, drawn: list[Generator], length: int, progress: Progress | None
    ) -> Iterator[SimulationRun]:
        moving = (state.weights.copy(), state.buffers.copy(), state.moments.copy())
        motion = Trials(self.problem, loop_settings(self.rule, projected=self.projected), *moving)
        for begin in range(state.step, self.steps, length):
            end = min(begin + length, self.steps)
            log = _Log(dict(recorders_of(self.record)))
            self._advance(motion, drawn, begin, end, log, progress or (lambda done, total: None))
            moved = (motion.weights.copy(), motion.buffers.copy(), motion.moments.copy())
            yield log.run(SimulationState(end, *moved, positions(drawn), self.seed, self.first_trial), self.trials)

    def _advance(
        self, motion: Trials, drawn: list[Generator], begin: int, end: int, log: _Log, progress: Progress
    ) -> None:
        """Take a stretch with one group of trials after the other; recorders see all trials, so they make one group.

        Every trial has random numbers of its own, and the same ones in any group.
        """
        size = self.trials if log.recorders or self.problem.kind is None else _TOGETHER
        diverged: list[DivergenceError] = []
        for first in range(0, self.trials, size):
            group = motion.part(first, min(first + size, self.trials))
            try:
                for block in self._blocks(group.trials, drawn[first : first + size], begin, end):
                    self._follow(group, block, log, first_trial=self.first_trial + first)
                    taken = (block.last - begin) * group.trials + (end - begin) * first
                    progress(begin + taken // self.trials, self.steps)
            except DivergenceError as error:
                diverged.append(error)
        if diverged:
            raise min(diverged, key=lambda error: (error.step, error.trial))

    def _blocks(self, trials: int, drawn: list[Generator], begin: int, end: int) -> Iterator[StepBlock]:
        lrs = as_schedule(self._lr, name="lr").values(end - begin, start=begin)
        decays = as_schedule(self._weight_decay, name="weight_decay").values(end - begin, start=begin)
        numbers = self.problem.draws
        length = min(end - begin, max(_LEAST_STEPS, _NUMBERS // (trials * numbers)) if numbers else _STEPS)
        draws = np.empty((trials, length, numbers))
        for first in range(begin, end, length):
            count = min(length, end - first)
            if count < length:
                draws = np.empty((trials, count, numbers))
            fill(drawn, draws[: len(drawn)])
            inside = slice(first - begin, first - begin + count)
            yield StepBlock(first, lrs[inside], decays[inside], draws)

    def _follow(self, motion: Trials, block: StepBlock, log: _Log, *, first_trial: int) -> None:
        before = motion.copy()
        here = block.first
        for step in self._stops(block, recording=bool(log.recorders)):
            motion.advance(block, here, step)
            here = step
            if step in self.rescale:
                motion.rescale(self.rescale[step])
            if log.recorders and step % self.every == 0:
                weights = motion.weights.copy()
                motion.advance(block, step, step + 1)
                here = step + 1
                self._check(motion, before, block, first_trial)
                inside = step - block.first
                rates = float(block.lr[inside]), float(block.weight_decay[inside])
                log.add(Moment(self.problem, step, weights, motion.weights, *rates))
        motion.advance(block, here, block.last)
        self._check(motion, before, block, first_trial)

    def _stops(self, block: StepBlock, *, recording: bool) -> list[int]:
        records = range(-(-block.first // self.every) * self.every, block.last, self.every) if recording else ()
        return sorted({*records, *(step for step in self.rescale if block.first <= step < block.last)})

    def _check(self, motion: Trials, before: Trials, block: StepBlock, first_trial: int) -> None:
        """Refuse weights that are not finite; the block is then taken again step by step, to say which step it was."""
        if np.isfinite(motion.weights).all():
            return
        for step in range(block.first, block.last):
            before.rescale(self.rescale.get(step, 1.0))
            before.advance(block, step, step + 1)
            bad = ~np.isfinite(before.weights).all(axis=1)
            if bad.any():
                trial = first_trial + int(bad.argmax())
                inside = step - block.first
                message = (
                    f"got weights that are not finite in trial {trial} after step {step}, with "
                    f"lr={block.lr[inside]:g}, weight_decay={block.weight_decay[inside]:g}; expected a run that stays "
                    "finite: lower the learning rate, or start elsewhere"
                )
                raise DivergenceError(message, step=step, trial=trial)


class _Log:
    """Records as they come."""

    def __init__(self, recorders: dict[str, Recorder]) -> None:
        self.recorders = recorders
        self._steps: list[int] = []
        self._rows: dict[str, list[Array]] = {name: [] for name in recorders}

    def add(self, moment: Moment) -> None:
        self._steps.append(moment.step)
        for name, recorder in self.recorders.items():
            row = np.asarray(recorder(moment), np.float64)
            if row.shape[:1] != (len(moment.weights),):
                raise EquilibriaError(
                    f"got shape {row.shape} from recorder {name!r}; expected {len(moment.weights)} trials first"
                )
            self._rows[name].append(row)

    def run(self, state: SimulationState, trials: int) -> SimulationRun:
        values = {name: np.array(rows) if rows else np.empty((0, trials)) for name, rows in self._rows.items()}
        return SimulationRun(np.array(self._steps, np.int64), values, state)
