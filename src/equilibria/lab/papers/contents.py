"""Every definition, theorem, algorithm, figure and table of the five documents, and where it is here.

The pages in ``docs/papers/items`` and the counts in the README are written from `ITEMS`. A new experiment or law of a
paper gets its row, or a place in one, in the ``contents`` of its folder.
"""

from __future__ import annotations

from collections import Counter

from equilibria.lab.papers.explr import contents as explr
from equilibria.lab.papers.items import STATUSES, Item
from equilibria.lab.papers.nrq import contents as nrq
from equilibria.lab.papers.sharp import contents as sharp
from equilibria.lab.papers.smd import contents as smd

ITEMS: dict[str, tuple[Item, ...]] = {
    "smd": smd.ITEMS,
    "smd+": smd.APPENDIX_ITEMS,
    "nrq": nrq.ITEMS,
    "explr": explr.ITEMS,
    "sharp": sharp.ITEMS,
}
"""The items of each document, by its key in `equilibria.theory.PAPERS`."""


def counts(papers: tuple[str, ...] = tuple(ITEMS)) -> str:
    """How many items of these documents have each status, in words.

    Example:
        >>> counts(("explr",))
        '24 items: 19 work, 5 at desk scale'
    """
    statuses = Counter(item.status for paper in papers for item in ITEMS[paper])
    words = {"works": "work"}
    parts = [f"{statuses[status]} {words.get(status, status)}" for status in STATUSES if statuses[status]]
    return f"{statuses.total()} items: {', '.join(parts)}"
