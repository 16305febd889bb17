"""Changes training: optimizers."""

from __future__ import annotations

from equilibria.control.lion import Lion

__all__ = ["Lion"]
