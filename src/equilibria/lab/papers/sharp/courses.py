"""What a descent shows: means over windows, by how much they change, and the panels that all its figures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.experiment import Arrays, Findings
from equilibria.lab.harness.figures import THEORY
from equilibria.lab.papers.sharp.descents import STANDARD_RESNET, Config, Variant, key
from equilibria.theory.generalization import final_bn_minimum
from equilibria.theory.stability import effective_lr

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
Window = tuple[int, int]
POINTS = "points"
FITTED = 99.0
"""Per cent of the training images: from there on a window is after the fit. Bursts may cost a few images later."""


@dataclass(frozen=True)
class Course:
    """One descent, a number per measurement.

    What alternates from step to step at the edge of stability is the mean over two steps, that of the measurement and
    the one before it.

    Attributes:
        step: of each.
        sharpness: largest eigenvalue of the Hessian at the direction of the weights, mean over two steps.
        edge: 2 over the effective learning rate: above it the direction of largest curvature is unstable; the same.
        ratio: sharpness over edge, the same.
        excess: training loss above the least that the last BatchNorm allows, the same.
        train: accuracy in per cent, the same.
        test: accuracy in per cent.
        unit_gradient: squared norm of the gradient at the direction of the weights, of the step before.
        loss: mean training loss of the steps since the measurement before, above its minimum.
    """

    step: Array
    sharpness: Array
    edge: Array
    ratio: Array
    excess: Array
    train: Array
    test: Array
    unit_gradient: Array
    loss: Array

    def within(self, window: Window) -> NDArray[np.bool_]:
        """Which measurements are in a window, both ends included."""
        return np.asarray((window[0] <= self.step) & (self.step <= window[1]))

    def since(self, window: Window) -> NDArray[np.bool_]:
        """Which measurements tell of steps within a window only: the first one's ``loss`` is of the steps before."""
        return np.asarray((window[0] < self.step) & (self.step <= window[1]))

    def mean(self, what: str, window: Window) -> float:
        """Over a window."""
        return float(getattr(self, what)[self.within(window)].mean())

    def rise(self, what: str, windows: tuple[Window, Window]) -> float:
        """How much larger in the second window than in the first."""
        return self.mean(what, windows[1]) - self.mean(what, windows[0])

    def fall(self, what: str, windows: tuple[Window, Window]) -> float:
        """How many times smaller in the second window than in the first."""
        return self.mean(what, windows[0]) / self.mean(what, windows[1])

    def at_edge(self, window: Window) -> float:
        """Sharpness over 2 / effective learning rate: mean over a window."""
        return self.mean("ratio", window)

    def fitted(self) -> float:
        """The first measured step at which every training image is right; infinite if there is none."""
        right = self.step[self.train == 100]
        return float(right[0]) if len(right) else np.inf


def course(config: Config, variant: Variant, run: Arrays) -> Course:
    """The numbers of a descent in the units of the figures."""
    least = least_loss(config, variant)
    sharpness, norm_sq, loss, accuracy = (
        np.stack([run[f"{name}_before"], run[name]])
        for name in ("sharpness", "norm_sq", "train_loss", "train_accuracy")
    )
    edge = 2 / effective_lr(variant.lr, variant.weight_decay, norm_sq=norm_sq)
    return Course(
        step=run["step"],
        sharpness=sharpness.mean(0),
        edge=edge.mean(0),
        ratio=(sharpness / edge).mean(0),
        excess=loss.mean(0) - least,
        train=100 * accuracy.mean(0),
        test=100 * run["test_accuracy"],
        unit_gradient=run["grad_norm_sq"] * norm_sq[0],
        loss=run["loss"] - least,
    )


def least_loss(config: Config, variant: Variant) -> float:
    """Eq. (53); the standard network has no last BatchNorm, and its loss may come as near to 0 as it likes."""
    if variant.network == STANDARD_RESNET:
        return 0.0
    return float(final_bn_minimum(variant.scale, len(config.classes) or 10).loss)


def returns(values: Array, *, factor: float) -> int:
    """How often they rise by a factor after a fall by it: never, on a course that only falls."""
    found, falling, extreme = 0, False, values[0]
    for value in values:
        if falling and value >= factor * extreme:
            found, falling, extreme = found + 1, False, value
        elif not falling and value <= extreme / factor:
            falling, extreme = True, value
        else:
            extreme = min(extreme, value) if falling else max(extreme, value)
    return found


def courses(config: Config, variant: Variant, found: Findings) -> list[Course]:
    """Of all seeds."""
    return [course(config, variant, found[key(variant, seed)]) for seed in config.seeds]


def numbers(config: Config, found: Findings) -> dict[str, dict[str, object]]:
    """Means over the windows, a number per seed."""
    windows = {"early": config.early, "middle": config.middle, "late": config.late}
    table: dict[str, dict[str, object]] = {}
    for variant in config.variants:
        each = courses(config, variant, found)
        table[variant.name] = {
            "seeds": config.seeds,
            "first_step_with_every_image_right": [one.fitted() for one in each],
            **{
                f"{what}_{name}": [one.mean(what, window) for one in each]
                for what in ("sharpness", "edge", "excess", "test")
                for name, window in windows.items()
            },
        }
    return table


def draw_edge(axis: Axes, each: Sequence[Course], *, colour: str, edge_colour: str = THEORY) -> None:
    """Sharpness of every seed thin, their mean thick; 2 / effective learning rate dashed, as a theory line."""
    draw_mean(axis, each, "sharpness", colour=colour)
    axis.plot(each[0].step, np.mean([one.edge for one in each], axis=0), color=edge_colour, lw=0.8, ls="--")
    axis.set_yscale("log")


def draw_mean(axis: Axes, each: Sequence[Course], what: str, *, colour: str, label: str = "") -> None:
    """Every seed thin, their mean thick."""
    for one in each:
        axis.plot(one.step, getattr(one, what), color=colour, lw=0.4, alpha=0.5)
    axis.plot(each[0].step, np.mean([getattr(one, what) for one in each], axis=0), color=colour, label=label)


def mark_windows(axis: Axes, config: Config) -> None:
    """The two windows that are compared."""
    for window in (config.early, config.late):
        axis.axvspan(*window, color="#eef1f4", zorder=0)
    axis.set_xlabel("steps")
