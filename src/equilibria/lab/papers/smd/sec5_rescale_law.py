"""smd-rescale-law: which optimizer state to rescale with the weights when the lr is divided (section 5.2)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.lab import problems
from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, rms
from equilibria.lab.papers.smd.random_walk import tangent_noise, turned
from equilibria.lab.problems import RandomWalk, Simulation
from equilibria.theory.rules import SGD, AdamW
from equilibria.theory.states import State, rescale_factors, settled
from equilibria.theory.transient import evolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RULE = Source(
    "smd",
    "section 5.2",
    corrected="the momentum buffer is rescaled too, by the inverse factor; the paper rescales the weights alone",
    law="states.rescale_factors",
)
_ADAM = Source("", "beyond smd section 5.2", law="states.rescale_factors")
_CHOICES = {
    "nothing": "no rescale",
    "weights": "weights only (the paper)",
    "wrong-way": "buffer with the weights",
    "zero": "buffer emptied",
    "whole": "buffer inversely",
    "split": "buffer, radial part apart",
}
_ADAM_CHOICES = {"nothing": "no rescale", "weights": "weights only", "all": "weights and both moments"}
_RECORDED = 500
_WALKED = 60
_BEFORE = 300  # steps of the walk before the drop, after which the empty start of the buffer has no effect


@dataclass(frozen=True)
class Config:
    """SGD with momentum by its moments and on the random walk, AdamW by torch.optim on it; lr divided by each drop."""

    lr: float = 0.1
    weight_decay: float = 5e-4
    momentum: float = 0.9
    drops: tuple[float, ...] = (2.0, 10.0, 100.0, 0.1)
    adam_lr: float = 1e-2
    adam_weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_drop: float = 10.0
    adam_steps_before: int = 4000
    dim: int = 1000
    replicas: int = 16
    walks: int = 200
    seed: int = 0


def tasks(config: Config) -> dict[str, tuple[str, Any]]:
    """A task per drop, one for all choices on the random walk, and one per choice for AdamW."""
    moments: dict[str, tuple[str, Any]] = {f"sgdm-{drop:g}": ("sgdm", drop) for drop in config.drops}
    moments["walk"] = ("walk", 10.0)
    return moments | {f"adamw-{choice}": ("adamw", choice) for choice in _ADAM_CHOICES}


def run_task(config: Config, task: tuple[str, Any]) -> Arrays:
    """Run one drop by its moments, all choices on the walk, or one choice of AdamW."""
    kind, what = task
    if kind == "adamw":
        return _adamw(config, what)
    return _moments(config, what) if kind == "sgdm" else _walk(config, what)


def _moments(config: Config, drop: float) -> Arrays:
    """Angle over its new equilibrium after the drop, for every choice."""
    old = SGD(config.lr, config.weight_decay, momentum=config.momentum)
    new = dataclasses.replace(old, lr=old.lr / drop)
    goal = new.equilibrium().angle
    eps = new.lr * new.weight_decay
    slow = round(8 * (1 - config.momentum) / (4 * eps))
    ratios: dict[str, Any] = {}
    for choice in _CHOICES:
        steps = slow if choice == "nothing" else 2000
        path = evolve(new, steps, start=_after(settled(old), choice, rescale_factors(old, new).weight))
        ratio = path.angle / goal
        outside = np.flatnonzero(np.abs(ratio - 1) > 0.01)
        ratios[choice] = ratio[:_RECORDED]
        ratios[f"{choice}_worst"] = np.asarray(np.max(np.abs(ratio - 1)))
        ratios[f"{choice}_settled"] = np.asarray(outside[-1] + 1 if len(outside) else 0)
    return ratios


def _after(state: State, choice: str, r: float) -> State:
    """The moments of weight and buffer right after the change."""
    p, q, b = state.norm_sq, state.radial, state.buffer_sq
    if choice == "nothing":
        return state
    if choice == "split":
        along = q**2 / p  # the squared radial part of the buffer
        return dataclasses.replace(
            state, norm_sq=p * r**2, radial=q * r**2, buffer_sq=(b - along) / r**2 + along * r**2
        )
    s = {"weights": 1.0, "wrong-way": r, "zero": 0.0, "whole": 1 / r}[choice]
    return dataclasses.replace(state, norm_sq=p * r**2, radial=q * r * s, buffer_sq=b * s**2)


def _walk(config: Config, drop: float) -> Arrays:
    """Run the optimizer on the random walk: rms angle over its new equilibrium, for every choice, with equal noise.

    The norm at the drop is not exactly that of equilibrium, so angles are relative to those just before the drop.
    """
    old = SGD(config.lr, config.weight_decay, momentum=config.momentum)
    new = dataclasses.replace(old, lr=old.lr / drop)
    norm = old.equilibrium(unit_grad_sq=1.0).norm
    assert norm is not None
    problem = RandomWalk(config.dim, unit_grad_sq=1.0)
    start = problem.start(config.walks, norm_sq=float(norm) ** 2, seed=config.seed)
    before = Simulation(problem, start, rule=old, steps=_BEFORE, record=["angle"], seed=config.seed).run()
    usual = np.sqrt(np.mean(before["angle"][-_BEFORE // 2 :] ** 2)) / old.equilibrium().angle
    after = Simulation(problem, start, rule=new, steps=_BEFORE + _WALKED, record=["angle"], seed=config.seed)
    angles = {}
    for choice in _CHOICES:
        run = after.run(state=_rescaled(before.state, choice, rescale_factors(old, new).weight))
        angles[choice] = np.sqrt(np.mean(run["angle"] ** 2, axis=1)) / usual / new.equilibrium().angle
    return angles


def _rescaled(state: problems.SimulationState, choice: str, r: float) -> problems.SimulationState:
    """Weights and buffers right after the change."""
    w, v = state.weights, state.buffers
    if choice == "nothing":
        return state
    if choice == "split":
        along = np.einsum("ti,ti->t", v, w)[:, None] / np.einsum("ti,ti->t", w, w)[:, None] * w
        return dataclasses.replace(state, weights=w * r, buffers=(v - along) / r + along * r)
    s = {"weights": 1.0, "wrong-way": r, "zero": 0.0, "whole": 1 / r}[choice]
    return dataclasses.replace(state, weights=w * r, buffers=v * s)


def _adamw(config: Config, choice: str) -> Arrays:
    """Run torch.optim.AdamW on the random walk in float64, long before the drop and some steps after it."""
    import torch

    torch.set_num_threads(1)
    old = AdamW(config.adam_lr, config.adam_weight_decay, betas=config.adam_betas)
    new = dataclasses.replace(old, lr=old.lr / config.adam_drop)
    start = old.equilibrium(dim=config.dim).norm
    assert start is not None
    rng = np.random.default_rng(config.seed)  # every choice sees the same noise
    direction = rng.standard_normal((config.replicas, config.dim))
    w = torch.from_numpy(direction * start / np.linalg.norm(direction, axis=1, keepdims=True)).requires_grad_()
    optimizer = torch.optim.AdamW(
        [w], lr=old.lr, betas=old.betas, weight_decay=old.weight_decay, eps=1e-30, foreach=False
    )
    angles = np.empty(_RECORDED)
    for step in range(config.adam_steps_before + _RECORDED):
        if step == config.adam_steps_before:
            factors = rescale_factors(old, new)
            _rescale_adam(w, optimizer, choice, factors)
            optimizer.param_groups[0]["lr"] = new.lr
        before = w.detach().numpy().copy()
        w.grad = torch.from_numpy(tangent_noise(before, rng, unit_grad_sq=1.0))
        optimizer.step()
        if step >= config.adam_steps_before:
            angles[step - config.adam_steps_before] = np.sqrt(np.mean(turned(before, w.detach().numpy()) ** 2))
    return {"ratio": angles / new.equilibrium(dim=config.dim).angle}


def _rescale_adam(w: Any, optimizer: Any, choice: str, factors: Any) -> None:
    if choice == "nothing":
        return
    w.data.mul_(factors.weight)
    if choice == "all":
        optimizer.state[w]["exp_avg"].mul_(factors.first_moment)
        optimizer.state[w]["exp_avg_sq"].mul_(factors.second_moment)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the transients of all choices."""
    table = {
        choice: {f"{drop:g}": float(results[f"sgdm-{drop:g}"][f"{choice}_worst"]) for drop in config.drops}
        for choice in _CHOICES
    }
    ten = results["sgdm-10"]
    a, eps = config.momentum, config.lr * config.weight_decay
    adam = {choice: results[f"adamw-{choice}"]["ratio"] for choice in _ADAM_CHOICES}
    noise = 4 / np.sqrt(config.replicas * 2 * config.dim)  # four standard errors of one step's rms angle
    claims = [
        *_judge_walk(config, results["walk"]),
        _RULE.says(
            "Momentum, weights and buffer (inversely): largest deviation of the angle over all drops, by its moments"
        ).at_most(
            100 * eps,  # the radial part of the buffer, of order lr*wd and larger by the drop, goes the other way
            max(table["whole"].values()),
        ),
        _RULE.says(
            "Momentum, the same with the radial part apart, by its moments: new equilibrium at once, largest deviation"
        ).to_rounding(
            max(table["split"].values()),
            operations=2000,  # a step's rounding errors decay more slowly than this recursion is long
        ),
        _RULE.says("Momentum, lr / 10, nothing rescaled: steps until the angle is within 1 %, by its moments").near(
            (1 - a) / (4 * eps / 10) * np.log(9 / (0.99**-2 - 1)),
            float(ten["nothing_settled"]),
            relative=0.01,
            unit="steps",
        ),
        _ADAM.says("AdamW (torch.optim), lr / 10, nothing rescaled: angle over new equilibrium, first 100 steps").near(
            config.adam_drop**-0.5, rms(adam["nothing"][:100]), relative=0.03
        ),
        _ADAM.says(
            "AdamW, weights only: the second moment is too small by k for long, and the angle overshoots: at step 20"
        ).near(
            _overshoot(config, 20),
            adam["weights"][19],
            relative=0.03 + noise,  # the mean field leaves out a few per cent of Adam's norm
        ),
        _ADAM.says("AdamW, weights and both moments: angle over new equilibrium, first 100 steps").near(
            1.0, rms(adam["all"][:100]), absolute=0.02 + noise
        ),
    ]
    ratio_at_step = {
        choice: {str(step): float(ratio[step - 1]) for step in (1, 5, 20, 100, 500)} for choice, ratio in adam.items()
    }
    return Outcome(claims, {"largest_deviation_of_the_angle": table, "adamw_angle_ratio_at_step": ratio_at_step})


def _judge_walk(config: Config, walk: Arrays) -> list[Claim]:
    """Judge the first step after the drop on the random walk: a share a^2 of its square is the buffer, the rest new."""
    a, k = config.momentum, 10.0
    scaled = {"weights": 1.0, "wrong-way": k**-0.25, "zero": 0.0, "whole": k**0.25, "split": k**0.25}
    first = {choice: math.sqrt(a**2 * s**2 * k**-0.5 + 1 - a**2) for choice, s in scaled.items()}
    return [
        (_RULE if choice != "zero" else Source("", "beyond smd section 5.2", law="states.rescale_factors"))
        .says(
            f"Momentum on a random walk, lr / {k:g}, {_CHOICES[choice]}: angle of the first step over new equilibrium"
        )
        .near(expected, float(walk[choice][0]), relative=_walk_room(config))
        for choice, expected in {"nothing": k**-0.5, **first}.items()
    ]


def _walk_room(config: Config) -> float:
    """Four standard errors of one step's rms angle and of the steps before it, and lr wd over 1 - momentum."""
    a, eps = config.momentum, config.lr * config.weight_decay
    entries = config.walks * (config.dim - 1)
    earlier = _BEFORE // 2 * (1 - a**2) / (1 + a**2)  # of that many the angles are independent
    return 4 * math.sqrt((1 + 1 / earlier) / (2 * entries)) + eps / (1 - a)


def _overshoot(config: Config, step: int) -> float:
    """Angle over new equilibrium by the mean field of AdamW, weights rescaled and moments left."""
    old = AdamW(config.adam_lr, config.adam_weight_decay, betas=config.adam_betas)
    new = dataclasses.replace(old, lr=old.lr / config.adam_drop)
    start = _after(settled(old, dim=config.dim), "weights", rescale_factors(old, new).weight)
    path = evolve(new, step, start=start, dim=config.dim)
    return float(path.angle[-1] / new.equilibrium(dim=config.dim).angle)


def draw(config: Config, results: TaskResults) -> Figures:
    """Angle over new equilibrium after lr / 10: momentum on the walk and by its moments, AdamW by torch.optim."""
    figure, (momentum, adam) = panels(1, 2, width=3.6, height=2.7)
    ten, walk = results["sgdm-10"], results["walk"]
    _draw_lines(momentum, {label: ten[choice] for choice, label in _CHOICES.items()}, last=_WALKED)
    for choice, colour in zip(_CHOICES, COLOURS, strict=False):
        steps = np.arange(0, _WALKED, 3)
        momentum.plot(steps + 1, walk[choice][steps], "o", color=colour)
    label_panel(momentum, "a", "SGD with momentum, lr ÷ 10 (dots: walk)")
    lines = {label: results[f"adamw-{choice}"]["ratio"] for choice, label in _ADAM_CHOICES.items()}
    _draw_lines(adam, lines, last=_RECORDED)
    label_panel(adam, "b", f"torch.optim.AdamW, lr ÷ {config.adam_drop:g}")
    return {"section-5-2": figure}


def _draw_lines(axes: Axes, lines: Mapping[str, Any], *, last: int) -> None:
    for (label, ratio), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(np.arange(1, last + 1), ratio[:last], color=colour, lw=1.0, label=label)
    axes.axhline(1, color=THEORY, lw=0.8, ls="--", label="new equilibrium")
    axes.set(xlabel="steps after the change", ylabel="angle / new equilibrium", ylim=(0, None))
    axes.legend()


EXPERIMENT = Experiment(
    id="smd-rescale-law",
    title="Weights and optimizer state at a learning-rate drop: what to rescale, and how",
    source="smd §5.2",
    scales={
        "smoke": Config(
            adam_steps_before=800, adam_betas=(0.9, 0.99), dim=200, replicas=8, walks=400, drops=(2.0, 10.0)
        ),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
