"""What a logger should hold after a watched run, reckoned from the sample table alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from equilibria.integrations.scalars import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


def snippet(title: str) -> str:
    """The lines that the page shows under a title."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return code


def sgd(net: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)


def expected_layers(samples: pa.Table) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of every layer, for networks with few of them."""
    found: dict[str, dict[int, float]] = {}
    for row in samples.to_pylist():
        for metric in METRICS:
            value = _ratio(row) if metric == "angle_vs_predicted" else row[metric]
            if value is not None and math.isfinite(value):
                found.setdefault(f"equilibria/{metric}/{row['param']}", {})[row["step"]] = value
    return found


def expected_over_layers(samples: pa.Table) -> dict[str, dict[int, float]]:
    """Tag -> step -> median and extremes over layers, and how many are in which state."""
    found: dict[str, dict[int, float]] = {}
    for tag, values in expected_layers(samples).items():
        for step, value in values.items():
            found.setdefault(tag.rpartition("/")[0], {}).setdefault(step, []).append(value)  # type: ignore
    summaries = {"median": np.median, "min": np.min, "max": np.max}
    result = {
        f"{metric}/{word}": {step: float(summary(values)) for step, values in by_step.items()}
        for metric, by_step in found.items()
        for word, summary in summaries.items()
    }
    states = samples.select(["step", "state"]).to_pylist()
    for state in ("settling", "settled", "disturbed", "none"):
        result[f"equilibria/layers/{state.replace(' ', '_')}"] = {
            step: float(sum(row["step"] == step and row["state"] == state for row in states))
            for step in {row["step"] for row in states}
        }
    return result


def expected(samples: pa.Table) -> dict[str, dict[int, float]]:
    return expected_layers(samples) | expected_over_layers(samples)


def assert_logged(
    found: dict[str, dict[int, float]], wanted: dict[str, dict[int, float]], *, rel: float = 1e-12
) -> None:
    """The same tags, the same steps, each once, and the same numbers; ``rel`` is the logger's rounding."""
    assert wanted
    assert set(found) == set(wanted)
    for tag, values in wanted.items():
        assert list(found[tag]) == sorted(values), tag
        np.testing.assert_allclose(
            [found[tag][step] for step in sorted(values)], [values[s] for s in sorted(values)], rtol=rel
        )


def _ratio(row: dict[str, Any]) -> float | None:
    if row["angle"] is None or not row["angle_predicted"]:
        return None
    return row["angle"] / row["angle_predicted"]
