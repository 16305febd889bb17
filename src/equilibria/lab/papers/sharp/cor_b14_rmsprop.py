"""sharp-rmsprop: scalar RMSprop follows the flow in the full space, at a speed that C_b sets (corollary B.14)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, not_demanded
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, shown_steps
from equilibria.lab.problems import ScalarRMSpropRule, Simulation, Valley
from equilibria.lab.problems.valleys import drift_factor
from equilibria.theory.flow_examples import rmsprop_valley_position
from equilibria.theory.hamiltonian import energy, full_space_energy_rate, mean_square_displacement, rest_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
_FLOW = Source("sharp", "Corollary B.14, eq. (8)", law="flow_examples.rmsprop_valley_position")
_DECAY = Source(
    "sharp",
    "Corollary B.14",
    corrected="the decay is 1 - C_b eta^2 + O(eta^4); with the printed O(eta^2) it says nothing about C_b",
    law="flow_examples.rmsprop_valley_position",
)
_MEAN = Source("sharp", "Appendix N.2", law="hamiltonian.mean_square_displacement")
_DRIFT = Source("sharp", "Definition H.2", law="flow.flow_velocity")
_ENERGY = Source("", "ours, on Theorem H.22", law="hamiltonian.full_space_energy_rate")
_GRID = 601


@dataclass(frozen=True)
class Config:
    """Runs on (1 + y^2) x^2/2 from y = ``height`` at the edge of stability, and at y = 0, where oscillations grow."""

    c_bs: tuple[float, ...] = (0.25, 1.0, 2.0, 4.0)
    etas: tuple[float, ...] = (0.1, 0.05, 0.025, 0.0125, 0.00625)
    flow_time: float = 3.0
    height: float = 2.0
    kick: float = 0.01
    straight_eta: float = 0.01
    straight_offset: float = 0.1
    straight_time: float = 1.0

    @property
    def ordered(self) -> tuple[float, ...]:
        """Values of C_b whose amplification, exp(C_b flow_time), leaves the error small enough to measure its order."""
        return tuple(c_b for c_b in self.c_bs if c_b * self.flow_time <= 6)


def tasks(config: Config) -> dict[str, tuple[float, float | None]]:
    """C_b and eta of a run along the valley; C_b alone of one at y = 0."""
    along = {_key(c_b, eta): (c_b, eta) for c_b in config.c_bs for eta in config.etas}
    return {**along, **{f"straight-{c_b:g}": (c_b, None) for c_b in config.c_bs}}


def _key(c_b: float, eta: float) -> str:
    return f"cb-{c_b:g}-eta-{eta:g}"


def run_task(config: Config, task: tuple[float, float | None]) -> Arrays:
    """Run along the valley, or at y = 0."""
    c_b, eta = task
    return _straight(config, c_b) if eta is None else _along(config, c_b, eta)


def _trajectory(start: tuple[float, float], *, eta: float, c_b: float, moment: float, steps: int) -> tuple[Array, ...]:
    """x, y, and the effective lr eta/sqrt(v) of every step, with v recomputed from the gradients."""
    from scipy.signal import lfilter

    decay = 1 - c_b * eta**2
    rule = ScalarRMSpropRule(lr=eta, decay=decay, second_moment=moment)
    run = Simulation(Valley(), [start], rule=rule, steps=steps, record=["weights"]).run()
    weights = run["weights"][:, 0]
    squares = np.sum(Valley().gradient(weights) ** 2, axis=1)
    later, _ = lfilter([1 - decay], [1, -decay], squares, zi=[decay * moment])
    return weights[:, 0], weights[:, 1], eta / np.sqrt(np.append(moment, later[:-1]))


def _along(config: Config, c_b: float, eta: float) -> Arrays:
    sharpness = 1 + config.height**2
    x, y, rate = _trajectory(
        (config.kick * eta, config.height),
        eta=eta,
        c_b=c_b,
        moment=(eta * sharpness / 2) ** 2,
        steps=round(config.flow_time / eta**2),
    )
    time = eta**2 * np.arange(len(x))
    grid = np.linspace(0, time[-1], _GRID)
    law = np.array([rmsprop_valley_position(config.height, time=float(moment), c_b=c_b) for moment in grid])
    offset = ((rate * (1 + y**2) / 2) ** -2 - 1) / eta
    slope = 2 * y / (1 + y**2)
    expected = mean_square_displacement(eta, grad_norm=np.abs(slope), c_b=c_b)  # y may overshoot 0 at large eta
    keep = shown_steps(len(x))
    return {
        "time": time[keep],
        "y": y[keep],
        "x": x[keep],
        "flow": np.interp(time[keep], grid, law),
        "worst": np.asarray(np.max(np.abs(y - np.interp(time, grid, law)))),
        "end": y[-1],
        "mean_square": np.asarray(np.mean(x**2 / expected)),
        "swing": np.asarray(np.ptp(offset) / 2),
        "drift": np.asarray(drift_factor(_minimiser(x, y), slope, x)),
    }


def _minimiser(x: Array, y: Array) -> Array:
    """y at the end of the gradient flow, which conserves ln y + (y^2 - x^2)/2."""
    from scipy.special import lambertw

    squared = lambertw(y**2 * np.exp(y**2 - x**2))  # type: ignore[call-overload]  # the stubs know no float64 array
    return np.asarray(np.sqrt(squared.real))


def _straight(config: Config, c_b: float) -> Arrays:
    """Excess energy and its rate of growth at y = 0, where the valley is straight and exactly quadratic."""
    eta, start = config.straight_eta, float(rest_point(0.0, c_b).displacement)
    x, _, rate = _trajectory(
        (start * eta, 0.0),
        eta=eta,
        c_b=c_b,
        moment=(eta / 2) ** 2 * (1 + eta * config.straight_offset),
        steps=round(config.straight_time / eta**2),
    )
    offset = ((rate / 2) ** -2 - 1) / eta
    excess = energy(x / eta, offset, c_b=c_b) - rest_point(0.0, c_b).energy
    time = eta**2 * np.arange(len(x))
    period = round(float(rest_point(0.0, c_b).period) / eta)
    whole = len(x) // period * period
    means = excess[:whole].reshape(-1, period).mean(axis=1)
    middles = time[:whole].reshape(-1, period).mean(axis=1)
    growth = np.polyfit(middles, np.log(means), 1)[0]
    return {"time": middles, "excess": means, "growth": np.asarray(growth)}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the ends of the runs, their distances from the flow, and the amplification that grows with C_b."""
    smallest = config.etas[-1]
    table = {
        name: [[float(results[_key(c_b, eta)][name]) for eta in config.etas] for c_b in config.c_bs]
        for name in ("worst", "end", "mean_square", "drift")
    }
    claims = [
        *(_order(config, results, c_b) for c_b in config.ordered),
        *_judge_speed(config, results),
        *_judge_motion(config, results[_key(1.0, smallest)]),
        *(
            _ENERGY.says(f"Excess energy at y = 0 grows at the rate C_b per flow time: C_b = {c_b:g}").near(
                float(full_space_energy_rate(c_b=c_b)),
                float(results[f"straight-{c_b:g}"]["growth"]),
                relative=2 * config.straight_eta,  # the law is the limit of small eta
            )
            for c_b in config.c_bs
        ),
    ]
    flows = [rmsprop_valley_position(config.height, time=config.flow_time, c_b=c_b) for c_b in config.c_bs]
    return Outcome(claims, {"c_b": config.c_bs, "eta": config.etas, "flow": flows, **table})


def _order(config: Config, results: TaskResults, c_b: float) -> Claim:
    """Claim first order; at the largest eta the next order, a share eta u/2 of the first, tilts the line."""
    runs = [results[_key(c_b, eta)] for eta in config.etas]
    share = config.etas[0] * float(runs[0]["swing"]) / 2
    return _FLOW.says(
        f"Scalar RMSprop follows the flow, with an error of first order in eta (theorem: 1/2): C_b = {c_b:g}"
    ).of_order(
        1.0,
        sizes=config.etas,
        errors=[float(run["worst"]) for run in runs],
        absolute=math.log1p(share) / math.log(config.etas[0] / config.etas[-1]),
    )


def _judge_speed(config: Config, results: TaskResults) -> list[Claim]:
    smallest = config.etas[-1]
    flow = {c_b: rmsprop_valley_position(config.height, time=config.flow_time, c_b=c_b) for c_b in (0.25, 1.0)}
    errors = {c_b: float(results[_key(c_b, smallest)]["worst"]) for c_b in config.c_bs}
    last, first = max(config.c_bs), min(config.c_bs)
    amplified = _ENERGY.says(
        f"The error grows faster than C_b, as the oscillation is amplified: C_b = {last:g} over {first:g}"
    ).at_least(last / first, errors[last] / errors[first])
    return [
        _DECAY.says(
            "C_b sets the speed: decay 1 - eta^2, which is 1 - eta^2/4 + O(eta^2), ends where C_b = 1 leads, "
            f"not at the {flow[0.25]:.3f} of C_b = 1/4"
        ).near(
            flow[1.0],
            float(results[_key(1.0, smallest)]["end"]),
            absolute=(flow[0.25] - flow[1.0]) / 4,  # a quarter of the distance between the two
        ),
        not_demanded(amplified) if last in config.ordered else amplified,
    ]


def _judge_motion(config: Config, run: Arrays) -> list[Claim]:
    eta, swing = config.etas[-1], float(run["swing"])
    return [
        _MEAN.says(f"Mean of h^2 over eta^2/(4 + (2/C_b) g^2): C_b = 1, eta = {eta:g}").near(
            1.0,
            float(run["mean_square"]),
            relative=2 * swing * eta / config.flow_time,  # u(end) - u(start) over C_b times the time
        ),
        _DRIFT.says(f"Two steps move the minimiser by this times h^2 grad log lambda1: C_b = 1, eta = {eta:g}").near(
            -2.0,
            float(run["drift"]),
            relative=eta * swing / 2,  # Appendix H: corrections of relative order eta u
        ),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the flow, the oscillation, the errors and the amplification; the corollary has no figure."""
    figure, (flow, height, errors, growth) = panels(2, 2, height=2.3)
    shown = config.etas[-2]
    for c_b, colour in zip(config.c_bs, COLOURS, strict=False):
        run = results[_key(c_b, shown)]
        flow.plot(run["time"], run["y"], color=colour, lw=0.9, label=f"{c_b:g}")
        flow.plot(run["time"], run["flow"], color=THEORY, ls="--", lw=0.8)
    flow.plot([], [], color=THEORY, ls="--", lw=0.8, label="flow")
    flow.set(xlabel="flow time $\\tau' = t\\,\\eta^2$", ylabel="$y$")
    flow.legend(title="$C_b$")
    label_panel(flow, "a", f"along the valley, $\\eta = {shown:g}$")
    _draw_height(height, results[_key(1.0, shown)], shown)
    _draw_errors(errors, config, results)
    for c_b, colour in zip(config.c_bs, COLOURS, strict=False):
        run = results[f"straight-{c_b:g}"]
        growth.plot(run["time"], run["excess"], "o", color=colour, label=f"{c_b:g}")
        law = run["excess"][0] * np.exp(c_b * (run["time"] - run["time"][0]))
        growth.plot(run["time"], law, color=THEORY, ls="--", lw=0.8)
    growth.plot([], [], color=THEORY, ls="--", lw=0.8, label="$e^{C_b \\tau'}$")
    growth.set(yscale="log", xlabel="flow time $\\tau'$", ylabel="excess energy")
    growth.legend(title="$C_b$")
    label_panel(growth, "d", f"amplification at $y = 0$, $\\eta = {config.straight_eta:g}$")
    return {"corollary-b14": figure}


def _draw_height(axes: Axes, run: Arrays, eta: float) -> None:
    slope = 2 * run["flow"] / (1 + run["flow"] ** 2)
    axes.plot(run["time"], np.abs(run["x"]) / eta, lw=0.6, label="$|x_t|/\\eta$")
    rms = np.sqrt(mean_square_displacement(eta, grad_norm=slope, c_b=1.0)) / eta
    axes.plot(run["time"], rms, color=THEORY, ls="--", lw=0.9, label="$(4 + 2g^2/C_b)^{-1/2}$")
    axes.set(xlabel="flow time $\\tau'$", ylabel="displacement", ylim=(0, None))
    label_panel(axes, "b", "oscillation across it, $C_b = 1$", legend=True)


def _draw_errors(axes: Axes, config: Config, results: TaskResults) -> None:
    sizes = np.array(config.etas)
    for c_b, colour in zip(config.c_bs, COLOURS, strict=False):
        worst = np.array([float(results[_key(c_b, eta)]["worst"]) for eta in config.etas])
        axes.plot(sizes, worst, "o", color=colour)
        axes.plot(sizes, worst[-1] * sizes / sizes[-1], color=THEORY, ls="--", lw=0.8)
    axes.plot([], [], color=THEORY, ls="--", lw=0.8, label="$\\propto \\eta$")
    axes.set(xscale="log", yscale="log", xlabel="$\\eta$", ylabel="largest error of $y$")
    label_panel(axes, "c", "distance from the flow", legend=True)


EXPERIMENT = Experiment(
    id="sharp-rmsprop",
    title="Scalar RMSprop follows the sharpness-reduction flow, for several C_b",
    source="sharp cor. B.14",
    scales={
        "smoke": Config(c_bs=(0.25, 1.0), etas=(0.05, 0.025, 0.0125), straight_eta=0.02),
        "desk": Config(),
        "paper": Config(),
    },
    functions=(tasks, run_task, collect, draw),
)
