"""Steps of any optimizer at constant norm: weight decay no longer decides how far a weight turns."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._optimizer import OptimizerWrapper, require_fine, require_optimizer, require_whole
from equilibria.control._units import Granularity, require_units, unit_axes, unit_norms, write_units
from equilibria.errors import EquilibriaError, one_of
from equilibria.findings import counted
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import matrix
from equilibria.theory.rules import Muon, Rule

HeldNorm: TypeAlias = Literal["start", "equilibrium"]
"""The norm that `Hyperball` holds."""


class Hyperball(OptimizerWrapper):
    """Brings scale-invariant weights back to a constant norm after every step of an optimizer (AdamH, MuonH).

    A step ``w - lr u`` turns a weight of norm R by exactly ``atan2(r sin(phi), 1 - r cos(phi))``, r = lr ||u|| / R, phi
    the angle between u and w (`theory.sphere`): the angle follows lr at every step, without a transient. Weight decay
    shrinks w before the step and so multiplies lr by 1 / (1 - lr wd), nothing else; leave it at 0 for these weights
    unless its equilibrium sets the norm. All other parameters are stepped as by the wrapped optimizer, bit for bit.

    Learning rates that turn weights as an optimizer with weight decay does: ``equilibria.translate(rule, to="sphere",
    ...)``.

    It shares groups and state with the wrapped optimizer, which must no longer be stepped directly. Schedulers,
    checkpoints and gradient scaling work as on any optimizer.

    Args:
        optimizer: any torch optimizer.
        model: the network, to look up names and the axis that numbers a tensor's outputs (0 without it).
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is used.
        norm: "start": the norm that each weight has at its first step; "equilibrium": the one in which lr and weight
            decay would settle (AdamW, Lion, Muon, and measured laws like them). The weights get it now, so this is for
            networks without running statistics that are already used.
        granularity: "tensor", or "row": each output row keeps its own norm, which needs rows that are invariant one by
            one, as before BatchNorm.

    Raises:
        EquilibriaError: a weight that is zero, spread over processes or coarser than float32; norm="equilibrium" for an
            optimizer without such a norm, or after its first step. From ``step()``, before anything is changed: in the
            first twenty steps, gradients that show that a weight is not scale-invariant.

    Example:
        >>> w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        >>> optimizer = Hyperball(torch.optim.SGD([w], lr=0.1), invariant=[w])
        >>> (w[0] / w.norm()).backward()
        >>> gradient = w.grad.norm().item()
        >>> optimizer.step()
        >>> cosine = (3 * w[0] + 4 * w[1]) / 25
        >>> round(w.norm().item(), 12), round(math.tan(math.acos(cosine.item())) / (0.1 * gradient / 5), 6)
        (5.0, 1.0)
    """

    _attributes: ClassVar = ("plain", "granularity", "axes", "_check", "_names")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        invariant: Invariant,
        model: nn.Module | None = None,
        norm: HeldNorm = "start",
        granularity: Granularity = "tensor",
    ) -> None:
        require_optimizer(optimizer)
        one_of("norm", norm, get_args(HeldNorm))
        weights = invariant_tensors(invariant, optimizer=optimizer, model=model)
        axes = unit_axes(weights, invariant=invariant, model=model, granularity=granularity)
        for name, weight in weights.items():
            require_fine([weight], by="Hyperball")
            require_whole(name, weight)
            require_units(name, weight, axis=axes[name])
        self.granularity = granularity
        self._check, self._names = InvarianceCheck(), {weight: name for name, weight in weights.items()}
        self.axes = {weight: axes[name] for name, weight in weights.items()}
        targets = self._equilibrium_norms(optimizer) if norm == "equilibrium" else {}
        super().__init__(optimizer)
        for weight, target in targets.items():
            _hold(weight, self.axes[weight], target)

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        return f"holds the norm of {counted(len(self.axes), 'weight')}"

    def promised_angle(self, weight: Tensor, group: dict[str, Any], *, by_row: bool) -> float | None:
        """NaN for a weight whose norm is held: its angle follows the update; None for others."""
        return math.nan if weight in self.axes else None

    def equilibria_rule(self, group: dict[str, Any]) -> Rule:
        """The rule that a group without held weights follows; held ones have no equilibrium."""
        if any(param in self.axes for param in group["params"]):
            raise EquilibriaError("its invariant weights keep their norm: the angle follows from lr alone")
        return super().equilibria_rule(group)

    def _move_all(self) -> None:
        held = {
            weight: self._radius(weight) for _, weights in self._moving() for weight in weights if weight in self.axes
        }
        self._check.check({self._names[weight]: weight for weight in held}, self.axes)
        self.plain.step()
        for weight, radius in held.items():
            _hold(weight, self.axes[weight], radius)
            self.state[weight]["radius"] = radius

    def _radius(self, weight: Tensor) -> Tensor:
        """The constant norm of every unit: its norm at the first step."""
        axis = self.axes[weight]
        radius: Tensor | None = self.state.get(weight, {}).get("radius")
        if radius is None:
            return unit_norms(weight, axis=axis).to(weight.dtype)
        if radius.numel() != (units := 1 if axis is None else weight.shape[axis]):
            raise EquilibriaError(
                f"got a checkpoint with {radius.numel()} norms for a tensor of shape {tuple(weight.shape)}; expected "
                f"{units}: it was written with another granularity than {self.granularity!r}",
                argument="state_dict",
            )
        return radius

    def _equilibrium_norms(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """The norm of every unit in the equilibrium of its group's lr and weight decay; raises where it is unknown."""
        norms: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            typed = {"lr": group.get("max_lr", group.get("initial_lr", group["lr"]))}  # a warm-up may have begun
            law = rule_of_group(optimizer, {**group, **typed}, measure=True)
            for weight in (param for param in group["params"] if param in self.axes and param.requires_grad):
                name = self._names[weight]
                if optimizer.state.get(weight):
                    raise EquilibriaError(
                        f"got norm='equilibrium' for {name}, which the optimizer has stepped; expected a fresh one: "
                        "its averages belong to the present norm",
                        argument="norm",
                    )
                norms[weight] = _equilibrium_norm(name, law.rule, law.reason, weight, self.axes[weight])
        return norms


def _equilibrium_norm(name: str, rule: Rule | None, reason: str, weight: Tensor, axis: int | None) -> Tensor:
    rows = 1 if axis is None else weight.shape[axis]
    norm = None
    if isinstance(rule, Muon):
        norm = rule.equilibrium(shape=(len(weight), weight.numel() // len(weight))).norm
    elif rule is not None and rule.decay_per_step > 0:
        norm = rule.equilibrium(dim=weight.numel()).norm
    if norm is None:
        why = reason or f"the norm of {type(rule).__name__} depends on the gradients"
        raise EquilibriaError(
            f"got norm='equilibrium' for {name}: {why}; expected AdamW, Lion or Muon with weight decay, or "
            "norm='start'",
            argument="norm",
        )
    # Rows of one size share the squared norm alike.
    return torch.full((rows,), float(norm) / math.sqrt(rows), dtype=weight.dtype, device=weight.device)


@torch.no_grad()
def _hold(weight: Tensor, axis: int | None, radius: Tensor) -> None:
    """Bring every unit to its norm."""
    units = matrix(weight, axis=axis, like=weight)
    factor = radius.double() / unit_norms(weight, axis=axis)
    units.mul_(factor.to(units.dtype).unsqueeze(1))
    write_units(weight, units, axis=axis)
