"""sharp-schedulers: gradient descent with weight decay is projected descent with the GWSI scheduler (B.7, B.9)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, shown_steps
from equilibria.theory.effective_schedulers import (
    gwsi_moment_step,
    gwsi_parameters,
    gwsi_step,
    quasi_rmsprop_parameters,
    rmsprop_scheduler_step,
)
from equilibria.theory.stability import effective_lr, projected_step

Array = NDArray[np.float64]
_GWSI = Source("sharp", "Theorem B.7", law="effective_schedulers.gwsi_step")
_QUASI = Source(
    "sharp",
    "Theorem B.9",
    corrected="Appendix E.2 prints sqrt((decay - 1)/2), which is imaginary, for the base lr sqrt((1/decay - 1)/2)",
    law="effective_schedulers.quasi_rmsprop_parameters",
)
_LR = 0.5


@dataclass(frozen=True)
class Config:
    """lr*wd of the runs, flow time t*lr*wd of each, and a start at the edge of stability of Appendix F's loss."""

    intrinsic_lrs: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    flow_time: float = 3.0
    height: float = 0.8
    kick: float = 1e-3
    seed: int = 0


def tasks(config: Config) -> dict[str, float]:
    """One run per lr*wd."""
    return {f"lr-wd-{rate:g}": rate for rate in config.intrinsic_lrs}


def run_task(config: Config, rate: float) -> Arrays:
    """Run gradient descent with weight decay, and every scheduler on the gradients of that run.

    On its own gradients a scheduler would diverge from the run at the edge of stability, where rounding grows.
    """
    steps = round(config.flow_time / rate)
    frame = np.linalg.qr(np.random.default_rng(config.seed).standard_normal((3, 3)))[0]
    w = _start(config, rate) @ frame.T
    decay = rate / _LR
    exact, quasi = gwsi_parameters(rate), quasi_rmsprop_parameters(rate)
    lr = float(effective_lr(_LR, decay, norm_sq=float(w @ w)))
    moment = quasi_moment = lr**-2
    names = ("effective_lr", "gwsi", "moment_form", "quasi", "residual", "turn_error")
    series = {name: np.empty(steps) for name in names}
    for step in range(steps):
        norm_sq = float(w @ w)
        theta = w / math.sqrt(norm_sq)
        true = float(effective_lr(_LR, decay, norm_sq=norm_sq))
        gradient = frame @ _gradient(frame.T @ theta)
        unit = float(gradient @ gradient)
        plain = float(rmsprop_scheduler_step(true**-2, unit, parameters=quasi))
        next_w = (1 - rate) * w - _LR * gradient / math.sqrt(norm_sq)
        next_true = float(effective_lr(_LR, decay, norm_sq=float(next_w @ next_w)))
        turned = projected_step(theta, gradient, effective_lr=true)
        values = (true, lr, moment**-0.5, quasi_moment**-0.5, next_true**-2 - plain, _gap(next_w, turned))
        for name, value in zip(names, values, strict=True):
            series[name][step] = value
        lr = float(gwsi_step(lr, unit, intrinsic_lr=rate))
        moment = float(gwsi_moment_step(moment, unit, parameters=exact))
        quasi_moment = float(rmsprop_scheduler_step(quasi_moment, unit, parameters=quasi))
        series["residual"][step] -= _residual(true**-2, unit, quasi.decay, quasi.base_lr)
        w = next_w
    return _summary(series, rate)


def _start(config: Config, rate: float) -> Array:
    """A start kicked across the manifold of minimisers at ``height``, with the norm of the edge of stability."""
    flat = math.sqrt((1 - config.height**2) / 2)
    kick = config.kick * math.sqrt(rate / 2)
    theta = np.array([flat + kick, flat - kick, config.height])
    sharpness = 6 / (1 - config.height**2)
    return np.asarray(theta / np.linalg.norm(theta) * math.sqrt(_LR * sharpness / (2 * (1 - rate))))


def _gradient(w: Array) -> Array:
    """Gradient of Appendix F's loss 2 - (x + y)/sqrt(x^2 - x y + y^2), which does not depend on z."""
    x, y, _ = w
    radius = math.sqrt(x * x - x * y + y * y)
    along = (x + y) / (2 * radius**3)
    return np.array([-1 / radius + along * (2 * x - y), -1 / radius + along * (2 * y - x), 0.0])


def _residual(moment: float, unit_grad_sq: float, decay: float, base_lr: float) -> float:
    """Excess of GWSI's moment over RMSprop's after one step, to second order in 1 - decay."""
    size = unit_grad_sq / base_lr**2
    return (1 - decay) ** 2 * (6 * moment - 16 * size + 4 * size**2 / moment) / 16


def _gap(w: Array, theta: Array) -> float:
    return float(np.linalg.norm(w / np.linalg.norm(w) - theta))


def _summary(series: Mapping[str, Array], rate: float) -> Arrays:
    true = series["effective_lr"]
    keep = shown_steps(len(true))
    errors = {f"{name}_error": np.abs(series[name] / true - 1) for name in ("gwsi", "moment_form", "quasi")}
    return {
        "time": keep * rate,
        **{name: values[keep] for name, values in {**errors, "effective_lr": true}.items()},
        **{f"worst_{name}": values.max() for name, values in errors.items()},
        "worst_residual": np.asarray(np.max(np.abs(series["residual"]) * true**2)),
        "worst_turn_error": np.asarray(series["turn_error"].max()),
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge GWSI to rounding, and the first-order error of quasi-RMSprop."""
    rates = np.array(config.intrinsic_lrs)
    runs = [results[f"lr-wd-{rate:g}"] for rate in rates]
    worst = {name: np.array([float(run[f"worst_{name}"]) for run in runs]) for name in _WORST}
    claims = [
        Source("sharp", "Lemma 3.1", law="stability.projected_step")
        .says("A step of descent with weight decay is a projected step with the effective lr: largest error")
        .to_rounding(worst["turn_error"].max(), operations=20),
        # A step makes some four roundings, possibly all of one sign, and forgets earlier ones at the rate 4 lr wd.
        _GWSI.says(
            "GWSI keeps lock-step with descent with weight decay: relative error of the effective lr"
        ).to_rounding(worst["gwsi_error"].max(), operations=1 / rates.min()),
        Source("sharp", "Definition B.6", law="effective_schedulers.gwsi_moment_step")
        .says("The printed form does so too, with more cancellation")
        .to_rounding(worst["moment_form_error"].max(), operations=4 / rates.min()),
        _QUASI.says("The error of the quasi-RMSprop scheduler is proportional to lr*wd: the order").of_order(
            1.0, sizes=rates.tolist(), errors=worst["quasi_error"].tolist(), absolute=0.15
        ),
        Source("", "ours", law="effective_schedulers.quasi_rmsprop_parameters")
        .says("The remainder of one step beyond (1 - decay)^2 (6v - 16G + 4G^2/v)/16 is of third order: the order")
        .of_order(3.0, sizes=rates.tolist(), errors=worst["residual"].tolist(), absolute=0.3),
        Source("sharp", "Theorem B.7", law="effective_schedulers.gwsi_parameters")
        .says("GWSI's base lr exceeds sqrt(2 lr wd) by the factor 1 + (5/4) lr wd: excess over lr wd, smallest lr wd")
        .near(
            1.25,
            (gwsi_parameters(float(rates.min())).base_lr / math.sqrt(2 * rates.min()) - 1) / rates.min(),
            relative=5 * float(rates.min()),  # the next term of the series is of that order
        ),
    ]
    return Outcome(claims, {"lr_wd": rates, **worst})


_WORST = ("gwsi_error", "moment_form_error", "quasi_error", "residual", "turn_error")


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the effective lr, and the error of each scheduler."""
    figure, (lr, errors, order) = panels(1, 3, width=2.7)
    for rate, colour in zip(config.intrinsic_lrs, COLOURS, strict=False):
        run = results[f"lr-wd-{rate:g}"]
        lr.plot(run["time"], run["effective_lr"], color=colour, lw=0.7, label=f"lr wd = {rate:g}")
        errors.plot(run["time"], np.maximum(run["quasi_error"], 1e-18), color=colour, lw=0.7)
        errors.plot(run["time"], np.maximum(run["gwsi_error"], 1e-18), color=colour, lw=0.7, ls=":")
    lr.set(xlabel="flow time $t\\,\\eta_{in}$", ylabel="effective lr $\\tilde\\eta$")
    label_panel(lr, "a", "descent with weight decay at the edge", legend=True)
    errors.set(yscale="log", xlabel="flow time $t\\,\\eta_{in}$", ylabel="relative error", ylim=(1e-17, 1))
    errors.plot([], [], color=THEORY, lw=0.8, label="quasi-RMSprop")
    errors.plot([], [], color=THEORY, lw=0.8, ls=":", label="GWSI")
    label_panel(errors, "b", "schedulers fed the same gradients", legend=True)
    rates = np.array(config.intrinsic_lrs)
    worst = np.array([float(results[f"lr-wd-{rate:g}"]["worst_quasi_error"]) for rate in rates])
    order.plot(rates, worst, "o", label="quasi-RMSprop, largest error")
    order.plot(rates, worst[-1] * rates / rates[-1], color=THEORY, label="$\\propto \\eta_{in}$")
    order.set(xscale="log", yscale="log", xlabel="$\\eta_{in}$ = lr wd", ylabel="relative error")
    label_panel(order, "c", "first order", legend=True)
    return {"theorems-b7-b9": figure}


EXPERIMENT = Experiment(
    id="sharp-schedulers",
    title="Weight decay as an effective-lr scheduler: GWSI to rounding, quasi-RMSprop to first order",
    source="sharp thm. B.7, B.9",
    scales={"smoke": Config(intrinsic_lrs=(1e-2, 3e-3, 1e-3), flow_time=2.0), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
