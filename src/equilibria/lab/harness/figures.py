"""Figures: colours, sizes for print, panels, training curves with all their seeds, and saving without a window."""

from __future__ import annotations

import io
import logging
import re
import textwrap
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


_LABEL = 26  # letters of a line of a y-label, which a panel of two inches has room for


def label_panel(axes: Axes, letter: str, text: str, *, legend: bool = False, **properties: Any) -> None:
    """Set the title of a panel, its axes and its legend.

    Args:
        axes: the panel, drawn.
        letter: of the panel in the paper.
        text: the quantity on the y-axis with its unit, or "subject: quantity"; the subject becomes the title. With a
            label on the y-axis already, or with ``ylabel``, all of it is the title.
        legend: whether to add one; `save` puts it outside the data.
        properties: of `Axes.set`, as ``xlabel`` and ``yscale``; ``ylabel=""`` for none.
    """
    axes.set(**properties)
    if "ylabel" not in properties and not axes.get_ylabel() and axes.name != "3d":
        text, _, quantity = text.rpartition(": ")
        axes.set_ylabel(textwrap.fill(quantity, _LABEL))
    axes.set_title(f"({letter}) {text}".rstrip(), loc="left")
    if legend:
        axes.legend()


def shown_steps(count: int, most: int = 1500) -> NDArray[np.int_]:
    """Indices of at most so many of the steps to draw, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as .png for the screen and as .pdf for print; the same figure gives the same bytes.

    Legends of panels move outside the data: into one below the figure where an entry looks the same in all panels and
    no two entries look alike, else below their panels.
    """
    _move_legends(figure)
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns about the dates in matplotlib's own fonts
    for suffix in SUFFIXES:
        content = io.BytesIO()
        undated = {"Software": None} if suffix == "png" else {"CreationDate": None}
        figure.savefig(content, format=suffix, metadata=undated)
        write_whole(folder / f"{name}.{suffix}", content.getvalue())


# Inches: of a legend's line, of its handle and gaps beside the text, of a letter; from a panel to the legend below it.
_NO_WIDTH = str.maketrans("", "", "{}_^\\")  # signs of formulas that are not drawn
_LINE, _HANDLE, _LETTER, _BELOW_PANEL = 0.16, 0.45, 0.056, 0.4


def _move_legends(figure: Figure) -> None:
    panels = [axes for axes in figure.axes if axes.get_legend() is not None]
    if not panels:
        return
    entries = [entry for axes in panels for entry in _entries(axes)]
    by_label = dict(entries)
    looks = {(label, _look(handle)) for label, handle in entries}
    alike = len(looks) == len(by_label) == len({look for _, look in looks})
    titled = any(_title(axes) for axes in panels)
    if alike and not titled and not figure.legends:
        for axes in panels:
            _legend(axes).remove()
        columns = _columns(by_label, figure.get_figwidth())
        figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=columns)
        _grow(figure, -(-len(by_label) // columns))
    else:
        _grow(figure, sum(_below_panels(row) for row in _rows(figure)))


def _rows(figure: Figure) -> list[list[Axes]]:
    """The panels with a legend, row by row of the figure."""
    rows: dict[int, list[Axes]] = {}
    for axes in figure.axes:
        place = axes.get_subplotspec()
        if axes.get_legend() is not None:
            rows.setdefault(place.rowspan.start if place is not None else 0, []).append(axes)
    return list(rows.values())


def _below_panels(row: Sequence[Axes]) -> int:
    """Put the legends of a row below their panels; the number of lines that takes."""
    from matplotlib.transforms import ScaledTranslation

    lines = []
    for axes in row:
        handles, title = dict(_entries(axes)), _title(axes)
        place = axes.get_subplotspec()
        grid = place.get_gridspec().ncols if place is not None else 1
        figure = cast("Figure", axes.get_figure())
        columns = _columns(handles, figure.get_figwidth() / grid - 0.3)
        _legend(axes).remove()
        below = axes.transAxes + ScaledTranslation(0, -_BELOW_PANEL, figure.dpi_scale_trans)
        axes.legend(
            handles.values(),
            handles.keys(),
            title=title,
            title_fontsize=7,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=below,
            borderaxespad=0,
            ncols=columns,
        )
        lines.append(-(-len(handles) // columns) + bool(title))
    return max(lines)


def _legend(axes: Axes) -> Any:
    return axes.get_legend()


def _entries(axes: Axes) -> list[tuple[str, Any]]:
    """Label and handle of every entry of a panel's legend."""
    legend = _legend(axes)
    return [(text.get_text(), handle) for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)]


def _title(axes: Axes) -> str:
    return str(_legend(axes).get_title().get_text())


def _look(handle: Any) -> tuple[str, ...]:
    """Colour, line and marker of an entry."""
    from matplotlib.colors import to_hex

    colour = handle.get_color() if hasattr(handle, "get_color") else handle.get_facecolor()
    line, marker = (getattr(handle, f"get_{name}", str)() for name in ("linestyle", "marker"))
    return to_hex(colour), str(line), str(marker)


def _columns(labels: Iterable[str], inches: float) -> int:
    """As many columns as fit into this width, at most one per label."""
    lengths = [len(re.sub(r"\\[a-zA-Z]+", "x", label.replace("$", "")).translate(_NO_WIDTH)) for label in labels]
    return max(1, min(len(lengths), int(inches / (_HANDLE + _LETTER * max(lengths)))))


def _grow(figure: Figure, lines: int) -> None:
    """Make room for so many lines of legends, so that panels keep their size."""
    figure.set_figheight(figure.get_figheight() + _LINE * lines + 0.1)


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
    axis: Axes,
    lines: Mapping[str, Sequence[Arrays]],
    name: str,
    *,
    factor: float = 1.0,
    from_step: int = 0,
    less: Sequence[Arrays] | None = None,
) -> None:
    """Draw one measurement of several lines into a panel, each with all its seeds and their mean.

    Args:
        axis: the panel.
        lines: label -> runs, one per seed.
        name: of the measurement.
        factor: to multiply it by.
        from_step: first step to draw.
        less: runs whose measurement is subtracted, seed by seed: shows differences of curves that coincide.
    """
    for place, (label, runs) in enumerate(lines.items()):
        steps = runs[0]["step"]
        shown = steps >= from_step
        subtracted = [0.0] * len(runs) if less is None else [run[name][shown] for run in less]
        curves = [factor * (run[name][shown] - other) for run, other in zip(runs, subtracted, strict=True)]
        draw_seeds(axis, steps[shown], curves, label=label, **line_style(place if less is None else place + 1))
    if less is not None:
        axis.axhline(0, color=THEORY, lw=0.8, ls="--")
    axis.set_xlabel("step")


def mark_drops(axis: Axes, drops: Iterable[float]) -> None:
    """Draw a dotted vertical line at every drop of the learning rate."""
    for drop in drops:
        axis.axvline(drop, color=THEORY, lw=0.5, ls=":")
