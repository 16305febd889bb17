"""Cards for notebooks: a headline, an SVG picture, a small table and some notes, as HTML with nothing to load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from equilibria.views.svg import svg_bars

if TYPE_CHECKING:
    from equilibria.curvature._sharpness import Sharpness
    from equilibria.symmetry._result import Symmetries

MOST_ROWS = 12
"""Rows of a table in a card; the others are counted."""

_MOST_NOTES = 4
_CELL = "padding:1px 10px 1px 0"


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
        picture: from `equilibria.views.svg`.
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
