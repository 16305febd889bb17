"""The hand-derived symmetries beside the tests of `symmetries`, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "measure" / "symmetry"))
