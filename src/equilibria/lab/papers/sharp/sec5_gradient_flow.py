"""sharp-gradient-flow: descent with weight decay beats the gradient flow however small the lr is (section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.problems import Regression, Simulation
from equilibria.theory.rules import SGD

Array = NDArray[np.float64]
_FLOW = "flow"
_DECAYED_FLOW = "flow-with-decay"


@dataclass(frozen=True)
class Config:
    """The regression of figure 4 at one weight decay and ever smaller learning rates, beside the gradient flow.

    Every descent takes ``flow_time`` / (lr wd) steps. The flow is descent without weight decay at ``small_lrs``, which
    approaches it as lr falls; of one data set it is also integrated, with weight decay and without.
    """

    data_sets: int = 10
    samples: int = 20
    dim: int = 40
    weight_decay: float = 2e-3
    lrs: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    flow_time: float = 8.0
    small_lrs: tuple[float, ...] = (0.2, 0.1, 0.05, 0.025)
    fitted_time: float = 800.0
    records: int = 400
    seed: int = 0

    @property
    def problem(self) -> Regression:
        """The problem, with one data set per trial."""
        seeds = range(self.seed, self.seed + self.data_sets)
        return Regression.generate(seeds, samples=self.samples, dim=self.dim)


def tasks(config: Config) -> dict[str, tuple[str, float]]:
    """A descent for each learning rate, the flow by small steps, and the flow with weight decay."""
    return {
        **{f"lr-{lr:g}": ("descent", lr) for lr in config.lrs},
        **{f"{_FLOW}-{lr:g}": (_FLOW, lr) for lr in config.small_lrs},
        _DECAYED_FLOW: (_DECAYED_FLOW, 0.0),
    }


def run_task(config: Config, task: tuple[str, float]) -> Arrays:
    """Run one of the three kinds."""
    kind, lr = task
    if kind == _DECAYED_FLOW:
        return _integrate(config)
    return _descend(config, lr) if kind == "descent" else _follow(config, lr)


def _descend(config: Config, lr: float) -> Arrays:
    problem, rule = config.problem, SGD(lr=lr, weight_decay=config.weight_decay)
    steps = math.ceil(config.flow_time / (lr * config.weight_decay))
    run = Simulation(
        problem,
        problem.initial,
        rule=rule,
        steps=steps,
        record=["risk", "weights", "norm", "loss"],
        every=max(1, steps // config.records // 2 * 2 + 1),  # odd: both phases of the period of 2
    ).run()
    null = np.stack([problem.null_part(weights) for weights in run["weights"]])
    return {
        "time": lr * config.weight_decay * run.steps,
        "risk": run["risk"],
        "loss": run["loss"],
        "norm": run["norm"],
        "distance": _along_minimisers(np.linalg.norm(null, axis=2), run["norm"]),
    }


def _along_minimisers(null: Array, norm: Array) -> Array:
    """Distance from the least-norm solution w*, over |w*|, of the minimiser with this null part and this norm."""
    distance: Array = null / np.sqrt(norm**2 - null**2)
    return distance


def _follow(config: Config, lr: float) -> Arrays:
    """Descent without weight decay until the data are fitted: the coefficients it ends with."""
    problem = config.problem
    steps = math.ceil(config.fitted_time / lr)
    run = Simulation(problem, problem.initial, rule=SGD(lr=lr, weight_decay=0.0), steps=steps, record=()).run()
    weights = run.state.weights
    return {"coefficients": problem.coefficients(weights), "loss": problem.value(weights)}


def _integrate(config: Config) -> Arrays:
    """Directions of the flow of the first data set, without weight decay at some times and with it when it is there.

    With weight decay the norm shrinks and gradients grow: what takes the time s without takes ln(1 + 2 wd s)/(2 wd).
    """
    from scipy.integrate import solve_ivp

    problem = config.problem.take(0, 1)
    times = np.geomspace(config.fitted_time / 100, config.fitted_time, 5)
    shorter = np.log1p(2 * config.weight_decay * times) / (2 * config.weight_decay)
    paths = []
    for decay, at in ((0.0, times), (config.weight_decay, shorter)):

        def slope(time: float, weights: Array, decay: float = decay) -> Array:
            return np.asarray(-problem.gradient(weights[None])[0] - decay * weights)

        path = solve_ivp(slope, (0, at[-1]), problem.initial[0], t_eval=at, rtol=1e-10, atol=1e-13)
        paths.append(path.y / np.linalg.norm(path.y, axis=0))
    return {"paths": np.stack(paths)}


# ---- judging

_SAME = Source("sharp", "Section 5, after Theorem 5.1")
_BETTER = Source("sharp", "Section 5, after Theorem 5.1", law="flow_examples.regression_flow")


def flow_end(problem: Regression) -> Array:
    """Coefficients at which the gradient flow ends, (data sets, d): it keeps the norm and the null part of w."""
    null = problem.null_part(problem.initial)
    size = np.linalg.norm(problem.flattest, axis=1)
    left = _along_minimisers(np.linalg.norm(null, axis=1), np.linalg.norm(problem.initial, axis=1))
    ends: Array = problem.flattest + null * (size * left / np.linalg.norm(null, axis=1))[:, None]
    return ends


def settled_distance(config: Config, problem: Regression, lr: float, *, steps: int) -> Array:
    """Distance from w* over |w*| at the edge of stability, by data set.

    Weight decay alone shrinks the null part, by 1 - lr wd per step; the edge holds the rest of the squared norm at
    lr lambda1*/(2 (1 - lr wd)), lambda1* the sharpness of w*.
    """
    kept = 1 - lr * config.weight_decay
    null = np.linalg.norm(problem.null_part(problem.initial), axis=1)
    distance: Array = kept**steps * null / np.sqrt(lr * problem.sharpness(problem.flattest) / (2 * kept))
    return distance


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the flow's end, then descent at every learning rate against it."""
    problem = config.problem
    ends = flow_end(problem)
    risks = problem.risk(ends)
    off = [
        float(np.max(np.linalg.norm(results[f"{_FLOW}-{lr:g}"]["coefficients"] - ends, axis=1)))
        for lr in config.small_lrs
    ]
    last = {lr: results[f"lr-{lr:g}"] for lr in config.lrs}
    claims = [*_judge_flow(config, results, off), *_judge_descent(config, problem, last, risks)]
    numbers = {
        "test_loss_of_flow": risks,
        "test_loss_of_least_norm": problem.risk(problem.flattest),
        "test_loss_of_descent": {f"{lr:g}": _late(run, "risk") for lr, run in last.items()},
        "distance_of_flow": _along_minimisers(
            np.linalg.norm(problem.null_part(problem.initial), axis=1), np.linalg.norm(problem.initial, axis=1)
        ),
        "distance_of_descent": {f"{lr:g}": run["distance"][-1] for lr, run in last.items()},
        "distance_of_small_steps_from_flow": off,
    }
    return Outcome(claims, numbers)


def _late(run: Arrays, name: str) -> Array:
    """Mean over the last twentieth of the records, by data set: it averages the oscillation."""
    values = run[name]
    mean: Array = values[-max(1, len(values) // 20) :].mean(axis=0)
    return mean


def _judge_flow(config: Config, results: TaskResults, off: list[float]) -> list[Claim]:
    unlike = np.linalg.norm(np.diff(results[_DECAYED_FLOW]["paths"], axis=0)[0], axis=0).max()
    return [
        _BETTER.says(
            "The gradient flow ends where it keeps norm and null part of w: distance of descent without weight decay "
            "from there, farthest data set, falls as lr: the order"
        ).of_order(
            1.0,
            sizes=list(config.small_lrs),
            errors=off,
            absolute=0.1,  # the next order, lr lambda1 of the largest step, is a tenth
        ),
        _SAME.says(
            "Weight decay rescales the time of the gradient flow and nothing else: largest distance of its directions "
            "at five times s without from those at ln(1 + 2 wd s)/(2 wd) with it"
        ).at_most(1e-7, float(unlike)),  # the integrator's relative error 1e-10 per step, over a thousand steps
    ]


def _judge_descent(config: Config, problem: Regression, runs: dict[float, Arrays], risks: Array) -> list[Claim]:
    claims = []
    for lr, run in runs.items():
        rate = lr * config.weight_decay
        ratio = run["distance"][-1] / settled_distance(config, problem, lr, steps=round(float(run["time"][-1]) / rate))
        claims += [
            _BETTER.says(
                f"lr {lr:g}: test loss at the end of the gradient flow less that of descent with weight decay, by data "
                "set"
            ).at_least(0.0, risks - _late(run, "risk")),
            _BETTER.says(
                f"lr {lr:g}: distance from the least-norm solution at flow time {config.flow_time:g} over that of the "
                "edge of stability, to which weight decay shrinks the null part: the data set farthest off"
            ).near(
                1.0,
                float(ratio[np.argmax(np.abs(np.log(ratio)))]),
                relative=math.sqrt(2 * rate),  # it goes as the root of the stability ratio: eta u/4 with u below 4
            ),
        ]
    return claims


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Distance from the least norm and test loss over flow time, and the ends over the learning rate."""
    problem = config.problem
    figure, (distance, risk, ends) = panels(1, 3, width=2.7, height=2.6)
    flow, least = problem.risk(flow_end(problem)), problem.risk(problem.flattest)
    for lr, colour in zip(config.lrs, COLOURS, strict=False):
        run = results[f"lr-{lr:g}"]
        distance.plot(run["time"], np.median(run["distance"], axis=1), color=colour, label=f"lr {lr:g}")
        risk.plot(run["time"], np.mean(run["risk"], axis=1), color=colour, lw=0.9)
    risk.axhline(float(flow.mean()), color=THEORY, ls="--", lw=1, label="gradient flow")
    risk.axhline(float(least.mean()), color=THEORY, ls=":", lw=1, label="least norm")
    late = np.array([_late(results[f"lr-{lr:g}"], "risk") for lr in config.lrs])
    for place, colour in zip(range(config.data_sets), COLOURS * 2, strict=False):
        ends.plot(config.lrs, late[:, place] / flow[place], "o-", color=colour, ms=3, lw=0.7)
    ends.axhline(1, color=THEORY, ls="--", lw=1, label="gradient flow")
    label_panel(
        distance,
        "a",
        "to the least norm, median data set",
        yscale="log",
        ylabel="distance/$||w^*||$",
        xlabel="flow time $\\tau = t\\,\\eta_{in}$",
        legend=True,
    )
    risk.set(xlabel="flow time $\\tau$", ylabel="test loss", ylim=(0.9 * float(least.mean()), 1.3 * float(flow.mean())))
    label_panel(risk, "b", "mean of the data sets", legend=True)
    ends.set(xscale="log", xlabel="lr", ylabel="test loss / that of the flow")
    ends.set_xticks(config.lrs, [f"{lr:g}" for lr in config.lrs])
    ends.set_xticks([], minor=True)
    label_panel(ends, "c", "in the end, each data set", legend=True)
    return {"section-5": figure}


EXPERIMENT = Experiment(
    id="sharp-gradient-flow",
    title="However small the lr, descent with weight decay ends in a better solution than the gradient flow",
    source="sharp sec. 5",
    scales={
        "smoke": Config(data_sets=4, weight_decay=2e-2, lrs=(0.25, 0.125), flow_time=6.0, small_lrs=(0.2, 0.1), seed=1),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
