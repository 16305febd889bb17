"""sharp-hamiltonian: the slow oscillation at the edge of stability is a particle in a well (figure 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels, shown_steps
from equilibria.theory.hamiltonian import orbit, potential, rest_point, rms_drift

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIGURE = Source("sharp", "fig. 5, eq. (17)", law="hamiltonian.orbit")
_MAP = Source(
    "sharp",
    "Definition H.2",
    corrected="iterated as printed it is Euler's method and gains energy; a symplectic form of the same order does not",
    law="hamiltonian.rms_drift",
)
_MEAN = Source(
    "sharp",
    "Section 4.2.3, Appendix N.2",
    corrected="Section 4.2.3 says that 2h^2 averages 2 lr wd/(4 + g); it is h^2, and g is squared",
    law="hamiltonian.mean_square_displacement",
)


@dataclass(frozen=True)
class Config:
    """K and C_b of figure 5; energies above the minimum; accuracy of the integration; step of the printed map."""

    coupling: float = 2.0
    c_b: float = 1.0
    energies: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
    accuracy: float = 1e-11
    eta: float = 0.002
    flow_time: float = 0.5
    drift_energy: float = 0.01

    @property
    def grad_norm(self) -> float:
        """g of K^2 = 2 C_b + g^2."""
        return math.sqrt(self.coupling**2 - 2 * self.c_b)


def tasks(config: Config) -> dict[str, float | None]:
    """One orbit per energy, and the two maps."""
    return {**{f"orbit-{energy:g}": energy for energy in config.energies}, "map": None}


def run_task(config: Config, energy: float | None) -> Arrays:
    """Integrate an orbit, or iterate the maps."""
    return _maps(config) if energy is None else _orbit(config, energy)


def _orbit(config: Config, energy: float) -> Arrays:
    """Integrate equation (17) from the inner turning point over one period, up to the second zero of the velocity."""
    from scipy.integrate import solve_ivp

    law = orbit(energy, grad_norm=config.grad_norm, c_b=config.c_b)

    def motion(_: float, state: NDArray[np.float64]) -> list[float]:
        x, velocity, _area = state
        return [velocity, config.c_b - 2 * config.coupling**2 * math.exp(2 * x), math.exp(2 * x)]

    def stops(_: float, state: NDArray[np.float64]) -> float:
        return float(state[1])

    stops.direction = 1  # type: ignore[attr-defined]  # at the inner turning point again
    end = 1.2 * float(law.period)
    start = [math.log(float(law.smallest)), 0.0, 0.0]
    solved: Any = solve_ivp(
        motion,
        (0, end),
        start,
        method="DOP853",
        events=stops,
        dense_output=True,
        rtol=config.accuracy,
        atol=config.accuracy,
    )
    period, area = next(
        (time, state[2]) for time, state in zip(solved.t_events[0], solved.y_events[0], strict=True) if time > end / 2
    )
    times = np.linspace(0, period, 401)
    x, velocity, _ = solved.sol(times)
    well = potential(x, grad_norm=config.grad_norm, c_b=config.c_b)
    return {
        "time": times,
        "position": x,
        "velocity": velocity,
        "energy": velocity**2 / 2 + well,
        "period": np.asarray(period),
        "mean_square": np.asarray(area / period),
    }


def _maps(config: Config) -> Arrays:
    """Excess energy along Definition H.2 as printed and along its symplectic form, from one state."""
    rest = rest_point(config.grad_norm, config.c_b)
    eta, pairs = config.eta, round(config.flow_time / (2 * config.eta**2))
    start, offset = float(rest.displacement), math.sqrt(2 * config.drift_energy)
    excess = np.empty(pairs + 1)
    h, u = start, offset
    for pair in range(pairs + 1):
        height = config.coupling**2 * h * h - config.c_b * math.log(h)
        excess[pair] = u * u / 2 + height - float(rest.energy)
        h, u = (1 - 2 * eta * u) * h, u + 4 * eta * h * h * config.coupling**2 - 2 * eta * config.c_b
    path = rms_drift(start, offset, pairs=pairs, eta=eta, grad_norm=config.grad_norm, c_b=config.c_b)
    well = potential(np.log(path.displacement), grad_norm=config.grad_norm, c_b=config.c_b)
    symplectic = path.offset**2 / 2 + well - rest.energy
    keep = shown_steps(pairs + 1, 401)
    return {"flow_time": 2 * eta**2 * keep, "printed": excess[keep], "symplectic": symplectic[keep]}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare periods, energy and averages with the laws."""
    law = orbit(np.array(config.energies), grad_norm=config.grad_norm, c_b=config.c_b)
    rest = rest_point(config.grad_norm, config.c_b)
    orbits = [results[f"orbit-{energy:g}"] for energy in config.energies]
    periods = np.array([float(path["period"]) for path in orbits])
    drifts = [np.ptp(path["energy"]) for path in orbits]
    means = np.array([float(path["mean_square"]) for path in orbits])
    mean = config.c_b / (2 * config.coupling**2)
    drift = results["map"]
    rate = math.log(drift["printed"][-1] / drift["printed"][0]) / config.flow_time
    away = float(np.max(np.abs(drift["symplectic"] / drift["symplectic"][0] - 1)))
    loss = 1e3 * config.accuracy  # some hundred steps of the integrator, each of this accuracy
    claims = [
        *(
            _FIGURE.says(f"Period of the orbit with energy {energy:g} above the minimum").near(
                expected, measured, relative=loss
            )
            for energy, expected, measured in zip(config.energies, law.period, periods, strict=True)
        ),
        _FIGURE.says("Energy is conserved: largest change along an orbit").at_most(loss, max(drifts)),
        _MEAN.says("The mean of h^2 over an orbit is C_b/(2K^2) whatever its energy: the one farthest off").near(
            mean, means[np.argmax(np.abs(means - mean))], relative=loss
        ),
        _MAP.says("Energy of Definition H.2 iterated as printed grows at the rate 4 C_b per flow time").near(
            4 * config.c_b, rate, relative=0.02
        ),
        _MAP.says("Energy of the symplectic form stays: largest relative change").at_most(
            4 * config.eta * math.sqrt(2 * config.c_b), away
        ),
    ]
    numbers = {
        "energy": config.energies,
        "period": periods,
        "smallest": law.smallest,
        "largest": law.largest,
        "fastest": law.fastest,
        "least_energy": float(rest.energy),
    }
    return Outcome(claims, numbers)


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the well and the phase portrait, as in figure 5, the periods and the two maps."""
    figure, (well, portrait, periods, maps) = panels(2, 2)
    _draw_well(well, config)
    _draw_portrait(portrait, config, results)
    _draw_periods(periods, config, results)
    _draw_maps(maps, config, results["map"])
    return {"figure-5": figure}


def _draw_well(axes: Axes, config: Config) -> None:
    rest = rest_point(config.grad_norm, config.c_b)
    x = np.linspace(-5, 0.2, 400)
    axes.plot(x, potential(x, grad_norm=config.grad_norm, c_b=config.c_b), color=THEORY)
    for energy, colour in zip(config.energies, COLOURS, strict=False):
        law = orbit(energy, grad_norm=config.grad_norm, c_b=config.c_b)
        ends = np.log([float(law.smallest), float(law.largest)])
        axes.plot(np.clip(ends, -5, None), [rest.energy + energy] * 2, color=colour, lw=0.9, label=f"{energy:g}")
    axes.set(xlabel="position $x = \\log |h|$", ylabel="energy", ylim=(1, 6.2), xlim=(-5, 0.3))
    axes.legend(title="$E - E_{\\min}$")
    label_panel(axes, "a", "potential $U(x) = K^2 e^{2x} - C_b x$")


def _draw_portrait(axes: Axes, config: Config, results: TaskResults) -> None:
    for energy, colour in zip(config.energies, COLOURS, strict=False):
        path = results[f"orbit-{energy:g}"]
        axes.plot(path["position"], path["velocity"], color=colour)
    rest = rest_point(config.grad_norm, config.c_b)
    axes.plot([float(rest.position)], [0], "o", color=THEORY)
    label_panel(axes, "b", "phase portrait", xlabel="position $\\log |h|$", ylabel="velocity $-u$", xlim=(-5, 0.8))


def _draw_periods(axes: Axes, config: Config, results: TaskResults) -> None:
    energies = np.geomspace(min(config.energies) / 3, max(config.energies) * 1.5, 100)
    law = orbit(energies, grad_norm=config.grad_norm, c_b=config.c_b)
    axes.plot(energies, law.period, color=THEORY, label="theory")
    small = float(rest_point(config.grad_norm, config.c_b).period)
    axes.axhline(small, color=THEORY, lw=0.8, ls=":", label="small oscillations")
    measured = [float(results[f"orbit-{energy:g}"]["period"]) for energy in config.energies]
    axes.plot(config.energies, measured, "o", label="integrated")
    axes.set(xscale="log", xlabel="energy above the minimum", ylabel="period ($1/\\eta$ steps)")
    label_panel(axes, "c", "period against energy", legend=True)


def _draw_maps(axes: Axes, config: Config, drift: Arrays) -> None:
    times = drift["flow_time"]
    axes.plot(times, drift["printed"], label="Definition H.2 as printed")
    axes.plot(times, drift["symplectic"], label="symplectic form")
    growth = drift["printed"][0] * np.exp(4 * config.c_b * times)
    axes.plot(times, growth, color=THEORY, ls="--", lw=0.9, label="$e^{4 C_b \\tau'}$")
    axes.set(yscale="log", xlabel="flow time $\\tau' = t \\eta^2$", ylabel="energy above the minimum")
    label_panel(axes, "d", "two ways to iterate", legend=True)


EXPERIMENT = Experiment(
    id="sharp-hamiltonian",
    title="The oscillation at the edge of stability: phase portrait, energy, period",
    source="sharp fig. 5",
    scales={"smoke": Config(energies=(0.1, 1.0, 5.0), eta=0.005), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
