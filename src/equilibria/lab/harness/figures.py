"""Figures: colours, sizes for print, panels, training curves with all their seeds, and saving without a window."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.experiment import Arrays
from equilibria.records._files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEORY = "#1a1d21"
"""The colour of theory lines; measurements have one of `COLOURS`."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f4f7d")
"""Distinguishable for colour-blind readers (Okabe and Ito)."""
COLUMN_INCHES = 3.3
SUFFIXES = ("png", "pdf")
_STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "pdf.fonttype": 42,  # letters stay letters
    "svg.fonttype": "none",
    "figure.dpi": 100,
    "savefig.dpi": 200,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the style above, whatever the user's matplotlib settings are."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast("Any", _STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}))
        yield


def panels(
    rows: int, columns: int, *, width: float = COLUMN_INCHES, height: float = 2.5
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels, row by row.

    Args:
        rows: of panels.
        columns: of panels.
        width: of a panel in inches.
        height: of a panel in inches.

    Returns:
        The figure and its panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def label_panel(axes: Axes, letter: str, text: str, *, legend: str | None = None, **properties: Any) -> None:
    """Set the title of a panel, its legend and its axes.

    Args:
        axes: the panel, drawn.
        letter: of the panel in the paper.
        text: what it shows.
        legend: where the legend goes, as "upper right"; None for none.
        properties: of `Axes.set`, as ``xlabel`` and ``yscale``.
    """
    axes.set(**properties)
    axes.set_title(f"({letter}) {text}", loc="left")
    if legend is not None:
        axes.legend(loc=cast("Any", legend))


def shown_steps(count: int, most: int = 1500) -> NDArray[np.int_]:
    """Indices of at most so many of the steps to draw, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as .png for the screen and as .pdf for print; the same figure gives the same bytes."""
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns about the dates in matplotlib's own fonts
    for suffix in SUFFIXES:
        content = io.BytesIO()
        undated = {"Software": None} if suffix == "png" else {"CreationDate": None}
        figure.savefig(content, format=suffix, metadata=undated)
        write_whole(folder / f"{name}.{suffix}", content.getvalue())


# ---- training curves: means over windows, angles of layers, several seeds in one panel


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


def rms(values: Array) -> float:
    """Root mean square of all values."""
    return float(np.sqrt(np.mean(values**2)))


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
