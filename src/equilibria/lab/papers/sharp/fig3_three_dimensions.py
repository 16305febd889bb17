"""sharp-3d: the flow to the flattest minimiser on losses in three dimensions (figure 3, appendix F)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, shown_steps
from equilibria.lab.problems import Simulation, Sphere3D, SphereValley
from equilibria.lab.problems.valleys import drift_factor
from equilibria.theory.flow import curve_position, integrate_flow
from equilibria.theory.flow_examples import sphere3d_angle
from equilibria.theory.hamiltonian import (
    energy,
    mean_square_displacement,
    rest_point,
    stability_offset,
    two_cycle_angle,
)
from equilibria.theory.rules import SGD
from equilibria.theory.stability import edge_of_stability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
_APPENDIX = Source("sharp", "fig. 3c, Appendix F", law="flow_examples.sphere3d_angle")
_FLOW = Source("sharp", "Theorem 4.6, eq. (3)", law="flow.integrate_flow")
_CYCLE = Source("", "ours, on Appendix F's run", law="hamiltonian.two_cycle_angle")
_DRIFT = Source(
    "sharp",
    "Section 4.2.3",
    corrected="two steps move the minimiser by -2 h^2 grad log lambda1, as Appendix H has it; Section 4.2.3 has -4 h^2",
    law="flow.flow_velocity",
)
_MEAN = Source(
    "sharp",
    "Section 4.2.3",
    corrected="the mean of h^2, not of 2 h^2, is 2 lr wd/(4 + g^2), and g is squared",
    law="hamiltonian.mean_square_displacement",
)
_CUBIC = -19 / 6  # p3 of Appendix F's loss across its minimisers


@dataclass(frozen=True)
class Config:
    """Appendix F's run, and runs of ``flow_time`` from the edge of stability at several lr*wd on two losses."""

    lr: float = 0.5
    weight_decay: float = 0.08
    start: tuple[float, float, float] = (0.3, 1.3, 1.2)
    steps: int = 1000
    intrinsic_lrs: tuple[float, ...] = (4e-2, 1e-2, 2.5e-3, 6.25e-4, 1.5625e-4, 4e-5)
    flow_time: float = 2.0
    height: float = 0.8
    kick: float = 1e-3
    valley_lrs: tuple[float, ...] = (1e-2, 2.5e-3, 6.25e-4, 1.5625e-4, 4e-5)
    valley_start: float = 1.2
    seed: int = 0

    @property
    def valley(self) -> SphereValley:
        """A loss with a bent curve of minimisers, where no coordinate is conserved."""
        return SphereValley(1.0, 8.0, rotation_seed=self.seed)


def tasks(config: Config) -> dict[str, tuple[str, float]]:
    """The run of the figure, and one run per loss and lr*wd."""
    return {
        "figure": ("figure", config.lr * config.weight_decay),
        **{f"sphere-{rate:g}": ("sphere", rate) for rate in config.intrinsic_lrs},
        **{f"valley-{rate:g}": ("valley", rate) for rate in config.valley_lrs},
    }


def run_task(config: Config, task: tuple[str, float]) -> Arrays:
    """Run one of the three kinds."""
    kind, rate = task
    return {"figure": _figure_run, "sphere": _sphere_run, "valley": _valley_run}[kind](config, rate)


def _path(problem: Sphere3D | SphereValley, start: Array, *, rate: float, lr: float, steps: int) -> Array:
    """Weights before every step in the coordinates of the loss, (steps, 3)."""
    rule = SGD(lr=lr, weight_decay=rate / lr)
    run = Simulation(problem, start, rule=rule, steps=steps, record=["weights"]).run()
    return problem.coordinates(run["weights"][:, 0])


def _figure_run(config: Config, rate: float) -> Arrays:
    problem = Sphere3D(rotation_seed=config.seed)
    start = problem.at(config.start)
    path = _path(problem, start, rate=rate, lr=config.lr, steps=config.steps)
    weights = problem.at(path)
    units = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    gradients = np.linalg.norm(problem.gradient(units), axis=1)
    return {"path": path, "loss": problem.value(weights), "gradient": gradients}


def _kicked(problem: Sphere3D | SphereValley, point: Array, *, config: Config, rate: float) -> Array:
    """A minimiser moved a little across the valley, with the norm at which the stability ratio is 1."""
    sharpness = problem.sharpness(point)
    across = np.linalg.eigh(problem.hessian(point)[0])[1][:, -1]
    moved = point + config.kick * math.sqrt(rate) * across
    norm_sq = edge_of_stability(config.lr, rate / config.lr, sharpness=sharpness).norm_sq
    return moved / np.linalg.norm(moved) * np.sqrt(norm_sq)[:, None]


def _sphere_run(config: Config, rate: float) -> Arrays:
    problem = Sphere3D(rotation_seed=config.seed)
    start = _kicked(problem, problem.minimiser([config.height]), config=config, rate=rate)
    path = _path(problem, start, rate=rate, lr=config.lr, steps=round(config.flow_time / rate))
    units = path / np.linalg.norm(path, axis=1, keepdims=True)
    time = np.asarray(rate * np.arange(len(path)), np.float64)
    latitude, h = np.arcsin(units[:, 2]), (units[:, 0] - units[:, 1]) / math.sqrt(2)
    flow = sphere3d_angle(math.asin(config.height), time=time)
    conserved = path[:, 2] / (path[0, 2] * (1 - rate) ** np.arange(len(path))) - 1
    expected = mean_square_displacement(math.sqrt(2 * rate), grad_norm=2 * np.tan(latitude))
    return {
        **_thinned(time, latitude, flow, h),
        "worst": np.asarray(np.max(np.abs(units[:, 2] - np.sin(flow)))),
        "mean_square": np.asarray(np.mean(h**2 / expected)),
        "drift": np.asarray(drift_factor(latitude, 2 * np.tan(latitude), h)),
        "conserved": np.asarray(np.max(np.abs(conserved))),
    }


def _valley_run(config: Config, rate: float) -> Arrays:
    problem = config.valley
    start = _kicked(problem, problem.minimiser([config.valley_start]), config=config, rate=rate)
    path = _path(problem, start, rate=rate, lr=config.lr, steps=round(config.flow_time / rate))
    units = path / np.linalg.norm(path, axis=1, keepdims=True)
    time = np.asarray(rate * np.arange(len(path)), np.float64)
    angle = np.arctan2(path[:, 1], path[:, 2])
    grid = np.linspace(0, time[-1], 2001)
    law = integrate_flow(lambda point: _valley_slope(config, point), [config.valley_start], times=grid)
    flow = np.interp(time, grid, law.points[:, 0])
    return {
        **_thinned(time, angle, flow, units[:, 0]),
        "worst": np.asarray(np.max(np.abs(angle - flow))),
        "end": angle[-1],
    }


def _valley_slope(config: Config, angle: Array) -> Array:
    a, b = config.valley.a, config.valley.b
    return b * np.sin(2 * angle) / (a + b * np.sin(angle) ** 2)


def _thinned(time: Array, angle: Array, flow: Array, h: Array) -> dict[str, Array]:
    keep = shown_steps(len(time))
    return {"time": time[keep], "angle": angle[keep], "flow": flow[keep], "h": h[keep]}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the end of the run, its speed, and the drift that drives it."""
    spheres = [results[f"sphere-{rate:g}"] for rate in config.intrinsic_lrs]
    valleys = [results[f"valley-{rate:g}"] for rate in config.valley_lrs]
    claims = [
        *_judge_figure(config, results["figure"]),
        *_judge_flow(config, [float(run["worst"]) for run in spheres]),
        *_judge_valley(config, [float(run["worst"]) for run in valleys], float(valleys[-1]["end"])),
        *_judge_motion(config, spheres),
    ]
    numbers = {
        "lr_wd": config.intrinsic_lrs,
        **{name: [float(run[name]) for run in spheres] for name in ("worst", "mean_square", "drift")},
        "valley_lr_wd": config.valley_lrs,
        **{f"valley_{name}": [float(run[name]) for run in valleys] for name in ("worst", "end")},
        "cycle_loss": results["figure"]["loss"][-1],
    }
    return Outcome(claims, numbers)


def _judge_figure(config: Config, run: Arrays) -> list[Claim]:
    rate, path = config.lr * config.weight_decay, run["path"]
    units = path / np.linalg.norm(path, axis=1, keepdims=True)
    middle = units[-1] + units[-2]
    away = middle / np.linalg.norm(middle) - np.array([0.5, 0.5, 0.0]) ** 0.5
    turned = math.asin(abs(units[-1, 0] - units[-1, 1]) / math.sqrt(2))
    effective = config.lr / ((1 - rate) * float(path[-1] @ path[-1]))
    steepness = Sphere3D().sharpness(Sphere3D().minimiser([0.6]))[0]
    offset = float(stability_offset(rate, cubic=_CUBIC))
    return [
        _APPENDIX.says(
            "It ends in oscillation about the flattest minimiser (1, 1, 0)/sqrt(2): distance from it"
        ).to_rounding(
            float(np.linalg.norm(away)),
            operations=100,  # weight decay has shrunk z below one rounding by then
        ),
        _CYCLE.says("It ends in a 2-cycle at the angle asin(sqrt(lr wd/2)) from the minimiser").near(
            float(two_cycle_angle(rate)), turned, relative=100 * float(np.finfo(np.float64).eps), unit="rad"
        ),
        Source("", "ours, on Appendix F's run", law="hamiltonian.stability_offset")
        .says("The stability ratio there is 1 - q lr wd/4 with q = -9")
        .near(
            offset,
            effective * 6 / 2,
            absolute=(offset - 1) ** 2,  # the square of the first-order term
        ),
        _APPENDIX.says(
            "Spherical sharpness of the minimiser at z = 0.6: 6/(1 - z^2), twice the factor before the matrix"
        ).near(6 / (1 - 0.36), float(steepness), relative=100 * float(np.finfo(np.float64).eps)),
    ]


def _swing(config: Config, rate: float, *, grad_norm: float) -> float:
    """Largest |u| on the orbit that the kick starts: the stability ratio then swings by eta u/2 about 1."""
    scaled = config.kick * math.sqrt(rate) / math.sqrt(2 * rate)
    excess = float(energy(scaled, 0.0, grad_norm=grad_norm)) - float(rest_point(grad_norm).energy)
    return math.sqrt(2 * excess)


def _judge_flow(config: Config, worst: list[float]) -> list[Claim]:
    """Judge the error of z: z (1 - z^2) eta u/4, of order eta, as the in-plane radius follows the stability ratio."""
    rates = np.array(config.intrinsic_lrs)
    etas = np.sqrt(2 * rates)
    swing = _swing(config, rates[-1], grad_norm=2 * math.tan(math.asin(config.height)))
    steepest = 2 / math.sqrt(27)  # the maximum of z (1 - z^2)
    return [
        _APPENDIX.says(f"tan(latitude) falls as exp(-tau): largest error of z at lr wd = {rates[-1]:g}").at_most(
            steepest * etas[-1] * swing / 4 * (1 + etas[-1] * swing), worst[-1]
        ),
        # At the largest lr*wd the next order is a share eta u/2 of the first, which tilts the whole line by this much.
        _FLOW.says("The error falls as (lr wd)^(1/2), better than the theorem's 1/4 - o(1): the order").of_order(
            0.5,
            sizes=rates.tolist(),
            errors=worst,
            absolute=math.log1p(etas[0] * swing / 2) / math.log(rates[0] / rates[-1]),
        ),
    ]


def _judge_valley(config: Config, worst: list[float], end: float) -> list[Claim]:
    rates = np.array(config.valley_lrs)
    expected, half, double = (_valley_flow(config, speed * config.flow_time) for speed in (1.0, 0.5, 2.0))
    swing = _swing(config, rates[-1], grad_norm=abs(float(_valley_slope(config, np.asarray(config.valley_start)))))
    return [
        _FLOW.says(
            f"On a bent valley the flow ends at {expected:.4f}; twice the speed: {double:.4f}, half: {half:.4f}"
        ).near(expected, end, absolute=min(half - expected, expected - double) / 4, unit="rad"),
        _FLOW.says("On the bent valley, too, the largest error falls as (lr wd)^(1/2): the order").of_order(
            0.5,
            sizes=rates.tolist(),
            errors=worst,
            absolute=math.log1p(math.sqrt(2 * rates[0]) * swing / 2) / math.log(rates[0] / rates[-1]),
        ),
    ]


def _valley_flow(config: Config, time: float) -> float:
    def slope(angle: float) -> float:
        return float(_valley_slope(config, np.asarray(angle)))

    return curve_position(config.valley_start, time=time, minimum=0.0, slope=slope)


def _judge_motion(config: Config, runs: list[Arrays]) -> list[Claim]:
    rate = config.intrinsic_lrs[-1]
    eta, steps = math.sqrt(2 * rate), config.flow_time / rate
    swing = _swing(config, rate, grad_norm=2 * math.tan(math.asin(config.height)))
    slope = 2 * np.tan(runs[-1]["angle"])
    return [
        _MEAN.says(f"Mean of h^2 over 2 lr wd/(4 + g^2) at lr wd = {rate:g}").near(
            1.0,
            float(runs[-1]["mean_square"]),
            relative=2 * swing / (2 * eta * steps),  # u(end) - u(start) over C_b times the time
            printed=float(np.mean((4 + slope**2) / (4 + slope) / 2)),
        ),
        _DRIFT.says(f"Two steps move the minimiser by this times h^2 grad log lambda1, at lr wd = {rate:g}").near(
            -2.0,
            float(runs[-1]["drift"]),
            relative=eta * swing / 2,  # Appendix H: corrections of relative order eta u
            printed=-4.0,
        ),
        Source("", "ours, on Appendix F's loss", law="flow_examples.sphere3d_angle")
        .says("z is not in the loss: weight decay alone shrinks it, by 1 - lr wd per step; largest relative error")
        .to_rounding(
            max(float(run["conserved"]) for run in runs),
            operations=steps * math.exp(config.flow_time),  # a rounding of |w| per step, and z shrinks meanwhile
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw norm, gradient and trajectory on the sphere, as in figure 3; below, the flow and its errors."""
    figure, (norm, gradient, globe, flow, errors, valley) = panels(2, 3, width=2.6, height=2.4)
    _draw_norms(norm, gradient, config, results["figure"])
    _draw_globe(globe, results["figure"]["path"])
    for rate, colour in zip(config.intrinsic_lrs, COLOURS, strict=False):
        run = results[f"sphere-{rate:g}"]
        flow.plot(run["time"], np.tan(run["angle"]), color=colour, lw=0.8, label=f"{rate:g}")
    flow.plot(run["time"], np.tan(run["flow"]), color=THEORY, ls="--", lw=1, label="$e^{-\\tau}$")
    flow.set(yscale="log", xlabel="flow time $\\tau = t\\,\\eta_{in}$", ylabel="$\\tan$ latitude")
    flow.legend(title="$\\eta_{in}$")
    label_panel(flow, "d", "the flow to the flattest")
    _draw_errors(errors, config, results)
    for rate, colour in zip(config.valley_lrs, COLOURS[1:], strict=False):
        run = results[f"valley-{rate:g}"]
        valley.plot(run["time"], run["angle"], color=colour, lw=0.8)
    valley.plot(run["time"], run["flow"], color=THEORY, ls="--", lw=1, label="flow (3)")
    valley.set(xlabel="flow time $\\tau$", ylabel="angle along the valley (rad)")
    label_panel(valley, "f", "a bent valley", legend=True)
    return {"figure-3": figure}


def _draw_norms(norm: Axes, gradient: Axes, config: Config, run: Arrays) -> None:
    shown = slice(0, min(120, config.steps))
    sizes = np.linalg.norm(run["path"], axis=1)[shown]
    norm.plot(sizes, color=COLOURS[0])
    norm.axhline(
        math.sqrt(3 * config.lr), color=THEORY, ls="--", lw=0.9, label="$(\\eta \\lambda_1/2)^{1/2}$, flattest"
    )
    label_panel(norm, "a", "the norm falls ...", xlabel="step", ylabel="$||w_t||$", legend=True)
    gradient.plot(run["gradient"][shown], color=COLOURS[1])
    gradient.set(xlabel="step", ylabel="$||\\nabla L(\\theta_t)||$", ylim=(0, None))
    label_panel(gradient, "b", "... while the gradient is small")


def _draw_globe(axes: Axes, path: Array) -> None:
    """Draw the front of the unit sphere, seen from far away; darker is lower loss."""
    toward = np.array([1.0, 0.55, 0.45]) / np.linalg.norm([1.0, 0.55, 0.45])
    right = np.cross([0.0, 0.0, 1.0], toward)
    right /= np.linalg.norm(right)
    screen = np.stack([right, np.cross(toward, right)])
    side = np.linspace(-1, 1, 241)
    across, up = np.meshgrid(side, side)
    depth_sq = 1 - across**2 - up**2
    points = np.stack([across, up, np.sqrt(np.maximum(depth_sq, 0))], -1) @ np.vstack([screen, toward])
    loss = Sphere3D().value(points.reshape(-1, 3)).reshape(across.shape)
    axes.imshow(
        np.where(depth_sq > 0, np.sqrt(loss), np.nan), extent=(-1, 1, -1, 1), origin="lower", cmap="Blues_r", vmax=2.4
    )
    latitude = np.linspace(-np.pi / 2, np.pi / 2, 200)
    level = np.cos(latitude) / math.sqrt(2)
    curve = np.stack([level, level, np.sin(latitude)], axis=1)
    curve = curve[curve @ toward > 0] @ screen.T
    axes.plot(*curve.T, color=THEORY, lw=1.2, label="minimisers")
    units = path / np.linalg.norm(path, axis=1, keepdims=True)
    axes.plot(*(units[:200] @ screen.T).T, ".-", color=COLOURS[4], lw=0.5, ms=2, label="$\\theta_t$")
    axes.plot(*(screen @ np.array([0.5, 0.5, 0.0]) ** 0.5), "*", color="#c00000", ms=8, label="flattest")
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    axes.set_axis_off()
    axes.legend()
    label_panel(axes, "c", "trajectory on the sphere", ylabel="")


def _draw_errors(axes: Axes, config: Config, results: TaskResults) -> None:
    for kind, rates, colour in (("sphere", config.intrinsic_lrs, 0), ("valley", config.valley_lrs, 1)):
        sizes = np.array(rates)
        worst = np.array([float(results[f"{kind}-{rate:g}"]["worst"]) for rate in rates])
        name = "$z$, Appendix F" if kind == "sphere" else "angle, bent valley"
        axes.plot(sizes, worst, "o", color=COLOURS[colour], label=name)
        axes.plot(sizes, worst[-1] * np.sqrt(sizes / sizes[-1]), color=THEORY, ls="--", lw=0.9)
    axes.plot([], [], color=THEORY, ls="--", lw=0.9, label="$\\propto \\eta_{in}^{1/2}$")
    axes.set(xscale="log", yscale="log", xlabel="$\\eta_{in}$ = lr wd", ylabel="largest error")
    label_panel(axes, "e", "distance from the flow", legend=True)


EXPERIMENT = Experiment(
    id="sharp-3d",
    title="Descent with weight decay drifts to the flattest minimiser: the 3-D example and its flow",
    source="sharp fig. 3, app. F",
    scales={
        "smoke": Config(intrinsic_lrs=(1e-2, 2.5e-3, 6.25e-4), valley_lrs=(1e-2, 2.5e-3, 6.25e-4)),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
