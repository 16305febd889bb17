"""Angles of all layers against their equilibrium: means over windows, running means, and how they are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, whole
from equilibria.lab.harness.experiment import Arrays
from equilibria.lab.harness.figures import COLOURS, THEORY
from equilibria.theory import SGD, evolve, settled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Window = tuple[int, int]
"""First step and the one after the last."""


def inside(steps: NDArray[np.int64], window: Window) -> NDArray[np.bool_]:
    """Which samples are in a window.

    Raises:
        EquilibriaError: none is.
    """
    found = (window[0] <= steps) & (steps < window[1])
    if not found.any():
        raise EquilibriaError(f"got the window {window}; expected one with samples, which are at {steps}")
    return found


def rms_ratio(run: Arrays, window: Window, *, part: str = "") -> Array:
    """Root mean square angle over that of equilibrium, of every layer; the law is one of mean squares.

    Example:
        >>> angle = np.array([[3.0], [4.0], [5.0]])
        >>> run = {"sampled_step": np.arange(3), "angle": angle, "angle_equilibrium": np.ones((3, 1))}
        >>> rms_ratio(run, (1, 3)).round(3)
        array([4.528])
    """
    chosen = inside(run[f"{part}sampled_step"], window)
    ratio = run[f"{part}angle"][chosen] / run[f"{part}angle_equilibrium"][chosen]
    found: Array = np.sqrt(np.mean(ratio**2, axis=0))
    return found


def explained(ratio: Array, start: float, *, before: Array, after: Array) -> float:
    """Angles right after lr / k, over what norms that stay and unit gradients as measured lead to: the median layer.

    Args:
        ratio: angle over its new equilibrium, by layer.
        start: what it is if the unit gradient stays: k^(-1/2), or 1 with rescaled weights.
        before: squared unit gradients before the drop, samples by layers; squared angles go with their mean.
        after: the same after it.

    Example:
        >>> explained(np.array([0.4]), 0.2, before=np.ones((3, 1)), after=np.full((3, 1), 4.0))
        1.0
    """
    old, new = before.mean(axis=0), after.mean(axis=0)
    known = (old > 0) & (new > 0)  # with momentum a mean over few samples may be negative
    return float(np.median(ratio[known] / (start * np.sqrt(new[known] / old[known])))) if known.any() else float("nan")


def law_after_drop(rule: SGD, divisor: float, window: Window) -> float:
    """Root mean square angle over its new equilibrium in a window after lr / k, for a constant unit gradient.

    Args:
        rule: before the drop, in equilibrium.
        divisor: k.
        window: in steps after the drop.

    Example:
        >>> round(law_after_drop(SGD(0.1, 5e-4, momentum=0.9), 10, (0, 1)), 4)  # 1/sqrt(10), before the norm follows
        0.3162
    """
    new = replace(rule, lr=rule.lr / divisor)
    course = evolve(new, window[1], start=settled(rule)).angle[window[0] :]
    return float(np.sqrt(np.mean(course**2)) / new.equilibrium().angle)


def running_mean(values: Array, count: int) -> Array:
    """Mean over ``count`` samples around each, over fewer at both ends.

    Example:
        >>> running_mean(np.array([1.0, 2.0, 3.0, 4.0]), 3)
        array([1.5, 2. , 3. , 3.5])
    """
    before = whole("count", count, low=1) // 2
    total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    place = np.arange(len(values))
    low, high = np.maximum(place - before, 0), np.minimum(place - before + count, len(values))
    spread = (high - low).reshape(-1, *(1,) * (values.ndim - 1))
    mean: Array = (total[high] - total[low]) / spread
    return mean


def layer(run: Arrays, name: str, *, part: str = "") -> int:
    """Column of a layer.

    Raises:
        EquilibriaError: there is no such layer.
    """
    names = [str(each) for each in run[f"{part}names"]]
    if name not in names:
        raise EquilibriaError(f"got the layer {name!r}; expected one of: {', '.join(names)}")
    return names.index(name)


def draw_layers(axes: Axes, run: Arrays, *, part: str = "", average: int = 1) -> None:
    """Angles of all layers, a colour each, and the theory's line."""
    steps, angle = run[f"{part}sampled_step"], run[f"{part}angle"]
    smooth = np.sqrt(running_mean(angle**2, average))
    for place in range(angle.shape[1]):
        axes.plot(steps, smooth[:, place], color=COLOURS[place % len(COLOURS)], lw=0.5, alpha=0.8)
    axes.plot(steps, run[f"{part}angle_equilibrium"][:, 0], color=THEORY, lw=1.1, ls="--", label="theory")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
