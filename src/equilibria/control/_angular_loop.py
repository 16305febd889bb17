"""The control loop of an angular schedule for one parameter group.

`GroupLoop` measures angles and norms and estimates how far a unit of learning rate turns the group's tensors;
`steering_decay` computes the weight decay that brings their norms to where they turn as requested.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equilibria.tensors.inner_products import moved_products
from equilibria.tensors.layout import copy_of, flat
from equilibria.theory.requested import decay_for_angle, norm_power
from equilibria.theory.rules import SGD, Rule

RECENT = 1000  # steps that a report covers at most
_WINDOW = 4  # steps over which c^2 is averaged: shorter is noisier, longer lags behind changing gradients
_LARGEST_RATIO_SQ = 10.0  # cap of one step's squared angle over the request's in the trim


@dataclass(slots=True)
class GroupLoop:
    """The state of the control loop of one parameter group; lists have one entry per invariant tensor.

    Attributes:
        group: the group's index.
        weights: its invariant tensors.
        copies: the tensors before the step, flat; None where unknown.
        versions: torch's change counts of the tensors when they were copied.
        norms: ||w|| before and after the last measured step.
        mean_sq: running mean of c^2.
        measured: the total weight of that mean's terms: 0 at first, 1 after many steps.
        pending: angle and norms of a step that was measured but not yet learnt from; a step that fails reads it again.
        trim: logarithm of the factor that corrects lr for the angles delivered so far.
        first_gain: the gain that the first lr was set with; 0 before.
        recent: (requested, delivered) of the last steps.
    """

    group: int
    weights: list[Tensor]
    copies: list[Tensor | None]
    versions: list[int]
    norms: list[tuple[float, float]]
    mean_sq: list[float]
    measured: list[float]
    pending: list[tuple[float, tuple[float, float]] | None]
    trim: float = 0.0
    first_gain: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @classmethod
    def of(cls, group: int, weights: list[Tensor]) -> GroupLoop:
        count = len(weights)
        return cls(
            group,
            weights,
            copies=[None] * count,
            versions=[0] * count,
            norms=[(0.0, 0.0)] * count,
            mean_sq=[0.0] * count,
            measured=[0.0] * count,
            pending=[None] * count,
        )

    def __getstate__(self) -> dict[str, Any]:
        """State with the number of changes since the copies: a copied tensor counts its changes from zero."""
        lags = [weight._version - version for weight, version in zip(self.weights, self.versions, strict=True)]
        return {**{name: getattr(self, name) for name in self.__slots__}, "versions": lags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.versions = [weight._version - lag for weight, lag in zip(self.weights, self.versions, strict=True)]

    @property
    def is_measured(self) -> bool:
        return any(self.measured)

    def gain(self, power: int) -> float:
        """Root mean square angle per unit of lr, at the present norms; 0 before the first measurement."""
        known = zip(self.mean_sq, self.measured, self.norms, strict=True)
        squares = [mean / share / norm ** (2 * power) for mean, share, (_, norm) in known if share]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def average(self, per_lr: dict[int, float], *, power: int) -> None:
        """Add the angles of a step per unit of lr, by tensor, to the running means."""
        for index, angle in per_lr.items():
            self.mean_sq[index] += ((angle * self.norms[index][0] ** power) ** 2 - self.mean_sq[index]) / _WINDOW
            self.measured[index] += (1 - self.measured[index]) / _WINDOW

    @property
    def drift(self) -> float:
        """Change of ln||w|| in the last step, mean over the tensors."""
        grown = [math.log(after / before) for before, after in self.norms if before > 0 and after > 0]
        return sum(grown) / len(grown) if grown else 0.0

    def correct(self, ratio: float, *, share: float, largest: float) -> None:
        """Correct the trim by the ratio of delivered to requested angle of a step."""
        trim = self.trim + share * (1 - min(ratio**2, _LARGEST_RATIO_SQ))
        self.trim = max(-largest, min(largest, trim))

    def remember(self) -> None:
        """Copy the tensors that changed since the last measurement, and those that were never copied."""
        self.clear_pending()
        for index, weight in enumerate(self.weights):
            if self.copies[index] is None or self.versions[index] != weight._version:
                self.copies[index] = flat(copy_of(weight.detach()), like=weight.detach())
                self.versions[index] = weight._version

    def angles(self) -> dict[int, float]:
        """The angles since the copies, of the tensors that moved, by index; the copies are brought up to date."""
        angles = {index: self._angle(index) for index, copy in enumerate(self.copies) if copy is not None}
        return {index: angle for index, angle in angles.items() if angle != 0}

    def _angle(self, index: int) -> float:
        measurement = self.pending[index]
        if measurement is None or self.versions[index] != self.weights[index]._version:
            measurement = self.pending[index] = self._measure(index)
            self.versions[index] = self.weights[index]._version
        angle, norms = measurement
        is_skipped = angle == 0 and norms[0] == norms[1]  # a skipped step does not show how the norm moves
        if math.isfinite(angle) and not is_skipped:
            self.norms[index] = norms
        return angle

    @torch.no_grad()
    def _measure(self, index: int) -> tuple[float, tuple[float, float]]:
        before, after = self.copies[index], flat(self.weights[index].detach())
        assert before is not None
        ww, we, ee = moved_products(before, after)
        if not math.isfinite(ww + we + ee):
            return math.nan, (math.nan, math.nan)
        norms = math.sqrt(ww), math.sqrt(max(ww + 2 * we + ee, 0.0))
        return math.atan2(math.sqrt(max(ee * ww - we * we, 0.0)), ww + we), norms

    def clear_pending(self) -> None:
        """Forget measurements that have been learnt from."""
        self.pending = [None] * len(self.weights)

    def snapshot(self) -> tuple[Any, ...]:
        """The values that a step changes, for `restore`; ``recent`` grows only after a step has succeeded."""
        return list(self.norms), list(self.mean_sq), list(self.measured), self.trim, self.first_gain

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Undo the changes since a snapshot."""
        self.norms, self.mean_sq, self.measured, self.trim, self.first_gain = snapshot

    def state_dict(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in ("norms", "mean_sq", "measured", "recent")}
        return {**lists, "trim": self.trim, "first_gain": self.first_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trim, self.mean_sq, self.measured = state["trim"], list(state["mean_sq"]), list(state["measured"])
        self.norms = [(float(a), float(b)) for a, b in state["norms"]]
        self.first_gain = float(state.get("first_gain", 0.0))
        self.recent = deque(((float(a), float(b)) for a, b in state["recent"]), maxlen=RECENT)
        self.copies = [None] * len(self.weights)  # weights may be loaded after this


# ---- weight decay that steers the norm to the one with the requested angle

# Noise alone may change the measured angle by a tenth. A norm that was shrunk because of it grows back no faster than
# weights turn, and in equilibrium decay takes as much: a rate of ten times that keeps the two in balance.
_RATE = 10.0
NEAR = 0.15  # logarithmic error of the angle that may be noise; with a larger one the norm is still approaching
_STRONGEST = 0.5  # largest share of the norm that one step's decay takes in the end


@dataclass(frozen=True, slots=True)
class Aim:
    """The angles that weight decay steers to.

    Attributes:
        rule: the optimizer's settings.
        wanted: requested radians of the next step.
        ahead: requested radians `steps_ahead` later, when weight decay has acted.
    """

    rule: Rule
    wanted: float
    ahead: float

    @property
    def equilibrium_decay(self) -> float:
        """Decay per step, lr times weight decay, of the equilibrium with the wanted angle."""
        return dataclasses.replace(self.rule, weight_decay=decay_for_angle(self.rule, self.wanted)).decay_per_step

    @property
    def rate(self) -> float:
        """Share of the norm's logarithmic error that is corrected per step."""
        free = 1 - inertia(self.rule)
        return min(free, _RATE * self.equilibrium_decay / free)


def inertia(rule: Rule) -> float:
    """Share of a norm's change that continues in the next step: coupled weight decay passes through the momentum."""
    return rule.momentum if isinstance(rule, SGD) else 0.0


def steps_ahead(rule: Rule) -> int:
    """Steps until weight decay has acted."""
    return round(1 / (1 - inertia(rule)))


def steering_decay(aim: Aim, present: float, *, drift: float) -> float:
    """Weight decay of the next step.

    In u = ln||w||, whose change continues with the inertia a, ``u'' = a u' - (eps - eps*)`` up to noise. With

        eps = eps* + rate (u - u_wanted) + a u' + (u_wanted now - u_wanted ahead)/(steps ahead),

    inertia cancels, the error falls by ``rate`` per step, and a schedule is followed without lag, as far as eps >= 0
    allows. A norm that is far too small grows as fast as it can, without decay. The faster a norm falls, the longer it
    continues to fall: no decay reduces it sooner without overshoot than a rate of 1 - a, the largest used.

    Args:
        aim: the requested angles.
        present: radians per step at the present norm.
        drift: u', change of ln||w|| in the last step.

    Returns:
        The weight decay, in the optimizer's convention.
    """
    if aim.ahead == 0 or math.log(present / aim.wanted) > NEAR:
        return 0.0
    power, free = norm_power(aim.rule), 1 - inertia(aim.rule)
    error = math.log(aim.wanted / present) / power
    slope = math.log(aim.ahead / aim.wanted) / power / steps_ahead(aim.rule)
    eps = aim.equilibrium_decay + aim.rate * error + inertia(aim.rule) * drift + slope
    return min(max(eps, 0.0), _STRONGEST * free) * decay_for_angle(aim.rule, aim.wanted) / aim.equilibrium_decay
