"""Log ratios of two runs' angles, layer by layer and over time, and how much of them each cause explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.comparing._inputs import Inputs, filled, powers, read_inputs, stretch_edges
from equilibria.comparing._replay import Replay, coalitions, least_angle, replay, shapley
from equilibria.comparing._settings import momentum_options, same_course
from equilibria.diagnosis.run import SampledRun
from equilibria.theory._reals import Array

LR, DECAY, MOMENTUM, OPTIMIZER = "lr", "weight decay", "momentum", "optimizer"
SIZE, ALIGNMENT, START, RESCALING, SKIPPED = "gradient size", "alignment", "start norm", "rescaling", "skipped steps"
_INPUTS: dict[str, tuple[str, ...]] = {
    LR: ("lr",),
    DECAY: ("weight_decay",),
    MOMENTUM: ("noise", "gain", "damping"),
    SIZE: ("size",),
    ALIGNMENT: ("rho", "sigma", "gamma", "pull", "coupling"),
    START: ("start",),
    RESCALING: ("jump",),
    SKIPPED: ("taken",),
}
_SCHEDULED = {"lr": ("lr",), "weight_decay": ("weight_decay",), "momentum": ("noise", "gain", "damping")}
_SCHEDULED_INPUTS = tuple(key for keys in _SCHEDULED.values() for key in keys)
_OF_OPTIMIZER = (LR, MOMENTUM, SIZE, ALIGNMENT)
_SAME = 1e-9  # relative difference of a setting


@dataclass(frozen=True, slots=True, eq=False)
class Differences:
    """What the angles of run A and run B have apart, in logarithms of A over B.

    Attributes:
        names: the layers.
        edges: first steps of the stretches, and the step after the last.
        causes: what differs.
        measured: of the angle per step, stretches x layers; NaN where a run has no sample.
        travelled: of the sum of the angles, one per layer.
        angle_parts: by cause, causes x stretches x layers.
        travelled_parts: by cause, causes x layers.
        inputs: of A and of B.
        played: the recursion under every coalition of the causes.
    """

    names: tuple[str, ...]
    edges: NDArray[np.int64]
    causes: tuple[str, ...]
    measured: Array
    travelled: Array
    angle_parts: Array
    travelled_parts: Array
    inputs: tuple[Inputs, Inputs]
    played: Replay

    @property
    def unexplained(self) -> Array:
        """What the recursion leaves of the angle travelled, one per layer."""
        return np.asarray(self.travelled - self.travelled_parts.sum(axis=0))


def differences(a: SampledRun, b: SampledRun, names: Sequence[str], *, same_optimizer: bool) -> Differences:
    """Compare the named layers over the steps that both runs have sampled."""
    edges = stretch_edges((a, b), names)
    power = powers(b, names)
    raw = tuple(read_inputs(run, names, edges, power) for run in (a, b))
    (first, second), factors = _of_one_schedule(filled(*raw), (a, b), names)
    causes = _differing(first, second, same_optimizer=same_optimizer)
    steps = np.diff(edges).astype(np.float64)
    played = replay(first, second, causes=causes, chosen=coalitions(len(causes)), steps=steps, power=power)
    with np.errstate(divide="ignore", invalid="ignore"):
        angles = [np.log(run.angle * run.taken * factor) for run, factor in zip(raw, factors, strict=True)]
        measured = angles[0] - angles[1]
    least = least_angle(first, second)
    sums = [(np.maximum(run.angle * run.taken, least) * steps[:, np.newaxis]).sum(axis=0) for run in (first, second)]
    return Differences(
        names=tuple(names),
        edges=edges,
        causes=tuple(causes),
        measured=measured,
        travelled=np.log(sums[0]) - np.log(sums[1]),
        angle_parts=shapley(played.angle),
        travelled_parts=shapley(played.travelled),
        inputs=(first, second),
        played=played,
    )


def _of_one_schedule(
    inputs: tuple[Inputs, Inputs], runs: tuple[SampledRun, SampledRun], names: Sequence[str]
) -> tuple[tuple[Inputs, Inputs], list[Array]]:
    """The inputs with equal settings where the schedules look the same and only the sampled steps differ.

    The layer with fewer samples takes the means of the other one, and its angles go with its lr: the factors.
    """
    changed = [{key: getattr(run, key).copy() for key in _SCHEDULED_INPUTS} for run in inputs]
    factors = [np.ones_like(run.lr) for run in inputs]
    for column, name in enumerate(names):
        few = int(np.argmin([run.series.counts[run.series.names.index(name)] for run in runs]))
        for setting, keys in _SCHEDULED.items():
            other_updates = setting == "momentum" and len({momentum_options(run, name) for run in runs}) > 1
            if other_updates or not same_course(*runs, name, setting):
                continue
            for key in keys:
                old, new = changed[few][key][:, column], getattr(inputs[1 - few], key)[:, column]
                if key == "lr":
                    factors[few][:, column] = np.divide(new, old, out=np.ones_like(new), where=old > 0)
                changed[few][key][:, column] = new
    first, second = (
        dataclasses.replace(run, angle=run.angle * factor, **values)
        for run, values, factor in zip(inputs, changed, factors, strict=True)
    )
    return (first, second), factors


def _differing(a: Inputs, b: Inputs, *, same_optimizer: bool) -> dict[str, tuple[str, ...]]:
    """The causes of which an input differs, with their inputs; those of an optimizer are one if optimizers differ."""
    causes = dict(_INPUTS)
    if not same_optimizer:
        joint = sum((causes.pop(name) for name in _OF_OPTIMIZER), ())
        causes = {OPTIMIZER: joint, **causes}
    return {
        cause: names
        for cause, names in causes.items()
        if any(not np.allclose(getattr(a, name), getattr(b, name), rtol=_SAME, atol=0) for name in names)
    }
