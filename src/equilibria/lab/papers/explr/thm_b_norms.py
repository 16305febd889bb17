"""explr-norms: exact identities of squared norms and steps (theorems B.1 and B.2, corrected)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.theory.norms import DecayFreeNorm, decay_free_norm, norm_residual, window_identity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
_B1 = Source(
    "explr",
    "Theorem B.1",
    corrected="the start term is +momentum^(t+1) (lr_t/lr_{-1}) (R_0 - R_{-1}) in both parts, and part 2 needs R_0",
    law="norms.decay_free_norm",
)
_B2 = Source("explr", "Theorem B.2", law="norms.window_identity")


@dataclass(frozen=True)
class Config:
    """Stochastic descent on Rayleigh quotients of random matrices, which are exactly scale-invariant."""

    dim: int = 20
    steps: int = 400
    long_steps: int = 200_000
    lr: float = 0.1
    weight_decay: float = 0.02
    momentum: float = 0.9
    seed: int = 0


_RUNS = ("varying", "no-decay", "stationary")


def tasks(config: Config) -> dict[str, str]:
    """Varying settings; no weight decay and a buffer that first pulls inward; a long run at constant settings."""
    return {name: name for name in _RUNS}


def run_task(config: Config, name: str) -> Arrays:
    """Squared norms R, squared steps D and the settings of one run; R and D begin with the step before the first."""
    rng = np.random.default_rng([config.seed, _RUNS.index(name)])
    steps = config.long_steps if name == "stationary" else config.steps
    t = np.arange(steps)
    lr, decay, momentum = (np.full(steps, value) for value in (config.lr, config.weight_decay, config.momentum))
    if name == "varying":
        lr = config.lr * (1 + np.cos(np.pi * t / steps)) / 2 + 1e-3
        decay, momentum = config.weight_decay * (1 + np.sin(t / 17)), 0.5 + 0.45 * np.sin(t / 23) ** 2
    if name == "no-decay":
        decay = np.zeros(steps)
    w = rng.standard_normal(config.dim)
    buffer = 2.0 * w + rng.standard_normal(config.dim) if name == "no-decay" else np.zeros(config.dim)
    return {**_descend(w, buffer, lr, decay, momentum, rng), "lr": lr, "weight_decay": decay, "momentum": momentum}


def _descend(w: Array, buffer: Array, lr: Array, decay: Array, momentum: Array, rng: np.random.Generator) -> Arrays:
    """Torch's SGD on L(w) = w'Aw/(2 w'w), a new random symmetric A at every step."""
    before = w + lr[0] * buffer
    norms, moved = [float(before @ before), float(w @ w)], [float((w - before) @ (w - before))]
    for eta, wd, g in zip(lr, decay, momentum, strict=True):
        product = _random_symmetric_product(w, rng)
        size = float(w @ w)
        gradient = (product - (w @ product) / size * w) / size
        gradient -= (w @ gradient) / size * w  # a second time, to rounding: the identity is about exact tangents
        buffer = g * buffer + gradient + wd * w
        step = eta * buffer
        w = w - step
        norms.append(float(w @ w))
        moved.append(float(step @ step))
    return {"norm_sq": np.array(norms), "step_sq": np.array(moved)}


def _random_symmetric_product(w: Array, rng: np.random.Generator) -> Array:
    """A w for a random symmetric matrix of rank two, diag(1...2) added: noise with a restoring mean."""
    u, v = rng.standard_normal((2, len(w)))
    return np.asarray(np.linspace(1, 2, len(w)) * w + (u * (v @ w) + v * (u @ w)))


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the identities to rounding, and report the printed ones."""
    varying, free, long = (results[name] for name in _RUNS)
    residual = norm_residual(
        varying["norm_sq"][1:],
        varying["step_sq"][1:],
        lr=varying["lr"],
        weight_decay=varying["weight_decay"],
        momentum=varying["momentum"],
    )
    terms = varying["norm_sq"][2:-1] / varying["lr"][1:]  # each side is a sum of terms of this size
    exact, printed = _decay_free(config, free)
    norms = free["norm_sq"][1:]
    increase = np.diff(norms)
    window = window_identity(
        long["norm_sq"], long["step_sq"], lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum
    )
    early = window_identity(
        long["norm_sq"][:61],
        long["step_sq"][:60],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
    )
    expected = np.sqrt(2 * config.lr * config.weight_decay / (1 + config.momentum))
    slack = 1e-12 * norms[:-1]
    claims = [
        Source("explr", "Appendix A.2, eq. (11)", law="norms.norm_residual")
        .says("The norm identity with lr, weight decay and momentum that vary: largest residual over its terms")
        .to_rounding(np.max(np.abs(residual) / terms), operations=20 * config.dim),
        _B1.says(
            f"Without weight decay the norm is a sum over the squared steps: ||w||^2 after {config.steps} steps"
        ).near(norms[-1], exact.norm_sq[-1], relative=1e-15 * config.steps * config.dim, printed=printed),
        _B1.says("The norm never grows by less than the start term allows: steps that violate it").at_most(
            0,
            int(np.sum(increase < exact.least_increase - slack)),
            unit="steps",
            printed=int(np.sum(increase < -exact.least_increase - slack)),
        ),
        _B2.says(
            "Mean squared step of a window from the norms and the window's ends, far from stationarity: relative error"
        ).to_rounding(abs(float(early.implied_step_sq / early.step_sq) - 1), operations=100 * config.dim),
        _B2.says("Long run: root of mean squared step over mean squared norm").near(
            expected, float(np.sqrt(window.step_sq / window.norm_sq)), relative=_end_terms(config, long)
        ),
    ]
    naive = float(early.stationary_step_sq / early.step_sq)
    return Outcome(claims, {"early_window_naive_over_measured": naive, "relative_step": expected})


def _end_terms(config: Config, long: Arrays) -> float:
    """Bound on the relative contribution of the ends of the window: their largest size over the sum."""
    largest, steps = float(long["norm_sq"].max()), len(long["step_sq"])
    return 2 * largest / (2 * config.lr * config.weight_decay * float(long["norm_sq"].mean()) * steps)


def _decay_free(config: Config, free: Arrays) -> tuple[DecayFreeNorm, float]:
    """The norms by the corrected theorem, and the last one by the printed theorem."""
    start, earlier = float(free["norm_sq"][1]), float(free["norm_sq"][1] - free["norm_sq"][0])
    steps, g = free["step_sq"], config.momentum
    exact = decay_free_norm(
        start,
        steps[1:],
        lr=config.lr,
        momentum=g,
        earlier_increase=earlier,
        earlier_step_sq=float(steps[0]),
        earlier_lr=config.lr,
    )
    last = len(steps) - 2
    weights = (1 - g ** (last - np.arange(last + 1) + 1)) / (1 - g)
    printed = np.sum(weights * (steps[1:] + g * steps[:-1])) - g * (1 - g ** (last + 1)) / (1 - g) * earlier
    return exact, float(printed)


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the norm without weight decay, its increase with both bounds, and the window identity."""
    figure, (growth, bounds, windows) = panels(1, 3, width=2.7)
    free = results["no-decay"]
    exact, _ = _decay_free(config, free)
    steps = np.arange(len(free["norm_sq"]) - 1)
    growth.plot(steps, free["norm_sq"][1:], lw=2.5, alpha=0.5, label="measured")
    growth.plot(steps, exact.norm_sq, color=THEORY, lw=0.9, label="Theorem B.1, corrected")
    label_panel(growth, "a", "no weight decay", xlabel="step", ylabel="$||w||^2$", legend=True)
    first = slice(0, 60)
    bounds.plot(np.diff(free["norm_sq"][1:])[first], label="measured")
    bounds.plot(exact.least_increase[first], color=THEORY, label="lower bound, corrected")
    bounds.plot(-exact.least_increase[first], color=COLOURS[1], ls="--", label="as printed")
    bounds.set(xlabel="step", ylabel="increase of $||w||^2$")
    label_panel(bounds, "b", "a buffer that pulls inward at first", legend=True)
    _draw_windows(windows, config, results["stationary"])
    return {"theorems-b1-b2": figure}


def _draw_windows(axes: Axes, config: Config, long: Arrays) -> None:
    settings = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    ends = np.unique(np.geomspace(8, len(long["step_sq"]), 60).astype(int))
    windows = [window_identity(long["norm_sq"][: end + 1], long["step_sq"][:end], **settings) for end in ends]
    axes.plot(ends, [np.sqrt(w.step_sq / w.norm_sq) for w in windows], "o", label="measured")
    axes.plot(
        ends, [np.sqrt(w.implied_step_sq / w.norm_sq) for w in windows], color=THEORY, label="exact, with its ends"
    )
    axes.plot(
        ends, [np.sqrt(w.stationary_step_sq / w.norm_sq) for w in windows], color=COLOURS[1], ls="--", label="B.2"
    )
    axes.set(xscale="log", xlabel="steps in the window", ylabel="relative step $\\sqrt{D/R}$")
    label_panel(axes, "c", "Theorem B.2 and its finite form", legend=True)


EXPERIMENT = Experiment(
    id="explr-norms",
    title="Squared norms and steps of a scale-invariant weight: the identities, corrected",
    source="explr thm. B.1, B.2",
    scales={"smoke": Config(steps=200, long_steps=10_000), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
