"""Rotational optimizers: every scale-invariant weight turns by exactly the equilibrium angle at every step.

`Rotational` computes the angle from lr and weight decay; the direction of a step is the plain optimizer's update
without its decay (``_sgd_direction`` and so on; where no such function is known, the step that it takes); ``turn``
moves the weight along it by the angle and keeps its norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria import theory
from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._lion import Lion
from equilibria.control._optimizer import (
    OptimizerWrapper,
    require_fine,
    require_optimizer,
    require_whole,
    with_gradient,
)
from equilibria.control._sgdw import SGDW
from equilibria.control._units import Granularity, require_units, unit_axes, unit_norms, unit_products, write_units
from equilibria.errors import EquilibriaError
from equilibria.findings import counted
from equilibria.optimizers.rules import follows, rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import flat, is_dense, matrix
from equilibria.theory.rules import Rule

_PLAIN = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, SGDW, Lion)  # Adam: its decay may be decoupled
_STRETCH = 1 << 18  # elements that stay in a processor's caches while several operations pass over them
_ILL_CONDITIONED = 0.1  # tangent share of the update's square, below which float32 leaves too few digits of it
_NO_TANGENT = 1e-12  # tangent share below which there is no direction to turn to, even in float64


class Rotational(OptimizerWrapper):
    """Turns scale-invariant weights by the equilibrium angle from the first step on (Kosson et al.).

    Wraps SGD (momentum, dampening, Nesterov), SGDW, AdamW, Lion, Muon, and every other optimizer that has a law, closed
    or measured (`equilibria.identify`). The direction of a step is the plain optimizer's update without its weight
    decay, orthogonal to the weight. Its angle is the equilibrium angle of the group's lr and
    weight decay, such as `theory.SGD(...).equilibrium().angle`. The norm stays constant, so weight decay only sets the
    angle. The plain optimizer steps all other parameters, weight decay included.

    Compared with the plain optimizer there is no transient (no warm-up by a large norm, none after a change of lr), and
    the angle does not depend on the gradient's size: it neither fluctuates nor fades as gradients do, and every weight
    turns alike. Compared with the authors' code: they divide the update by a running mean of its size, so their angle
    is right on average, while here it is exact; and Lion's law is the corrected one.

    It shares groups and state with the plain optimizer, which must no longer be stepped directly. Schedulers,
    checkpoints and gradient scaling work as on any optimizer. Muon's angle depends on the shape of the matrix. Under
    Muon, and optimizers of others, the plain one takes its step and the weight is turned along it; that needs a copy of
    the weights that turn.

    Args:
        optimizer: the plain optimizer.
        model: the network, to look up names and the axis that numbers a tensor's outputs (0 without it).
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is used.
        granularity: "tensor": each tensor turns as a whole; "row": each output row turns by the angle, which needs rows
            that are invariant one by one, as before BatchNorm.
        centred: subtract the mean of every unit from weights (now) and updates, as the authors do. This changes the
            network.

    Raises:
        EquilibriaError: an optimizer or settings without a law, a weight that is zero or coarser than float32. From
            ``step()``, before anything is changed: settings without an equilibrium, and, in the first twenty steps,
            gradients that show that a weight is not scale-invariant.

    Example:
        >>> w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = Rotational(torch.optim.SGD([w], lr=0.1, weight_decay=0.01), invariant=[w])
        >>> (w[0] / w.norm()).backward()
        >>> optimizer.step()
        >>> cosine = (3 * w[0] + 4 * w[1]) / 25
        >>> round(w.norm().item(), 12), round(cosine.item(), 12)  # cos(angle) = 1 - lr wd
        (5.0, 0.999)
    """

    _attributes: ClassVar = ("plain", "granularity", "centred", "axes", "_check", "_names")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        invariant: Invariant,
        model: nn.Module | None = None,
        granularity: Granularity = "tensor",
        centred: bool = False,
    ) -> None:
        require_optimizer(optimizer)
        weights = invariant_tensors(invariant, optimizer=optimizer, model=model)
        axes = unit_axes(weights, invariant=invariant, model=model, granularity=granularity)
        self.plain, self.granularity, self.centred, self._scratch = optimizer, granularity, bool(centred), _Scratch()
        self._check, self._names = InvarianceCheck(), {weight: name for name, weight in weights.items()}
        self.axes = {weight: axes[name] for name, weight in weights.items()}
        for name, weight in weights.items():
            _check_weight(name, weight, self.axes[weight], centred=self.centred)
        for group in optimizer.param_groups:
            for weight in self._turning(group):
                self.angle_of(group, weight)
        super().__init__(optimizer)
        if self.centred:
            self._centre()

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        return f"turns {counted(len(self.axes), 'weight')} by the equilibrium angle at every step"

    def promised_angle(self, weight: Tensor, group: dict[str, Any], *, by_row: bool) -> float | None:
        """Radians by which the next step turns a weight, or each of its rows; None if the plain optimizer steps it.

        NaN if it turns the weight but does not say by how much: a row of a tensor that turns as a whole.
        """
        if weight not in self.axes:
            return None
        return math.nan if by_row and self.granularity == "tensor" else self.angle_of(group, weight)

    def angle_of(self, group: dict[str, Any], weight: Tensor | None = None) -> float:
        """Radians per step by which invariant weights of a group turn with its present settings.

        Args:
            group: the parameter group.
            weight: the weight, on whose shape Muon's angle depends.

        Raises:
            EquilibriaError: the settings have no equilibrium.
        """
        rule = self._rule(group)
        if isinstance(rule, theory.Muon) and weight is not None:
            rule = dataclasses.replace(rule, shape=(len(weight), weight.numel() // len(weight)))
        return 0.0 if rule.lr == 0 else _equilibrium_angle(rule)

    def equilibria_rule(self, group: dict[str, Any]) -> Rule:
        """The rule that a group without rotational weights follows; rotational ones keep their norm and follow none."""
        if weights := self._turning(group):
            angles = [self.angle_of(group, weight) for weight in weights]
            shown = " to ".join(dict.fromkeys(f"{angle:.3g}" for angle in (min(angles), max(angles))))
            raise EquilibriaError(f"its invariant weights keep their norm and turn by {shown} rad per step")
        return super().equilibria_rule(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_scratch": _Scratch()}

    def _move_all(self) -> None:
        turns = [planned for group in self.param_groups for planned in self._planned(group)]
        self._check.check({self._names[planned.weight]: planned.weight for planned in turns}, self.axes)
        stepped = [planned for planned in turns if planned.direction is None]
        before = [planned.weight.detach().clone() for planned in stepped]
        self._step_plain([planned.weight for planned in turns if planned.direction is not None])
        for planned, weight in zip(stepped, before, strict=True):
            taken = weight - planned.weight
            planned.weight.copy_(weight)
            self._turn(planned, taken)
        for planned in turns:
            if planned.direction is not None:
                self._turn(planned, self._update(planned, planned.direction))

    def _turning(self, group: dict[str, Any]) -> list[Tensor]:
        return [param for param in group["params"] if param in self.axes]

    def _rule(self, group: dict[str, Any]) -> Rule:
        law = rule_of_group(self.plain, group, measure=True)
        rule = law.rule
        coupled = isinstance(rule, theory.AdamL2) or (isinstance(rule, theory.Identified) and rule.is_coupled)
        if rule is None or coupled:
            why = law.reason or f"the angle of {type(self.plain).__name__} with L2 depends on the gradient's size"
            raise EquilibriaError(
                f"got a group of {type(self.plain).__name__} that cannot be rotational: {why}; expected SGD, SGDW, "
                "AdamW, Lion, Muon, or an optimizer for which equilibria.identify finds a decoupled decay",
                argument="optimizer",
            )
        return rule

    @torch.no_grad()
    def _centre(self) -> None:
        for weight, axis in self.axes.items():
            if not weight.requires_grad:
                continue
            units = matrix(weight, axis=axis, like=weight)
            units.sub_(units.mean(1, keepdim=True))
            write_units(weight, units, axis=axis)

    def _planned(self, group: dict[str, Any]) -> list[_Turn]:
        """The turns of a group's rotational weights; raises before anything is changed."""
        weights = [weight for weight in with_gradient(group["params"]) if weight in self.axes]
        if not weights:
            return []
        is_known = any(follows(self.plain, kind) for kind in _PLAIN)
        direction = _DIRECTIONS.get(type(self._rule(group))) if is_known else None
        return [
            _Turn(weight, group, direction, self.angle_of(group, weight), self._radius(weight)) for weight in weights
        ]

    def _radius(self, weight: Tensor) -> Tensor:
        """The constant norm of every unit: its norm at the first step."""
        axis = self.axes[weight]
        units = 1 if axis is None else weight.shape[axis]
        radius: Tensor | None = self.state.get(weight, {}).get("radius")
        if radius is None:
            return unit_norms(weight, axis=axis).to(weight.dtype)
        if radius.numel() != units:
            raise EquilibriaError(
                f"got a checkpoint with {radius.numel()} norms for a tensor of shape {tuple(weight.shape)}; expected "
                f"{units}: it was written with another granularity than {self.granularity!r}",
                argument="state_dict",
            )
        return radius

    def _step_plain(self, turning: list[Tensor]) -> None:
        """Let the plain optimizer step everything but these: it skips parameters without a gradient."""
        gradients = [weight.grad for weight in turning]
        try:
            for weight in turning:
                weight.grad = None
            if any(with_gradient(group["params"]) for group in self.param_groups):
                self.plain.step()
        finally:
            for weight, gradient in zip(turning, gradients, strict=True):
                weight.grad = gradient

    def _update(self, planned: _Turn, direction: _Direction) -> Tensor:
        weight, group = planned.weight, planned.group
        assert weight.grad is not None
        gradient = -weight.grad if group.get("maximize") else weight.grad
        return direction(weight, gradient, self.state[weight], group, self._scratch)

    def _turn(self, planned: _Turn, update: Tensor) -> None:
        weight, axis = planned.weight, self.axes[planned.weight]
        self.state[weight]["radius"] = planned.radius
        units, towards = (matrix(tensor, axis=axis, like=weight) for tensor in (weight, update))
        turn(units, towards, angle=planned.angle, radius=planned.radius, centred=self.centred)
        write_units(weight, units, axis=axis)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn whose settings have been checked; without a direction it follows the step of the plain optimizer."""

    weight: Tensor
    group: dict[str, Any]
    direction: _Direction | None
    angle: float
    radius: Tensor


@lru_cache(maxsize=256)
def _equilibrium_angle(rule: Rule) -> float:
    return float(rule.equilibrium().angle)


def _check_weight(name: str, weight: Tensor, axis: int | None, *, centred: bool) -> None:
    require_fine([weight], by="Rotational")
    require_whole(name, weight)
    require_units(name, weight, axis=axis, centred=centred)


# ---- the direction of a step: the update that the plain optimizer would subtract, up to a factor, without its decay
#
# Each function advances the state as torch does, under torch's names, so that a checkpoint fits the plain optimizer,
# and returns a tensor of the weight's shape along the update. Work proceeds stretch by stretch, so that all operations
# on one stretch find it in the processor's cache.

_State: TypeAlias = dict[str, Any]


class _Scratch:
    """Memory for one update at a time, reused by every step: allocating it costs as much as filling it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, weight: Tensor) -> Tensor:
        """An uninitialised tensor with the shape and memory layout of the weight."""
        kind, size = (weight.device, weight.dtype), weight.numel()
        if kind not in self._buffers or self._buffers[kind].numel() < size:
            self._buffers[kind] = torch.empty(size, device=weight.device, dtype=weight.dtype)
        memory = self._buffers[kind][:size]
        return memory.as_strided(weight.shape, weight.stride()) if is_dense(weight) else memory.view(weight.shape)


_Direction: TypeAlias = Callable[[Tensor, Tensor, _State, Mapping[str, Any], _Scratch], Tensor]
"""(weight, gradient, state, group, scratch) -> update."""


def _sgd_direction(
    weight: Tensor, gradient: Tensor, state: _State, group: Mapping[str, Any], scratch: _Scratch
) -> Tensor:
    """torch.optim.SGD and SGDW: the buffer, with Nesterov the gradient ahead of it, without momentum the gradient."""
    momentum, kept = group["momentum"], 1 - group.get("dampening", 0.0)
    if not momentum:
        return gradient
    first = state.get("momentum_buffer") is None
    buffer = _buffer("momentum_buffer", state, weight)
    if first:
        buffer.copy_(gradient)  # torch does not damp the first
    else:
        for v, g in _stretches(weight, buffer, gradient):
            v.mul_(momentum).add_(g, alpha=kept)
    if not group.get("nesterov"):
        return buffer
    update = scratch.like(weight)
    for out, v, g in _stretches(weight, update, buffer, gradient):
        torch.mul(v, momentum, out=out).add_(g)
    return update


def _adamw_direction(
    weight: Tensor, gradient: Tensor, state: _State, group: Mapping[str, Any], scratch: _Scratch
) -> Tensor:
    """torch.optim.AdamW: ``m / (sqrt(v) + eps sqrt(1 - beta2^t))``, its update but for factors of bias correction."""
    state["step"] = state.get("step", torch.tensor(0.0)) + 1
    beta1, beta2 = group["betas"]
    eps = float(group["eps"]) * (1 - beta2 ** float(state["step"])) ** 0.5
    moments = _buffer("exp_avg", state, weight), _buffer("exp_avg_sq", state, weight)
    update = scratch.like(weight)
    for out, first, second, g in _stretches(weight, update, *moments, gradient):
        first.lerp_(g, 1 - beta1)
        second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(first, torch.sqrt(second, out=out).add_(eps), out=out)
    return update


def _lion_direction(
    weight: Tensor, gradient: Tensor, state: _State, group: Mapping[str, Any], scratch: _Scratch
) -> Tensor:
    """Lion: the sign of the interpolated momentum."""
    beta1, beta2 = group["betas"]
    update = scratch.like(weight)
    for out, first, g in _stretches(weight, update, _buffer("exp_avg", state, weight), gradient):
        torch.mul(first, beta1, out=out).add_(g, alpha=1 - beta1).sign_()
        first.mul_(beta2).add_(g, alpha=1 - beta2)
    return update


_DIRECTIONS: dict[type[Rule], _Direction] = {
    theory.SGD: _sgd_direction,
    theory.SGDW: _sgd_direction,
    theory.AdamW: _adamw_direction,
    theory.Lion: _lion_direction,
}


def _buffer(name: str, state: _State, weight: Tensor) -> Tensor:
    """A buffer of the state, zeros at first, with the memory layout of the weight."""
    buffer: Tensor | None = state.get(name)
    if buffer is None:
        buffer = state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    elif buffer.stride() != weight.stride() and is_dense(weight):  # a checkpoint of another memory format
        buffer = state[name] = torch.empty_like(weight).copy_(buffer)
    return buffer


def _stretches(weight: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding stretches of tensors of one shape, in the weight's memory order."""
    width = _STRETCH if weight.device.type == "cpu" else max(1, weight.numel())
    return zip(*(torch.split(flat(tensor, like=weight), width) for tensor in tensors), strict=True)


# ---- the turn


def turn(weights: Tensor, updates: Tensor, *, angle: float, radius: Tensor, centred: bool) -> None:
    """Turn every unit by ``angle`` against its update, in place; a unit whose update has no tangent part stays.

    A unit w of norm n turns by the angle a and gets the norm r:

        w' = r (cos(a) w/n - sin(a) t/||t||),      t = u - (<u, w>/n^2) w   (- its mean, if centred),

    which is ``A w + B u (+ C)`` with three numbers per unit, so only inner products are formed besides the result.

    Args:
        weights: (units, entries), changed.
        updates: (units, entries), the direction that the optimizer would subtract.
        angle: radians.
        radius: norm of every unit afterwards, (units,).
        centred: whether to subtract the update's mean; the weights have none already.
    """
    height = max(1, _STRETCH // weights.shape[1]) if weights.device.type == "cpu" else len(weights)
    pieces = (torch.split(tensor, height) for tensor in (weights, updates, radius))
    for weight, update, size in zip(*pieces, strict=True):
        _turn_piece(weight, update, angle=angle, radius=size.double(), centred=centred)


def _turn_piece(weight: Tensor, update: Tensor, *, angle: float, radius: Tensor, centred: bool) -> None:
    """Turn units that fit into the cache together, or a single one."""
    ww, uw, uu = unit_products(weight, update)
    mean = update.mean(1, dtype=torch.float64) if centred else torch.zeros_like(uu)
    share = 1 - (uw * uw / ww + weight.shape[1] * mean * mean) / uu  # NaN without an update, which turns nothing
    if weight.dtype != torch.float64 and bool((share < _ILL_CONDITIONED).any()):
        fine = weight.double()
        _turn_piece(fine, update.double(), angle=angle, radius=radius, centred=centred)
        weight.copy_(fine)
        return
    turns = share > _NO_TANGENT
    along = torch.where(turns, -radius * math.sin(angle) / torch.sqrt(uu * share), 0.0)
    kept = torch.where(turns, radius * math.cos(angle) / torch.sqrt(ww) - along * uw / ww, 1.0)
    offset = -along * mean if centred else None
    _combine(weight, update, kept, along, offset)


def _combine(weight: Tensor, update: Tensor, kept: Tensor, along: Tensor, offset: Tensor | None) -> None:
    """``weight = kept weight + along update + offset``, unit by unit; a large unit stretch by stretch."""
    a, b = (factor.to(weight.dtype).unsqueeze(1) for factor in (kept, along))
    width = _STRETCH if weight.device.type == "cpu" else weight.shape[1]
    for part, change in zip(torch.split(weight, width, dim=1), torch.split(update, width, dim=1), strict=True):
        part.mul_(a).addcmul_(change, b)
        if offset is not None:
            part.add_(offset.to(weight.dtype).unsqueeze(1))
