"""Training curves: means over windows of steps, angles of layers, and drawing several seeds into one panel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.figures import COLOURS, THEORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Window = tuple[int, int]
"""First and last step."""
POINTS = "points"


def mean_in(run: Arrays, name: str, window: Window, *, origin: int = 0, prefix: str = "") -> float:
    """Mean over the measurements in a window of steps; accuracies in points.

    A loss is the mean since the previous measurement, so the one at the first step of the window is left out: it is of
    steps before the window.

    Args:
        run: measurements by name, with their ``step``.
        name: of the measurement.
        window: first and last step, counted from ``origin``.
        origin: step that the window counts from.
        prefix: of all names in ``run``.
    """
    steps = run[f"{prefix}step"] - origin
    begins = window[0] < steps if name == "loss" else window[0] <= steps
    values = run[f"{prefix}{name}"][begins & (steps <= window[1])]
    return float(values.mean()) * (100 if name.endswith("accuracy") else 1)


def rms_angle(run: Arrays, window: Window) -> float:
    """Root mean square angle per step of the median layer, radians."""
    inside = (window[0] <= run["sampled_step"]) & (run["sampled_step"] < window[1])
    return float(np.median(np.sqrt(np.mean(run["layer_angle"][inside] ** 2, axis=0))))


def binned_angles(runs: Sequence[Arrays], *, bins: int) -> tuple[Array, Array]:
    """Middle of every bin of samples, and the root mean square angle of the median layer in it."""
    count = len(runs[0]["sampled_step"]) // bins * bins
    square = np.mean([np.median(run["layer_angle"], axis=1)[:count] ** 2 for run in runs], axis=0)
    middle = runs[0]["sampled_step"][:count].reshape(-1, bins).mean(1)
    return middle, np.sqrt(square.reshape(-1, bins).mean(1))


def line_style(place: int) -> dict[str, Any]:
    """Colour of the line at a place; every other line is dashed, so that a line below it stays visible."""
    return {"color": COLOURS[place], "ls": "-" if place % 2 == 0 else (0, (3, 2))}


def draw_seeds(
    axis: Axes, steps: NDArray[Any], curves: Sequence[Array], *, label: str | None = None, **style: Any
) -> None:
    """Draw the curve of every seed thin and their mean thick."""
    for curve in curves:
        axis.plot(steps, curve, color=style["color"], lw=0.4, alpha=0.5)
    axis.plot(steps, np.mean(curves, axis=0), label=label, **style)


def draw_over(
    axis: Axes, lines: Mapping[str, Sequence[Arrays]], name: str, *, factor: float = 1.0, from_step: int = 0
) -> None:
    """Draw one measurement of several lines into a panel, each with all its seeds and their mean."""
    for place, (label, runs) in enumerate(lines.items()):
        steps = runs[0]["step"]
        shown = steps >= from_step
        draw_seeds(axis, steps[shown], [factor * run[name][shown] for run in runs], label=label, **line_style(place))
    axis.set_xlabel("step")


def mark_drops(axis: Axes, drops: Iterable[float]) -> None:
    """Draw a dotted vertical line at every drop of the learning rate."""
    for drop in drops:
        axis.axvline(drop, color=THEORY, lw=0.5, ls=":")
