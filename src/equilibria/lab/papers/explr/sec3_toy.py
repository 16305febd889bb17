"""explr-toy: weight decay alone and BatchNorm alone reach the optimum; both together keep leaving it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, not_demanded
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, rms
from equilibria.lab.problems import LogisticToy, Simulation
from equilibria.lab.problems.recorders import Moment
from equilibria.theory.norms import cone_exit_bound
from equilibria.theory.rules import SGD

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
_EXIT = Source(
    "explr",
    "Theorem 3.1",
    corrected="the theorem is about the angle, pi times the training error; it needs lr wd > 2 angle^2",
    law="norms.cone_exit_bound",
)
_ERROR = Source("explr", "Section 3", corrected="the training error is arccos(w_1/||w||)/pi; the 1/pi is missing")
_ALONE = Source(
    "explr",
    "Section 3, case 1",
    corrected="weight decay alone at a fixed lr stalls too; its floor vanishes only as lr does",
)
_BN = Source("explr", "Section 3, case 2")
_BOTH = Source("explr", "Section 3, case 3")
_LABELS = {
    "decay": "weight decay alone, small lr",
    "decay-large": "weight decay alone, large lr",
    "normalised": "BatchNorm alone",
    "both": "both",
}
_WINDOWS = 10


@dataclass(frozen=True)
class Config:
    """Single-sample SGD from random directions of norm 1, ``trials`` of them; the cone is ``cone`` rad wide.

    lr and weight decay are those of both together; ``small_lr`` and ``small_decay`` those of weight decay alone;
    ``products`` are values of lr*wd at which the floor of both together is measured.
    """

    dim: int = 2
    cone: float = 0.1
    lr: float = 0.5
    weight_decay: float = 0.1
    small_lr: float = 0.02
    small_decay: float = 1e-3
    failure: float = 0.01
    products: tuple[float, ...] = (5e-5, 5e-4, 5e-3)
    steps: int = 100_000
    trials: int = 16
    samples: int = 4_000_000
    seed: int = 0

    def setting(self, name: str) -> tuple[bool, SGD]:
        """Whether a case is normalised, and its optimizer."""
        if name == "decay":
            return False, SGD(self.small_lr, self.small_decay)
        if name.startswith("floor"):
            return True, SGD(self.lr, float(name.removeprefix("floor-")) / self.lr)
        return name in ("normalised", "both"), SGD(self.lr, 0.0 if name == "normalised" else self.weight_decay)


def tasks(config: Config) -> dict[str, str]:
    """The cases, both together at other products of lr and weight decay, and the training error itself."""
    floors = [f"floor-{product:g}" for product in config.products]
    return {name: name for name in (*_LABELS, *floors, "training-error")}


def run_task(config: Config, name: str) -> Arrays:
    """Count the training error, or run a case."""
    return _training_error(config) if name == "training-error" else _case(config, name)


def _training_error(config: Config) -> Arrays:
    """Share of samples that a weight at an angle to the optimum classifies wrongly, counted."""
    rng = np.random.default_rng([config.seed, 1])
    angle = 0.528
    first, second = rng.standard_normal((2, config.samples))
    wrong = np.sign(first * math.cos(angle) + second * math.sin(angle)) != np.sign(first)
    return {"angle": np.asarray(angle), "wrong": np.mean(wrong)}


def _case(config: Config, name: str) -> Arrays:
    """Run a case, and reduce angle to the optimum and norm at every step to the numbers of the claims."""
    normalised, rule = config.setting(name)
    start = np.random.default_rng([config.seed, 0]).standard_normal((config.trials, config.dim))
    start /= np.linalg.norm(start, axis=1, keepdims=True)
    record: Mapping[str, Any] = {"risk": "risk", "norm": "norm", **({"log_cos": _log_cos} if name == "both" else {})}
    toy = LogisticToy(config.dim, normalised=normalised)
    simulation = Simulation(toy, start, rule=rule, steps=config.steps, record=record, seed=config.seed)
    run = simulation.run()
    angle, norm = math.pi * run["risk"], run["norm"]
    outside = angle > config.cone
    parts = np.array_split(np.arange(config.steps), _WINDOWS)
    shown = np.unique(np.geomspace(10, config.steps, 80).astype(int))
    result = {
        "outside": np.array([outside[part].mean() for part in parts]),
        "rms_angle": np.array([rms(angle[part]) for part in parts]),
        "last_exit": np.array([np.flatnonzero(column)[-1] if column.any() else 0 for column in outside.T]),
        "shown": shown,
        "angle_until": np.array([rms(angle[end // 2 : end]) for end in shown]),
        "norm_fourth": np.mean(norm[shown - 1] ** 4, axis=1),
        "norm_fourth_ends": norm[[config.steps // 10, -1]] ** 4,
        "path": angle[:1000, 0],
        "floor": rms(angle[parts[1][0] :]),
    }
    if name == "both":
        first = parts[1][0]
        gain = np.log(np.linalg.norm(run.state.weights, axis=1) / norm[first])
        turned = -run["log_cos"][first:].mean()
        result |= {"log_cos": turned, "log_norm_gain": gain.mean() / (config.steps - first)}
        result |= _exits(config, rule, outside, norm)
    return result


def _log_cos(moment: Moment) -> Array:
    """ln cos of the step's angle, from the chord."""
    chord_sq = np.sum((moment.unit_after - moment.unit) ** 2, axis=1)
    return np.asarray(np.log1p(-chord_sq / 2))


def _exits(config: Config, rule: SGD, outside: NDArray[np.bool_], norm: Array) -> Arrays:
    """Compare the time from every step until the angle leaves the cone with the bound of the theorem."""
    steps = np.arange(config.steps)[:, None]
    next_exit = np.minimum.accumulate(np.where(outside, steps, config.steps)[::-1])[::-1]
    bound = cone_exit_bound(
        rule.lr, rule.weight_decay, angle=config.cone, norm=norm, dim=config.dim, failure=config.failure
    )
    judged = steps + bound < config.steps  # only windows that the run covers
    return {
        "late": np.sum(judged & (next_exit - steps > bound)),
        "judged": np.sum(judged),
        "longest_stay": np.max((next_exit - steps)[: -int(bound.max()) - 1]),
        "shortest_bound": bound.min(),
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge which cases leave the cone, and how close to the optimum they get."""
    claims = [*_judge_both(config, results), *_judge_normalised(config, results), *_judge_decay(results)]
    numbers = {
        name: {
            "share_outside_by_tenth_of_the_run": results[name]["outside"],
            "rms_angle_by_tenth_of_the_run": results[name]["rms_angle"],
            "median_last_exit": float(np.median(results[name]["last_exit"])),
        }
        for name in _LABELS
    }
    return Outcome(claims, numbers)


def _judge_both(config: Config, results: TaskResults) -> list[Claim]:
    both, error = results["both"], results["training-error"]
    share = float(error["angle"]) / math.pi
    eps = config.lr * config.weight_decay
    floors = [float(results[f"floor-{product:g}"]["floor"]) for product in config.products]
    span = math.log(max(config.products) / min(config.products))
    return [
        _ERROR.says("Training error of a weight 0.528 rad off, counted").near(
            share,
            float(error["wrong"]),
            absolute=4 * math.sqrt(share * (1 - share) / config.samples),
            printed=float(error["angle"]),
        ),
        _EXIT.says(
            "Both: share of steps from which the angle stays in the cone for longer than the theorem's bound"
        ).at_most(config.failure, float(both["late"]) / float(both["judged"])),
        _EXIT.says("Both: longest stay in the cone, against the shortest bound").at_most(
            float(both["shortest_bound"]), float(both["longest_stay"]), unit="steps"
        ),
        _BOTH.says(
            "Both: longer training gains nothing: share outside the cone, last tenth of the run over second tenth"
        ).near(
            1.0, both["outside"][-1] / both["outside"][1], relative=4 * _share_error(config, float(both["outside"][-1]))
        ),
        Source("explr", "Section 3, after Theorem 3.1", law="angles.log_cos_balance")
        .says("Both: mean of -ln cos of a step's angle, which weight decay sets: -ln(1 - lr wd)")
        .near(
            -math.log1p(-eps) + float(both["log_norm_gain"]),
            float(both["log_cos"]),
            relative=1e-12,  # an identity: roundings of a step, some 1e-15 of the chord, add up at random
        ),
        Source("", "explr Section 3, beyond")
        .says("Both, small lr wd: the floor of the angle goes as (lr wd)^(1/4)")
        .of_order(
            0.25,
            sizes=config.products,
            errors=floors,
            absolute=2 * math.sqrt(max(config.products)) / span,  # the next order is (lr wd)^(1/2), relative
        ),
    ]


def _share_error(config: Config, share: float) -> float:
    """Relative standard error of a ratio of two shares, each over a tenth of the run; steps forget in 1/(2 lr wd)."""
    independent = config.trials * config.steps / _WINDOWS * 2 * config.lr * config.weight_decay
    return math.sqrt(2 * (1 - share) / share / independent)


def _judge_normalised(config: Config, results: TaskResults) -> list[Claim]:
    run = results["normalised"]
    first, last = run["norm_fourth_ends"]
    grown = (last - first) / (config.steps - 1 - config.steps // 10)
    rate = 2 * config.lr**2 * (config.dim - 1) * _mean_square_push()
    error = float(grown.std(ddof=1)) / math.sqrt(config.trials) / rate
    late = run["shown"] > 200
    left = _BN.says(
        "BatchNorm alone: share outside the cone in the last tenth of the run, less than a tenth of that of both"
    ).at_most(float(results["both"]["outside"][-1]) / 10, float(run["outside"][-1]))
    return [
        _BN.says("BatchNorm alone: ||w||^4 grows linearly, by 2 lr^2 E|unit gradient|^2 a step").near(
            rate,
            float(grown.mean()),
            # At an angle the gradient is larger by 3 angle^2: some large samples are on the wrong side.
            relative=3 * rms(run["rms_angle"][1:]) ** 2 + 4 * error,
        ),
        Source("", "explr Section 3, case 2: lr/||w||^2 falls as t^(-1/2)")
        .says("BatchNorm alone: the angle falls as t^(-1/4)")
        .of_order(
            -0.25,
            sizes=run["shown"][late].tolist(),
            errors=run["angle_until"][late].tolist(),
            absolute=0.05,  # scatter of some 10 % at the early end, and a start at norm 1, over four to six e-folds
        ),
        left if config.steps >= 50_000 else not_demanded(left),  # the angle falls slowly
    ]


def _mean_square_push() -> float:
    """E[1/(1 + exp|z|)^2] for a standard normal z: the squared factor of the gradient at the optimum."""
    nodes, weights = np.polynomial.legendre.leggauss(80)
    z = 6 * (nodes + 1)  # both halves are alike, and nothing is left beyond 12
    return float(np.sum(weights * np.exp(-z * z / 2) / (1 + np.exp(z)) ** 2) * 12 / math.sqrt(2 * math.pi))


def _judge_decay(results: TaskResults) -> list[Claim]:
    return [
        Source("explr", "Section 3, case 1")
        .says("Weight decay alone, small lr: share outside the cone, all but the first tenth of the run")
        .at_most(0.0, float(results["decay"]["outside"][1:].max())),
        _ALONE.says(
            "Weight decay alone, large lr: it stalls as well: rms angle, last tenth of the run over second tenth"
        ).at_least(
            0.9,  # falling as BatchNorm alone does would leave 0.63
            float(results["decay-large"]["rms_angle"][-1] / results["decay-large"]["rms_angle"][1]),
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw one path of each case with the cone, the angle over time, and the norm."""
    figure, (paths, angles, norms) = panels(1, 3, width=2.9, height=2.7)
    _draw_paths(paths, config, results)
    for (name, label), colour in zip(_LABELS.items(), COLOURS, strict=False):
        run = results[name]
        angles.plot(run["shown"], run["angle_until"], color=colour, label=label)
        norms.plot(run["shown"], run["norm_fourth"], color=colour)
    times = results["normalised"]["shown"].astype(float)
    late = times[times > 300]
    first = results["normalised"]["angle_until"][times > 300][0]
    angles.plot(late, first * (late / late[0]) ** -0.25, color=THEORY, ls="--", lw=0.9, label="$t^{-1/4}$")
    angles.axhline(config.cone, color=THEORY, lw=0.8, ls=":", label="cone")
    angles.set(
        xscale="log", yscale="log", xlabel="step $t$", ylabel="rms angle over $(t/2, t)$, rad", ylim=(3e-3, None)
    )
    label_panel(angles, "b", "distance from the optimum", legend=True)
    rate = 2 * config.lr**2 * (config.dim - 1) * _mean_square_push()
    norms.plot(times, 1 + rate * times, color=THEORY, ls="--", lw=0.9, label="$1 + 2\\eta^2 E|\\tilde{g}|^2\\, t$")
    norms.set(xscale="log", yscale="log", xlabel="step $t$", ylabel="$||w||^4$")
    label_panel(norms, "c", "the norm", legend=True)
    return {"section-3": figure}


def _draw_paths(axes: Axes, config: Config, results: TaskResults) -> None:
    colours = dict(zip(_LABELS, COLOURS, strict=False))
    for name in ("both", "normalised", "decay"):  # the widest behind
        axes.plot(results[name]["path"], color=colours[name], lw=0.7)
    axes.axhline(config.cone, color=THEORY, lw=0.8, ls=":")
    axes.set(yscale="log", xlabel="step $t$", ylabel="angle to the optimum, rad", ylim=(1e-4, 4))
    label_panel(axes, "a", "one run of each")


EXPERIMENT = Experiment(
    id="explr-toy",
    title="Weight decay, BatchNorm, or both: who leaves the cone around the optimum",
    source="explr §3, thm. 3.1",
    scales={"smoke": Config(steps=10_000, trials=8, samples=400_000), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
