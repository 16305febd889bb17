"""The small networks of the monitor's tests and the helpers of the record's, importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("measure", "record"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
