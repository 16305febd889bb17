"""nrq-initialization: lr and weight decay compensate for the scale of the first weights (figure 2 i-l, corollary 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import panels
from equilibria.lab.papers.nrq import rayleigh
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_curve import exact_risk_curve
from equilibria.theory.rayleigh_risk import equilibrium_risk_bounds

_EXACT = Source("nrq", "corollary 3, fig. 2 (i)-(k)", law="rayleigh.NoisyRayleigh")
_ANGLE = Source("nrq", "fig. 2 (k), eq. (14)", law="rayleigh.angular_update")
_CURVE = Source("nrq", "fig. 2 (j)", law="rayleigh_curve.exact_risk_curve")
_LIMIT = Source("nrq", "fig. 2 (i)-(l), section 3.2", law="rayleigh_risk.stationary_risk")
_TRAJECTORY = 5000  # steps over which trajectories are compared number by number
_OPERATIONS = 20  # roundings of one coordinate in one step


@dataclass(frozen=True)
class Config:
    """First weights of standard deviation 1 and k; lr and weight decay kept, or times k^2 and 1/k^2."""

    dim: int = 10
    gap: float = 1.0
    noise: float = 1.0
    lr: float = 0.1
    weight_decay: float = 0.01
    k: float = 10.0
    scales: tuple[float, ...] = (2.0, 10.0, 0.37)
    steps: int = 10_000
    trials: int = 500
    every: int = 10
    seed: int = 0

    def model(self) -> NoisyRayleigh:
        """The model at the configured lr and weight decay."""
        return NoisyRayleigh.two_level(self.gap, self.dim, noise=self.noise, lr=self.lr, weight_decay=self.weight_decay)


def tasks(config: Config) -> dict[str, tuple[str, Any]]:
    """The three lines of the figure, and trajectories at each scale."""
    lines: dict[str, tuple[str, Any]] = {name: ("line", name) for name in ("small", "adjusted", "large")}
    return lines | {f"scale-{k:g}": ("trajectory", k) for k in config.scales}


def run_task(config: Config, task: tuple[str, Any]) -> Arrays:
    """Simulate a line of the figure, or compare trajectories at one scale."""
    kind, setting = task
    return _line(config, setting) if kind == "line" else _trajectory(config, setting)


def _line(config: Config, name: str) -> Arrays:
    model, k = config.model(), 1.0 if name == "small" else config.k
    used = model.rescaled(k) if name == "adjusted" else model
    norm_sq = config.dim * k**2  # the mean for standard deviation k
    run = rayleigh.simulate(
        used,
        k * rayleigh.starts(model, config.trials, norm_sq=config.dim, seed=config.seed),
        steps=config.steps,
        every=config.every,
        seed=config.seed,
    )
    late = rayleigh.window(run, config.steps * 3 // 4)
    return {
        **rayleigh.averages(run, model),
        **rayleigh.predicted(exact_risk_curve(used, config.steps, norm_sq=norm_sq), model, config.every),
        "late_risk": late["risk"],
        "late_angle": late["angle"],
    }


def _trajectory(config: Config, k: float) -> Arrays:
    """Largest distance of X^(k)/k from X over all trials and records, relative to the norm of X."""
    model, count = config.model(), min(config.trials, 100)
    begin = rayleigh.starts(model, count, norm_sq=config.dim, seed=config.seed)
    options = {"steps": min(config.steps, _TRAJECTORY), "every": config.every, "record": ["weights", "norm"]}
    here = rayleigh.simulate(model, begin, seed=config.seed, **options)
    there = rayleigh.simulate(model.rescaled(k), k * begin, seed=config.seed, **options)
    distance = np.linalg.norm(there["weights"] / k - here["weights"], axis=2) / here["norm"]
    return {"difference": distance.max()}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge that adjusted runs are identical to rounding, and others slower at first and equal in the end."""
    differences = {k: float(results[f"scale-{k:g}"]["difference"]) for k in config.scales}
    rate = equilibrium_risk_bounds(config.model(), xi=0.5).slowest
    claims = [
        *(
            _EXACT.says(
                f"X times {k:g}, lr times {k**2:g}, weight decay / {k**2:g}: the same trajectory, bit for bit "
                "(a power of two rounds nothing)"
            ).at_most(0.0, difference)
            if np.log2(k) % 1 == 0
            else _EXACT.says(
                f"X times {k:g}, lr times k^2, weight decay / k^2: the same trajectory; largest relative distance"
            ).to_rounding(
                difference,
                operations=_OPERATIONS / rate,  # the descent forgets roundings at this rate
            )
            for k, difference in differences.items()
        ),
        _EXACT.says(
            "Averaged over the trials, the risks of (lr, wd, 1) and (k^2 lr, wd/k^2, k) coincide: largest difference"
        ).to_rounding(
            float(np.max(np.abs(results["small"]["risk"] - results["adjusted"]["risk"]))),
            operations=_OPERATIONS / rate,
        ),
        *_judge_large(config, results),
    ]
    shown = [step for step in (1000, 3000) if step < config.steps]
    table = {
        name: {str(step): float(results[name]["risk"][step // config.every]) for step in shown}
        for name in ("small", "adjusted", "large")
    }
    return Outcome(
        claims, {"trajectory_difference": {f"{k:g}": gap for k, gap in differences.items()}, "risk_at": table}
    )


def _judge_large(config: Config, results: TaskResults) -> list[Claim]:
    """Judge first weights k times larger with nothing adjusted."""
    model, small, large = config.model(), results["small"], results["large"]
    slope_sq = model.gap**2 * (config.dim - 1) / (config.dim * (config.dim + 2))  # E f(1-f) of a random direction
    first = model.lr * np.sqrt(model.unit_grad_sq + slope_sq) / (config.dim * config.k**2)
    # chi-square with p - 1 degrees of freedom; half its relative scatter is that of the root
    scatter = rayleigh.ERRORS * np.sqrt(2 / (config.dim - 1) / config.trials) / 2
    half_way = int(np.argmax(small["theory_risk"] < 0.45))
    return [
        _ANGLE.says("Larger weights alone: angular update of the first step, smaller by k^2").near(
            first, large["angle"][0], relative=float(scatter), unit="rad"
        ),
        _CURVE.says(
            f"Larger weights alone: slower at first; risk at step {small['step'][half_way]}, where the other's is 0.45"
        ).at_least(
            0.45,
            large["risk"][half_way],
            interval=rayleigh.interval([large["risk"][half_way], large["risk_error"][half_way]]),
        ),
        rayleigh.judge_curve("Larger weights alone", _CURVE, large, model=model),
        *(
            rayleigh.judge_limit(
                f"{label}: limiting risk, the same for all three", _LIMIT, line["late_risk"], model=model
            )
            for line, label in ((small, "Standard deviation 1"), (large, "Standard deviation k, nothing adjusted"))
        ),
        _ANGLE.says("Larger weights alone: the angular update reaches the same equilibrium").near(
            model.angular_update,
            large["late_angle"][0],
            relative=0.01,
            unit="rad",
            interval=rayleigh.interval(large["late_angle"]),
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the third row of figure 2; the adjusted line covers the first, as in the paper."""
    figure, axes = panels(1, 4, width=2.5, height=2.4)
    lr, decay, k = config.lr, config.weight_decay, config.k
    lines = {
        f"(lr, wd, initial std) = ({lr:g}, {decay:g}, 1)": results["small"],
        f"({lr:g}, {decay:g}, {k:g})": results["large"],
        f"({lr * k**2:g}, {decay / k**2:g}, {k:g})": results["adjusted"],
    }
    rayleigh.draw_panels(figure, axes, lines, letters="ijkl", log_time=True)
    return {"figure-2-i-l": figure}


EXPERIMENT = Experiment(
    id="nrq-initialization",
    title="The scale of the initial weights is undone by lr times k², weight decay / k²",
    source="nrq fig. 2 i-l, cor. 3",
    scales={"smoke": Config(weight_decay=0.04, steps=2500, trials=300), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
