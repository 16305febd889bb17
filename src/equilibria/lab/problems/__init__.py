"""Exact small worlds: losses with their derivatives in closed form, and an engine that trains many of them at once.

Problems
    - `RayleighQuotient`: the noisy Rayleigh quotient; `RandomWalk`: its noise alone; `NoisyQuadratic`: without the
      normalisation.
    - `Sphere3D`, `SphereValley`: curves of minima on a sphere; `Valley`: one in the plane.
    - `Regression`: linear regression with BatchNorm; `Completion`: matrix completion with BatchNorm.
    - `LogisticToy`: one Gaussian sample per step, with or without normalisation.

Weights are float64 arrays (trials, size). Every problem has ``value``, ``gradient``, ``hvp``, ``hessian``,
``sharpness``, most have a ``risk``; ``split(weights)`` names the parameters; ``torch_loss(params)`` is the same loss in
torch, for `equilibria.Objective`. `Regression` and `Completion` hold one data set per trial, made from seeds by
``generate(seeds)``, and the weights to start from in ``initial``. torch is needed for `torch_loss` only.

Engine
    - `Simulation`: an optimizer (`theory.SGD` with all options of torch's, or `ScalarRMSpropRule`) on a problem;
      ``run()`` gives a `SimulationRun`, ``stream()`` the same in stretches, ``parts(n)`` splits them for workers.
    - `SimulationRun`: ``run["norm"]`` is (records, trials); ``run.state`` goes on: ``simulation.run(state=run.state)``.
      `SimulationRun.side_by_side` puts parts together again.
    - `SimulationState`: ``save(path)``, ``SimulationState.load(path)``.
    - `RECORDERS`: what can be recorded by name; `Moment`: what a recorder of your own is given.
    - `DivergenceError`: raised with the step and the trial.

Example:
    Ten data sets of linear regression, trained past the edge of stability:

    >>> from equilibria.theory import SGD
    >>> problem = Regression.generate(range(10))
    >>> rule = SGD(lr=0.5, weight_decay=2e-4)
    >>> simulation = Simulation(problem, problem.initial, rule=rule, steps=500, record=["loss", "risk"], every=100)
    >>> run = simulation.run()
    >>> run.steps.tolist(), run["loss"].shape
    ([0, 100, 200, 300, 400], (5, 10))

    The same from two workers:

    >>> parts = [part.run() for part in simulation.parts(2)]
    >>> bool((SimulationRun.side_by_side(parts)["loss"] == run["loss"]).all())
    True
"""

from __future__ import annotations

from equilibria.lab.problems._trials import ScalarRMSpropRule
from equilibria.lab.problems.batch_norm import Completion, Regression
from equilibria.lab.problems.logistic import LogisticToy
from equilibria.lab.problems.problem import Problem
from equilibria.lab.problems.rayleigh import NoisyQuadratic, RandomWalk, RayleighQuotient
from equilibria.lab.problems.recorders import RECORDERS, Moment, Recorder
from equilibria.lab.problems.simulation import DivergenceError, Simulation, SimulationRun
from equilibria.lab.problems.state import SimulationState
from equilibria.lab.problems.valleys import Sphere3D, SphereValley, Valley

__all__ = [
    "RECORDERS",
    "Completion",
    "DivergenceError",
    "LogisticToy",
    "Moment",
    "NoisyQuadratic",
    "Problem",
    "RandomWalk",
    "RayleighQuotient",
    "Recorder",
    "Regression",
    "ScalarRMSpropRule",
    "Simulation",
    "SimulationRun",
    "SimulationState",
    "Sphere3D",
    "SphereValley",
    "Valley",
]
