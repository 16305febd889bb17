"""What changed between two saved outputs of the doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError

_COMPARED = ("role", "shape", "invariant", "lr", "weight_decay")


def compare_outputs(old: Path, new: Path) -> list[dict[str, Any]]:
    """Every parameter that came, went or changed: name, what (field), old and new value.

    Args:
        old: file with the output of ``equilibria doctor ... --json``.
        new: a later one.

    Raises:
        EquilibriaError: if a file is not such an output.
    """
    before, after = _read(old), _read(new)
    changes: list[dict[str, Any]] = []
    for name in dict.fromkeys([*before, *after]):
        if name not in after or name not in before:
            changes.append(
                {"name": name, "field": "parameter", "old": _there(name, before), "new": _there(name, after)}
            )
            continue
        for field in _COMPARED:
            if before[name].get(field) != after[name].get(field):
                pair = {"old": before[name].get(field), "new": after[name].get(field)}
                changes.append({"name": name, "field": field, **pair})
    return changes


def _there(name: str, rows: dict[str, Any]) -> str:
    return "there" if name in rows else "not there"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["parameters"]
        return {row["name"]: row for row in rows}
    except FileNotFoundError:
        raise EquilibriaError(f"got {path}, which is not there; expected a saved output of doctor --json") from None
    except (ValueError, KeyError, TypeError):
        raise EquilibriaError(f"got {path}, which is no output of equilibria doctor --json") from None
