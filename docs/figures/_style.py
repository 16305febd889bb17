"""What the figures of the concept pages have in common: size, colours, and where they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONCEPTS = Path(__file__).parents[1] / "concepts"
BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9822b", "#3b8f5a", "#777777"
THEORY: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "legend.frameon": False})


def panels(count: int) -> tuple[Any, Any]:
    """A row of panels as wide as a page."""
    return plt.subplots(1, count, figsize=(8.6, 3.2), layout="constrained")


def save(figure: Any, name: str, *, folder: Path = CONCEPTS) -> None:
    """Write `NAME.png`, by default into `docs/concepts`."""
    figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
    plt.close(figure)
