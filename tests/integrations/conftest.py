"""The small networks of the monitor's tests, importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("measure", "integrations"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
