"""Results of the demo: how far every layer turned and should have turned before and after the drop, and accuracies."""

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
from equilibria.lab.demo.training import LESS_DECAY, PLAIN, RESCALED, DemoSettings
from equilibria.lab.harness.figures import rms

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """Angles of one layer per step, root mean squares over a window of steps, in rad.

    Attributes:
        measured: by the monitor.
        equilibrium: of the present lr, weight decay and momentum.
        predicted: by the recursion, from the measured size of the gradients; None without a prediction.
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
class DemoArm:
    """One of the trainings.

    Attributes:
        run: its run directory.
        report: its HTML page.
        accuracy_steps: steps done at each measurement of the test accuracy.
        accuracies: share of the test images that are recognised, at each measurement.
        layers: every convolution.
    """

    run: Path
    report: Path
    accuracy_steps: tuple[int, ...]
    accuracies: tuple[float, ...]
    layers: tuple[LayerTurns, ...]

    @property
    def test_accuracy(self) -> float:
        """Share of the test images that are recognised at the end."""
        return self.accuracies[-1]

    def ratios(self, when: str) -> list[float]:
        """Measured over equilibrium of every layer, ``when`` being before, after or end."""
        return [getattr(layer, when).ratio for layer in self.layers]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All trainings.

    Attributes:
        out: the folder with everything.
        settings: of the trainings.
        plain: the learning rate was divided, nothing else.
        rescaled: weights and momentum were rescaled at the same step.
        less_decay: weight decay was divided by the same factor at the same step.
    """

    out: Path
    settings: DemoSettings
    plain: DemoArm
    rescaled: DemoArm
    less_decay: DemoArm

    @property
    def off_before(self) -> float:
        """Largest relative deviation of a layer from equilibrium before the drop, where all trainings are the same."""
        return max(abs(ratio - 1) for ratio in self.plain.ratios("before"))

    @property
    def as_predicted(self) -> bool:
        """Whether every layer was within 5 % of its equilibrium before the drop."""
        return self.off_before <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "out": str(self.out),
            "settings": dataclasses.asdict(self.settings),
            "off_before": self.off_before,
            "as_predicted": self.as_predicted,
            PLAIN: _arm_dict(self.plain),
            RESCALED: _arm_dict(self.rescaled),
            LESS_DECAY: _arm_dict(self.less_decay),
        }


def _arm_dict(arm: DemoArm) -> dict[str, Any]:
    return {
        "run": str(arm.run),
        "report": str(arm.report),
        "test_accuracy": arm.test_accuracy,
        "accuracy_steps": list(arm.accuracy_steps),
        "accuracies": list(arm.accuracies),
        "layers": [
            {
                "layer": layer.layer,
                **{
                    when: {**dataclasses.asdict(turn), "ratio": turn.ratio, "predicted_ratio": turn.predicted_ratio}
                    for when, turn in (("before", layer.before), ("after", layer.after), ("end", layer.end))
                },
            }
            for layer in arm.layers
        ],
    }


def layer_turns(
    samples: pa.Table, metadata: Mapping[str, Any], *, settings: DemoSettings, layers: Sequence[str]
) -> tuple[LayerTurns, ...]:
    """The angles of the named layers in the three windows of a run.

    Args:
        samples: the sample table of the run.
        metadata: the run's.
        settings: with the step of the drop and the lengths of the windows.
        layers: names of weights.

    Raises:
        EquilibriaError: if a layer has no sample in one of the windows.
    """
    series = steps_taken(by_parameter(samples, metadata=metadata))
    drop, end = settings.steps_before, settings.steps
    windows = {
        "before": range(drop - settings.steady_window, drop),
        "after": range(drop, drop + settings.drop_window),
        "end": range(end - settings.steady_window, end),
    }
    turns = []
    for layer in layers:
        if layer not in series.names:
            raise EquilibriaError(f"got a run without {layer}; expected: {', '.join(layers)}")
        columns = series.of(series.names.index(layer))
        turns.append(LayerTurns(layer, **{when: _turn(columns, layer, steps) for when, steps in windows.items()}))
    return tuple(turns)


def _turn(columns: Mapping[str, NDArray[Any]], layer: str, steps: range) -> Turn:
    inside = (columns["step"] >= steps.start) & (columns["step"] < steps.stop)
    if not inside.any():
        raise EquilibriaError(f"got no sample of {layer} in steps {steps.start} to {steps.stop - 1}")
    angles = [rms(columns[name][inside]) for name in ("angle", "angle_equilibrium", "angle_predicted")]
    return Turn(angles[0], angles[1], angles[2] if np.isfinite(angles[2]) else None)
