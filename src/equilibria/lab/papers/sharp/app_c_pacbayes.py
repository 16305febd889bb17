"""sharp-pacbayes: the terms of the PAC-Bayes bound, and the effect of a fixed final BatchNorm (appendices C and R)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source, identity
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.theory.generalization import (
    final_bn_minimum,
    final_bn_scale,
    label_smoothing,
    max_noise,
    pac_bayes_bound,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BOUND = Source(
    "sharp",
    "Theorem C.2",
    corrected="the line before the last has + 1 where + 1/sqrt(n) is meant; with + 1 the last inequality fails",
    law="generalization.pac_bayes_bound",
)
_FINAL_BN = Source("sharp", "Appendix R.2, eqs. (52)-(53)", law="generalization.final_bn_minimum")
_PAPERS_SCALE = 0.3 * math.log(91)  # Appendix P: the final BatchNorm of every network of the paper


@dataclass(frozen=True)
class Config:
    """The worked example of the bound, random draws of its arguments, and minimisations over free logits."""

    dim: int = 100
    samples: int = 50_000
    sigma: float = 0.35
    sharpness: float = 10.0
    third_derivative: float = 5.0
    delta: float = 0.05
    draws: int = 20_000
    cases: tuple[tuple[int, float], ...] = (
        (2, 0.3),
        (2, 1.5),
        (3, 0.1),
        (3, 2.0),
        (5, 1.0),
        (5, 5.0),
        (10, 0.5),
        (10, _PAPERS_SCALE),
    )
    seed: int = 0


def tasks(config: Config) -> dict[str, tuple[int, float] | None]:
    """The random draws, and one minimisation per number of classes and scale."""
    return {"bound": None, **{_key(case): case for case in config.cases}}


def _key(case: tuple[int, float]) -> str:
    return f"logits-{case[0]}-{case[1]:.4f}"


def run_task(config: Config, case: tuple[int, float] | None) -> Arrays:
    """Evaluate the bound at random arguments, or minimise."""
    return _draw_bounds(config) if case is None else _minimise(config, *case)


def _draw_bounds(config: Config) -> Arrays:
    rng = np.random.default_rng(config.seed)
    tails, totals = np.empty(config.draws), np.empty(config.draws)
    for index in range(config.draws):
        dim, samples = int(10 ** rng.uniform(0, 8)), int(10 ** rng.uniform(1, 8))
        sigma = max_noise(dim, samples) * 10 ** rng.uniform(-3, 0)
        bound = pac_bayes_bound(
            10 ** rng.uniform(-3, 3),
            10 ** rng.uniform(-3, 3),
            dim=dim,
            samples=samples,
            sigma=sigma,
            delta=10 ** rng.uniform(-6, -0.01),
        )
        tails[index] = bound.tight.complexity / bound.final.complexity
        totals[index] = bound.tight.total / bound.final.total
    return {"tails": tails, "totals": totals}


def _minimise(config: Config, classes: int, scale: float) -> Arrays:
    """The least cross entropy over free outputs of a batch with two samples of each class, normalised by columns."""
    from scipy.optimize import minimize

    labels = np.repeat(np.arange(classes), 2)
    rng = np.random.default_rng([config.seed, classes, round(1e4 * scale)])

    def loss_and_gradient(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        raw = flat.reshape(len(labels), classes)
        centred = raw - raw.mean(0)
        spread = np.sqrt((centred**2).mean(0))
        unit = centred / spread
        probability = _softmax(scale * unit)
        loss = -np.log(probability[np.arange(len(labels)), labels]).mean()
        pull = scale * (probability - np.eye(classes)[labels]) / len(labels)
        back = (pull - pull.mean(0) - unit * (pull * unit).mean(0)) / spread
        return float(loss), back.ravel()

    starts = [rng.standard_normal(len(labels) * classes) for _ in range(3)]
    options: Any = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 5000, "maxfun": 20_000}
    best: Any = min(
        (minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=options) for start in starts),
        key=lambda solution: solution.fun,
    )
    raw = best.x.reshape(len(labels), classes)
    centred = raw - raw.mean(0)
    probability = _softmax(scale * centred / np.sqrt((centred**2).mean(0)))
    right = probability[np.arange(len(labels)), labels]
    return {"loss": np.asarray(best.fun), "wrong": np.asarray(1 - right.mean())}


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    grown = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(grown / grown.sum(1, keepdims=True))


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the inequalities of the bound, and compare the minima with their closed form."""
    example = _example(config)
    with_one = example.tight.total - config.samples**-0.5 + 1
    laws = [final_bn_minimum(scale, classes) for classes, scale in config.cases]
    losses = np.array([float(results[_key(case)]["loss"]) for case in config.cases])
    off = np.abs(losses / np.array([float(law.loss) for law in laws]) - 1)
    smoothing = [float(label_smoothing(scale, classes)) for classes, scale in config.cases]
    wrong = [float(results[_key(case)]["wrong"]) for case in config.cases]
    smooth = [eps * (case[0] - 1) / case[0] for eps, case in zip(smoothing, config.cases, strict=True)]
    differ = max(abs(a / b - 1) for a, b in zip(wrong, smooth, strict=True))
    claims = [
        _BOUND.says(
            "The theorem's last line is above the one before: largest ratio of the two over random arguments"
        ).at_most(1.0, results["bound"]["totals"].max(), printed=with_one / example.final.total),
        _BOUND.says(
            "The same for the complexity terms alone, so that the constants of the last line have room"
        ).at_most(1.0, results["bound"]["tails"].max()),
        _FINAL_BN.says(
            "With a final BatchNorm of fixed scale the least loss over free logits has the closed form: relative error"
        ).at_most(
            1e-7,  # the minimiser stops at relative changes of 1e-16 of the loss, its square root in the logits
            off.max(),
        ),
        Source("sharp", "Appendix R.2", law="generalization.label_smoothing")
        .says("There the wrong classes have the probability that label smoothing epsilon targets: relative error")
        .at_most(
            1e-5,  # first order in the logits, which are good to the root of the loss's accuracy
            differ,
        ),
        identity(
            Source("sharp", "Appendix R.2", law="generalization.final_bn_scale")
            .says("The paper's scale 0.3 ln 91 is label smoothing 0.1 on 10 classes")
            .near(_PAPERS_SCALE, float(final_bn_scale(0.1, 10)), relative=1e-14)
        ),
        identity(
            _FINAL_BN.says("Its least training loss is ln(100/91): relative error").to_rounding(
                abs(float(final_bn_minimum(_PAPERS_SCALE, 10).loss) / math.log(100 / 91) - 1), operations=100
            )
        ),
    ]
    numbers = {
        "example_final": example.final.total,
        "example_tight": example.tight.total,
        "example_tight_as_printed": with_one,
        "cases": config.cases,
        "least_loss": losses,
    }
    return Outcome(claims, numbers)


def _example(config: Config, sigma: float | None = None) -> Any:
    return pac_bayes_bound(
        config.sharpness,
        config.third_derivative,
        dim=config.dim,
        samples=config.samples,
        sigma=config.sigma if sigma is None else sigma,
        delta=config.delta,
    )


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the terms of the bound over the noise, and the final BatchNorm's loss and label smoothing over its scale."""
    figure, (terms, loss, smoothing) = panels(1, 3, width=2.7)
    _draw_terms(terms, config)
    scales = np.linspace(0.05, 5, 200)
    for classes, colour in zip((2, 3, 5, 10, 100), COLOURS, strict=False):
        loss.plot(scales, final_bn_minimum(scales, classes).loss, color=colour, label=f"C = {classes}")
        here = [(case[1], float(results[_key(case)]["loss"])) for case in config.cases if case[0] == classes]
        if here:
            loss.plot(*zip(*here, strict=True), "o", color=colour)
        smoothing.plot(scales, label_smoothing(scales, classes), color=colour)
    loss.set(yscale="log", xlabel="scale $\\gamma$", ylabel="least cross entropy (nats)", ylim=(1e-6, None))
    loss.legend()
    label_panel(loss, "b", "final BatchNorm (dots: minimised)")
    smoothing.plot([_PAPERS_SCALE], [0.1], "*", color=THEORY, markersize=8, label="$\\gamma = 0.3 \\ln 91$, C = 10")
    smoothing.set(yscale="log", xlabel="scale $\\gamma$", ylabel="label smoothing $\\epsilon$", ylim=(1e-6, 1))
    label_panel(smoothing, "c", "the same as label smoothing", legend=True)
    return {"appendix-c-r": figure}


def _draw_terms(axes: Axes, config: Config) -> None:
    sigmas = np.geomspace(0.005, max_noise(config.dim, config.samples), 100)
    bounds = [_example(config, float(sigma)) for sigma in sigmas]
    for name, label in (("curvature", "sharpness"), ("remainder", "third derivative"), ("complexity", "complexity")):
        axes.plot(sigmas, [getattr(bound.final, name) for bound in bounds], label=label)
    axes.plot(sigmas, [bound.final.total for bound in bounds], color=THEORY, label="bound")
    axes.plot(sigmas, [bound.tight.total for bound in bounds], color=THEORY, ls="--", lw=0.9, label="tighter line")
    axes.set(xscale="log", yscale="log", xlabel="noise $\\sigma$", ylabel="generalisation gap", ylim=(1e-4, None))
    axes.legend()
    label_panel(axes, "a", f"the bound, D = {config.dim}, n = {config.samples:,}")


EXPERIMENT = Experiment(
    id="sharp-pacbayes",
    title="The PAC-Bayes bound term by term; a fixed final BatchNorm is label smoothing",
    source="sharp app. C, R",
    scales={"smoke": Config(draws=300, cases=((2, 0.3), (5, 1.0))), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
