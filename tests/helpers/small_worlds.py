"""The problems of the tests: small, several trials each, with weights and draws at which to look."""

from __future__ import annotations

import numpy as np

from equilibria.lab.problems import (
    Completion,
    LogisticToy,
    NoisyQuadratic,
    RandomWalk,
    RayleighQuotient,
    Regression,
    Sphere3D,
    SphereValley,
    Valley,
)

TRIALS = 3
SEEDS = range(TRIALS)

PROBLEMS = {
    "rayleigh": lambda: RayleighQuotient([0.5, 1.0, 1.5, 4.0]),
    "noisy-rayleigh": lambda: RayleighQuotient.two_level(0.7, 6, noise=0.8),
    "random-walk": lambda: RandomWalk(5, unit_grad_sq=3.0),
    "noisy-quadratic": lambda: NoisyQuadratic([0.5, 1.0, 4.0], noise=0.8),
    "sphere3d": lambda: Sphere3D(),
    "sphere3d-rotated": lambda: Sphere3D(rotation_seed=4),
    "sphere-valley": lambda: SphereValley(1.0, 8.0, rotation_seed=2),
    "valley": lambda: Valley(),
    "logistic-normalised": lambda: LogisticToy(4),
    "logistic-plain": lambda: LogisticToy(3, normalised=False),
    "regression": lambda: Regression.generate(SEEDS, samples=6, dim=9),
    "completion": lambda: Completion.generate(SEEDS, dim=5, rank=2, observed=13),
}
INVARIANT = [name for name in PROBLEMS if name not in ("valley", "logistic-plain", "noisy-quadratic")]


def point(problem, seed=0, scale=1.0):
    """Weights, a direction and draws (or None) for every trial."""
    rng = np.random.default_rng(seed)
    weights, direction = scale * rng.standard_normal((2, TRIALS, problem.size))
    return weights, direction, rng.standard_normal((TRIALS, problem.draws)) if problem.draws else None


def without_kernel(problem):
    """The same problem for the engine's way through `gradient`."""
    plain = type(f"Plain{type(problem).__name__}", (type(problem),), {"kind": None})
    same = object.__new__(plain)
    same.__dict__.update(problem.__dict__)
    return same
