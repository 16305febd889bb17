"""What an angular schedule knows about one parameter group: norms, and how far a unit of learning rate turns it."""

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

# The error of the angle may swing by a tenth from noise alone. A norm that was shrunk for it grows back no faster than
# weights turn, which in equilibrium is what decay takes: a rate of ten times that keeps the two in balance.
_RATE = 10.0
NEAR = 0.15  # logarithmic error of the angle up to which it may be noise; a norm that is further off is on its way
_STRONGEST = 0.5  # share of the norm that one step's decay takes in the end, at most


@dataclass(frozen=True, slots=True)
class Aim:
    """What weight decay is to bring about.

    Attributes:
        rule: the optimizer's settings.
        wanted: radians of the next step.
        ahead: radians of the step by which weight decay has acted, `steps_ahead` later.
    """

    rule: Rule
    wanted: float
    ahead: float

    @property
    def settled(self) -> float:
        """The decay per step of the equilibrium with this angle."""
        return dataclasses.replace(self.rule, weight_decay=decay_for_angle(self.rule, self.wanted)).decay_per_step

    @property
    def rate(self) -> float:
        """Share of the logarithmic error of the norm that is taken away per step."""
        free = 1 - inertia(self.rule)
        return min(free, _RATE * self.settled / free)


def inertia(rule: Rule) -> float:
    """Share of a norm's change that goes on in the next step: coupled weight decay passes through the momentum."""
    return rule.momentum if isinstance(rule, SGD) else 0.0


def steps_ahead(rule: Rule) -> int:
    """Steps in which weight decay acts."""
    return round(1 / (1 - inertia(rule)))


def steering_decay(aim: Aim, present: float, *, drift: float) -> float:
    """Weight decay of the next step.

    In u = ln||w||, whose change goes on with the inertia a, ``u'' = a u' - (eps - eps*)`` up to noise. With

        eps = eps* + rate (u - u_wanted) + a u' + (u_wanted now - u_wanted ahead)/(steps ahead),

    inertia cancels, the error falls by ``rate`` per step, and a schedule is followed without lag, as far as eps >= 0
    allows. A norm that is far too small is left to grow as fast as it can, without decay. The faster a norm falls, the
    longer it goes on falling: no decay brings it down sooner without overshoot than a rate of 1 - a, the largest used.

    Args:
        aim: what is wanted.
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
    eps = aim.settled + aim.rate * error + inertia(aim.rule) * drift + slope
    return min(max(eps, 0.0), _STRONGEST * free) * decay_for_angle(aim.rule, aim.wanted) / aim.settled


RECENT = 1000  # steps that a report looks back at most
_WINDOW = 4  # steps over which c^2 is averaged: shorter is noisier, longer lags behind gradients that change
_LARGEST_SURPRISE = 10.0  # what a single step's squared angle over the request's may count at most in the trim


@dataclass(slots=True)
class GroupLoop:
    """What is known about one parameter group; lists have one entry per invariant tensor.

    Attributes:
        group: its index.
        weights: its invariant tensors.
        copies: these before the step, flat; None where unknown.
        versions: torch's counts of their changes when they were copied.
        norms: ||w|| before the last step that was measured, and after it.
        mean_sq: running mean of c^2.
        measured: the total weight of what is in that mean, 0 at first and 1 after many steps.
        unused: angle and norms of a step that were measured, but not yet learnt from: a failing step asks again.
        trim: logarithm of the factor by which lr is corrected for what was delivered so far.
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
    unused: list[tuple[float, tuple[float, float]] | None]
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
            unused=[None] * count,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For a copy, whose tensors count their changes anew: changes since they were remembered instead."""
        lags = [weight._version - at for weight, at in zip(self.weights, self.versions, strict=True)]
        return {**{name: getattr(self, name) for name in self.__slots__}, "versions": lags}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.versions = [weight._version - lag for weight, lag in zip(self.weights, self.versions, strict=True)]

    @property
    def is_measured(self) -> bool:
        return any(self.measured)

    def gain(self, power: int) -> float:
        """Root mean square angle per unit of lr, at the present norms; 0 if nothing is known yet."""
        known = zip(self.mean_sq, self.measured, self.norms, strict=True)
        squares = [mean / share / norm ** (2 * power) for mean, share, (_, norm) in known if share]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0

    def average(self, per_lr: dict[int, float], *, power: int) -> None:
        """Take the angles of a step per unit of lr into the means."""
        for at, angle in per_lr.items():
            self.mean_sq[at] += ((angle * self.norms[at][0] ** power) ** 2 - self.mean_sq[at]) / _WINDOW
            self.measured[at] += (1 - self.measured[at]) / _WINDOW

    @property
    def drift(self) -> float:
        """By how much the logarithm of the norm grew in the last step, mean over the tensors."""
        grown = [math.log(after / before) for before, after in self.norms if before > 0 and after > 0]
        return sum(grown) / len(grown) if grown else 0.0

    def correct(self, ratio: float, *, share: float, largest: float) -> None:
        """Take delivered over requested angle of a step into the trim."""
        trim = self.trim + share * (1 - min(ratio**2, _LARGEST_SURPRISE))
        self.trim = max(-largest, min(largest, trim))

    def remember(self) -> None:
        """Copy the tensors that somebody changed since the last measurement, and those that were never copied."""
        self.used()
        for at, weight in enumerate(self.weights):
            if self.copies[at] is None or self.versions[at] != weight._version:
                self.copies[at] = flat(copy_of(weight.detach()), like=weight.detach())
                self.versions[at] = weight._version

    def turned(self) -> dict[int, float]:
        """The angles since the copies were made, of those tensors that moved; the copies become what these are now."""
        angles = {at: self._turned(at) for at, copy in enumerate(self.copies) if copy is not None}
        return {at: angle for at, angle in angles.items() if angle != 0}

    def _turned(self, at: int) -> float:
        held = self.unused[at]
        if held is None or self.versions[at] != self.weights[at]._version:
            held = self.unused[at] = self._measured(at)
            self.versions[at] = self.weights[at]._version
        angle, norms = held
        is_skipped = angle == 0 and norms[0] == norms[1]  # which says nothing about how the norm moves
        if math.isfinite(angle) and not is_skipped:
            self.norms[at] = norms
        return angle

    @torch.no_grad()
    def _measured(self, at: int) -> tuple[float, tuple[float, float]]:
        before, after = self.copies[at], flat(self.weights[at].detach())
        assert before is not None
        ww, we, ee = moved_products(before, after)
        if not math.isfinite(ww + we + ee):
            return math.nan, (math.nan, math.nan)
        norms = math.sqrt(ww), math.sqrt(max(ww + 2 * we + ee, 0.0))
        return math.atan2(math.sqrt(max(ee * ww - we * we, 0.0)), ww + we), norms

    def used(self) -> None:
        """What was measured is learnt."""
        self.unused = [None] * len(self.weights)

    def learnt(self) -> tuple[Any, ...]:
        """What a step changes, to be put back if it fails; the report's list grows only when it has not failed."""
        return list(self.norms), list(self.mean_sq), list(self.measured), self.trim, self.first_gain

    def put_back(self, learnt: tuple[Any, ...]) -> None:
        """Undo what was learnt."""
        self.norms, self.mean_sq, self.measured, self.trim, self.first_gain = learnt

    def state_dict(self) -> dict[str, Any]:
        held = {name: list(getattr(self, name)) for name in ("norms", "mean_sq", "measured", "recent")}
        return {**held, "trim": self.trim, "first_gain": self.first_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trim, self.mean_sq, self.measured = state["trim"], list(state["mean_sq"]), list(state["measured"])
        self.norms = [(float(a), float(b)) for a, b in state["norms"]]
        self.first_gain = float(state.get("first_gain", 0.0))
        self.recent = deque(((float(a), float(b)) for a, b in state["recent"]), maxlen=RECENT)
        self.copies = [None] * len(self.weights)  # the weights may be loaded later
