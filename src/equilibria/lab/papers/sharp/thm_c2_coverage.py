"""sharp-coverage: the PAC-Bayes bound on trained models, with measured constants, over resampled data (theorem C.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.problems import Regression
from equilibria.theory.generalization import PacBayesBound, max_noise, pac_bayes_bound

Array = NDArray[np.float64]
_SETS, _REGRESSION = "data-sets", "regression"


@dataclass(frozen=True)
class Config:
    """A normalised linear classifier, ln(1 + exp(-scale y x.w/|w|)), trained on many data sets of one distribution.

    Inputs are uniform on the unit sphere in three dimensions, labels the sign of the first coordinate, some of them
    wrong: the population loss of every w is then an integral in one dimension, and the loss is bounded. The largest
    third derivative is that of any sample, so that it holds for every data set. Beside it the regression of figure 4,
    which has more weights than samples.
    """

    samples: int = 10_000
    scale: float = 2.0
    wrong_labels: float = 0.1
    sigmas: tuple[float, ...] = (0.02, 0.05, 0.1)
    delta: float = 0.05
    data_sets: int = 200
    perturbed_sets: int = 20
    draws: int = 2000
    steps: int = 60
    regressions: int = 10
    seed: int = 0

    @property
    def max_loss(self) -> float:
        """The loss of the worst sample."""
        return math.log1p(math.exp(self.scale))

    @property
    def most_perturbed(self) -> int:
        """Draws of the noise for which the loss on the training samples is averaged."""
        return max(1, self.draws // 10)


DIM = 3


def tasks(config: Config) -> dict[str, str]:
    """All data sets of the classifier, and the regressions."""
    return {_SETS: _SETS, _REGRESSION: _REGRESSION}


def run_task(config: Config, task: str) -> Arrays:
    """Train and measure."""
    return _train_all(config) if task == _SETS else _regressions(config)


def _loss(score: Array, scale: float) -> Array:
    """Of samples with y x.w/|w| = score."""
    return np.asarray(np.logaddexp(0.0, -scale * score))


def _train_all(config: Config) -> Arrays:
    """For each data set: the trained direction's loss, sharpness, trace and gap for every sigma."""
    population = PopulationLoss(config)
    rows: dict[str, list[Array]] = {name: [] for name in ("loss", "sharpness", "trace", "gap", "taylor")}
    for index in range(config.data_sets):
        rng = np.random.default_rng([config.seed, index])
        signed = draw_samples(config, rng)
        unit = train(signed, config)
        hessian = sample_hessian(signed, unit, config.scale)
        train_loss = float(_loss(signed @ unit, config.scale).mean())
        noise = rng.standard_normal((config.draws, DIM)) / math.sqrt(DIM)
        moved = [unit + sigma * noise for sigma in config.sigmas]
        rows["loss"].append(np.asarray(train_loss))
        rows["sharpness"].append(np.asarray(np.linalg.eigvalsh(hessian)[-1]))
        rows["trace"].append(np.asarray(np.trace(hessian)))
        rows["gap"].append(np.array([population(weights).mean() for weights in moved]) - train_loss)
        if index < config.perturbed_sets:
            rows["taylor"].append(np.array([_perturbed(signed, weights, config) for weights in moved]) - train_loss)
    return {name: np.stack(values) for name, values in rows.items()} | {
        "third_derivative": np.asarray(largest_third_derivative(config.scale))
    }


def draw_samples(config: Config, rng: np.random.Generator) -> Array:
    """Inputs times their labels, (samples, 3): the loss depends on nothing else."""
    inputs = rng.standard_normal((config.samples, DIM))
    inputs /= np.linalg.norm(inputs, axis=1, keepdims=True)
    right = rng.random(config.samples) >= config.wrong_labels
    signed: Array = inputs * (np.where(inputs[:, 0] >= 0, 1.0, -1.0) * np.where(right, 1.0, -1.0))[:, None]
    return signed


def train(signed: Array, config: Config) -> Array:
    """Projected gradient descent on the sphere, from the mean of the samples."""
    unit = signed.mean(axis=0)
    unit /= np.linalg.norm(unit)
    for _ in range(config.steps):
        score = signed @ unit
        push = -config.scale / (1 + np.exp(config.scale * score))
        unit = unit - (push @ signed - (push @ score) * unit) / len(signed)  # lr 1, below 2/sharpness
        unit /= np.linalg.norm(unit)
    return np.asarray(unit)


def sample_hessian(signed: Array, unit: Array, scale: float) -> Array:
    """Hessian of the mean loss at a unit weight, (3, 3)."""
    score = signed @ unit
    wrong = 1 / (1 + np.exp(scale * score))
    first, second = -scale * wrong, scale**2 * wrong * (1 - wrong)
    across = signed - score[:, None] * unit
    mean, along = first @ signed / len(signed), float(first @ score) / len(signed)
    bent = -np.outer(mean, unit) - np.outer(unit, mean) - along * np.eye(DIM) + 3 * along * np.outer(unit, unit)
    return np.asarray((across * second[:, None]).T @ across / len(signed) + bent)


def third_derivative(p: Array, q: Array, a: Array, scale: float) -> Array:
    """Third derivative of a sample's loss along v at w, |w| = |v| = 1: p = y x.w, q = y x.v, a = w.v.

    x.(w + tv)/|w + tv| is (p + q t) times the generating function of the Legendre polynomials at -a.
    """
    second, third = (3 * a**2 - 1) / 2, -(5 * a**3 - 3 * a) / 2
    c1, c2, c3 = q - p * a, p * second - q * a, q * second + p * third
    wrong = 1 / (1 + np.exp(scale * p))
    d1, d2 = -scale * wrong, scale**2 * wrong * (1 - wrong)
    d3 = scale**3 * wrong * (1 - wrong) * (2 * wrong - 1)
    derivative: Array = 6 * d1 * c3 + 6 * d2 * c1 * c2 + d3 * c1**3
    return derivative


def largest_third_derivative(scale: float, points: int = 121) -> float:
    """The largest in size over all samples, weights and directions, on a grid of their inner products."""
    grid = np.linspace(-1, 1, points)
    p, a, turn = np.meshgrid(grid, grid, grid, indexing="ij")
    q = p * a + turn * np.sqrt((1 - p**2) * (1 - a**2))
    return float(np.abs(third_derivative(p, q, a, scale)).max())


class PopulationLoss:
    """Expected loss of weights, by their angle to the first axis: a table of integrals over x.w/|w|, uniform here."""

    def __init__(self, config: Config, points: int = 2001) -> None:
        self._angles = np.linspace(1e-9, np.pi - 1e-9, 401)
        nodes, weights = np.polynomial.legendre.leggauss(points)
        right, wrong = _loss(nodes, config.scale), _loss(-nodes, config.scale)
        share = config.wrong_labels
        positive, negative = (1 - share) * right + share * wrong, (1 - share) * wrong + share * right
        across = np.sqrt(1 - nodes**2)
        edge = -nodes / across / np.tan(self._angles)[:, None]
        chance = np.arccos(np.clip(edge, -1, 1)) / np.pi  # that the label of such a sample is positive
        self._values = (weights / 2 * (chance * positive + (1 - chance) * negative)).sum(axis=1)

    def __call__(self, weights: Array) -> Array:
        """Of weights (n, 3), any norm."""
        angle = np.arctan2(np.linalg.norm(weights[:, 1:], axis=1), weights[:, 0])
        return np.asarray(np.interp(angle, self._angles, self._values))


def _perturbed(signed: Array, weights: Array, config: Config) -> float:
    """Mean training loss of some of the perturbed weights."""
    few = weights[: config.most_perturbed]
    units = few / np.linalg.norm(few, axis=1, keepdims=True)
    return float(np.mean([_loss(signed @ unit, config.scale).mean() for unit in units]))


def _regressions(config: Config) -> Arrays:
    """Sharpness and test loss where the gradient flow ends, and of the least-norm solution."""
    problem = Regression.generate(range(config.seed, config.seed + config.regressions))
    null = problem.null_part(problem.initial)
    size, norm = np.linalg.norm(null, axis=1), np.linalg.norm(problem.initial, axis=1)
    stretch = np.linalg.norm(problem.flattest, axis=1) / np.sqrt(norm**2 - size**2)
    ends = problem.flattest + null * stretch[:, None]
    return {
        "sharpness": np.stack([problem.sharpness(ends), problem.sharpness(problem.flattest)]),
        "test": np.stack([problem.risk(ends), problem.risk(problem.flattest)]),
        "shape": np.array(problem.inputs.shape[1:]),
    }


# ---- judging

_BOUND = Source(
    "sharp",
    "Theorem C.2",
    corrected="the loss must not be negative, and Theorem C.1's difference has the other sign",
    law="generalization.pac_bayes_bound",
)
_OURS = Source("", "ours, on Theorem C.2", law="generalization.pac_bayes_bound")


def bounds(config: Config, line: Arrays, sigma: float) -> list[PacBayesBound]:
    """The bound of every data set, with its own sharpness."""
    constants = {"samples": config.samples, "delta": config.delta, "max_loss": config.max_loss}
    return [
        pac_bayes_bound(max(float(top), 0.0), float(line["third_derivative"]), dim=DIM, sigma=sigma, **constants)  # type: ignore[arg-type]
        for top in line["sharpness"]
    ]


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge coverage, the Taylor part of the bound, and what it says where weights outnumber samples."""
    line, regression = results[_SETS], results[_REGRESSION]
    by_sigma = {sigma: bounds(config, line, sigma) for sigma in config.sigmas}
    final = {sigma: np.array([bound.final.total for bound in found]) for sigma, found in by_sigma.items()}
    tight = {sigma: np.array([bound.tight.total for bound in found]) for sigma, found in by_sigma.items()}
    covered = {
        name: min(float(np.mean(line["gap"][:, place] <= lines[sigma])) for place, sigma in enumerate(config.sigmas))
        for name, lines in (("final", final), ("tight", tight))
    }
    taylor = [
        line["taylor"][:, place]
        / [bound.tight.curvature + bound.tight.remainder for bound in found[: config.perturbed_sets]]
        for place, found in enumerate(by_sigma.values())
    ]
    smallest = config.sigmas[0]
    by_trace = line["taylor"][:, 0] / (smallest**2 / (2 * DIM) * line["trace"][: config.perturbed_sets])
    n, dim = (int(number) for number in regression["shape"])
    least = pac_bayes_bound(0.0, 0.0, dim=dim, samples=n, sigma=max_noise(dim, n), delta=config.delta)
    claims = [
        *(
            _BOUND.says(
                f"{words}: share of {config.data_sets} resampled data sets whose gap it covers, at the worst of "
                f"{len(config.sigmas)} sigmas"
            ).at_least(1 - config.delta, covered[name])
            for name, words in (("final", "The theorem's bound"), ("tight", "The line before it"))
        ),
        _OURS.says(
            "It certifies something where samples outnumber weights: its total over the largest loss, at the best sigma"
        ).at_most(1.0, min(float(totals.mean()) for totals in final.values()) / config.max_loss),
        _BOUND.says(
            "Training loss of perturbed weights less that of the trained ones, over the bound's sharpness and "
            "third-derivative terms: largest of all data sets and sigmas"
        ).at_most(1.0, float(np.max(taylor))),
        _OURS.says(
            f"The same at sigma = {smallest:g} over sigma^2/(2 D) times the trace of the Hessian, which the bound's "
            "sharpness term exceeds: an equality for small noise"
        ).near(
            1.0,
            float(by_trace.mean()),
            # the third order vanishes in the mean, the fourth is of order sigma^2; and the scatter of so many draws
            relative=smallest + 4 * float(by_trace.std(ddof=1)) / math.sqrt(len(by_trace)),
        ),
        _OURS.says(
            f"Linear regression of figure 4 ({dim} weights, {n} samples): the complexity term alone over the largest "
            "loss, at the sigma where it is least: the bound is vacuous, before sharpness is reduced and after"
        ).at_least(1.0, least.final.complexity),
        _BOUND.says(
            "There the sharpness term falls on the way from the gradient flow's end to the least norm, and test loss "
            "with it: difference of test losses, by data set"
        ).at_least(0.0, regression["test"][0] - regression["test"][1]),
    ]
    numbers = {
        "third_derivative": float(line["third_derivative"]),
        "sharpness": [float(line["sharpness"].mean()), float(line["sharpness"].std())],
        "largest_loss": config.max_loss,
        "gap": {f"{sigma:g}": float(line["gap"][:, place].mean()) for place, sigma in enumerate(config.sigmas)},
        "bound": {f"{sigma:g}": float(totals.mean()) for sigma, totals in final.items()},
        "bound_tight": {f"{sigma:g}": float(totals.mean()) for sigma, totals in tight.items()},
        "regression_sharpness": regression["sharpness"],
        "regression_test_loss": regression["test"],
    }
    return Outcome(claims, numbers)


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Gaps of all data sets below their bounds, its terms, and the regression's way down."""
    line, regression = results[_SETS], results[_REGRESSION]
    figure, (gaps, terms, way) = panels(1, 3, width=2.7, height=2.5)
    grid = np.geomspace(0.01, max_noise(DIM, config.samples), 60)
    mean = {**line, "sharpness": line["sharpness"].mean(keepdims=True)}
    found = [bounds(config, mean, float(sigma))[0] for sigma in grid]
    for place, sigma in enumerate(config.sigmas):
        gaps.plot(np.full(config.data_sets, sigma), line["gap"][:, place], "_", color=COLOURS[0], alpha=0.3, ms=7)
    gaps.plot([], [], "_", color=COLOURS[0], ms=7, label="data sets")
    gaps.plot(grid, [bound.final.total for bound in found], color=THEORY, label="bound")
    gaps.plot(grid, [bound.tight.total for bound in found], color=THEORY, ls="--", lw=0.9, label="tighter line")
    gaps.axhline(config.max_loss, color=COLOURS[1], ls=":", lw=1, label="largest loss")
    for name, label in (("curvature", "sharpness"), ("remainder", "third derivative"), ("complexity", "complexity")):
        terms.plot(grid, [getattr(bound.final, name) for bound in found], label=label)
    for axis in (gaps, terms):
        axis.set(xscale="log", xlabel="noise $\\sigma$")
    label_panel(gaps, "a", "gap of perturbed weights", ylabel="loss (nats)", legend=True)
    label_panel(terms, "b", "terms of the bound", yscale="log", ylabel="loss (nats)", legend=True)
    for place in range(config.regressions):
        way.plot(regression["sharpness"][:, place], regression["test"][:, place], "-", color=COLOURS[0], lw=0.6)
    way.plot(
        *(regression[name][0] for name in ("sharpness", "test")), "o", color=COLOURS[1], ms=3.5, label="gradient flow"
    )
    way.plot(
        *(regression[name][1] for name in ("sharpness", "test")), "o", color=COLOURS[2], ms=3.5, label="least norm"
    )
    label_panel(way, "c", "regression, ten data sets", xlabel="spherical sharpness", ylabel="test loss", legend=True)
    return {"theorem-c2": figure}


EXPERIMENT = Experiment(
    id="sharp-coverage",
    title="The PAC-Bayes bound on trained models, with measured constants, over resampled data",
    source="sharp thm. C.2",
    scales={"smoke": Config(data_sets=30, perturbed_sets=5, draws=500), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
