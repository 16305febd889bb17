"""nrq-escape: after lr / 10 the risk dips and climbs back unless the weights are rescaled (fig. 2 e-h, cor. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.nrq import rayleigh
from equilibria.theory.rayleigh import NoisyRayleigh
from equilibria.theory.rayleigh_curve import exact_risk_curve
from equilibria.theory.rayleigh_risk import equilibrium_risk_bounds, escape_norm_sq, stationary_risk
from equilibria.theory.watson import watson_cdf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DROP = Source("nrq", "fig. 2 (e)-(h)", law="rayleigh_curve.exact_risk_curve")
_RESCALE = Source("nrq", "fig. 2 (e)-(h), section 3.2", law="states.rescale_factors")
_THRESHOLD = Source(
    "nrq",
    "corollary 2",
    corrected="half of the printed threshold suffices, and it is one on the squared norm",
    law="rayleigh_risk.escape_norm_sq",
)
_FLOOR = Source("nrq", "fig. 2 (f)", law="rayleigh_risk.stationary_risk")
_CHOICES = {"plain": "no rescale", "rescaled": "weights / k$^{1/4}$"}
_RIGHT_AFTER = 100  # steps after the drop that count as right after it
_SMOOTHED = 500  # steps of the running mean of the risk whose lowest value counts


@dataclass(frozen=True)
class Config:
    """A drop of the lr by ``k`` in equilibrium, and starts of corollary 2 as multiples of its corrected threshold.

    ``bump`` is the least ratio of the final to the lowest risk that is claimed without rescale.
    """

    dim: int = 10
    gap: float = 1.0
    noise: float = 1.0
    lr: float = 0.1
    weight_decay: float = 0.01
    k: float = 10.0
    drop_at: int = 10_000
    steps: int = 40_000
    xi: float = 0.8
    thresholds: tuple[float, ...] = (1.6, 4.0)
    corollary_steps: int = 3000
    bump: float = 2.2
    trials: int = 500
    every: int = 20
    seed: int = 0

    def model(self, *, k: float = 1.0) -> NoisyRayleigh:
        """The model before the drop, or at lr / k."""
        lr = self.lr / k
        return NoisyRayleigh.two_level(self.gap, self.dim, noise=self.noise, lr=lr, weight_decay=self.weight_decay)

    @property
    def low(self) -> float:
        """The risk at which corollary 2 starts: the lower bound of the limiting risk."""
        return equilibrium_risk_bounds(self.model(), xi=self.xi).risk_low

    @property
    def threshold(self) -> float:
        """The squared norm above which corollary 2 predicts an escape."""
        model = self.model()
        tail = float(watson_cdf(self.xi, model.gap * model.inverse_temperature, dim=self.dim))
        return escape_norm_sq(model, risk=self.low, xi=self.xi, tail=tail)


def tasks(config: Config) -> dict[str, tuple[str, Any]]:
    """The drop with and without rescale, and a start of corollary 2 for each norm."""
    drops: dict[str, tuple[str, Any]] = {choice: ("drop", choice == "rescaled") for choice in _CHOICES}
    return drops | {f"start-{times:g}": ("start", times) for times in config.thresholds}


def run_task(config: Config, task: tuple[str, Any]) -> Arrays:
    """Simulate a drop or a start."""
    kind, setting = task
    return _drop(config, rescale=setting) if kind == "drop" else _start(config, setting)


def _drop(config: Config, *, rescale: bool) -> Arrays:
    model, drop = config.model(), config.drop_at
    lr = np.full(config.steps, config.lr)
    lr[drop:] /= config.k
    begin = rayleigh.starts(model, config.trials, norm_sq=model.norm_sq, seed=config.seed)
    run = rayleigh.simulate(
        model,
        begin,
        steps=config.steps,
        every=config.every,
        seed=config.seed,
        lr=lr,
        rescale={drop: config.k**-0.25} if rescale else {},
    )
    curve = exact_risk_curve(model, config.steps, lr=lr, rescale=rescale)
    parts = {
        "before": rayleigh.window(run, drop // 2, drop),
        "after": rayleigh.window(run, drop, drop + _RIGHT_AFTER),
        "final": rayleigh.window(run, _final(config)),
    }
    dip = _dip(config, run.steps, run["risk"].mean(1))
    return {
        **rayleigh.averages(run, model),
        **rayleigh.predicted(curve, model, config.every),
        **{f"{part}_{name}": pair for part, means in parts.items() for name, pair in means.items()},
        "theory_after_angle": np.sqrt(np.mean(curve.angular_update[drop : drop + _RIGHT_AFTER : config.every] ** 2)),
        "dip": np.array(dip),
        "theory_dip": np.array(_dip(config, run.steps, curve.risk[: -1 : config.every])),
    }


def _final(config: Config) -> int:
    """The step from which the norm is in its new equilibrium."""
    return config.steps - (config.steps - config.drop_at) // 3


def _dip(config: Config, steps: np.ndarray, risk: np.ndarray) -> tuple[float, float, float]:
    """Step and value of the lowest smoothed risk after the drop, and the final risk."""
    length = _SMOOTHED // config.every
    smooth = np.convolve(risk, np.ones(length) / length, mode="valid")
    middle = steps[: len(smooth)] + _SMOOTHED / 2
    after = np.flatnonzero(middle > config.drop_at + _SMOOTHED / 2)
    lowest = after[int(np.argmin(smooth[after]))]
    return float(middle[lowest]), float(smooth[lowest]), float(risk[steps >= _final(config)].mean())


def _start(config: Config, times: float) -> Arrays:
    model, norm_sq = config.model(), times * config.threshold
    begin = rayleigh.starts(model, config.trials, norm_sq=norm_sq, risk=config.low, seed=config.seed)
    run = rayleigh.simulate(model, begin, steps=config.corollary_steps, every=config.every, seed=config.seed)
    curve = exact_risk_curve(model, config.corollary_steps, risk=config.low, norm_sq=norm_sq)
    return {
        **rayleigh.averages(run, model),
        **rayleigh.predicted(curve, model, config.every),
        "final_risk": rayleigh.window(run, config.corollary_steps * 2 // 3)["risk"],
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the bump without rescale, its absence with it, and corollary 2."""
    dips = {choice: results[choice]["dip"] for choice in _CHOICES}
    claims = [
        *_judge_drop(config, results),
        *(claim for times in config.thresholds for claim in _judge_start(config, times, results[f"start-{times:g}"])),
    ]
    names = ("step_of_lowest", "lowest", "final")
    numbers = {
        choice: {
            "measured": dict(zip(names, dips[choice].tolist(), strict=True)),
            "diffusion": dict(zip(names, results[choice]["theory_dip"].tolist(), strict=True)),
        }
        for choice in _CHOICES
    }
    thresholds = {"corrected": config.threshold, "printed": 2 * config.threshold, "equilibrium": config.model().norm_sq}
    return Outcome(claims, {"dip": numbers, "corollary_2_norm_sq": thresholds})


def _judge_drop(config: Config, results: TaskResults) -> list[Claim]:
    old, new = config.model(), config.model(k=config.k)
    plain, rescaled = results["plain"], results["rescaled"]
    bump = {choice: results[choice]["dip"][2] / results[choice]["dip"][1] for choice in _CHOICES}
    # The lowest and the final risk err by the scatter of their windows; that of the final one is known.
    error, mean = plain["final_risk"][1], plain["final_risk"][0]
    scatter = rayleigh.ERRORS * error / mean * np.sqrt((config.steps - _final(config)) / _SMOOTHED)
    angles = (
        (
            "No rescale: angular update in the 100 steps after the drop: the old one / k, too small by sqrt(k), and "
            "the relaxation of the norm since",
            plain["after_angle"],
            float(plain["theory_after_angle"]),
            0.03,  # the slope of the loss, a share gap^2 risk/S^2 of the noise, and scatter
        ),
        (
            "Rescaled: angular update in the 100 steps after the drop, already its new equilibrium",
            rescaled["after_angle"],
            new.angular_update,
            0.03,
        ),
        (
            "No rescale: angular update at the end, back in the new equilibrium",
            plain["final_angle"],
            new.angular_update,
            0.01,
        ),
    )
    return [
        rayleigh.judge_limit("Before the drop: limiting risk", _FLOOR, plain["before_risk"], model=old),
        _DROP.says("No rescale: the risk first falls and then rises; final over lowest risk").at_least(
            config.bump, bump["plain"]
        ),
        _DROP.says("No rescale: the same ratio by the exact diffusion").near(
            plain["theory_dip"][2] / plain["theory_dip"][1], bump["plain"], relative=scatter
        ),
        _RESCALE.says("Weights / k^(1/4) at the drop: no bump; final over lowest risk").at_most(1.2, bump["rescaled"]),
        *(
            rayleigh.judge_limit(f"{name}: limiting risk after the drop", _FLOOR, line["final_risk"], model=new)
            for name, line in (("No rescale", plain), ("Rescaled", rescaled))
        ),
        *(
            _RESCALE.says(text).near(expected, pair[0], relative=relative, unit="rad", interval=rayleigh.interval(pair))
            for text, pair, expected, relative in angles
        ),
    ]


def _judge_start(config: Config, times: float, line: Arrays) -> list[Claim]:
    norm_sq, lowest = times * config.threshold, int(np.argmin(line["theory_risk"]))
    where = "below" if times < 2 else "above"
    return [
        _THRESHOLD.says(
            f"From ||X||^2 = {norm_sq:.3g}, above the threshold {config.threshold:.3g} and {where} the printed "
            f"{2 * config.threshold:.3g}, the risk falls below its start: risk at step {line['step'][lowest]}"
        ).at_most(
            config.low,
            line["risk"][lowest],
            interval=rayleigh.interval([line["risk"][lowest], line["risk_error"][lowest]]),
        ),
        _THRESHOLD.says(f"From ||X||^2 = {norm_sq:.3g}: and returns to no less than its start: limiting risk").at_least(
            config.low, line["final_risk"][0], interval=rayleigh.interval(line["final_risk"])
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the second row of figure 2, and the starts of corollary 2."""
    figure, axes = panels(1, 4, width=2.5, height=2.4)
    rayleigh.draw_panels(figure, axes, {label: results[choice] for choice, label in _CHOICES.items()}, letters="efgh")
    model, lowest = config.model(), float(results["plain"]["risk"].min())
    best = model.spectrum[0] / 2
    axes[0].set_ylim(best, best + 2 * stationary_risk(model).excess_loss)  # hides the descent from the start
    axes[1].set_ylim(0.7 * lowest, 2 * stationary_risk(model).risk)
    return {"figure-2-e-h": figure, "corollary-2": _draw_starts(config, results)}


def _draw_starts(config: Config, results: TaskResults) -> Figure:
    figure, (risk, angle) = panels(1, 2)
    for colour, times in zip(COLOURS, config.thresholds, strict=False):
        line = results[f"start-{times:g}"]
        label = f"$||X_0||^2$ = {times * config.threshold:.3g}"
        risk.plot(line["step"], line["risk"], color=colour, label=label)
        risk.plot(line["step"], line["theory_risk"], color=THEORY, lw=0.8, ls="--")
        angle.plot(line["step"], line["angle"], color=colour, lw=0.8, label=label)
        angle.plot(line["step"], line["theory_angle"], color=THEORY, lw=0.8, ls="--")
    risk.axhline(config.low, color=COLOURS[2], lw=0.9, ls=":", label="risk at the start")
    risk.plot([], [], color=THEORY, lw=0.8, ls="--", label="diffusion, exact")
    risk.set(xlabel="step", ylabel="risk", ylim=(0, None))
    label_panel(risk, "a", "escape from a large norm", legend=True)
    angle.set(xlabel="step", ylabel="angular update (rad)", ylim=(0, None))
    label_panel(angle, "b", "the angular update that causes it")
    return figure


EXPERIMENT = Experiment(
    id="nrq-escape",
    title="The risk dips and climbs back after the lr is divided by 10; with rescaled weights it does not",
    source="nrq fig. 2 e-h, cor. 2",
    scales={
        "smoke": Config(
            weight_decay=0.04, xi=0.65, drop_at=1000, steps=7000, corollary_steps=1500, bump=1.5, trials=400, every=10
        ),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
