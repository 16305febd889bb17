"""The helpers beside these tests, the browser of the page tests and the made-up runs of the report tests."""

from __future__ import annotations

import sys
from pathlib import Path

here = Path(__file__).parent
sys.path[:0] = [str(here), str(here.parent / "pages"), str(here.parent / "report")]
