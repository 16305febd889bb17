"""What a tool raised, in a line."""

from __future__ import annotations


def in_a_line(error: Exception) -> str:
    """Type and first line; and those of the error that it was raised on top of, which often is the cause."""
    words = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
    cause = error.__cause__ or error.__context__
    return words if not isinstance(cause, Exception) else f"{words} (after {in_a_line(cause)})"
