"""Log ratios of two runs' angles, layer by layer and over time, and how much of them each cause explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.comparing._inputs import Inputs, filled, powers, read_inputs, stretch_edges
from equilibria.comparing._replay import Replay, coalitions, least_angle, replay, shapley
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
    first, second = filled(*raw)
    causes = _differing(first, second, same_optimizer=same_optimizer)
    steps = np.diff(edges).astype(np.float64)
    played = replay(first, second, causes=causes, chosen=coalitions(len(causes)), steps=steps, power=power)
    with np.errstate(divide="ignore", invalid="ignore"):
        measured = np.log(raw[0].angle * raw[0].taken) - np.log(raw[1].angle * raw[1].taken)
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
