"""Angles, norms and unit gradients of layers against their equilibrium: means over windows, and drawing them."""

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
"""First step, and the step after the last one."""


def inside(steps: NDArray[np.int64], window: Window) -> NDArray[np.bool_]:
    """Mask of the samples in a window.

    Raises:
        EquilibriaError: the window has no samples.
    """
    chosen = (window[0] <= steps) & (steps < window[1])
    if not chosen.any():
        raise EquilibriaError(f"got the window {window}; expected one with samples, which are at {steps}")
    return chosen


def rms_ratio(run: Arrays, window: Window, *, prefix: str = "") -> Array:
    """Root mean square angle over that of equilibrium, of every layer; the law is one of mean squares.

    Example:
        >>> angle = np.array([[3.0], [4.0], [5.0]])
        >>> run = {"sampled_step": np.arange(3), "angle": angle, "angle_equilibrium": np.ones((3, 1))}
        >>> rms_ratio(run, (1, 3)).round(3)
        array([4.528])
    """
    chosen = inside(run[f"{prefix}sampled_step"], window)
    ratio = run[f"{prefix}angle"][chosen] / run[f"{prefix}angle_equilibrium"][chosen]
    rms: Array = np.sqrt(np.mean(ratio**2, axis=0))
    return rms


def explained(ratio: Array, start: float, *, before: Array, after: Array) -> float:
    """Angle right after lr / k over the one that unchanged norms and the measured unit gradients give: median layer.

    Args:
        ratio: angle over its new equilibrium, by layer.
        start: the ratio for a constant unit gradient: k^(-1/2), or 1 with rescaled weights.
        before: squared unit gradients before the drop, samples by layers; squared angles go with their mean.
        after: the same after the drop.

    Example:
        >>> explained(np.array([0.4]), 0.2, before=np.ones((3, 1)), after=np.full((3, 1), 4.0))
        1.0
    """
    old, new = before.mean(axis=0), after.mean(axis=0)
    known = (old > 0) & (new > 0)  # with momentum a mean over few samples may be negative
    return float(np.median(ratio[known] / (start * np.sqrt(new[known] / old[known])))) if known.any() else float("nan")


def explained_after_drop(
    run: Arrays, ratio: Array, *, drop: int, window: Window, start: float, before: str = "", after: str = ""
) -> float:
    """`explained` for samples in a window after the drop, and equally many steps before it.

    Args:
        run: with ``momentum_unit_grad_sq``.
        ratio: angle over its new equilibrium, by layer.
        drop: step of the drop.
        window: in steps after the drop.
        start: see `explained`.
        before: prefix of the samples before the drop.
        after: prefix of the samples after the drop.
    """
    first, end = window
    old, new = (
        run[f"{prefix}momentum_unit_grad_sq"][inside(run[f"{prefix}sampled_step"], steps)]
        for prefix, steps in ((before, (drop - end, drop)), (after, (drop + first, drop + end)))
    )
    return explained(ratio, start, before=old, after=new)


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
    angles = evolve(new, window[1], start=settled(rule)).angle[window[0] :]
    return float(np.sqrt(np.mean(angles**2)) / new.equilibrium().angle)


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


def equilibrium_norm(rule: SGD, unit_grad_sq: Array, *, lr_factor: float | Array = 1.0) -> Array:
    """Equilibrium norm for mean squared unit gradients; its fourth power goes with them and with lr.

    Args:
        rule: of the first stage.
        unit_grad_sq: means, which may be slightly negative under momentum.
        lr_factor: factor of the learning rate since the first stage.
    """
    at_one = rule.equilibrium(unit_grad_sq=1.0).norm
    assert at_one is not None
    norm: Array = at_one * (np.maximum(unit_grad_sq, 0.0) * lr_factor) ** 0.25
    return norm


def layer_column(run: Arrays, name: str, *, prefix: str = "") -> int:
    """Column of a layer.

    Raises:
        EquilibriaError: there is no such layer.
    """
    names = [str(known) for known in run[f"{prefix}names"]]
    if name not in names:
        raise EquilibriaError(f"got the layer {name!r}; expected one of: {', '.join(names)}")
    return names.index(name)


def draw_layers(axes: Axes, run: Arrays, *, prefix: str = "", average: int = 1) -> None:
    """Draw the angles of all layers, a colour each, and the theory's line."""
    steps, angle = run[f"{prefix}sampled_step"], run[f"{prefix}angle"]
    smooth = np.sqrt(running_mean(angle**2, average))
    for place in range(angle.shape[1]):
        axes.plot(steps, smooth[:, place], color=COLOURS[place % len(COLOURS)], lw=0.5, alpha=0.8)
    axes.plot(steps, run[f"{prefix}angle_equilibrium"][:, 0], color=THEORY, lw=1.1, ls="--", label="theory")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")


def draw_unit_gradients(axes: Axes, run: Arrays, column: int, *, average: int, momentum: bool = True) -> None:
    """Draw the squared unit gradient of a layer and, with momentum, h~: single steps thin, running means thick."""
    names = {"unit_grad_sq": "$\\|\\tilde g\\|^2$", "momentum_unit_grad_sq": "$\\tilde h$"}
    for colour, (name, label) in zip(COLOURS, names.items(), strict=False):
        if name == "momentum_unit_grad_sq" and not momentum:
            continue
        values = run[name][:, column]
        axes.plot(run["sampled_step"], values, color=colour, lw=0.3, alpha=0.3)
        axes.plot(run["sampled_step"], running_mean(values, average), color=colour, label=label)
    means = [running_mean(run[name][:, column], average).max() for name in names if momentum or name == "unit_grad_sq"]
    high = max(float(np.quantile(run["unit_grad_sq"][:, column], 0.995)), *map(float, means))
    axes.set_ylim(-0.3 * high if momentum else 0, 1.05 * high)
    axes.set_xlabel("step")
