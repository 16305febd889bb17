"""rich, imported so that nothing else notices: its import draws from Python's global random numbers.

A training script that seeds ``random`` and is then watched has to draw the same numbers as one that is not.
"""

from __future__ import annotations

import random

_before = random.getstate()
try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_before)

__all__ = ["Console", "Live", "Table", "Text"]
