"""What several tests share: small networks, made-up runs, a browser, processes that are killed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Of the repository."""
