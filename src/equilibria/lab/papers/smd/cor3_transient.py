"""smd-transient: time to the new equilibrium after the lr is divided (corollary 3.1, remark 2)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, Array, label_panel, panels
from equilibria.lab.papers.smd.random_walk import next_order, tangent_noise, walk_heavy_ball
from equilibria.theory.rules import SGD
from equilibria.theory.settling import after_lr_drop, minimum_settling_steps, settling_steps, steps_to_tolerance
from equilibria.theory.states import settled
from equilibria.theory.transient import evolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BOUND = Source(
    "smd",
    "Corollary 3.1",
    corrected="the lr in the bound is the new one; with the old one it is k times too small",
    law="settling.minimum_settling_steps",
)
_CLOSED = Source("smd", "Corollary 3.1, remark 2", law="settling.after_lr_drop")
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Config:
    """lr is divided by ``drop``, down to ``lr``, from equilibrium; weight decays of SGD and of SGD with momentum."""

    lr: float = 0.1
    drop: float = 10.0
    momentum: float = 0.9
    weight_decay: float = 5e-4
    weight_decay_momentum: float = 1e-4
    unit_grad_sq: float = 10.0
    dim: int = 200
    replicas: int = 8
    seed: int = 0

    def rule(self, name: str) -> SGD:
        """The optimizer after the drop."""
        if name == "sgd":
            return SGD(self.lr, self.weight_decay)
        equal = name == "sgdm-equal"
        return SGD(self.lr, self.weight_decay if equal else self.weight_decay_momentum, momentum=self.momentum)

    def before(self, name: str) -> SGD:
        """The optimizer before the drop."""
        rule = self.rule(name)
        return SGD(rule.lr * self.drop, rule.weight_decay, momentum=rule.momentum)


_NAMES = {"sgd": "SGD", "sgdm": "SGD with momentum"}
_ALL = (*_NAMES, "sgdm-equal")


def tasks(config: Config) -> dict[str, tuple[str, str]]:
    """The recursion and the random walk of each optimizer; at equal lr * wd only the recursion."""
    pairs = [*(("recursion", name) for name in _ALL), *(("walk", name) for name in _NAMES)]
    return {f"{kind}-{name}": (kind, name) for kind, name in pairs}


def run_task(config: Config, task: tuple[str, str]) -> Arrays:
    """Run a recursion or a walk."""
    kind, name = task
    return _recursion(config, name) if kind == "recursion" else _walk(config, name)


def _recursion(config: Config, name: str) -> Arrays:
    """Evolve the moments from the old equilibrium; number of steps until they stay within 5 % of the new one."""
    rule, start = config.rule(name), settled(config.before(name), unit_grad_sq=config.unit_grad_sq)
    scale = {"unit_grad_sq": config.unit_grad_sq}
    steps = {
        f"steps_{quantity}": np.asarray(
            settling_steps(rule, start, tolerance=_TOLERANCE, quantity=quantity, unit_grad_sq=config.unit_grad_sq)
        )
        for quantity in ("norm", "angle")
    }
    count = round(1.5 * float(steps["steps_angle"]))
    path = evolve(rule, count, start=start, unit_grad_sq=config.unit_grad_sq)
    goal = rule.equilibrium(**scale)
    assert goal.norm is not None
    return {**steps, "norm_ratio": path.norm[:-1] / goal.norm, "angle_ratio": path.angle / goal.angle}


def _walk(config: Config, name: str) -> Arrays:
    """Run the optimizer on the random walk: some steps before the drop to fill the buffer, then after it."""
    rule, before = config.rule(name), config.before(name)
    rng = np.random.default_rng([config.seed, _ALL.index(name)])
    gradient = functools.partial(tangent_noise, rng=rng, unit_grad_sq=config.unit_grad_sq)
    start, goal = (
        before.equilibrium(unit_grad_sq=config.unit_grad_sq),
        rule.equilibrium(unit_grad_sq=config.unit_grad_sq),
    )
    assert start.norm is not None and goal.norm is not None
    w = rng.standard_normal((config.replicas, config.dim))
    w *= start.norm / np.linalg.norm(w, axis=1, keepdims=True)
    run = functools.partial(walk_heavy_ball, weight_decay=rule.weight_decay, momentum=rule.momentum, gradient=gradient)
    w, buffer, _, _ = run(w, np.zeros_like(w), 300, lr=before.lr)
    count = round(1.5 * steps_to_tolerance(rule, config.drop**0.25, tolerance=_TOLERANCE))
    _, _, norms, angles = run(w, buffer, count, lr=rule.lr)
    return {"walk_norm_ratio": np.sqrt(norms) / goal.norm, "walk_angle_ratio": np.sqrt(angles) / goal.angle}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the times to 5 %, the bound, and the walk against the closed form."""
    both = {name: {**results[f"recursion-{name}"], **results[f"walk-{name}"]} for name in _NAMES}
    claims = [claim for name in _NAMES for claim in _judge(config, name, both[name])]
    plain, heavy = (int(results[f"recursion-{name}"]["steps_norm"]) for name in ("sgd", "sgdm-equal"))
    claims.append(
        Source("smd", "remark 2", law="settling.relaxation")
        .says("At equal lr*wd momentum settles faster by 1/(1 - momentum): ratio of the times to 5 % in norm")
        .near(1 / (1 - config.momentum), plain / heavy, relative=next_order(config.rule("sgdm-equal")))
    )
    numbers = {
        name: {key: int(results[f"recursion-{name}"][key]) for key in ("steps_norm", "steps_angle")} for name in _ALL
    }
    return Outcome(claims, {"steps_to_5_per_cent": numbers})


def _judge(config: Config, name: str, path: Arrays) -> list[Claim]:
    rule, label = config.rule(name), _NAMES[name]
    bound = minimum_settling_steps(rule, config.drop)
    law = after_lr_drop(rule, config.drop, steps=np.arange(len(path["walk_norm_ratio"])))
    start = config.drop**0.25
    walk = np.max(np.abs(path["walk_norm_ratio"] / law.norm_ratio - 1))
    return [
        *(
            _CLOSED.says(
                f"{label}: steps until the {quantity} is within 5 % of the new equilibrium, by recursion"
            ).near(
                steps_to_tolerance(rule, start, tolerance=_TOLERANCE, quantity=quantity),
                float(path[f"steps_{quantity}"]),
                relative=next_order(rule) + 1 / bound,  # plus rounding to whole steps
                unit="steps",
            )
            for quantity in ("norm", "angle")
        ),
        _BOUND.says(f"{label}: the corollary's lower bound on these steps").at_least(
            bound, float(path["steps_norm"]), unit="steps", printed=bound / config.drop
        ),
        _BOUND.says(f"{label}: at the bound the norm is still (2 - 1/k)^(1/4) of its target").near(
            (2 - 1 / config.drop) ** 0.25, path["norm_ratio"][bound], relative=0.001
        ),
        _CLOSED.says(f"{label}: the angle falls at once, in the first step, to k^(-1/2) of its new equilibrium").near(
            config.drop**-0.5,
            path["angle_ratio"][0],
            relative=config.before(name).lr * rule.weight_decay,  # first order in the larger lr wd
        ),
        _CLOSED.says(
            f"{label}: the optimizer on the random walk follows the closed form: largest deviation of the norm"
        ).at_most(next_order(rule) / 4 + 4 * _scatter(config, name), walk),
    ]


def _scatter(config: Config, name: str) -> float:
    """Relative standard deviation of the norm on the walk, averaged over replicas; that before the drop is larger."""
    rule = config.before(name)
    a, eps = rule.momentum, rule.lr * rule.weight_decay
    noise = 2 / (config.dim - 1) * (1 + a**2) / (1 - a**2)
    return math.sqrt(noise * eps / (2 * (1 - a)) / config.replicas) / 2


def draw(config: Config, results: TaskResults) -> Figures:
    """Norm above, angle below, each with its difference from the closed form; SGD left, momentum right."""
    figure, axes = panels(4, 2, height=1.8)
    letters = iter("abcd")
    for row, quantity in enumerate(("norm", "angle")):
        for column, name in enumerate(_NAMES):
            panel, below = axes[4 * row + column], axes[4 * row + 2 + column]
            _draw_panel(panel, below, config, name, quantity, results)
            letter = next(letters)
            label_panel(panel, letter, f"{_NAMES[name]}, lr ÷ {config.drop:g}")
            label_panel(below, f"{letter}'", f"{_NAMES[name]}: {quantity} / closed form - 1, %")
    axes[0].legend()
    return {"corollary-3-1": figure}


def _draw_panel(axes: Axes, below: Axes, config: Config, name: str, quantity: str, results: TaskResults) -> None:
    rule = config.rule(name)
    walk, recursion = (
        results[f"walk-{name}"][f"walk_{quantity}_ratio"],
        results[f"recursion-{name}"][f"{quantity}_ratio"],
    )
    window = 25 if quantity == "angle" else 1
    means = np.sqrt(np.convolve(walk**2, np.ones(window) / window, mode="valid"))
    every = slice(None, None, max(1, len(means) // 600))

    def law(times: NDArray[Any]) -> Array:
        return np.asarray(getattr(after_lr_drop(rule, config.drop, steps=times), f"{quantity}_ratio"))

    middles = np.arange(len(means))[every] + (window - 1) / 2
    axes.plot(middles, means[every], color=COLOURS[0], lw=0.8, label="random walk")
    below.plot(middles, 100 * (means[every] / law(middles) - 1), color=COLOURS[0], lw=0.8)
    steps = np.arange(len(recursion))[:: max(1, len(recursion) // 40)]
    axes.plot(steps, recursion[steps], "o", color=COLOURS[1], label="moment recursion")
    below.plot(steps, 100 * (recursion[steps] / law(steps) - 1), "o", color=COLOURS[1])
    times = np.linspace(0, len(recursion), 300)
    axes.plot(times, law(times), color=THEORY, label="closed form")
    below.axhline(0, color=THEORY)
    below.set(xlabel="steps after the drop")
    axes.axhline(1, color=THEORY, lw=0.6, ls=":")
    axes.axvline(minimum_settling_steps(rule, config.drop), color=COLOURS[2], lw=0.9, ls="--", label="corollary 3.1")
    axes.set(xlabel="steps after the drop", ylabel=f"{quantity} / new equilibrium")


EXPERIMENT = Experiment(
    id="smd-transient",
    title="Time to equilibrium after the lr is divided: SGD against momentum",
    source="smd cor. 3.1, remark 2",
    scales={
        "smoke": Config(weight_decay=2e-3, weight_decay_momentum=2e-4, dim=50, replicas=4, drop=4.0),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
