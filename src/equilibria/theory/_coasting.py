"""The long way to equilibrium in long strides: how fast the norm moves, by the recursion at places on the way.

After a few memory lengths the buffers follow the norm, and the norm alone says how fast it moves. So the recursion is
run for a few memory lengths from many norms between here and there at once, and the steps are the integral of the
inverse speed. In u = ln|y/y* - 1|, y the power of the norm that relaxes linearly, that speed is nearly constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.theory.rules import AdamL2, AdamW, Lion, Rule
from equilibria.theory.states import State, rescaled, settled
from equilibria.theory.transient import Trajectory, evolve

Array = NDArray[np.float64]

_PLACES = 256
# Memory lengths until what is amiss at a place is forgotten: <w, buffer> of a rescaled state may be off many times
# over, a second moment only by the ratio of its memory to the time constant.
_FIRST_MOMENT, _SECOND_MOMENT = 32, 8
_STRETCH = 5000  # steps of one call: its arrays stay small


def memory_length(rule: Rule) -> float:
    """Steps in which the slowest average of the optimizer forgets by a factor e."""
    return max(_memory_lengths(rule))


def _memory_lengths(rule: Rule) -> tuple[float, float]:
    """Those of the first and second moment; the latter 0 where there is none."""
    if isinstance(rule, AdamW | AdamL2):
        return 1 / (1 - rule.betas[0]), 1 / (1 - rule.betas[1])
    return 1 / (1 - (rule.betas[1] if isinstance(rule, Lion) else rule.momentum)), 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to come within a tolerance of its equilibrium.

    Attributes:
        quantity: "angle", "norm" or "norm_sq".
        value: its equilibrium value; ||w*||^2 for "norm" too.
        tolerance: relative.
    """

    quantity: str
    value: float
    tolerance: float

    def deviation(self, path: Trajectory) -> Array:
        """Relative deviation at every step of a path."""
        series = path.angle if self.quantity == "angle" else path.norm_sq[:-1]
        ratio = np.sqrt(series / self.value) if self.quantity == "norm" else series / self.value
        return np.abs(ratio - 1)


def coasting_length(rule: Rule) -> int:
    """Steps that `coasting_steps` runs the recursion for; it needs a way several times as long."""
    first, second = _memory_lengths(rule)
    return math.ceil(_FIRST_MOMENT * first + _SECOND_MOMENT * second)


def coasting_steps(
    rule: Rule, start: State, goal: Goal, *, norm_sq: float, power: int, edge: float, unit_grad_sq: float, dim: float
) -> float:
    """Steps until the goal is reached, from a state whose buffers follow the norm.

    Args:
        rule: the optimizer.
        start: the present state of one weight.
        goal: what is to be reached.
        norm_sq: ||w*||^2.
        power: the power of the norm that relaxes linearly, or nearly so.
        edge: about where the goal lies, as (||w|| / ||w*||)^power.
        unit_grad_sq: L.
        dim: number of entries.

    Returns:
        The steps, with a fraction.
    """
    length = coasting_length(rule)
    here = float(start.norm_sq) / norm_sq
    side = 1.0 if here > 1 else -1.0
    # One e-fold beyond the edge, since all places move while the buffers settle and the angle lags behind the norm.
    ends = math.log(abs(here ** (power / 2) - 1)), math.log(abs(edge - 1)) - 1
    places = (1 + side * np.exp(np.linspace(*ends, _PLACES))) ** (1 / power)
    state = _beside(start, rescaled(settled(rule, unit_grad_sq=unit_grad_sq, dim=dim), places[1:]))
    for done in range(0, length, _STRETCH):
        state = evolve(rule, min(_STRETCH, length - done), start=state, unit_grad_sq=unit_grad_sq, dim=dim).final
    last = evolve(rule, 2, start=state, unit_grad_sq=unit_grad_sq, dim=dim)
    depth = np.log(side * ((last.norm_sq / norm_sq) ** (power / 2) - 1))
    return length + _time(depth[1], (depth[0] - depth[2]) / 2, goal.deviation(last)[1], goal.tolerance)


def _beside(one: State, many: State) -> State:
    """One weight in front of many."""
    fields = {
        name: np.append(getattr(one, name), np.broadcast_to(getattr(many, name), many.norm_sq.shape))
        for name in ("norm_sq", "radial", "buffer_sq", "second")
    }
    memory = np.column_stack([one.memory.reshape(len(many.memory)), many.memory])
    return State(**fields, memory=memory, steps_done=one.steps_done)


def _time(depth: Array, speed: Array, deviation: Array, tolerance: float) -> float:
    """From the first place to where the deviation has fallen to the tolerance, by the trapezium rule."""
    inside = int(np.argmax(deviation <= tolerance))
    fraction = math.log(deviation[inside - 1] / tolerance) / math.log(deviation[inside - 1] / deviation[inside])
    times = (depth[:-1] - depth[1:]) * (1 / speed[:-1] + 1 / speed[1:]) / 2
    return float(times[: inside - 1].sum() + fraction * times[inside - 1])
