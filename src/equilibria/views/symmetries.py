"""The notebook card of `Symmetries`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from equilibria.views.notebook import card, svg_bars

if TYPE_CHECKING:
    from equilibria.symmetry._result import Symmetries

_KINDS = ("jointly", "against", "groups of", "undecided", "no effect", "alone", "rows")


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
