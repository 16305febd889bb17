"""Every scale-invariant weight turns by exactly the equilibrium angle at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria.control._directions import DIRECTIONS, Direction, Scratch
from equilibria.control._lion import Lion
from equilibria.control._optimizer import CheckedOptimizer, require_fine, with_gradient
from equilibria.control._radial import InvarianceWatch
from equilibria.control._sgdw import SGDW
from equilibria.control._turning import norms, require_units, turn, write_units
from equilibria.errors import EquilibriaError, one_of
from equilibria.optimizers.rules import follows, rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors, require_rows
from equilibria.tensors.layout import is_sharded, matrix
from equilibria.tensors.parameters import row_axes
from equilibria.theory.rules import Rule

PLAIN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, SGDW, Lion)  # Adam: its decay may be decoupled


class Rotational(CheckedOptimizer):
    """An optimizer whose scale-invariant weights turn by the equilibrium angle from the first step on (Kosson et al.).

    Around SGD (momentum, dampening, Nesterov), SGDW, AdamW or Lion: the direction of a step is that of the plain
    optimizer without its weight decay, orthogonal to the weight; its angle is where lr and weight decay of the group
    would settle, `theory.SGD(...).equilibrium().angle` and its like; the norm stays what it was. Weight decay then only
    sets the angle. All other parameters, weight decay included, are stepped by the plain optimizer itself.

    Different from the plain optimizer: no transient (no warm-up by a large norm, none after a change of lr), the angle
    does not depend on the gradient's size, so it does not fluctuate and does not fade as gradients do; every weight
    turns alike. Different from the authors' code: they divide the update by a running mean of its size, so that their
    angle is right on average, here it is exact; and the law for Lion is the corrected one.

    It shares groups and state with the plain optimizer, which must not be stepped on its own any more. Schedulers,
    checkpoints and gradient scaling work as on any optimizer.

    Args:
        optimizer: the plain one: torch.optim.SGD, torch.optim.AdamW, or SGDW, Lion of this package.
        invariant: which tensors are scale-invariant: names, tensors, or a result of `equilibria.symmetries`, of
            which ``sym.alone`` is what counts.
        model: where names are looked up, and which axis of a tensor numbers its outputs (0 without it).
        granularity: "tensor": each turns as a whole; "row": each output row turns by the angle on its own, which needs
            rows that are invariant one by one, as before BatchNorm.
        centred: weights (now) and updates lose their mean, per unit, as the authors do. This changes the network.

    Raises:
        EquilibriaError: an optimizer or settings without a law, a weight that is zero or coarser than float32; from
            ``step()``, before anything is changed: settings that have lost their equilibrium, and, in the first twenty
            steps, gradients that show that a weight is not scale-invariant.

    Example:
        >>> w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = Rotational(torch.optim.SGD([w], lr=0.1, weight_decay=0.01), invariant=[w])
        >>> (w[0] / w.norm()).backward()
        >>> optimizer.step()
        >>> cosine = (3 * w[0] + 4 * w[1]) / 25
        >>> round(w.norm().item(), 12), round(cosine.item(), 12)  # cos(angle) = 1 - lr wd
        (5.0, 0.999)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        invariant: Invariant,
        *,
        model: nn.Module | None = None,
        granularity: str = "tensor",
        centred: bool = False,
    ) -> None:
        if not isinstance(optimizer, PLAIN) or not any(follows(optimizer, kind) for kind in PLAIN):
            raise EquilibriaError(
                f"got optimizer of type {type(optimizer).__name__}; expected torch.optim.SGD, torch.optim.AdamW, "
                "equilibria.control.SGDW or equilibria.control.Lion"
            )
        one_of("granularity", granularity, ("tensor", "row"))
        found = invariant_tensors(invariant, optimizer=optimizer, model=model)
        if granularity == "row":
            require_rows(invariant, found)
        numbering = {} if model is None else row_axes(model)
        self.plain, self.granularity, self.centred, self._scratch = optimizer, granularity, bool(centred), Scratch()
        self._watch, self._called = InvarianceWatch(), {weight: name for name, weight in found.items()}
        self.axes = {
            weight: numbering.get(id(weight), 0) if granularity == "row" else None for weight in found.values()
        }
        for name, weight in found.items():
            _check_weight(name, weight, self.axes[weight], centred=self.centred)
        for group in optimizer.param_groups:
            if self._is_rotational(group):
                self.angle_of(group)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        vars(optimizer)["equilibria_stepped_by"] = type(self).__name__  # who watches it is told to watch this one
        if self.centred:
            self._centre()

    def angle_of(self, group: dict[str, Any]) -> float:
        """Radians by which the invariant weights of a group turn in a step with its present settings.

        Raises:
            EquilibriaError: the settings have no equilibrium.
        """
        rule = self._rule(group)
        return 0.0 if rule.lr == 0 else _equilibrium_angle(rule)

    def equilibria_rule(self, group: dict[str, Any]) -> Rule:
        """The rule that a group follows, if nothing in it is rotational: what is has a fixed norm, nothing settles."""
        if self._is_rotational(group):
            raise EquilibriaError(
                f"its invariant weights keep their norm and turn by {self.angle_of(group):.3g} rad per step"
            )
        law = rule_of_group(self.plain, group)
        if law.rule is None:
            raise EquilibriaError(law.reason)
        return law.rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of further parameters, which are not rotational."""
        if "plain" in self.__dict__ and self.param_groups is self.plain.param_groups:
            self.plain.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint of this optimizer."""
        self.plain.load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("plain", "granularity", "centred", "axes", "_watch", "_called")}
        return {**super().__getstate__(), **own, "_scratch": Scratch()}

    def _move_all(self) -> None:
        turns = [planned for group in self.param_groups for planned in self._planned(group)]
        self._watch.look({self._called[planned.weight]: planned.weight for planned in turns}, self.axes)
        self._step_others([planned.weight for planned in turns])
        for planned in turns:
            self._turn(planned)

    def _is_rotational(self, group: dict[str, Any]) -> bool:
        return any(param in self.axes for param in group["params"])

    def _rule(self, group: dict[str, Any]) -> Rule:
        law = rule_of_group(self.plain, group)
        if law.rule is None or type(law.rule) not in DIRECTIONS:
            why = law.reason or f"the angle of {type(law.rule).__name__} depends on the gradient's size"
            raise EquilibriaError(f"got a group that cannot be rotational: {why}; expected SGD, SGDW, AdamW or Lion")
        return law.rule

    def _share(self) -> None:
        self.param_groups, self.state = self.plain.param_groups, self.plain.state

    @torch.no_grad()
    def _centre(self) -> None:
        for weight, axis in self.axes.items():
            if not weight.requires_grad:
                continue
            units = matrix(weight, axis=axis, like=weight)
            units.sub_(units.mean(1, keepdim=True))
            write_units(weight, units, axis=axis)

    def _planned(self, group: dict[str, Any]) -> list[_Turn]:
        """What is to be done for the rotational weights of a group; raises before anything is changed."""
        weights = [weight for weight in with_gradient(group["params"]) if weight in self.axes]
        if not weights:
            return []
        direction, angle = DIRECTIONS[type(self._rule(group))], self.angle_of(group)
        return [_Turn(weight, group, direction, angle, self._radius(weight)) for weight in weights]

    def _radius(self, weight: Tensor) -> Tensor:
        """The norm of every unit that is kept: what it was at the first step."""
        axis = self.axes[weight]
        units = 1 if axis is None else weight.shape[axis]
        held = self.state.get(weight, {}).get("radius")
        if held is None:
            return norms(matrix(weight, axis=axis, like=weight))
        if held.numel() != units:
            raise EquilibriaError(
                f"got a checkpoint with {held.numel()} norms for a tensor of shape {tuple(weight.shape)}; expected "
                f"{units}: it was written with another granularity than {self.granularity!r}"
            )
        radius: Tensor = held
        return radius

    def _step_others(self, turning: list[Tensor]) -> None:
        """Let the plain optimizer step everything else: it passes over parameters without a gradient."""
        held = [weight.grad for weight in turning]
        try:
            for weight in turning:
                weight.grad = None
            if any(with_gradient(group["params"]) for group in self.param_groups):
                self.plain.step()
        finally:
            for weight, gradient in zip(turning, held, strict=True):
                weight.grad = gradient

    def _turn(self, planned: _Turn) -> None:
        weight, group, axis = planned.weight, planned.group, self.axes[planned.weight]
        assert weight.grad is not None
        gradient = -weight.grad if group.get("maximize") else weight.grad
        state = self.state[weight]
        state["radius"] = planned.radius
        update = planned.direction(weight, gradient, state, group, self._scratch)
        units, towards = (matrix(each, axis=axis, like=weight) for each in (weight, update))
        turn(units, towards, angle=planned.angle, radius=planned.radius, centred=self.centred)
        write_units(weight, units, axis=axis)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that is known to be possible."""

    weight: Tensor
    group: dict[str, Any]
    direction: Direction
    angle: float
    radius: Tensor


@lru_cache(maxsize=256)
def _equilibrium_angle(rule: Rule) -> float:
    return float(rule.equilibrium().angle)


def _check_weight(name: str, weight: Tensor, axis: int | None, *, centred: bool) -> None:
    require_fine([weight], by="Rotational")
    if is_sharded(weight):
        raise EquilibriaError(f"got {name} as a DTensor; expected whole tensors: its norm is spread over processes")
    require_units(name, weight, axis=axis, centred=centred)
