"""The recursion of angles with the inputs of one run or the other, cause by cause, and what each cause contributes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.comparing._inputs import NAMES, Inputs
from equilibria.theory._reals import Array
from equilibria.theory.gain import advance_by_gain

_LEAST = 0.01  # of a layer's largest angle: what is smaller counts as this, so that logarithms stay finite
_MOST_EXPONENT = 50.0


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Angles by the recursion under every coalition of causes; those in it have A's inputs, the others B's.

    Attributes:
        angle: ln of the angle per step, coalitions x stretches x layers.
        travelled: ln of the angle travelled, coalitions x layers.
    """

    angle: Array
    travelled: Array


def coalitions(count: int) -> NDArray[np.bool_]:
    """All subsets of so many causes; row i holds the binary digits of i.

    Example:
        >>> coalitions(2).tolist()
        [[False, False], [True, False], [False, True], [True, True]]
    """
    return np.asarray((np.arange(2**count)[:, np.newaxis] >> np.arange(count)) % 2 == 1)


def least_angle(a: Inputs, b: Inputs) -> Array:
    """The angle of each layer below which a logarithm counts as that of this angle."""
    return np.asarray(np.maximum(_LEAST * np.maximum(a.angle.max(axis=0), b.angle.max(axis=0)), 1e-300))


def replay(
    a: Inputs, b: Inputs, *, causes: Mapping[str, Sequence[str]], chosen: NDArray[np.bool_], steps: Array, power: Array
) -> Replay:
    """Run the recursion of all layers under the chosen coalitions.

    Args:
        a: the run whose inputs a cause in the coalition has.
        b: the run whose inputs all others have.
        causes: the inputs that each cause switches.
        chosen: coalitions x causes.
        steps: of every stretch.
        power: p of every layer.
    """
    switch = {name: np.zeros((len(chosen), 1), dtype=bool) for name in NAMES}
    for column, inputs in enumerate(causes.values()):
        for name in inputs:
            switch[name] = chosen[:, [column]]
    state = np.exp(power * np.where(switch["start"], a.start, b.start))
    angles = np.empty((len(chosen), len(steps), len(power)))
    moved = np.zeros((len(chosen), len(power)))
    least = least_angle(a, b)
    for row, count in enumerate(steps.tolist()):
        now = {
            name: np.where(switch[name], getattr(a, name)[row], getattr(b, name)[row])
            for name in NAMES
            if name not in ("start", "angle")
        }
        state = state * np.exp(power * np.clip(now["jump"], -_MOST_EXPONENT, _MOST_EXPONENT))
        length_sq = now["size"] * now["noise"] * now["rho"] * (1 + now["sigma"] * (now["gain"] - 1))
        done = count * now["taken"] / 2
        decay = now["lr"] * now["weight_decay"] * now["damping"] * now["coupling"] + now["pull"] / 2
        half = {"decay": decay * done, "lr_sq": now["lr"] ** 2 * done, "power": power}
        fed = now["gamma"] * now["gain"] * length_sq
        state = np.maximum(advance_by_gain(state, fed, **half), 1e-290)
        turned = np.sqrt(now["lr"] ** 2 * length_sq / state)
        state = np.maximum(advance_by_gain(state, fed, **half), 1e-290)
        angles[:, row] = np.log(np.maximum(turned * now["taken"], least))
        moved += np.maximum(turned * now["taken"], least) * count
    return Replay(angles, np.log(moved))


def shapley(values: Array) -> Array:
    """What each cause contributes to the value of all of them: its effect, averaged over the orders of switching.

    Args:
        values: one row per coalition of `coalitions`.

    Returns:
        One row per cause; they sum to the last value minus the first.

    Example:
        >>> shapley(np.array([0.0, 1.0, 2.0, 5.0]))  # 1 and 2 by themselves, 2 more together
        array([2., 3.])
    """
    count = int(math.log2(len(values)))
    inside = coalitions(count)
    sizes = inside.sum(axis=1)
    parts = []
    for cause in range(count):
        without = np.flatnonzero(~inside[:, cause])
        weights = np.array([1 / (count * math.comb(count - 1, int(size))) for size in sizes[without]])
        parts.append(np.tensordot(weights, values[without + 2**cause] - values[without], axes=1))
    return np.array(parts).reshape(count, *values.shape[1:])
