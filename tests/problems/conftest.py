"""The helper beside these tests, importable: tests are imported by path (import mode "importlib")."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
