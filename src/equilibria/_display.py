"""How a result prints itself: its renderer in `equilibria.views`, looked up on first use.

Results stand to the left of the views that show them; this is the only way across.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def renderer(name: str) -> Callable[..., Any]:
    """A function of `equilibria.views` by its dotted name there, such as "plan.tables.plan_card"."""
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"equilibria.views.{module}"), function)
    return found


@dataclass(frozen=True, slots=True, repr=False)
class Printable:
    """What ``table()`` returns: ``print`` shows it in the terminal, a notebook shows it as the value of a cell.

    Attributes:
        text: for the terminal, with colours where standard output is one.
        html: for notebooks, nothing to load.
    """

    text: str
    html: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html
