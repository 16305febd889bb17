"""The helpers beside these tests, and the browser of the page tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "pages")]
