"""Sentences and table cells of the pages, as HTML."""

from __future__ import annotations

import math
import re
from html import escape

from equilibria.findings import rounded

SLOWER, FASTER = "▼", "▲"


def text(words: str) -> str:
    """Escape plain text and keep numbers with their unit on one line."""
    shown = re.sub(r"(?<=\d) %", "\u00a0%", escape(words))
    return re.sub(r"\blr [x×] wd\b", "lr\u00a0×\u00a0wd", shown)


def sentence_case(words: str) -> str:
    """Start with a capital letter, unless the first word is a name.

    Example:
        >>> sentence_case("the norm grows"), sentence_case("head.weight rests"), sentence_case("lr falls")
        ('The norm grows', 'head.weight rests', 'The lr falls')
    """
    first, _, rest = words.partition(" ")
    if first == "lr" and not rest.startswith("x "):
        return f"The {words}"
    is_a_name = first == "lr" or re.search(r"\d|[._]\w", first)  # lr x wd, float32, head.weight
    return words if is_a_name else words[:1].upper() + words[1:]


def full_stop(words: str) -> str:
    """Start with a capital letter and end with a full stop.

    Example:
        >>> full_stop("the norm grows"), full_stop("Why?")
        ('The norm grows.', 'Why?')
    """
    words = sentence_case(words)
    return words if words.endswith((".", "!", "?")) else f"{words}."


def settings_list(settings: list[tuple[str, str, str]]) -> str:
    """The items of a definition list: name, value and a smaller remark ("" for none)."""
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in settings
    )


def ratio_mark(ratio: float | None, tolerance: float) -> str:
    """The sign of a ratio that is off 1; empty where it is within the tolerance or unknown.

    Example:
        >>> ratio_mark(0.45, 0.05), ratio_mark(1.02, 0.05), ratio_mark(None, 0.05)
        ('▼', '', '')
    """
    if ratio is None or abs(ratio - 1) <= tolerance:
        return ""
    return SLOWER if ratio < 1 else FASTER


def ratio_cell(ratio: float | None, tolerance: float, *, words: tuple[str, str] = ("slower", "faster")) -> str:
    """A table cell with a ratio, marked where it is off 1 by more than the tolerance.

    Args:
        ratio: a positive number, or None where there is none.
        tolerance: how far from 1 it may be.
        words: what a screen reader says below and above.
    """
    if ratio is None or not math.isfinite(ratio):
        return "<td>–</td>"
    shown = f"{ratio:.2f}" if 0.005 <= ratio < 100 else rounded(ratio)
    sign = ratio_mark(ratio, tolerance)
    if not sign:
        return f'<td>{shown}<span class="mark"></span></td>'
    word = words[0] if sign == SLOWER else words[1]
    spoken = f'<span class="mark" aria-hidden="true">{sign}</span><span class="unseen"> {word}</span>'
    return f'<td class="out">{shown}{spoken}</td>'
