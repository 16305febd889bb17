"""MERGE-SHIM: the text that today's print functions print; goes when the views return text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from equilibria.views._rich import Console


def text(show: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    """The text that a print function of the views prints, with colours if standard output is a terminal."""
    outside = Console()
    out = io.StringIO()
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    show(*args, console=Console(file=out, width=outside.width, force_terminal=is_terminal), **kwargs)
    return out.getvalue().rstrip("\n")
