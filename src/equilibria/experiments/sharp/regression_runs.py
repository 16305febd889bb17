"""The run of sharp-regression, apart from what judges and draws it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.experiment import Arrays
from equilibria.problems import Moment, Regression, Simulation
from equilibria.theory.rules import SGD

Array = NDArray[np.float64]
_LATE = 0.5  # the share of the steps, at the end, over which levels are taken


@dataclass(frozen=True)
class Config:
    """The paper's data (Appendix Q.2), one set per seed, and its lr and weight decay."""

    data_sets: int = 10
    samples: int = 20
    dim: int = 40
    lr: float = 0.5
    weight_decay: float = 2e-4
    steps: int = 40_000
    seed: int = 0

    @property
    def rate(self) -> float:
        """lr*wd."""
        return self.lr * self.weight_decay

    @property
    def eta(self) -> float:
        """The small number of the theory."""
        return math.sqrt(2 * self.rate)

    @property
    def problem(self) -> Regression:
        """One data set per trial."""
        seeds = range(self.seed, self.seed + self.data_sets)
        return Regression.generate(seeds, samples=self.samples, dim=self.dim)

    @property
    def late(self) -> slice:
        """The last part of the steps."""
        return slice(round(self.steps * (1 - _LATE)), None)


def run_task(config: Config, _: None) -> Arrays:
    """All data sets at once, every step.

    Descent keeps the part of w in the null space of the data, and so does the flow of the gradient, which also keeps
    the norm: the minimiser that w belongs to has the same null part, and the rest of its norm along w*. Its sharpness
    is then lambda1* |w|^2/|row part|^2, and its top eigenvector is the same everywhere.
    """
    problem = config.problem
    tops = top_eigenvectors(problem)
    unseen = problem.null_part(problem.initial)

    def across(moment: Moment) -> Array:
        return np.asarray(np.einsum("ti,ti->t", moment.unit, tops))

    def null_norm(moment: Moment) -> Array:
        return np.asarray(np.linalg.norm(problem.null_part(moment.weights), axis=1))

    def null_error(moment: Moment) -> Array:
        expected = (1 - config.rate) ** moment.step * unseen
        return np.asarray(np.linalg.norm(problem.null_part(moment.weights) - expected, axis=1))

    def distance(moment: Moment) -> Array:
        return np.asarray(np.linalg.norm(problem.coefficients(moment.weights) - problem.flattest, axis=1))

    run = Simulation(
        problem,
        problem.initial,
        rule=SGD(lr=config.lr, weight_decay=config.weight_decay),
        steps=config.steps,
        record={
            **{name: name for name in ("loss", "risk", "norm")},
            "h": across,
            "null_norm": null_norm,
            "null_error": null_error,
            "distance": distance,
        },
    ).run()
    worst = run["null_error"].max(axis=0) / np.linalg.norm(unseen, axis=1)
    return {**{name: run[name] for name in _SERIES}, "worst_null_error": worst}


_SERIES = ("loss", "risk", "norm", "h", "null_norm", "distance")


def top_eigenvectors(problem: Regression) -> Array:
    """That of the Hessian at the flattest minimum, (trials, d)."""
    return np.asarray(np.linalg.eigh(problem.hessian(problem.flattest))[1][..., -1])
