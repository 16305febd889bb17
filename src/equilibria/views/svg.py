"""Pictures for notebooks and reports, as plain SVG: plotly would put megabytes into every output cell.

Text takes the colour of its surroundings, so that pictures are readable on light and on dark. Axes end on round
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from equilibria.findings import rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEASURED, PREDICTED, EQUILIBRIUM, OTHER = "#009e73", "#0072b2", "#d55e00", "#868e97"
"""Colours of lines that the colour-blind can tell apart too."""

WIDE, NARROW = 560, 312
"""Widths of a picture: that of a card, and one of which a report shows three side by side, and a phone one."""

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 226, 58, 20, 24, 50
_MOST_STEPS = 5  # between the ends of an axis
_LEGEND_ROW = 15
_CHARACTER, _GAP = 6.3, 7  # mean width, rounded up, and the distance between two names


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; points that are not finite, or not positive where the axis is logarithmic, are gaps."""

    label: str
    x: Sequence[float] | NDArray[Any]
    y: Sequence[float] | NDArray[Any]
    colour: str
    dashed: bool = False
    marked: bool = False  # a dot at every point


def svg_chart(lines: Sequence[Line], *, x: str, y: str, log: bool = False, width: int = WIDE) -> str:
    """Lines over a common axis, as SVG; empty if there is nothing to draw.

    Args:
        lines: drawn in order, named in a legend below.
        x: the horizontal axis, with its unit.
        y: the vertical axis, with its unit.
        log: whether the vertical axis is logarithmic.
        width: of the picture.
    """
    drawn = [(line, _points(line, log)) for line in lines]
    points = [point for _, stretches in drawn for stretch in stretches for point in stretch]
    if not points:
        return ""
    frame = _Frame([across for across, _ in points], [up for _, up in points], log=log, width=width)
    paths = [
        f'<polyline fill="none" stroke="{line.colour}" stroke-width="1.6"{_dashes(line)} '
        f'points="{frame.path(stretch)}"/>'
        for line, stretches in drawn
        for stretch in stretches
    ]
    paths += [
        f'<circle cx="{frame.across(point[0]):.1f}" cy="{frame.down(point[1]):.1f}" r="2.6" fill="{line.colour}"/>'
        for line, stretches in drawn
        if line.marked
        for stretch in stretches
        for point in stretch
    ]
    return frame.picture(paths, lines, x=x, y=y)


def svg_stack(parts: Sequence[Line], total: Line, *, x: str, y: str, width: int = WIDE) -> str:
    """Parts of a sum over a common axis, stacked upward where positive and downward where negative, with their sum.

    Args:
        parts: as areas, all with the same x; named in a legend below.
        total: drawn as a line above them.
        x: the horizontal axis, with its unit.
        y: the vertical axis, with its unit.
        width: of the picture.
    """
    if len(total.x) < 2:
        return ""
    above, below = [0.0] * len(total.x), [0.0] * len(total.x)
    bands: list[tuple[Line, list[float], list[float]]] = []
    for part in parts:
        for stack, sign in ((above, 1), (below, -1)):
            inner = list(stack)
            for place, value in enumerate(map(float, part.y)):
                stack[place] += value if value * sign > 0 else 0.0
            bands.append((part, inner, list(stack)))
    steps = list(map(float, total.x))
    frame = _Frame(steps, [*above, *below, *map(float, total.y)], log=False, width=width)
    areas = [
        f'<polygon fill="{part.colour}" fill-opacity=".55" '
        f'points="{frame.path(zip(steps, outer, strict=True))} '
        f'{frame.path(reversed(list(zip(steps, inner, strict=True))))}"/>'
        for part, inner, outer in bands
        if inner != outer
    ]
    line = frame.path(zip(steps, map(float, total.y), strict=True))
    areas.append(f'<polyline fill="none" stroke="{total.colour}" stroke-width="1.8" points="{line}"/>')
    return frame.picture(areas, [*parts, total], x=x, y=y)


def svg_bars(shares: Sequence[tuple[str, float]], *, label: str) -> str:
    """Shares of a whole as horizontal bars, as SVG; empty if there is nothing to draw.

    Args:
        shares: names with shares between 0 and 1; at most eight are drawn.
        label: what is shared, for screen readers.
    """
    drawn, step, left = shares[:8], 20, 200
    rows = []
    for row, (name, share) in enumerate(drawn):
        width, across = (WIDE - left - 60) * share, row * step
        shown = name if len(name) <= 30 else f"…{name[-29:]}"
        rows += [
            _text(left - 6, across + 14, shown, "end"),
            f'<rect x="{left}" y="{across + 4}" width="{max(width, 1):.1f}" height="12" fill="{PREDICTED}"/>',
            _text(left + width + 6, across + 14, f"{share:.0%}", "start"),
        ]
    return _svg(label, rows, height=len(drawn) * step + 6) if drawn else ""


def _points(line: Line, log: bool) -> list[list[tuple[float, float]]]:
    """The points of a line, split at its gaps."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(map(float, line.x), map(float, line.y), strict=True):
        if math.isfinite(y) and (y > 0 or not log):
            stretches[-1].append((x, math.log10(y) if log else y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


class _Frame:
    """Two axes that end on round numbers, and where points lie between them."""

    def __init__(self, x: Sequence[float], y: Sequence[float], *, log: bool, width: int) -> None:
        self._width = width
        few_whole = max(x) - min(x) <= _MOST_STEPS and all(float(value).is_integer() for value in x)
        self._x = round_levels(min(x), max(x))
        if few_whole and min(x) < max(x):
            self._x = [float(number) for number in range(int(min(x)), int(max(x)) + 1)]
        self._y = log_levels(min(y), max(y)) if log else round_levels(min(y), max(y))
        self._value: Callable[[float], float] = (lambda level: 10**level) if log else (lambda level: level)

    def across(self, x: float) -> float:
        """The horizontal place of a value."""
        low, high = self._x[0], self._x[-1]
        return _LEFT + (self._width - _LEFT - _RIGHT) * (x - low) / (high - low)

    def down(self, y: float) -> float:
        """The vertical place of a value."""
        low, high = self._y[0], self._y[-1]
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - y) / (high - low)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """The points of a polyline or polygon."""
        return " ".join(f"{self.across(x):.1f},{self.down(y):.1f}" for x, y in points)

    def picture(self, drawn: Sequence[str], lines: Sequence[Line], *, x: str, y: str) -> str:
        """What was drawn, with axes and a legend."""
        right, bottom = self._width - _RIGHT, _HEIGHT - _BOTTOM
        grid = []
        for level in self._y:
            height = self.down(level)
            strength = ".45" if level == 0 and self._y[0] < 0 else ".15"
            grid.append(
                f'<line x1="{_LEFT}" y1="{height:.1f}" x2="{right}" y2="{height:.1f}" stroke="currentColor" '
                f'stroke-opacity="{strength}"/>'
            )
            grid.append(_text(_LEFT - 6, height + 4, _short(self._value(level)), "end"))
        grid += [_text(self.across(level), bottom + 14, _short(level), "middle") for level in self._x]
        names = [_text(2, 10, y, "start"), _text((_LEFT + right) / 2, bottom + 28, x, "middle")]
        legend, height = _legend(lines, self._width)
        return _svg(f"{y} over {x}", [*grid, *names, *drawn, *legend], width=self._width, height=height)


def round_levels(low: float, high: float) -> list[float]:
    """Up to six multiples of 1, 2 or 5 times a power of ten, the first at or below low, the last at or above high.

    Example:
        >>> round_levels(325, 395), round_levels(0, 3)
        ([320.0, 340.0, 360.0, 380.0, 400.0], [0.0, 1.0, 2.0, 3.0])
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
    power = math.floor(math.log10((high - low) / _MOST_STEPS))
    for tenth in (1, 2, 5, 10, 20, 50):
        step = tenth * 10.0**power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= _MOST_STEPS:
            break
    return [number * tenth / 10**-power if power < 0 else number * step for number in range(first, last + 1)]


def log_levels(low: float, high: float) -> list[float]:
    """Logarithms of up to six round numbers, the first at or below low and the last at or above high, both logarithms.

    Example:
        >>> [round(10**level, 6) for level in log_levels(-2.9, -1.2)], [10**level for level in log_levels(0, 8)]
        ([0.001, 0.003, 0.01, 0.03, 0.1], [1.0, 100.0, 10000.0, 1000000.0, 100000000.0])
    """
    if high - low < math.log10(2):
        return [math.log10(level) for level in round_levels(10**low, 10**high) if level > 0]
    decades = range(math.floor(low), math.ceil(high + 1e-9) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        levels = [decade + math.log10(digit) for decade in decades for digit in digits]
        first = max(place for place, level in enumerate(levels) if level <= low + 1e-9)
        last = min(place for place, level in enumerate(levels) if level >= high - 1e-9)
        if last - first <= _MOST_STEPS:
            return levels[first : last + 1]
    step = math.ceil((last - first) / _MOST_STEPS)
    return list(map(float, range(decades[first], decades[last] + step, step)))


def _legend(lines: Sequence[Line], width: int) -> tuple[list[str], int]:
    """The names of the lines, in rows below, and the height of the picture with them."""
    begin = 2.0 if width == NARROW else float(_LEFT)
    x, y, parts = begin, _HEIGHT - 8, list[str]()
    for line in {line.label: line for line in lines}.values():
        wide = 23 + _GAP + _CHARACTER * len(line.label)
        if x > begin and x + wide - _GAP > width:
            x, y = begin, y + _LEGEND_ROW
        parts.append(
            f'<line x1="{x:.0f}" y1="{y}" x2="{x + 18:.0f}" y2="{y}" stroke="{line.colour}" '
            f'stroke-width="2"{_dashes(line)}/>'
        )
        parts.append(_text(x + 23, y + 4, line.label, "start"))
        x += wide
    return parts, y + 8


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 4"' if line.dashed else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], *, width: int = WIDE, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="11">'
        f"{''.join(parts)}</svg>"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else rounded(value)
