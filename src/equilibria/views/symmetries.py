"""Symmetries as a notebook shows them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from equilibria.views.notebook import bars, card

if TYPE_CHECKING:
    from equilibria.symmetry._result import Symmetries

_KINDS = ("jointly", "against", "groups of", "undecided", "no effect", "alone", "rows")


def symmetries_card(found: Symmetries) -> str:
    """How much of the network is invariant in which way; a row per tensor; the notes."""
    shares = Counter[str]()
    for name, how in found.how.items():
        shares[_kind(how)] += found.elements[name]
    total = max(sum(shares.values()), 1)
    return card(
        f"{len(found.alone)} of {len(found.elements)} tensors are scale-invariant by themselves; "
        f"{len(found.basis)} independent symmetries",
        picture=bars([(kind, count / total) for kind, count in shares.most_common()], what="entries by invariance"),
        headings=("tensor", "entries", "invariant"),
        rows=[[name, f"{found.elements[name]:,}", how] for name, how in found.how.items()],
        notes=found.notes,
    )


def _kind(how: str) -> str:
    if " of " in how and how.endswith(" rows") and not how.startswith("groups of"):
        return "some rows"
    return next((kind for kind in _KINDS if how.startswith(kind)), how)
