"""How commands print JSON: without NaN."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any


def jsonable(value: Any) -> Any:
    """Dataclasses, arrays and numbers as JSON values; what is not finite becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """One JSON value and nothing else."""
    print(json.dumps(jsonable(value), allow_nan=False))
