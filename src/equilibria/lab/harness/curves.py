"""Curves of trainings: means over windows, angles of layers, several seeds drawn over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Window = tuple[int, int]
"""First and last step."""
POINTS = "points"


def mean_in(run: Arrays, name: str, window: Window) -> float:
    """Mean over the measurements in a window of steps; accuracies in points.

    A loss is the mean since the measurement before, so the one at the first step of the window is of steps before it.
    """
    begins = window[0] < run["step"] if name == "loss" else window[0] <= run["step"]
    inside = begins & (run["step"] <= window[1])
    return float(run[name][inside].mean()) * (100 if name.endswith("accuracy") else 1)


def rms_angle(run: Arrays, window: Window) -> float:
    """Root mean square angle per step of the median layer, radians."""
    inside = (window[0] <= run["sampled_step"]) & (run["sampled_step"] < window[1])
    return float(np.median(np.sqrt(np.mean(run["layer_angle"][inside] ** 2, axis=0))))


def binned_angles(several: Sequence[Arrays], *, bins: int) -> tuple[Array, Array]:
    """Middle of every bin of samples, and the root mean square angle of the median layer in it."""
    count = len(several[0]["sampled_step"]) // bins * bins
    square = np.mean([np.median(run["layer_angle"], axis=1)[:count] ** 2 for run in several], axis=0)
    middle = several[0]["sampled_step"][:count].reshape(-1, bins).mean(1)
    return middle, np.sqrt(square.reshape(-1, bins).mean(1))


def line_style(place: int) -> dict[str, Any]:
    """Colour of the line at a place; every other one is dashed, so that what it lies on is seen."""
    return {"color": COLOURS[place], "ls": "-" if place % 2 == 0 else (0, (3, 2))}


def draw_over(
    axis: Axes, lines: Mapping[str, Sequence[Arrays]], name: str, *, factor: float = 1.0, from_step: int = 0
) -> None:
    """A curve of every seed, thin, and their mean, thick."""
    for at, (label, several) in enumerate(lines.items()):
        steps = several[0]["step"]
        shown = steps >= from_step
        curves = [factor * run[name][shown] for run in several]
        for curve in curves:
            axis.plot(steps[shown], curve, color=COLOURS[at], lw=0.4, alpha=0.5)
        axis.plot(steps[shown], np.mean(curves, axis=0), label=label, **line_style(at))
    axis.set_xlabel("step")
