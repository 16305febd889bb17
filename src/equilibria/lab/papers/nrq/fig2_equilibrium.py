"""nrq-equilibrium: a larger angular update descends faster and ends higher (figure 2 a-d, corollary 1, remark 4)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import panels
from equilibria.lab.papers.nrq import rayleigh
from equilibria.lab.problems import NoisyQuadratic, Simulation
from equilibria.theory.rayleigh import NoisyRayleigh, equilibrium_angle, noisy_quadratic_loss
from equilibria.theory.rayleigh_curve import exact_risk_curve
from equilibria.theory.rayleigh_risk import equilibrium_risk_bounds, stationary_risk
from equilibria.theory.rules import SGD

_ANGLE = Source("nrq", "fig. 2 (c), lemma 1", law="rayleigh.equilibrium_angle")
_FLOOR = Source("nrq", "fig. 2 (b), corollary 1", law="rayleigh_risk.stationary_risk")
_BOUND = Source(
    "nrq",
    "corollary 1, eq. (24)",
    corrected="the lower bound of the limiting risk is half of what is printed: S D/(2 (a_p - a_1))",
    law="rayleigh_risk.equilibrium_risk_bounds",
)
_CURVE = Source(
    "nrq",
    "fig. 2 (b), eq. (16)",
    corrected="the drift of f needs a factor 2, and its L is the quotient 2 L",
    law="rayleigh_curve.exact_risk_curve",
)
_QUADRATIC = Source("nrq", "remark 4", law="rayleigh.noisy_quadratic_loss")


@dataclass(frozen=True)
class Config:
    """A two-level spectrum, started in equilibrium from one risk; 500 trials (the paper: 100) for smaller errors.

    Beside it the noisy quadratic model of remark 4: the same spectrum and noise, at several lr and the weight decays.
    """

    dim: int = 10
    gap: float = 1.0
    noise: float = 1.0
    lr: float = 0.1
    weight_decays: tuple[float, ...] = (0.04, 0.01, 0.0025)
    quadratic_lrs: tuple[float, ...] = (0.1, 0.05, 0.025)
    risk: float = 0.9
    level: float = 0.45
    steps: int = 10_000
    trials: int = 500
    every: int = 10
    seed: int = 0

    def model(self, weight_decay: float) -> NoisyRayleigh:
        """The model with this weight decay."""
        return NoisyRayleigh.two_level(self.gap, self.dim, noise=self.noise, lr=self.lr, weight_decay=weight_decay)


Task = float | tuple[float, float]


def _lines(config: Config) -> dict[str, float]:
    """Key and weight decay of every line of the figure, from the largest angular update to the smallest."""
    return {f"{weight_decay:g}": weight_decay for weight_decay in config.weight_decays}


def _quadratics(config: Config) -> dict[str, tuple[float, float]]:
    """Key, lr and weight decay of the quadratic models: several lr, then the largest lr with every weight decay."""
    last, lr = config.weight_decays[-1], config.quadratic_lrs[0]
    pairs = [*((rate, last) for rate in config.quadratic_lrs), *((lr, decay) for decay in config.weight_decays[:-1])]
    return {f"quadratic-{rate:g}-{decay:g}": (rate, decay) for rate, decay in pairs}


def tasks(config: Config) -> dict[str, Task]:
    """One task per weight decay, and one per quadratic model."""
    return {**_lines(config), **_quadratics(config)}


def run_task(config: Config, task: Task) -> Arrays:
    """Simulate the trials, and compute the exact curve of the diffusion."""
    return _quadratic(config, *task) if isinstance(task, tuple) else _quotient(config, task)


def _quadratic(config: Config, lr: float, weight_decay: float) -> Arrays:
    """Trials of the noisy quadratic model, all from the unit vector of a large eigenvalue."""
    problem = NoisyQuadratic(config.model(weight_decay).spectrum, noise=config.noise)
    start = np.tile(np.eye(config.dim)[-1], (config.trials, 1))
    run = Simulation(
        problem,
        start,
        rule=SGD(lr, weight_decay),
        steps=config.steps // 10,
        record=["loss"],
        seed=config.seed,
    ).run()
    late = run["loss"][len(run.steps) // 2 :].mean(0)
    return {
        "step": run.steps,
        "loss": run["loss"].mean(1),
        "late": np.array([late.mean(), rayleigh.standard_error(late)]),
    }


def _quotient(config: Config, weight_decay: float) -> Arrays:
    model = config.model(weight_decay)
    begin = rayleigh.starts(model, config.trials, norm_sq=model.norm_sq, risk=config.risk, seed=config.seed)
    run = rayleigh.simulate(model, begin, steps=config.steps, every=config.every, seed=config.seed)
    late = rayleigh.window(run, config.steps // 2)
    curve = exact_risk_curve(model, config.steps, risk=config.risk)
    return {
        **rayleigh.averages(run, model),
        **rayleigh.predicted(curve, model, config.every),
        "late_risk": late["risk"],
        "late_angle": late["angle"],
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare each weight decay with its laws, and the three with each other."""
    lines = {weight_decay: results[key] for key, weight_decay in _lines(config).items()}
    claims = [claim for weight_decay, line in lines.items() for claim in _judge(config, weight_decay, line)]
    hits = {weight_decay: _hit(line["step"], line["risk"], config.level) for weight_decay, line in lines.items()}
    floors = [line["late_risk"] for line in lines.values()]
    claims += [
        Source("nrq", "corollary 1, fig. 2 (b)")
        .says(f"Bigger angular update, faster: steps to risk {config.level:g}, the next smaller one's over its own")
        .at_least(1.0, min(slow / fast for fast, slow in pairwise(hits.values()))),
        Source("nrq", "corollary 1, fig. 2 (b)")
        .says("Bigger angular update, higher floor: its limiting risk over the next smaller one's, least")
        .at_least(
            1.0,
            min(high[0] / low[0] for high, low in pairwise(floors)),
            interval=_ratio_interval(min(pairwise(floors), key=lambda pair: float(pair[0][0] / pair[1][0]))),
        ),
    ]
    claims += _judge_quadratic(config, results)
    table = {
        f"{weight_decay:g}": {
            "angular_update": float(line["late_angle"][0]),
            "risk": float(line["late_risk"][0]),
            "loss": (1 + config.gap * float(line["late_risk"][0])) / 2,
            "steps_to_level": hits[weight_decay],
        }
        for weight_decay, line in lines.items()
    }
    return Outcome(claims, {"by_weight_decay": table})


def _judge(config: Config, weight_decay: float, line: Arrays) -> list[Claim]:
    model, name = config.model(weight_decay), f"Weight decay {weight_decay:g}"
    step_effect = rayleigh.finite_step_words(stationary_risk(model).finite_step, rayleigh.LIMIT_TOLERANCE)
    return [
        _ANGLE.says(f"{name}: angular update in equilibrium, sqrt(2 lr wd)").near(
            float(equilibrium_angle(config.lr, weight_decay)),
            line["late_angle"][0],
            relative=0.01,
            unit="rad",
            interval=rayleigh.interval(line["late_angle"]),
        ),
        rayleigh.judge_limit(
            f"{name}: limiting risk by Watson's law, {step_effect}", _FLOOR, line["late_risk"], model=model
        ),
        _BOUND.says(f"{name}: the limiting risk is not below the lower bound").at_least(
            equilibrium_risk_bounds(model, xi=0.5).risk_low,
            line["late_risk"][0],
            interval=rayleigh.interval(line["late_risk"]),
            printed=float(np.sqrt(model.unit_grad_sq)) * model.angular_update / model.spread,
        ),
        rayleigh.judge_curve(name, _CURVE, line, model=model),
    ]


def _judge_quadratic(config: Config, results: TaskResults) -> list[Claim]:
    """Judge the floors of the quadratic model, which hardly depend on weight decay, and the trade-off by lr."""
    models = _quadratics(config)
    claims = [
        _QUADRATIC.says(f"Noisy quadratic model, lr {lr:g}, weight decay {decay:g}: mean loss in the end").near(
            _quadratic_floor(config, lr, decay),
            results[key]["late"][0],
            relative=rayleigh.ERRORS * float(results[key]["late"][1] / results[key]["late"][0]),
        )
        for key, (lr, decay) in models.items()
    ]
    by_lr = [results[key] for key in list(models)[: len(config.quadratic_lrs)]]
    return [
        *claims,
        _QUADRATIC.says(
            "It has the trade-off too: larger lr, faster: steps for nine tenths of the way to its floor, the next "
            "smaller lr's over its own"
        ).at_least(1.0, min(slow / fast for fast, slow in pairwise(_fall(line) for line in by_lr))),
        _QUADRATIC.says("And a higher floor: its loss in the end over that of the next smaller lr, least").at_least(
            1.0, min(high["late"][0] / low["late"][0] for high, low in pairwise(by_lr))
        ),
    ]


def _quadratic_floor(config: Config, lr: float, weight_decay: float) -> float:
    steps, spectrum = np.arange(config.steps // 20, config.steps // 10), config.model(weight_decay).spectrum
    start = np.eye(config.dim)[-1]
    law = noisy_quadratic_loss(steps, spectrum, start=start, noise=config.noise, lr=lr, weight_decay=weight_decay)
    return float(np.mean(law))


def _fall(line: Arrays) -> float:
    """Steps until the mean loss has fallen by nine tenths of the way to its floor."""
    level = line["late"][0] + 0.1 * (line["loss"][0] - line["late"][0])
    return _hit(line["step"], line["loss"], float(level))


def _hit(steps: np.ndarray, risk: np.ndarray, level: float) -> float:
    """The step at which the mean risk first falls below the level, interpolated between records."""
    after = int(np.argmax(risk < level))
    share = (risk[after - 1] - level) / (risk[after - 1] - risk[after])
    return float(steps[after - 1] + share * (steps[after] - steps[after - 1]))


def _ratio_interval(pair: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    (high, high_error), (low, low_error) = pair
    return rayleigh.interval([high / low, high / low * float(np.hypot(high_error / high, low_error / low))])


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the first row of figure 2."""
    figure, axes = panels(1, 4, width=2.5, height=2.4)
    lines = {f"wd = {weight_decay:g}": results[key] for key, weight_decay in _lines(config).items()}
    rayleigh.draw_panels(figure, axes, lines, letters="abcd", log_time=True)
    return {"figure-2-a-d": figure}


EXPERIMENT = Experiment(
    id="nrq-equilibrium",
    title="In equilibrium the angular update decides speed and floor of the risk",
    source="nrq fig. 2 a-d, cor. 1, remark 4",
    scales={"smoke": Config(steps=2000, trials=500), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
