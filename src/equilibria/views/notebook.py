"""Cards for notebooks: a headline, an SVG picture, a small table and some notes, as HTML with nothing to load.

Charts are plain SVG: plotly would put megabytes into every output cell. Text takes the colour of the notebook, so that
cards are readable on light and on dark.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equilibria.curvature._sharpness import Sharpness
    from equilibria.symmetry._result import Symmetries

MEASURED, PREDICTED, EQUILIBRIUM, OTHER = "#009e73", "#0072b2", "#d55e00", "#868e97"
"""Colours of lines that the colour-blind can tell apart too."""

_WIDTH, _HEIGHT = 560, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 24, 34
_TICKS = 4
_LEGEND_ROW = 15
MOST_ROWS = 12
"""Rows of a table in a card; the others are counted."""

_MOST_NOTES = 4
_CELL = "padding:1px 10px 1px 0"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart; points that are not finite, or not positive where the axis is logarithmic, are gaps."""

    label: str
    x: Sequence[float] | NDArray[Any]
    y: Sequence[float] | NDArray[Any]
    colour: str
    dashed: bool = False
    marked: bool = False  # a dot at every point


def card(
    title: str,
    *,
    picture: str = "",
    headings: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    left_out: int = 0,
    notes: Sequence[str] = (),
) -> str:
    """A card: a headline, a picture, a table and notes.

    Args:
        title: plain text, as are all cells and notes.
        picture: from `svg_chart` or `svg_bars`.
        headings: of the columns; numbers are aligned on the right, words on the left.
        rows: the cells of each row; the first twelve are shown, the others counted.
        left_out: rows that are counted too, but not given.
        notes: sentences; the first four are shown, the others counted.
    """
    parts = [f'<div style="font-weight:600;margin:2px 0 6px">{escape(title)}</div>', picture]
    all_rows = list(rows)
    if all_rows:
        parts.append(_table(headings, all_rows, left_out=left_out))
    parts += [
        f'<div style="margin-top:4px;max-width:70ch">{escape(note[:1].upper() + note[1:])}</div>'
        for note in notes[:_MOST_NOTES]
    ]
    left = len(notes) - _MOST_NOTES
    parts += [_soft(f"and {left} more")] if left > 0 else []
    return f'<div style="font:13px/1.45 system-ui,sans-serif;margin:4px 0">{"".join(parts)}</div>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left_out: int) -> str:
    shown = rows[:MOST_ROWS]
    sides = ["right" if all(map(_is_number, column)) else "left" for column in zip(*shown, strict=True)]

    def line(kind: str, texts: Sequence[str]) -> str:
        cells = zip(sides, texts, strict=True)
        return "".join(f'<{kind} style="text-align:{side};{_CELL}">{escape(cell)}</{kind}>' for side, cell in cells)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in shown)
    left = len(rows) + left_out - len(shown)
    more = _soft(f"and {left} more") if left else ""
    return f'<table style="border-collapse:collapse;font:inherit"><tr>{line("th", headings)}</tr>{body}</table>{more}'


def _is_number(cell: str) -> bool:
    return cell[:1] in "-0123456789"  # an empty cell too


def _soft(text: str) -> str:
    return f'<div style="opacity:.65">{escape(text)}</div>'


def svg_chart(lines: Sequence[Line], *, x: str, y: str, log: bool = False) -> str:
    """Lines over a common axis, as SVG; empty if there is nothing to draw.

    Args:
        lines: drawn in order, named in a legend below.
        x: the horizontal axis, with its unit.
        y: the vertical axis, with its unit.
        log: whether the vertical axis is logarithmic.
    """
    drawn = [(line, _points(line, log)) for line in lines]
    points = [point for _, stretches in drawn for stretch in stretches for point in stretch]
    if not points:
        return ""
    low_x, high_x = _ends([x_value for x_value, _ in points])
    low_y, high_y = _ends([y_value for _, y_value in points])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x_value: float, y_value: float) -> str:
        across, up = (x_value - low_x) / (high_x - low_x), (y_value - low_y) / (high_y - low_y)
        return f"{_LEFT + width * across:.1f},{_TOP + height * (1 - up):.1f}"

    paths = [
        f'<polyline fill="none" stroke="{line.colour}" stroke-width="1.6"{_dashes(line)} '
        f'points="{" ".join(place(*point) for point in stretch)}"/>'
        for line, stretches in drawn
        for stretch in stretches
    ]
    for line, stretches in drawn:
        dots = [place(*point).split(",") for stretch in stretches for point in stretch] if line.marked else []
        paths += [f'<circle cx="{across}" cy="{down}" r="2.6" fill="{line.colour}"/>' for across, down in dots]
    parts = [tick / (_TICKS - 1) for tick in range(_TICKS)]
    levels = [low_y + (high_y - low_y) * part for part in parts]
    grid = [
        _level(_TOP + height * (1 - part), _short(10**level if log else level))
        for part, level in zip(parts, levels, strict=True)
    ]
    ends = [
        _text(_LEFT, _HEIGHT - _BOTTOM + 14, _short(low_x), "start"),
        _text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 14, f"{_short(high_x)} {x}", "end"),
    ]
    legend, full = _legend(lines)
    return _svg(f"{y} over {x}", [*grid, _text(2, 10, y, "start"), *ends, *paths, *legend], height=full)


def svg_stack(parts: Sequence[Line], total: Line, *, x: str, y: str) -> str:
    """Parts of a sum over a common axis, stacked upward where positive and downward where negative, with their sum.

    Args:
        parts: as areas, all with the same x; named in a legend below.
        total: drawn as a line above them.
        x: the horizontal axis, with its unit.
        y: the vertical axis, with its unit.
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
    low, high = _ends([*above, *below, *map(float, total.y)])
    begin, end = _ends([float(value) for value in total.x])
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place_at(x_value: float, y_value: float) -> str:
        across, up = (x_value - begin) / (end - begin), (y_value - low) / (high - low)
        return f"{_LEFT + width * across:.1f},{_TOP + height * (1 - up):.1f}"

    areas = [
        f'<polygon fill="{part.colour}" fill-opacity=".55" points="'
        f"{' '.join(map(place_at, map(float, part.x), outer))} "
        f'{" ".join(reversed([*map(place_at, map(float, part.x), inner)]))}"/>'
        for part, inner, outer in bands
        if inner != outer
    ]
    line = " ".join(map(place_at, map(float, total.x), map(float, total.y)))
    areas.append(f'<polyline fill="none" stroke="{total.colour}" stroke-width="1.8" points="{line}"/>')
    levels = sorted({low, 0.0, high})
    grid = [_level(_TOP + height * (1 - (level - low) / (high - low)), _short(level)) for level in levels]
    ends = [
        _text(_LEFT, _HEIGHT - _BOTTOM + 14, _short(begin), "start"),
        _text(_WIDTH - _RIGHT, _HEIGHT - _BOTTOM + 14, f"{_short(end)} {x}", "end"),
    ]
    legend, full = _legend([*parts, total])
    return _svg(f"{y} over {x}", [*grid, _text(2, 10, y, "start"), *ends, *areas, *legend], height=full)


def svg_bars(shares: Sequence[tuple[str, float]], *, label: str) -> str:
    """Shares of a whole as horizontal bars, as SVG; empty if there is nothing to draw.

    Args:
        shares: names with shares between 0 and 1; at most eight are drawn.
        label: what is shared, for screen readers.
    """
    drawn, step, left = shares[:8], 20, 200
    rows = []
    for row, (name, share) in enumerate(drawn):
        width, across = (_WIDTH - left - 60) * share, row * step
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


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5 * abs(high) or 1.0
    return (low, high) if low != high else (low - margin, high + margin)


def _level(height: float, label: str) -> str:
    rule = (
        f'<line x1="{_LEFT}" y1="{height:.1f}" x2="{_WIDTH - _RIGHT}" y2="{height:.1f}" stroke="currentColor" '
        'stroke-opacity=".15"/>'
    )
    return rule + _text(_LEFT - 6, height + 4, label, "end")


def _legend(lines: Sequence[Line]) -> tuple[list[str], int]:
    """The names of the lines, in rows below, and the height of the picture with them."""
    x, y, parts = float(_LEFT), _HEIGHT - 8, list[str]()
    for line in {line.label: line for line in lines}.values():
        width = 34 + 6.2 * len(line.label)
        if x > _LEFT and x + width > _WIDTH:
            x, y = float(_LEFT), y + _LEGEND_ROW
        parts.append(
            f'<line x1="{x:.0f}" y1="{y}" x2="{x + 18:.0f}" y2="{y}" stroke="{line.colour}" '
            f'stroke-width="2"{_dashes(line)}/>'
        )
        parts.append(_text(x + 23, y + 4, line.label, "start"))
        x += width
    return parts, y + 8


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 4"' if line.dashed else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def _svg(title: str, parts: Sequence[str], *, height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="11">'
        f"{''.join(parts)}</svg>"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ---- the cards of `Sharpness` and `Symmetries`

_KINDS = ("jointly", "against", "groups of", "undecided", "no effect", "alone", "rows")


def sharpness_card(sharpness: Sharpness) -> str:
    """A card with the shares of the first eigenvector by tensor, and one row per eigenvalue."""
    shares = {name: float(part.square().sum()) for name, part in sharpness.vectors[0].items()}
    ranked = sorted(shares.items(), key=lambda item: item[1], reverse=True)
    rows = zip(sharpness.values, sharpness.bound, sharpness.residuals, strict=True)
    certainty = "99.9 %" if sharpness.certified else "estimate"
    return card(
        str(sharpness),
        picture=svg_bars(ranked, label="share of the first eigenvector by tensor"),
        headings=("eigenvalue", "value", f"relative error, at most ({certainty})", "residual"),
        rows=[
            [f"{place}", f"{value:.6g}", f"{bound:.1e}", f"{residual:.1e}"]
            for place, (value, bound, residual) in enumerate(rows, 1)
        ],
        notes=["The bars are the shares of the first eigenvector in each tensor."],
    )


def symmetries_card(symmetries: Symmetries) -> str:
    """A card with the share of entries by kind of invariance, one row per tensor, and the notes."""
    shares = Counter[str]()
    for name, how in symmetries.how.items():
        shares[_kind(how)] += symmetries.elements[name]
    total = max(sum(shares.values()), 1)
    return card(
        f"{len(symmetries.alone)} of {len(symmetries.elements)} tensors are scale-invariant by themselves; "
        f"{len(symmetries.basis)} independent symmetries",
        picture=svg_bars(
            [(kind, count / total) for kind, count in shares.most_common()], label="entries by invariance"
        ),
        headings=("tensor", "entries", "invariant"),
        rows=[[name, f"{symmetries.elements[name]:,}", how] for name, how in symmetries.how.items()],
        notes=symmetries.notes,
    )


def _kind(how: str) -> str:
    if " of " in how and how.endswith(" rows") and not how.startswith("groups of"):
        return "some rows"
    return next((kind for kind in _KINDS if how.startswith(kind)), how)
