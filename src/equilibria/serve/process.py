"""When a process began: its number alone may have gone to another one since."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def began(pid: int) -> float | None:
    """Seconds since 1970, to about a second; None where the system does not tell (it does on Linux)."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        lines = (_PROC / "stat").read_text(encoding="utf-8").splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
        return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all, after the name in parentheses
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return None
