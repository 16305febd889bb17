"""What the demo found: how far every layer turned, beside what it should have, before, at and after the drop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.diagnosis.series import by_parameter, steps_taken
from equilibria.errors import EquilibriaError
from equilibria.lab.demo.recipe import Recipe

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """Angles of one layer per step, root mean squares over a window of steps, in rad.

    Attributes:
        measured: what it turned.
        equilibrium: what lr, weight decay and momentum settle at.
        predicted: what the recursion says, driven by the measured size of the gradients; None without one.
    """

    measured: float
    equilibrium: float
    predicted: float | None

    @property
    def ratio(self) -> float:
        """Measured over equilibrium."""
        return self.measured / self.equilibrium

    @property
    def predicted_ratio(self) -> float | None:
        """Predicted over equilibrium."""
        return None if self.predicted is None else self.predicted / self.equilibrium


@dataclass(frozen=True, slots=True)
class LayerTurns:
    """One layer of one training.

    Attributes:
        layer: name of the convolution's weight.
        before: at the end of the first phase.
        after: right after the drop.
        end: at the end of the training.
    """

    layer: str
    before: Turn
    after: Turn
    end: Turn


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the two trainings.

    Attributes:
        run: its run directory.
        report: its HTML page.
        test_accuracy: share of the test images that it recognises at the end.
        layers: every convolution.
    """

    run: Path
    report: Path
    test_accuracy: float
    layers: tuple[LayerTurns, ...]

    def ratios(self, when: str) -> list[float]:
        """Measured over equilibrium of every layer, ``when`` being before, after or end."""
        return [getattr(layer, when).ratio for layer in self.layers]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Both trainings.

    Attributes:
        out: the folder with everything.
        recipe: the settings.
        plain: the training whose learning rate was only dropped.
        rescaled: the training whose weights and momentum were also rescaled.
    """

    out: Path
    recipe: Recipe
    plain: Branch
    rescaled: Branch

    @property
    def off_before(self) -> float:
        """How far the worst layer is from equilibrium before the drop, as a share; both trainings agree there."""
        return max(abs(ratio - 1) for ratio in self.plain.ratios("before"))

    @property
    def as_predicted(self) -> bool:
        """Whether every layer was within 5 % of its equilibrium before the drop."""
        return self.off_before <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "out": str(self.out),
            "settings": dataclasses.asdict(self.recipe),
            "off_before": self.off_before,
            "as_predicted": self.as_predicted,
            "plain": _branch_dict(self.plain),
            "rescaled": _branch_dict(self.rescaled),
        }


def _branch_dict(branch: Branch) -> dict[str, Any]:
    return {
        "run": str(branch.run),
        "report": str(branch.report),
        "test_accuracy": branch.test_accuracy,
        "layers": [
            {
                "layer": layer.layer,
                **{
                    when: {**dataclasses.asdict(turn), "ratio": turn.ratio, "predicted_ratio": turn.predicted_ratio}
                    for when, turn in (("before", layer.before), ("after", layer.after), ("end", layer.end))
                },
            }
            for layer in branch.layers
        ],
    }


def read_layers(
    samples: pa.Table, metadata: Mapping[str, Any], *, recipe: Recipe, layers: Sequence[str]
) -> tuple[LayerTurns, ...]:
    """How far the named layers turned in the three windows of a run.

    Args:
        samples: the sample table of the run.
        metadata: the run's.
        recipe: says when the drop was and how long the windows are.
        layers: names of weights.

    Raises:
        EquilibriaError: if a layer has no sample in one of the windows.
    """
    series = steps_taken(by_parameter(samples, metadata=metadata))
    drop, end = recipe.steps_before, recipe.steps
    windows = {
        "before": range(drop - recipe.steady_window, drop),
        "after": range(drop, drop + recipe.drop_window),
        "end": range(end - recipe.steady_window, end),
    }
    found = []
    for layer in layers:
        if layer not in series.names:
            raise EquilibriaError(f"got a run without {layer}; expected: {', '.join(layers)}")
        columns = series.of(series.names.index(layer))
        found.append(LayerTurns(layer, **{when: _turn(columns, layer, steps) for when, steps in windows.items()}))
    return tuple(found)


def _turn(columns: Mapping[str, NDArray[Any]], layer: str, steps: range) -> Turn:
    inside = (columns["step"] >= steps.start) & (columns["step"] < steps.stop)
    if not inside.any():
        raise EquilibriaError(f"got no sample of {layer} in steps {steps.start} to {steps.stop - 1}")
    angles = [_rms(columns[name][inside]) for name in ("angle", "angle_equilibrium", "angle_predicted")]
    return Turn(angles[0], angles[1], angles[2] if np.isfinite(angles[2]) else None)


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(values**2)))
