"""Words and numbers as the pages write them."""

from __future__ import annotations

import math
import re
from html import escape

SLOWER, FASTER = "▼", "▲"


def mark(ratio: float | None, tolerance: float) -> str:
    """The sign of an angle that is off its goal; empty where it is on it, and where there is none.

    Example:
        >>> mark(0.45, 0.05), mark(1.02, 0.05), mark(None, 0.05)
        ('▼', '', '')
    """
    if ratio is None or abs(ratio - 1) <= tolerance:
        return ""
    return SLOWER if ratio < 1 else FASTER


def ratio_cell(ratio: float | None, tolerance: float, *, words: tuple[str, str] = ("slower", "faster")) -> str:
    """A table cell with a ratio, marked where it is off by more than the tolerance.

    Args:
        ratio: a positive number, or None where there is none.
        tolerance: how far from 1 it may be.
        words: what a screen reader says below and above.
    """
    if ratio is None or not math.isfinite(ratio):
        return "<td>–</td>"
    shown = f"{ratio:.2f}" if 0.005 <= ratio < 100 else number(ratio)
    sign = mark(ratio, tolerance)
    if not sign:
        return f'<td>{shown}<span class="mark"></span></td>'
    word = words[0] if sign == SLOWER else words[1]
    spoken = f'<span class="mark" aria-hidden="true">{sign}</span><span class="unseen"> {word}</span>'
    return f'<td class="out">{shown}{spoken}</td>'


def settings_list(pairs: list[tuple[str, str, str]]) -> str:
    """Name, value and a smaller remark ("" for none), as the items of a definition list."""
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in pairs
    )


def text(words: str) -> str:
    """Escaped, and with what belongs together on one line."""
    shown = re.sub(r"(?<=\d) %", "\u00a0%", escape(words))
    return re.sub(r"\blr [x×] wd\b", "lr\u00a0×\u00a0wd", shown)


def sentence_case(words: str) -> str:
    """With a capital first letter, unless the first word is a name.

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
    """As a sentence: a capital in front, a full stop behind."""
    words = sentence_case(words)
    return words if words.endswith((".", "!", "?")) else f"{words}."


def percent(share: float) -> str:
    """A share of 1 in per cent.

    Example:
        >>> percent(0.523), percent(0.004)
        ('52 %', '0.4 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def number(value: float, *, digits: int = 3, all_digits: bool = False) -> str:
    """A number as people write it; a dash where there is none.

    Example:
        >>> number(0.00725), number(5e-7), number(0.029, all_digits=True), number(float("nan"))
        ('0.00725', '5e-7', '0.0290', '–')
    """
    if not math.isfinite(value):
        return "–"
    return re.sub(
        r"e([+-])0*", lambda match: "e-" if match[1] == "-" else "e", f"{value:{'#' if all_digits else ''}.{digits}g}"
    )
