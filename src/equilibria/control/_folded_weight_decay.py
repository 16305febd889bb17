"""Folds weight decay into a growing learning rate during training: the same network, without weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._clipping_check import ClippingCheck
from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.control._running_statistics import RunningStatistics, require_network
from equilibria.control._scheduler import (
    Hooked,
    SchedulerWrapper,
    closure_of,
    copies,
    restoring_scheduler,
    set_value,
    unshare_lr,
)
from equilibria.errors import EquilibriaError
from equilibria.findings import counted, joined
from equilibria.optimizers.controllers import StandsFor, control_log
from equilibria.optimizers.rules import follows
from equilibria.tensors.invariance import InvariantSet, JointlyInvariant, invariant_sets, named_parameters
from equilibria.tensors.parameters import plain_name
from equilibria.theory.exponential import LARGEST
from equilibria.theory.folding import FoldState, FoldStep, advance
from equilibria.theory.switching import Renormalisation, to_weight_decay

# The state of a folded run is stored in the optimizer's parameter groups, because weights, momentum and scale belong
# together: a checkpoint of the optimizer has all of it. A group without it is at the start, where both runs agree.
_LOG_SCALE, _Q, _EXPONENT, _MEMBERS = "fold_log_scale", "fold_q", "fold_exponent", "fold_members"


@dataclass(frozen=True, slots=True, eq=False)
class _GroupStep:
    """A group during an optimizer step: the settings to restore, and the state to store after it.

    Attributes:
        lr: the schedule's learning rate.
        weight_decay: the schedule's weight decay.
        step: the step of the recursion.
        extra: further entries for the group once the step is done.
    """

    lr: float
    weight_decay: float
    step: FoldStep
    extra: Mapping[str, Any]


class FoldedWeightDecay(Hooked, SchedulerWrapper):
    """Trains scale-invariant weights without weight decay, at the growing learning rate that gives the same network.

    ``w~_t = P_t w_t`` if ``lr~_t = P_t P_{t+1} lr_t``; the recursion of P is `equilibria.theory.folding.advance`.
    During each optimizer step the groups of scale-invariant weights have weight decay 0 and the folded learning rate;
    between steps they have the learning rate and weight decay of the schedule, so any scheduler of lr, weight decay or
    momentum may act on them. A step that does not happen (no gradient, infinite gradient under AMP) does not advance
    anything. After each step BatchNorm's running statistics behind the weights are rescaled, so eval mode is the same
    network too. Whenever P doubles, weights are halved and momentum is doubled, which is exact in floating point, so a
    run never overflows. `equilibria.watch` shows the run with weight decay: its lr, weight decay and norms.

    Args:
        scheduler: any torch scheduler of an SGD optimizer, or the optimizer itself for a constant learning rate. Call
            ``step()`` of this object in its place.
        model: the network.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`. A list of names
            or tensors inside the list is a set that is invariant only jointly; from symmetries, ``sym.uniform_sets()``
            are used. Invariant weights need separate parameter groups, such as those of
            ``equilibria.split_decay(model, weight_decay=..., invariant=sym)``, and a joint set needs all its tensors in
            one group, because its scale P is one number. Where the whole network is jointly invariant, that is the
            group of ``torch.optim.SGD(model.parameters(), ...)``.
        example: the arguments of one call of the model (a tensor, or a tuple), to locate the BatchNorm statistics
            behind the weights; without it, the first training batch is used.
        renormalise: whether to divide powers of two out of the weights; without it, the numbers overflow eventually.

    Raises:
        EquilibriaError: settings without an equivalent (Nesterov, dampening, other optimizers), groups that mix
            scale-invariant weights with others, or joint sets that are not in one group. Later, gradients that were
            visibly clipped by norm, and, in the first twenty steps, a weight whose gradient shows that it is not
            scale-invariant (cosine with it above 0.05 and three times chance), or a joint set whose radial gradients do
            not cancel.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> groups = [{"params": [net[0].weight]}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
        >>> folded = FoldedWeightDecay(optimizer, model=net, invariant=["0.weight"])
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     net(torch.randn(8, 3)).square().sum().backward()
        ...     optimizer.step()
        ...     folded.step()
        >>> [round(lr, 6) for lr in folded.get_last_lr()]  # 0.1 / 0.95^3
        [0.116635, 0.1]
        >>> optimizer.param_groups[0]["weight_decay"], round(folded.scales[0], 6)
        (0.5, 1.108033)
    """

    follows_settings = True

    def __init__(
        self,
        scheduler: LRScheduler | Optimizer,
        *,
        model: nn.Module,
        invariant: JointlyInvariant,
        example: Any = None,
        renormalise: bool = True,
    ) -> None:
        super().__init__(scheduler)
        require_network(model)
        _refuse_rescaling(self.scheduler)
        _require_sgd(self.optimizer)
        self._names = {tensor: name for name, tensor in named_parameters(self.optimizer, model).items()}
        sets = invariant_sets(invariant, optimizer=self.optimizer, model=model)
        no_effect = {plain_name(name) for name in getattr(invariant, "no_effect", ())}
        folded = _folded_groups(self.optimizer, sets, names=self._names, no_effect=no_effect)
        self._folded = list(folded)
        if any(isinstance(controller, FoldedWeightDecay) for controller in control_log(self.optimizer).controllers):
            raise EquilibriaError(
                "got an optimizer that is already folded; expected one that is not: pass all scale-invariant weights "
                "to one FoldedWeightDecay, or unfold() the first",
                argument="scheduler",
            )
        for index in self._folded:
            refuse_unequal(self.optimizer.param_groups[index], index)
        inside = [one for sets in folded.values() for one in sets]
        self._weights = {name: tensor for one in inside for name, tensor in one.tensors.items()}
        groups = self.optimizer.param_groups
        self._trained = {i: [weight for weight in groups[i]["params"] if weight.requires_grad] for i in folded}
        self._labels = {index: joined(self._names_of(weights), most=3) for index, weights in self._trained.items()}
        scaled_together = {self._labels[index]: weights for index, weights in self._trained.items()}
        self._statistics = RunningStatistics(model, scaled_together, example=example)
        self._renormalise = renormalise
        self._clipping = ClippingCheck()
        self._invariance = InvarianceCheck([list(one.tensors) for one in inside if one.is_joint])
        self._last_lr: list[float | Tensor] = copies(group["lr"] for group in self.optimizer.param_groups)
        self._in_step: dict[int, _GroupStep] = {}
        self._attach()

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        before = self.optimizer.register_step_pre_hook(self._before)
        after = self.optimizer.register_step_post_hook(self._after)
        return before, after, self.optimizer.register_state_dict_post_hook(self._on_state_dict)

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        return f"trains {counted(len(self._weights), 'weight')} without weight decay at a growing lr, the same network"

    def stands_for(self) -> dict[int, StandsFor]:
        """By folded group, the run with weight decay that its weights stand for."""
        return {index: self._stands_for(self.optimizer.param_groups[index], index) for index in self._folded}

    def _stands_for(self, group: Mapping[str, Any], index: int) -> StandsFor:
        state, group_step = _state(group), self._in_step.get(index)
        scale = math.exp(state.log_scale - state.exponent * math.log(2))
        if group_step is None:
            return StandsFor(float(group["lr"]), float(group["weight_decay"]), scale, state.q)
        return StandsFor(group_step.lr, group_step.weight_decay, scale, state.q, group_step.step.alpha)

    @property
    def scales(self) -> dict[int, float]:
        """The stored weights divided by those of the run with weight decay, by parameter group."""
        states = {index: _state(self.optimizer.param_groups[index]) for index in self._folded}
        return {index: math.exp(state.log_scale - state.exponent * math.log(2)) for index, state in states.items()}

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates of the last optimizer step, one per parameter group, folded where weights are."""
        return copies(self._last_lr)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler, per optimizer step or per epoch as it expects; an error leaves all as it was."""
        self._restore_settings()
        with restoring_scheduler(self.scheduler):
            super().step(*args, **kwargs)

    @torch.no_grad()
    def unfold(self) -> None:
        """Turn weights, momentum and statistics back into those of the run with weight decay.

        The optimizer then trains as if it had never been folded. This object still steps the scheduler.
        """
        self._restore_settings()
        if any(self._members(self.optimizer.param_groups[index]) for index in self._folded):
            self._statistics.require()
        for index in self._folded:
            group = self.optimizer.param_groups[index]
            switch = to_weight_decay(_state(group))
            members = self._members(group)
            if members:
                self._multiply(members, switch.weight)
                for weight, buffer in self._buffers(members):
                    buffer.mul_(switch.buffer).add_(weight, alpha=switch.buffer_from_weight)
                self._statistics.rescale([self._labels[index]], switch.weight)
            for key in [key for key in group if key.startswith("fold_")]:
                del group[key]
        self._folded = []
        self._statistics.close()
        self._detach()

    # ---- the optimizer's step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(
        self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._restore_settings()
        closure = closure_of(args, kwargs)
        if closure is None:
            self._begin()
            return None
        return args[:1], {**kwargs, "closure": self._then_begin(closure)}

    def _then_begin(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Fold the settings after the closure, which computes the gradients and may fail."""

        def wrapped() -> Any:
            loss = closure()
            self._begin()
            return loss

        return wrapped

    @torch.no_grad()
    def _begin(self) -> None:
        self._invariance.check(self._weights)
        self._statistics.require()
        self._clipping.check(self.optimizer)
        steps = {index: self._fold(index) for index in self._folded if self._moves(index)}
        unshare_lr(self.optimizer)
        for index, group_step in steps.items():
            group = self.optimizer.param_groups[index]
            if float(group["momentum"]) == 0:
                self._park(group)
            set_value(group, "lr", group_step.step.lr)
            group["weight_decay"] = 0.0
        self._in_step = steps
        self._last_lr = copies(group["lr"] for group in self.optimizer.param_groups)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        steps = self._restore_settings()
        found_inf = getattr(optimizer, "found_inf", None)  # a fused step decides by itself whether to happen
        if found_inf is not None and float(found_inf) != 0:
            return
        for index, group_step in steps.items():
            self._advance(index, group_step)

    def _restore_settings(self) -> dict[int, _GroupStep]:
        """Give the groups the schedule's settings again, also after a step that failed; returns that step."""
        steps, self._in_step = self._in_step, {}
        for index, group_step in steps.items():
            group = self.optimizer.param_groups[index]
            set_value(group, "lr", group_step.lr)
            group["weight_decay"] = group_step.weight_decay
        return steps

    def _on_state_dict(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Write the schedule's settings into a checkpoint, also into one that is saved because a step failed."""
        for index, group_step in self._in_step.items():
            packed, lr = state_dict["param_groups"][index], group_step.lr
            packed["lr"] = torch.full_like(packed["lr"], lr) if isinstance(packed["lr"], Tensor) else lr
            packed["weight_decay"] = group_step.weight_decay

    def _fold(self, index: int) -> _GroupStep:
        group = self.optimizer.param_groups[index]
        refuse_unequal(group, index)
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        try:
            step, extra = self._next(group, _state(group), lr=lr, weight_decay=decay)
        except EquilibriaError as error:
            raise EquilibriaError(f"parameter group {index}: {error}", argument=error.argument) from None
        if not step.lr <= LARGEST["float32"]:
            raise EquilibriaError(
                f"got a folded learning rate of exp({step.log_lr:g}) for parameter group {index}; expected one that "
                "torch can multiply with: use renormalise=True"
            )
        return _GroupStep(lr, decay, step, extra)

    def _next(
        self, group: Mapping[str, Any], state: FoldState, *, lr: float, weight_decay: float
    ) -> tuple[FoldStep, Mapping[str, Any]]:
        """The step of the recursion, and further entries for the group."""
        return advance(state, lr, weight_decay=weight_decay, momentum=float(group["momentum"])), {}

    def _advance(self, index: int, group_step: _GroupStep) -> None:
        group = self.optimizer.param_groups[index]
        step, state, members = group_step.step, group_step.step.state, self._members(group)
        if float(group["momentum"]) == 0:
            for _, buffer in self._buffers(members):
                buffer.mul_(step.alpha)  # a parked buffer stays that of the run with weight decay
        self._statistics.rescale([self._labels[index]], step.running_mean)
        shift = math.floor(state.log_scale / math.log(2)) - state.exponent
        if self._renormalise and shift >= 1:
            change = Renormalisation(shift)
            self._multiply(members, change.weight)
            for _, buffer in self._buffers(members):
                buffer.mul_(change.buffer)
            self._statistics.rescale([self._labels[index]], change.weight)
            state = state.renormalised(shift)
        group[_LOG_SCALE], group[_Q], group[_EXPONENT] = state.log_scale, state.q, state.exponent
        group.update(group_step.extra)

    def _multiply(self, members: list[Tensor], factor: float) -> None:
        """Multiply weights, which go on to stand for the same run, and announce it."""
        torch._foreach_mul_(members, factor)
        for weight in members:
            control_log(self.optimizer).note_rescaling(weight, factor, stands_for_same=True)

    def _park(self, group: dict[str, Any]) -> None:
        """Remove the decay's share from the momentum buffers, which torch neither uses nor updates at momentum 0.

        ``buf~ = (buf - q w)/P`` represents the same run at any q. At q = 0 it is that run's buffer over P, which is
        valid again as soon as momentum is.
        """
        state = _state(group)
        if state.q != 0:
            share = state.q * math.exp(2 * (state.exponent * math.log(2) - state.log_scale))
            for weight, buffer in self._buffers(self._members(group)):
                buffer.add_(weight, alpha=share)
            group[_Q] = 0.0

    # ---- the weights of a group

    def _moves(self, index: int) -> bool:
        """Whether the group's weights have gradients: all that ever had one, or none."""
        group = self.optimizer.param_groups[index]
        moving = [position for position, weight in enumerate(group["params"]) if weight.grad is not None]
        if not moving:
            return False
        if _MEMBERS not in group:
            self._require_all(index, [group["params"][position] for position in moving])
        members = group.setdefault(_MEMBERS, moving)
        if moving != members:
            changed = [group["params"][position] for position in sorted(set(moving) ^ set(members))]
            raise EquilibriaError(
                f"got gradients for {len(moving)} weights of parameter group {index}, for {len(members)} in earlier "
                "steps; expected the same ones: a weight without gradient does not decay, so it departs from the scale "
                f"that its group shares. Give {', '.join(self._names_of(changed))} a separate group, or unfold() and "
                "fold again"
            )
        return True

    def _require_all(self, index: int, moving: list[Tensor]) -> None:
        """Raise if the first step does not move the weights of a group that were trainable when it was folded."""
        expected, present = self._names_of(self._trained[index]), self._names_of(moving)
        differing = [name for name in (*expected, *present) if (name in expected) is not (name in present)]
        if differing:
            raise EquilibriaError(
                f"got gradients for {len(present)} weights of parameter group {index}, where {len(expected)} were "
                f"trainable when it was folded; expected the same ones, but {joined(differing, most=3)} made the "
                "difference: a weight without gradient does not decay, so it departs from the scale that its group "
                "shares. Freeze weights (requires_grad_(False)) before folding, or give them a separate group"
            )

    def _members(self, group: Mapping[str, Any]) -> list[Tensor]:
        return [group["params"][position] for position in group.get(_MEMBERS, [])]

    def _names_of(self, members: Iterable[Tensor]) -> list[str]:
        return [self._names[weight] for weight in members]

    def _buffers(self, members: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        pairs = ((weight, self.optimizer.state.get(weight, {}).get("momentum_buffer")) for weight in members)
        return [(weight, buffer) for weight, buffer in pairs if buffer is not None]


def _state(group: Mapping[str, Any]) -> FoldState:
    return FoldState(group.get(_LOG_SCALE, 0.0), group.get(_Q, 0.0), group.get(_EXPONENT, 0))


def _require_sgd(optimizer: Optimizer) -> None:
    if not follows(optimizer, torch.optim.SGD):
        raise EquilibriaError(
            f"got {type(optimizer).__name__}; expected torch.optim.SGD: the equivalence needs an update linear in the "
            "gradient and coupled weight decay, which adaptive, sign-based and decoupled rules do not have",
            argument="scheduler",
        )


def _folded_groups(
    optimizer: Optimizer, sets: Sequence[InvariantSet], *, names: Mapping[Tensor, str], no_effect: Collection[str]
) -> dict[int, list[InvariantSet]]:
    """By index, the groups whose trained parameters are whole invariant sets, or without effect; and these sets.

    Raises for other groups that have a weight of a requested set, and if there is no group to fold.
    """
    folded: dict[int, list[InvariantSet]] = {}
    refusals: list[tuple[bool, EquilibriaError]] = []
    for index, group in enumerate(optimizer.param_groups):
        present = {names[weight] for weight in group["params"]}
        trained = [names[weight] for weight in group["params"] if weight.requires_grad]
        inside = [one for one in sets if present & one.tensors.keys()]
        whole = [one for one in inside if _is_whole(one, present, trained)]
        covered = {name for one in whole for name in one.tensors} | set(no_effect)
        strangers = [name for name in trained if name not in covered]
        if whole and not strangers:
            folded[index] = whole
        elif inside:
            refusals.append((any(one.is_requested for one in inside), _mixed(index, inside, trained, strangers)))
    for is_requested, refusal in refusals:
        if is_requested or not folded:
            raise refusal
    return folded


def _is_whole(one: InvariantSet, present: Collection[str], trained: Collection[str]) -> bool:
    """Whether one group has all tensors of a set, and trains all or none of them."""
    if one.missing or not all(name in present for name in one.tensors):
        return False
    return not one.is_joint or len({name in trained for name in one.tensors}) == 1


def _mixed(
    index: int, inside: Sequence[InvariantSet], trained: Sequence[str], strangers: Sequence[str]
) -> EquilibriaError:
    """The error for a group with parameters that cannot be folded with the others."""
    partners = {name: [*one.tensors, *one.missing] for one in inside for name in one.tensors}
    others = [name for name in strangers if name not in partners]
    reasons = [f"{joined(others, most=3)} {'is' if len(others) == 1 else 'are'} not scale-invariant"] * bool(others)
    for name in [name for name in strangers if name in partners][:1]:
        lacking = [partner for partner in partners[name] if partner not in trained]
        reasons.append(
            f"{name} is scale-invariant only jointly with {joined(lacking, most=3)}, which this group does not train"
        )
    return EquilibriaError(
        f"got parameter group {index} with {len(set(partners) & set(trained))} scale-invariant weights among "
        f"{len(trained)} parameters; expected groups of one kind, because they need different learning rates, with all "
        f"tensors of a jointly invariant set in one group, because they share one scale: {', and '.join(reasons)}. Use "
        'torch.optim.SGD([{"params": invariant}, {"params": others}], ...), or the groups of '
        "eq.split_decay(model, weight_decay=..., invariant=sym)",
        argument="scheduler",
    )


def _refuse_rescaling(scheduler: LRScheduler) -> None:
    """Raise for a wrapped RescaleOnDecay: it would ignore the weight's share in a folded momentum buffer."""
    while isinstance(scheduler, SchedulerWrapper):
        if isinstance(scheduler, RescaleOnDecay):
            raise EquilibriaError(
                "got a RescaleOnDecay inside FoldedWeightDecay; expected one or the other: rescaled folded weights "
                "are no longer those of the run with weight decay",
                argument="scheduler",
            )
        scheduler = scheduler.scheduler


def refuse_unequal(group: Mapping[str, Any], index: int) -> None:
    """Raise EquilibriaError if a group's settings have no equivalent without weight decay."""
    if group["nesterov"]:
        raise EquilibriaError(
            f"got nesterov=True in parameter group {index}; expected False: the look-ahead update has no "
            "weight-decay-free equivalent with the same momentum",
            argument="scheduler",
        )
    if float(group["dampening"]) != 0 and float(group["momentum"]) != 0:
        raise EquilibriaError(
            f"got dampening={float(group['dampening']):g} in parameter group {index}; expected 0: the recursion "
            "holds for gradient and decay that enter the momentum buffer with weight 1",
            argument="scheduler",
        )
