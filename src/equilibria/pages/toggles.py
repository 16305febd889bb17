"""Alternatives of a page as one row of buttons: radio buttons, so that arrow keys and screen readers know them.

What belongs to the n-th alternative stands in a ``choice``; the shared style shows the chosen one, also without
JavaScript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equilibria.pages.words import text

MOST_CHOICES = 12  # for which the shared style has rules; more buttons nobody compares


def toggles(legend: str, choices: Mapping[str, str]) -> str:
    """The buttons and, below them, a sentence about the chosen one.

    Args:
        legend: what is chosen.
        choices: a sentence by name; the first one is chosen when the page opens.

    Returns:
        HTML; nothing if there is nothing to choose.

    Example:
        >>> toggles("Plan", {"as typed": "Only one."})
        ''
    """
    if len(choices) < 2:
        return ""
    buttons = "\n".join(_button(place, name) for place, name in enumerate(choices))
    said = alternatives([f"<p>{text(sentence)}</p>" for sentence in choices.values()])
    return (
        f'<fieldset class="toggles">\n<legend>{text(legend)}</legend>\n{buttons}\n</fieldset>\n'
        f'<div class="caption" aria-live="polite">\n{said}\n</div>'
    )


def alternatives(parts: Sequence[str]) -> str:
    """HTML of which the chosen part is shown; as it is where there is only one."""
    if len(parts) == 1:
        return parts[0]
    return "\n".join(f'<div class="choice choice-{place}">\n{part}\n</div>' for place, part in enumerate(parts))


def _button(place: int, name: str) -> str:
    checked = " checked" if place == 0 else ""
    return (
        f'<label><input type="radio" name="choice" id="choice-{place}" value="{place}" autocomplete="off"{checked}>'
        f"<span>{text(name)}</span></label>"
    )
