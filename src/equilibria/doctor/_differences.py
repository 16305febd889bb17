"""Compares two saved outputs of the doctor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError

_COMPARED = (
    "role",
    "shape",
    "invariant",
    "group",
    "lr",
    "weight_decay",
    "decay_per_step",
    "angle",
    "time_constant",
    "severity",
    "problem",
)
_SAME = 1e-9  # relative difference below which numbers differ by rounding only


def compare_outputs(old: Path, new: Path) -> list[dict[str, Any]]:
    """List every parameter that was added, removed or changed: name, field, old and new value.

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
                {"name": name, "field": "parameter", "old": _presence(name, before), "new": _presence(name, after)}
            )
            continue
        for field in _COMPARED:
            old_value, new_value = before[name][field], after[name][field]
            if not _same(old_value, new_value):
                changes.append({"name": name, "field": field, "old": old_value, "new": new_value})
    return changes


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=_SAME)
    return bool(old == new)


def _presence(name: str, rows: dict[str, Any]) -> str:
    return "there" if name in rows else "not there"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        what = "which is a folder" if path.is_dir() else "which does not exist"
        raise EquilibriaError(f"got {path}, {what}; expected a saved output of doctor --json")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["parameters"]
        lacking = [(row["name"], field) for row in rows for field in _COMPARED if field not in row]
    except (ValueError, KeyError, TypeError):
        raise EquilibriaError(f"got {path}; expected a saved output of equilibria doctor --json") from None
    if lacking:
        name, field = lacking[0]
        raise EquilibriaError(
            f"got {path}, whose row {name} has no {field!r}; expected an output of equilibria doctor --json as this "
            "version saves it: save it again"
        )
    return {row["name"]: row for row in rows}
