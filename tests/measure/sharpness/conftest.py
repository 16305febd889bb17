"""The helpers beside these tests and those of the curvature, importable."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "curvature"):
    sys.path.insert(0, str(folder))
