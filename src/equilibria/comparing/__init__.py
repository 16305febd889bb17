"""Runs compared: why two differ, and which of many left the band of those before it.

- `explain`: the causes for which the layers of two runs turn at different speeds; `Explanation` prints itself and
  writes a page.
- `history`: every run against a band from the runs before it; `History` does the same.
"""

from __future__ import annotations

from equilibria.comparing._causes import Cause
from equilibria.comparing._change import AngleCurve, Change
from equilibria.comparing._explanation import Explanation, LayerDifference, LoggedDifference, explain
from equilibria.comparing._history import Departure, History, JudgedRun, history
from equilibria.comparing._settings import SettingDifference

__all__ = [
    "AngleCurve",
    "Cause",
    "Change",
    "Departure",
    "Explanation",
    "History",
    "JudgedRun",
    "LayerDifference",
    "LoggedDifference",
    "SettingDifference",
    "explain",
    "history",
]
