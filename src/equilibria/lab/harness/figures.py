"""The style of all figures: colours, sizes for print, and saving without a window."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

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


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the figure as .png for the screen and as .pdf for print; the same figure gives the same bytes."""
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns about the dates in matplotlib's own fonts
    for suffix in SUFFIXES:
        content = io.BytesIO()
        undated = {"Software": None} if suffix == "png" else {"CreationDate": None}
        figure.savefig(content, format=suffix, metadata=undated)
        write_whole(folder / f"{name}.{suffix}", content.getvalue())
