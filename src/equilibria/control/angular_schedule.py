"""State the angle per step that you want; the learning rate or the weight decay is set to deliver it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from equilibria.control._gradients import as_number
from equilibria.control.invariant import Invariant, invariant_tensors
from equilibria.errors import EquilibriaError, one_of, whole, within
from equilibria.measure.dots import moved_products
from equilibria.measure.laws import law_of
from equilibria.measure.layout import copy_of, flat, is_sharded
from equilibria.theory.requested import decay_for_angle, step_angle
from equilibria.theory.rules import SGD, SGDW, AdamL2, Rule
from equilibria.theory.schedules import ScheduleLike, as_schedule, in_epochs

RECENT = 1000  # steps that a report looks back at most
_WINDOW = 4  # steps over which c^2 is averaged: shorter is noisier, longer lags behind gradients that change
_TRIM = 0.1  # share of the error of a step's squared angle that corrects the next lr: makes the mean right
_LARGEST_SURPRISE = 3.0  # what a single step may count at most in that
_LARGEST_TRIM = 1.0  # so that gradients that vanish for a while leave nothing behind
_LARGEST_LOSS = 1e8  # of gain since the first steps: norms that run away, or gradients that are gone
_STRONGEST = 30.0  # times the equilibrium's weight decay that is used at most to bring a norm down


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a parameter group was asked to turn, and what it turned.

    Attributes:
        group: its index in the optimizer.
        steps: how many steps this is about.
        requested: root mean square of the angles asked for, radians per step.
        delivered: root mean square of the measured angles, over these steps and the group's invariant tensors.
        lr: learning rate now.
        weight_decay: weight decay now.
    """

    group: int
    steps: int
    requested: float
    delivered: float
    lr: float
    weight_decay: float

    @property
    def ratio(self) -> float:
        """Delivered over requested; NaN if nothing was asked for."""
        return self.delivered / self.requested if self.requested else math.nan


class AngularSchedule(LRScheduler):
    """Turns the invariant weights of each parameter group by a scheduled angle per step (root mean square).

    A step turns a weight by ``lr c / ||w||^p``, where c changes slowly: p is 2 for SGD, whose gradients are inversely
    proportional to the norm, and 1 for optimizers that make up for that. The controller measures angle and norm of
    every tensor after every step, averages c^2 over the last few, and sets ``lr = angle / gain``, the gain being the
    root mean square of c / ||w||^p over the tensors, corrected by the mean of what it delivered so far. So a change of
    the schedule takes effect at once, whatever the norms are.

    With ``by="weight_decay"`` lr stays as it is and weight decay is set: that of the equilibrium with this angle, times
    (requested / present)^4, which brings the norm there in a third of the time; still, a norm moves no faster than the
    weights turn.

    Called after every optimizer step, as torch's schedulers are. It owns the learning rates (or weight decays) of
    groups with invariant weights: other parameters of such a group get them too, and other groups are left alone.

    Args:
        optimizer: any torch optimizer; its present lr is used for the first step.
        angle: radians per step, below pi/2: a number, a schedule of `equilibria.theory.schedules`, a function of the
            step, a list.
        invariant: which tensors are scale-invariant: names, tensors, or a result of `equilibria.symmetries`, of
            which ``sym.alone`` is what counts.
        model: where names are looked up.
        by: "lr" or "weight_decay": what is set.
        steps_per_epoch: if given, ``angle`` is per epoch, below pi/2, and a schedule of it counts epochs; the angle of
            one step follows from how the optimizer's momentum correlates steps, with gradients that are mostly noise.

    Raises:
        EquilibriaError: bad input, or an optimizer without the law that ``steps_per_epoch`` or ``by`` needs; later, in
            `step`, an lr that runs away because weights cannot turn that fast: it is left as it was then.

    Example:
        >>> w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> scheduler = AngularSchedule(optimizer, 0.001, invariant=[w])
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     (w[0] / w.norm()).backward()
        ...     optimizer.step()
        ...     scheduler.step()
        >>> round(scheduler.report(20)[0].ratio, 2)
        1.0
    """

    def __init__(
        self,
        optimizer: Optimizer,
        angle: ScheduleLike,
        *,
        invariant: Invariant,
        model: nn.Module | None = None,
        by: str = "lr",
        steps_per_epoch: int | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise EquilibriaError(f"got optimizer of type {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        self._by = one_of("by", by, ("lr", "weight_decay"))
        self._per_epoch = None if steps_per_epoch is None else whole("steps_per_epoch", steps_per_epoch, low=1)
        self._angle = as_schedule(angle)
        if self._per_epoch is not None:
            self._angle = in_epochs(self._angle, steps_per_epoch=self._per_epoch)
        self._loops = _loops(optimizer, invariant_tensors(invariant, optimizer=optimizer, model=model))
        self.optimizer = optimizer
        for loop in self._loops:
            wanted = self._request(loop, 0)
            if by == "weight_decay" and wanted > 0:
                decay_for_angle(self._rule(loop), wanted)  # refuses here what it would refuse later
        optimizer.register_step_pre_hook(self._before_step)
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Measure the step that the optimizer took, and set the next one."""
        if self.last_epoch >= 0:  # not torch's own first call
            for loop in self._loops:
                self._measure(loop)
        super().step(epoch)
        if self._by == "weight_decay":
            for loop in self._loops:
                self.optimizer.param_groups[loop.group]["weight_decay"] = self._weight_decay(loop)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates of the next step, one per group."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if self._by == "lr":
            for loop in self._loops:
                gain = loop.gain(self._power(loop))
                if gain > 0:
                    wanted = self._request(loop, self.last_epoch) * math.exp(loop.trim)
                    self._refuse_runaway(loop, gain, wanted / gain)
                    rates[loop.group] = _like(rates[loop.group], wanted / gain)
        return rates

    def _refuse_runaway(self, loop: _Loop, gain: float, lr: float) -> None:
        """Refuse what ends in weights that are not finite, while they still are."""
        loop.first_gain = loop.first_gain or gain
        takes_all = _takes_all(law_of(self.optimizer, self.optimizer.param_groups[loop.group]).rule, lr)
        if takes_all or gain < loop.first_gain / _LARGEST_LOSS:
            reason = "weight decay would take a whole weight per step" if takes_all else "that runs away"
            raise EquilibriaError(
                f"got an angle of {self._request(loop, self.last_epoch):.3g} radians per step, which takes lr={lr:.3g} "
                f"in parameter group {loop.group} now; a unit of lr turns weights {gain / loop.first_gain:.2g} times "
                f"as far as in the first steps: {reason}; expected a smaller angle, less momentum, or gradients that "
                "have not vanished. lr was left as it is. Rotational keeps norms"
            )

    def report(self, last: int = RECENT) -> list[Delivered]:
        """What was asked for and what was delivered, by group, over the last so many steps (at most 1000)."""
        count = whole("last", last, low=1)
        return [self._delivered(loop, list(loop.recent)[-count:]) for loop in self._loops]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: numbers only."""
        names = ("last_epoch", "_step_count", "_last_lr", "base_lrs")
        return {**{name: getattr(self, name) for name in names}, "loops": [loop.state_dict() for loop in self._loops]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        if len(state_dict["loops"]) != len(self._loops):
            raise EquilibriaError(
                f"got a checkpoint of {len(state_dict['loops'])} groups with invariant weights; expected "
                f"{len(self._loops)}"
            )
        for loop, held in zip(self._loops, state_dict["loops"], strict=True):
            loop.load_state_dict(held)
        self.__dict__.update({name: value for name, value in state_dict.items() if name != "loops"})

    def _before_step(self, *_: Any) -> None:
        for loop in self._loops:
            loop.remember()

    def _measure(self, loop: _Loop) -> None:
        """Learn from the last step; one that was skipped, or broke, teaches nothing."""
        lr = as_number("lr", self.optimizer.param_groups[loop.group]["lr"])
        turned = loop.turned()
        if not (turned and lr > 0 and all(math.isfinite(angle) for angle in turned.values())):
            return
        delivered = math.sqrt(sum(angle**2 for angle in turned.values()) / len(turned))
        requested = self._request(loop, self.last_epoch)
        if self._by == "lr" and loop.is_measured and requested > 0:  # the very first step has the lr that was found
            loop.correct(delivered / requested)
        loop.recent.append((requested, delivered))
        loop.average({at: angle / lr for at, angle in turned.items()}, power=self._power(loop))

    def _power(self, loop: _Loop) -> int:
        """How the angle at a given lr falls with the norm."""
        rule = law_of(self.optimizer, self.optimizer.param_groups[loop.group]).rule
        return 2 if isinstance(rule, SGD | SGDW) else 1

    def _request(self, loop: _Loop, step: int) -> float:
        """Radians of one step."""
        angle = within("angle (radians)", self._angle(step), low=0, below=math.pi / 2)
        return angle if self._per_epoch is None else step_angle(self._rule(loop), angle, steps=self._per_epoch)

    def _rule(self, loop: _Loop) -> Rule:
        law = law_of(self.optimizer, self.optimizer.param_groups[loop.group])
        if law.rule is None:
            raise EquilibriaError(
                f"got an optimizer without the law that is needed here: {law.reason}; expected by='lr' and an angle "
                "per step, which need none"
            )
        return law.rule

    def _weight_decay(self, loop: _Loop) -> float:
        wanted, rule = self._request(loop, self.last_epoch), self._rule(loop)
        if wanted == 0:
            return 0.0
        present = rule.lr * loop.gain(self._power(loop))
        off = min((present / wanted) ** -4, _STRONGEST) if present > 0 else 1.0
        return decay_for_angle(rule, wanted) * off

    def _delivered(self, loop: _Loop, recent: list[tuple[float, float]]) -> Delivered:
        group = self.optimizer.param_groups[loop.group]
        requested, delivered = (
            math.sqrt(sum(pair[at] ** 2 for pair in recent) / len(recent)) if recent else math.nan for at in (0, 1)
        )
        lr, decay = as_number("lr", group["lr"]), as_number("weight_decay", group.get("weight_decay", 0.0))
        return Delivered(loop.group, len(recent), requested, delivered, lr, decay)


@dataclass(slots=True)
class _Loop:
    """What is known about one parameter group; lists have one entry per invariant tensor.

    Attributes:
        group: its index.
        weights: its invariant tensors.
        copies: these before the step, flat; None where unknown.
        versions: torch's counts of their changes when they were copied.
        norms: ||w|| before the last step that was measured, and after it.
        mean_sq: running mean of c^2.
        measured: the total weight of what is in that mean, 0 at first and 1 after many steps.
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
    trim: float = 0.0
    first_gain: float = 0.0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @classmethod
    def of(cls, group: int, weights: list[Tensor]) -> _Loop:
        count = len(weights)
        return cls(group, weights, [None] * count, [0] * count, [(0.0, 0.0)] * count, [0.0] * count, [0.0] * count)

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

    def correct(self, ratio: float) -> None:
        """Take delivered over requested angle of a step into the trim."""
        trim = self.trim + _TRIM * (1 - min(ratio**2, _LARGEST_SURPRISE))
        self.trim = max(-_LARGEST_TRIM, min(_LARGEST_TRIM, trim))

    def remember(self) -> None:
        """Copy the tensors that somebody changed since the last measurement, and those that were never copied."""
        for at, weight in enumerate(self.weights):
            if self.copies[at] is None or self.versions[at] != weight._version:
                self.copies[at] = flat(copy_of(weight.detach()), like=weight.detach())
                self.versions[at] = weight._version

    def turned(self) -> dict[int, float]:
        """The angles since the copies were made, of those tensors that moved; the copies become what these are now."""
        angles = {at: self._turned(at) for at, copy in enumerate(self.copies) if copy is not None}
        return {at: angle for at, angle in angles.items() if angle != 0}

    @torch.no_grad()
    def _turned(self, at: int) -> float:
        before, after = self.copies[at], flat(self.weights[at].detach())
        assert before is not None
        ww, we, ee = moved_products(before, after)
        self.versions[at] = self.weights[at]._version
        if not math.isfinite(ww + we + ee):
            return math.nan
        self.norms[at] = math.sqrt(ww), math.sqrt(max(ww + 2 * we + ee, 0.0))
        return math.atan2(math.sqrt(max(ee * ww - we * we, 0.0)), ww + we)

    def state_dict(self) -> dict[str, Any]:
        held = {name: list(getattr(self, name)) for name in ("norms", "mean_sq", "measured", "recent")}
        return {**held, "trim": self.trim, "first_gain": self.first_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trim, self.mean_sq, self.measured = state["trim"], list(state["mean_sq"]), list(state["measured"])
        self.norms = [(float(a), float(b)) for a, b in state["norms"]]
        self.first_gain = float(state.get("first_gain", 0.0))
        self.recent = deque(((float(a), float(b)) for a, b in state["recent"]), maxlen=RECENT)
        self.copies = [None] * len(self.weights)  # the weights may be loaded later


def _loops(optimizer: Optimizer, found: dict[str, Tensor]) -> list[_Loop]:
    sharded = [name for name, weight in found.items() if is_sharded(weight)]
    if sharded:
        raise EquilibriaError(f"got {sharded[0]} as a DTensor; expected whole tensors: no process sees its angle")
    wanted = {id(weight) for weight in found.values()}
    groups = [[p for p in group["params"] if id(p) in wanted] for group in optimizer.param_groups]
    return [_Loop.of(at, weights) for at, weights in enumerate(groups) if weights]


def _takes_all(rule: Rule | None, lr: float) -> bool:
    """Whether weight decay takes a whole weight per step; that of AdamL2 is divided by the gradient's size."""
    return rule is not None and not isinstance(rule, AdamL2) and replace(rule, lr=lr).decay_per_step >= 1


def _like(old: float | Tensor, value: float) -> float | Tensor:
    return torch.full_like(old, value) if isinstance(old, Tensor) else value
