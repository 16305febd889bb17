"""Runs of sharp-completion: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.experiment import Arrays
from equilibria.problems import Completion, Moment, Simulation
from equilibria.theory.rules import SGD
from equilibria.theory.stability import crossing_time, effective_lr

Array = NDArray[np.float64]
SEEN = 1e-6
"""Training loss below which a run has fitted, and above which, later, its oscillation is seen."""
_EVERY = 10  # steps between two records of the losses


@dataclass(frozen=True)
class Config:
    """Sizes d and numbers N of observed entries of figures 1, 6 and 7; the paper's lr and weight decay."""

    small: int = 50
    small_observed: tuple[int, ...] = (400, 800, 1200, 1600)
    large: int = 100
    large_observed: tuple[int, ...] = (1600, 2400, 3200)
    closer_look: int = 800
    matrices: int = 3
    rank: int = 2
    lr: float = 0.1
    weight_decay: float = 0.01
    steps: int = 30_000
    sparse_every: int = 250
    window: int = 900
    seed: int = 0

    @property
    def rate(self) -> float:
        """lr*wd."""
        return self.lr * self.weight_decay

    @property
    def rule(self) -> SGD:
        """The optimizer."""
        return SGD(lr=self.lr, weight_decay=self.weight_decay)

    @property
    def cases(self) -> list[tuple[int, int]]:
        """d and N of every panel."""
        small = [(self.small, observed) for observed in self.small_observed]
        return small + [(self.large, observed) for observed in self.large_observed]

    @property
    def seeds(self) -> range:
        """One matrix, one set of observed entries and one start each."""
        return range(self.seed, self.seed + self.matrices)

    def problem(self, dim: int, observed: int, *, seed: int) -> Completion:
        """One matrix."""
        return Completion.generate([seed], dim=dim, rank=self.rank, observed=observed)


def key(dim: int, observed: int, seed: int) -> str:
    """Name of a task."""
    return f"d{dim}-n{observed}-s{seed}"


def tasks(config: Config) -> dict[str, tuple[str, int, int, int]]:
    """One run per matrix, and a closer look at one of them as it enters the edge of stability."""
    runs = {key(d, n, seed): ("run", d, n, seed) for d, n in config.cases for seed in config.seeds}
    return {**runs, "entry": ("entry", config.small, config.closer_look, config.seed)}


def run_task(config: Config, task: tuple[str, int, int, int]) -> Arrays:
    """One of them."""
    kind, dim, observed, seed = task
    problem = config.problem(dim, observed, seed=seed)
    return _entry(config, problem) if kind == "entry" else _run(config, problem)


def _run(config: Config, problem: Completion) -> Arrays:
    """The losses every few steps; sharpness and singular values, which cost more, less often."""
    run = Simulation(
        problem,
        problem.initial,
        rule=config.rule,
        steps=config.steps,
        every=_EVERY,
        record={
            **{name: name for name in ("loss", "risk", "norm")},
            "sharpness": _sometimes(config.sparse_every, problem.sharpness, 1),
            "singular": _sometimes(config.sparse_every, lambda weights: problem.singular_values(weights)[:, :3], 3),
        },
    ).run()
    sparse = run.steps % config.sparse_every == 0
    return {
        "step": run.steps,
        **{name: run[name][:, 0] for name in ("loss", "risk", "norm")},
        "sparse_step": run.steps[sparse],
        "sharpness": run["sharpness"][sparse, 0, 0],
        "singular": run["singular"][sparse, 0],
    }


def _sometimes(every: int, measure: Callable[[Array], Array], width: int) -> Callable[[Moment], Array]:
    """A recorder that measures at multiples of ``every`` steps and says nothing in between."""

    def recorder(moment: Moment) -> Array:
        if moment.step % every:
            return np.full((len(moment.weights), width), np.nan)
        return measure(moment.weights).reshape(len(moment.weights), width)

    return recorder


def _entry(config: Config, problem: Completion) -> Arrays:
    """Every step about the crossing that is predicted from the moment at which the loss has collapsed."""
    first = Simulation(problem, problem.initial, rule=config.rule, steps=config.steps, record=["loss"])
    fitted = next(stretch.state for stretch in first.stream(chunk=50) if stretch["loss"][-1, 0] < SEEN)
    lr = effective_lr(config.lr, config.weight_decay, norm_sq=float(np.sum(fitted.weights**2)))
    sharpness = problem.sharpness(fitted.weights)
    expected = float(crossing_time(lr, sharpness, intrinsic_lr=config.rate, start=fitted.step)[0])
    begin = round(expected) - config.window // 10
    there = replace(first, steps=begin, record=()).run(state=fitted).state
    look = replace(first, steps=begin + config.window, record=("loss", "norm", "sharpness")).run(state=there)
    return {
        "step": look.steps,
        **{name: look[name][:, 0] for name in ("loss", "norm", "sharpness")},
        "expected_crossing": np.asarray(expected),
    }
