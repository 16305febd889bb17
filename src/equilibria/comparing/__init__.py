"""Many runs side by side: which one left the band of those before it, and what had changed.

- `history`: every run against a band from the runs before it; `History` prints itself and writes a page.
- `Departure`, `JudgedRun`: what it says of a run.
- `SettingChange`: a setting that differs between two runs.
"""

from __future__ import annotations

from equilibria.comparing._history import Departure, History, JudgedRun, history
from equilibria.comparing._setting_changes import SettingChange

__all__ = ["Departure", "History", "JudgedRun", "SettingChange", "history"]
