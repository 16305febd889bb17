"""nrq-landscape: the loss landscape with weight decay, and the mechanism of equilibrium (figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Source
from equilibria.lab.harness.experiment import Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel
from equilibria.theory.rayleigh import equilibrium_angle

Array = NDArray[np.float64]
_LANDSCAPE = Source("nrq", "fig. 1 (b)")
_MECHANISM = Source(
    "nrq",
    "fig. 1 (a), Lemma 1",
    corrected="the definition of the angular update needs a square root",
    law="rayleigh.equilibrium_angle",
)
_EIGENVALUES = np.array([1.0, 2.0])


@dataclass(frozen=True)
class Config:
    """A grid for the surface, random points for its properties, and a walk of the noisy Rayleigh quotient in 2-D."""

    grid: int = 161
    points: int = 10_000
    steps: int = 20_000
    trials: int = 50
    lr: float = 0.1
    weight_decay: float = 0.05
    noise: float = 1.0
    seed: int = 0


def tasks(config: Config) -> dict[str, str]:
    """The surface, its properties, the walk."""
    return {name: name for name in ("surface", "properties", "walk")}


def run_task(config: Config, name: str) -> Arrays:
    """Compute one of the three."""
    return {"surface": _surface, "properties": _properties, "walk": _walk}[name](config)


def loss(x: Array, y: Array) -> Array:
    """Figure 1 (b): (x^2 + 2y^2)/(x^2 + y^2) + (x^2 + y^2)."""
    size = x**2 + y**2
    return np.asarray((x**2 + 2 * y**2) / size + size)


def _surface(config: Config) -> Arrays:
    """The loss on squares around the origin, where it is undefined: smooth along rays, discontinuous across."""
    turn, size = np.meshgrid(np.linspace(0, 2 * np.pi, 8 * (config.grid // 4) + 1), np.linspace(1e-3, 1, config.grid))
    reach = size / np.maximum(np.abs(np.cos(turn)), np.abs(np.sin(turn)))
    x, y = reach * np.cos(turn), reach * np.sin(turn)
    return {"x": x, "y": y, "loss": loss(x, y)}


def _properties(config: Config) -> Arrays:
    """Gradient by complex step, which has no cancellation, and Hessian by its differences, at random points."""
    rng = np.random.default_rng([config.seed, 0])
    points = rng.standard_normal((config.points, 2)) * 10 ** rng.uniform(-2, 0, (config.points, 1))
    size = np.linalg.norm(points, axis=1)
    radial = np.einsum("ij,ij->i", points, _gradient(points))
    smallest, largest = np.linalg.eigvalsh(_hessian(points)).T
    # The determinant of the Hessian in polar coordinates: 4 (cos 2phi/r^2 + 1) - sin^2(2phi)/r^4.
    twice = 2 * np.arctan2(points[:, 1], points[:, 0])
    saddle = np.sin(twice) ** 2 > 4 * size**2 * (np.cos(twice) + size**2)
    return {"size": size, "radial": radial, "smallest": smallest, "largest": largest, "saddle": saddle}


def _gradient(points: Array) -> Array:
    step = 1e-30
    columns = []
    for axis in range(2):
        shifted: Any = points.astype(complex)
        shifted[:, axis] += 1j * step * np.linalg.norm(points, axis=1)
        x, y = shifted.T
        size = x**2 + y**2
        value = (x**2 + 2 * y**2) / size + size
        columns.append(value.imag / (step * np.linalg.norm(points, axis=1)))
    return np.stack(columns, axis=1)


def _hessian(points: Array) -> Array:
    """Central differences of the gradient; relative error about 1e-10."""
    result = np.empty((len(points), 2, 2))
    for axis in range(2):
        step = np.zeros_like(points)
        step[:, axis] = 1e-5 * np.linalg.norm(points, axis=1)
        result[:, axis] = (_gradient(points + step) - _gradient(points - step)) / (2 * step[:, axis, None])
    return np.asarray((result + result.transpose(0, 2, 1)) / 2)


def _walk(config: Config) -> Arrays:
    """Simulate the noisy Rayleigh quotient with weight decay from far outside its equilibrium."""
    rng = np.random.default_rng([config.seed, 1])
    w = np.tile([2.0, 3.0], (config.trials, 1))
    start, logcos = np.einsum("ij,ij->i", w, w), np.zeros(config.trials)
    norms, angles, path = np.empty(config.steps), np.empty(config.steps), [w[0]]
    for step in range(config.steps):
        size = np.einsum("ij,ij->i", w, w)[:, None]
        unit = w / np.sqrt(size)
        push = unit * _EIGENVALUES + config.noise * rng.standard_normal(w.shape)
        push -= np.einsum("ij,ij->i", unit, push)[:, None] * unit
        moved = (1 - config.lr * config.weight_decay) * w - config.lr * push / np.sqrt(size)
        cross = np.abs(w[:, 0] * moved[:, 1] - w[:, 1] * moved[:, 0])
        angle = np.arctan2(cross, np.einsum("ij,ij->i", w, moved))
        logcos -= np.log(np.cos(angle))
        norms[step], angles[step] = np.mean(size**2) ** 0.25, np.sqrt(np.mean(angle**2))
        w = moved
        if step < 400:
            path.append(w[0])
    end = np.einsum("ij,ij->i", w, w)
    implied = -config.steps * np.log1p(-config.lr * config.weight_decay) + np.log(end / start) / 2
    return {
        "norm": norms,
        "angle": angles,
        "path": np.array(path),
        "balance_error": np.max(np.abs(logcos / implied - 1)),
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the singularity and curvature of the landscape, and the exact balance of the equilibrium."""
    flat, walk = results["properties"], results["walk"]
    near_origin = flat["size"] < 0.05
    along = [float(loss(np.array(1e-8), np.array(0.0))), float(loss(np.array(0.0), np.array(1e-8)))]
    late = walk["angle"][config.steps // 2 :]
    angle = float(equilibrium_angle(config.lr, config.weight_decay, discrete=True))
    claims = [
        _LANDSCAPE.says(
            "The quotient has no radial slope: <X, gradient> is weight decay's 2 ||X||^2, largest relative error"
        ).to_rounding(np.max(np.abs(flat["radial"] - 2 * flat["size"] ** 2) / (1 + flat["size"] ** 2)), operations=50),
        _LANDSCAPE.says(
            "There is no value at the origin: the limits along the two axes are the eigenvalues, so they differ by"
        ).near(float(np.ptp(_EIGENVALUES)), along[1] - along[0], absolute=1e-12),
        _LANDSCAPE.says(
            "The curvature explodes: (largest eigenvalue of the Hessian - 2) ||X||^2, its largest, is 2 (a_2 - a_1)"
        ).near(
            2 * float(np.ptp(_EIGENVALUES)),
            np.max((flat["largest"][near_origin] - 2) * flat["size"][near_origin] ** 2),
            relative=0.01,
        ),
        _LANDSCAPE.says(
            "It is convex only in a cone of half-angle about ||X|| around the solutions: share of points with "
            "||X|| < 0.05 where it is not"
        ).near(
            float(np.mean(flat["saddle"][near_origin])),
            float(np.mean(flat["smallest"][near_origin] < 0)),
            absolute=1e-3,  # points on the very edge, where differences decide either way
        ),
        Source("smd", "eq. (12), summed", law="angles.log_cos_balance")
        .says("Outward push and inward pull balance exactly: log-cosines of the steps against lr*wd and the norm")
        .at_most(1e-10, float(walk["balance_error"])),
        _MECHANISM.says(
            "In equilibrium each step turns by arccos(1 - lr*wd): root mean square over the second half"
        ).near(angle, float(np.sqrt(np.mean(late**2))), relative=0.05, unit="rad"),
    ]
    return Outcome(claims, {"equilibrium_norm": float(walk["norm"][config.steps // 2 :].mean())})


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw the mechanism on the left, the landscape on the right, as in the paper, and the norm between them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.0), layout="constrained")
    path, norm, surface = figure.add_subplot(131), figure.add_subplot(132), figure.add_subplot(133, projection="3d")
    walk, level = results["walk"], float(results["walk"]["norm"][config.steps // 2 :].mean())
    path.plot(*walk["path"].T, lw=0.5, color=COLOURS[0])
    turn = np.linspace(0, 2 * np.pi, 200)
    path.plot(level * np.cos(turn), level * np.sin(turn), color=THEORY, lw=0.9, ls="--", label="equilibrium norm")
    path.set(xlabel="$X_1$", ylabel="$X_2$", aspect="equal")
    label_panel(path, "a", "400 steps of one trial", legend=True)
    norm.plot(walk["norm"][:600], label="norm")
    norm.axhline(level, color=THEORY, lw=0.9, ls="--", label="equilibrium")
    label_panel(norm, "a'", "weight decay against noise", xlabel="step", ylabel="$||X||$", legend=True)
    lit: Any = surface
    lit.plot_surface(
        *(results["surface"][name] for name in ("x", "y", "loss")), cmap="viridis", lw=0, rcount=80, ccount=160
    )
    lit.set(xlabel="x", ylabel="y")
    lit.zaxis.set_rotate_label(False)  # written across it would reach over the ticks
    lit.set_zlabel("loss", rotation=90, labelpad=2)
    lit.set_box_aspect(None, zoom=0.75)  # room for the label of the third axis
    lit.view_init(elev=35, azim=-60)
    label_panel(surface, "b", "$(x^2 + 2y^2)/(x^2 + y^2) + (x^2 + y^2)$")
    return {"figure-1": figure}


EXPERIMENT = Experiment(
    id="nrq-landscape",
    title="The loss landscape with weight decay, and how an equilibrium arises on it",
    source="nrq fig. 1",
    scales={"smoke": Config(points=500, steps=2000, trials=20, grid=41), "desk": Config(), "paper": Config()},
    functions=(tasks, run_task, collect, draw),
)
