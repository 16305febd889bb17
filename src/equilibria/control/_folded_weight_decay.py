"""Weight decay folded into the learning rate while training runs: the same network, without weight decay."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._radial import InvarianceWatch
from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.control._scheduler import Hooked, SchedulerWrapper, copies, scheduler_kept, set_value, unshare_lr
from equilibria.control._statistics import RunningStatistics, refuse_no_network
from equilibria.errors import EquilibriaError
from equilibria.optimizers.rules import follows, setting
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import is_sharded
from equilibria.theory.exponential import LARGEST
from equilibria.theory.folding import FoldState, FoldStep, advance
from equilibria.theory.switching import Renormalisation, to_weight_decay

_IN_A_ROW = 3
_EVERY = 200  # steps between two looks of three steps each: reading all gradients is not free
_KEPT = 9  # norms that are compared: three looks
_SAME = 5e-6  # clip_grad_norm_ divides by norm + 1e-6, and the sum of float32 squares rounds
_MOVED = 200 * _SAME  # change of a tensor's share from which on the gradients are not simply the same ones again


class ClippingWatch:
    """Looks at the norms of all gradients in three steps out of 200.

    Clipped gradients have one and the same norm, whatever their directions. Three of the last nine that agree to six
    digits, while the shares of the tensors in them do not, are no chance: 84 triples times (1e-5)^2. Where the shares
    agree too (a single tensor, or the same batch again at a tiny learning rate) three in a row must agree, and be a
    number that people type: two digits. Clipping by value, by layer, or above the norms met is not noticed.
    """

    def __init__(self) -> None:
        self._count = 0
        self._seen: list[list[float]] = []

    def look(self, optimizer: Optimizer) -> None:
        """Look before a step, if it is time; refuse clipped gradients."""
        place = self._count % _EVERY
        self._count += 1
        if place >= _IN_A_ROW:
            return
        self._seen = [*self._seen, _norms(optimizer)][-_KEPT:]
        norm = math.hypot(*self._seen[-1])
        alike = [each for each in self._seen if _same(math.hypot(*each), norm)]
        typed = place == _IN_A_ROW - 1 and all(_is_typed(math.hypot(*each), norm) for each in self._seen[-_IN_A_ROW:])
        if typed or (len(alike) >= _IN_A_ROW and _pairwise_apart(alike)):
            raise EquilibriaError(
                f"got gradients with the same norm {norm:.5g} in {_IN_A_ROW} steps of {len(self._seen)}; expected "
                "gradients that were not clipped: clipping by norm depends on the scale of the weights, so that a "
                "folded run is not equal to the run with weight decay. Train without clip_grad_norm_, or with weight "
                "decay (unfold())"
            )


def _norms(optimizer: Optimizer) -> list[float]:
    """One norm per gradient; NaN if they cannot be read."""
    gradients = [
        weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None
    ]
    if not gradients or any(is_sharded(each) or each.layout != torch.strided for each in gradients):
        return [math.nan]
    # Norms of 16-bit gradients in 16 bits would agree by chance.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in gradients) else torch.float32
    return [float(norm) for norm in torch._foreach_norm(gradients, 2, dtype=dtype)]


def _same(norm: float, other: float) -> bool:
    return math.isfinite(norm) and norm > 0 and abs(norm - other) <= _SAME * other


def _pairwise_apart(seen: list[list[float]]) -> bool:
    """Whether no two of these gradients have the same norms, tensor by tensor."""
    return all(_apart(a, b) for a, b in itertools.combinations(seen, 2))


def _apart(a: list[float], b: list[float]) -> bool:
    return len(a) != len(b) or max(abs(x - y) for x, y in zip(a, b, strict=True)) > _MOVED * math.hypot(*a)


def _is_typed(norm: float, other: float) -> bool:
    """Whether this is a number of two digits, and the same one as another."""
    return _same(norm, float(f"{other:.1e}"))


# The state of a folded run lives in the optimizer's parameter groups: weights, momentum and this belong together, so a
# checkpoint of the optimizer holds all of it. A group without it is at the start, where the two runs are the same.
_LOG_SCALE, _Q, _EXPONENT, _MEMBERS = "fold_log_scale", "fold_q", "fold_exponent", "fold_members"


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A group during a step: what its settings were, and what follows from the step.

    Attributes:
        lr: its learning rate before.
        weight_decay: its weight decay before.
        step: the step of the recursion.
        notes: what else to note in the group once the step is done.
    """

    lr: float
    weight_decay: float
    step: FoldStep
    notes: Mapping[str, Any]


class FoldedWeightDecay(Hooked, SchedulerWrapper):
    """Trains scale-invariant weights without weight decay, at the growing learning rate that gives the same network.

    ``w~_t = P_t w_t`` if ``lr~_t = P_t P_{t+1} lr_t``; the recursion of P is `equilibria.theory.folding.advance`.
    During each optimizer step the groups of scale-invariant weights have weight decay 0 and the folded learning rate;
    between steps they show the learning rate and weight decay of the schedule, so any scheduler of lr, weight decay
    or momentum may act on them. A step that does not happen (no gradient, infinite gradient under AMP) does not
    advance anything. After each step BatchNorm's running statistics behind the weights follow, so eval mode is the
    same network too. Whenever P doubles, weights are halved and momentum is doubled, which rounds nothing, so it runs
    forever.

    Args:
        scheduler: any torch scheduler of an SGD optimizer, or the optimizer itself for a constant learning rate. Call
            ``step()`` of this object in its place.
        model: the network.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is what counts. They need parameter groups of their own, as `equilibria.split_decay` makes
            them with symmetries.
        example: the arguments of one call of the model (a tensor, or a tuple), to find the BatchNorm statistics behind
            the weights; without it, the first training batch is used.
        renormalise: whether to divide powers of two out of the weights; without, the numbers overflow some day.

    Raises:
        EquilibriaError: what has no equivalent without weight decay (Nesterov, dampening, other optimizers), groups
            that mix scale-invariant weights with others; later, gradients clipped by their norm, as far as it shows,
            and, in the first twenty steps, a weight whose gradient says that it is not scale-invariant (cosine with it
            above 0.05 and three times chance).

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> groups = [{"params": [net[0].weight]}, {"params": [*net[1].parameters(), *net[2].parameters()]}]
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=0.5)
        >>> folded = FoldedWeightDecay(optimizer, net, invariant=["0.weight"])
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

    def __init__(
        self,
        scheduler: LRScheduler | Optimizer,
        model: nn.Module,
        *,
        invariant: Invariant,
        example: Any = None,
        renormalise: bool = True,
    ) -> None:
        super().__init__(scheduler)
        refuse_no_network(model)
        _refuse_rescaling(self.scheduler)
        weights = invariant_tensors(invariant, optimizer=self.optimizer, model=model)
        self._names = {tensor: name for name, tensor in weights.items()}
        self._folded = _folded_groups(self.optimizer, self._names)
        if any(isinstance(getattr(hook, "__self__", None), FoldedWeightDecay) for hook in self._pre_hooks.values()):
            raise EquilibriaError(
                "got an optimizer that is folded already; expected one that is not: give all scale-invariant weights "
                "to one FoldedWeightDecay, or unfold() the first"
            )
        for index in self._folded:
            refuse_unequal(self.optimizer.param_groups[index], index)
        self._statistics = RunningStatistics(model, weights, example=example)
        self._renormalise = renormalise
        self._clipping, self._watch, self._weights = ClippingWatch(), InvarianceWatch(), weights
        self._last_lr: list[float | Tensor] = copies(group["lr"] for group in self.optimizer.param_groups)
        self._open: dict[int, _Open] = {}
        self._attach()

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        before = self.optimizer.register_step_pre_hook(self._before)
        # First, so that whoever else looks at the step sees the settings it is taken with.
        self._pre_hooks.move_to_end(before.id, last=False)
        after = self.optimizer.register_step_post_hook(self._after)
        return before, after, self.optimizer.register_state_dict_post_hook(self._on_state_dict)

    @property
    def _pre_hooks(self) -> OrderedDict[int, Any]:
        hooks: OrderedDict[int, Any] = self.optimizer._optimizer_step_pre_hooks  # type: ignore[assignment]
        return hooks

    @property
    def scales(self) -> dict[int, float]:
        """Stored weights over those of the run with weight decay, by parameter group."""
        states = {index: _state(self.optimizer.param_groups[index]) for index in self._folded}
        return {index: math.exp(state.log_scale - state.exponent * math.log(2)) for index, state in states.items()}

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates of the last optimizer step, one per parameter group: the folded ones where folded."""
        return copies(self._last_lr)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler inside, per optimizer step or per epoch as that expects; if it fails, all stays."""
        self._close_open()
        with scheduler_kept(self.scheduler):
            super().step(*args, **kwargs)

    @torch.no_grad()
    def unfold(self) -> None:
        """Turn the run back into the one with weight decay, which goes on from here; weights, momentum, statistics.

        The optimizer then trains as if it had never been folded. This object still steps the scheduler.
        """
        self._close_open()
        if any(self._members(self.optimizer.param_groups[index]) for index in self._folded):
            self._statistics.require()
        for index in self._folded:
            group = self.optimizer.param_groups[index]
            switch = to_weight_decay(_state(group))
            members = self._members(group)
            if members:
                torch._foreach_mul_(members, switch.weight)
                for weight, buffer in self._buffers(members):
                    buffer.mul_(switch.buffer).add_(weight, alpha=switch.buffer_from_weight)
                self._statistics.rescale(self._names_of(members), switch.weight)
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
        self._close_open()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begin()
            return None
        return args[:1], {**kwargs, "closure": self._then_begin(closure)}

    def _then_begin(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure makes the gradients, and may fail: the settings are folded once it is through."""

        def wrapped() -> Any:
            loss = closure()
            self._begin()
            return loss

        return wrapped

    @torch.no_grad()
    def _begin(self) -> None:
        self._watch.look(self._weights)
        self._statistics.require()
        self._clipping.look(self.optimizer)
        steps = {index: self._fold(index) for index in self._folded if self._moves(index)}
        unshare_lr(self.optimizer)
        for index, each in steps.items():
            group = self.optimizer.param_groups[index]
            if setting(group["momentum"]) == 0:
                self._park(group)
            set_value(group, "lr", each.step.lr)
            group["weight_decay"] = 0.0
        self._open = steps
        self._last_lr = copies(group["lr"] for group in self.optimizer.param_groups)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        opened = self._close_open()
        found_inf = getattr(optimizer, "found_inf", None)  # a fused step decides by itself whether to happen
        if found_inf is not None and float(found_inf) != 0:
            return
        for index, each in opened.items():
            self._advance(self.optimizer.param_groups[index], each)

    def _close_open(self) -> dict[int, _Open]:
        """Give the groups the schedule's settings back, also after a step that failed."""
        opened, self._open = self._open, {}
        for index, each in opened.items():
            group = self.optimizer.param_groups[index]
            set_value(group, "lr", each.lr)
            group["weight_decay"] = each.weight_decay
        return opened

    def _on_state_dict(self, _optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """A checkpoint holds the schedule's settings, also one that is saved because a step failed."""
        for index, each in self._open.items():
            packed = state_dict["param_groups"][index]
            packed["lr"] = torch.full_like(packed["lr"], each.lr) if isinstance(packed["lr"], Tensor) else each.lr
            packed["weight_decay"] = each.weight_decay

    def _fold(self, index: int) -> _Open:
        group = self.optimizer.param_groups[index]
        refuse_unequal(group, index)
        lr, decay = setting(group["lr"]), setting(group["weight_decay"])
        try:
            step, notes = self._next(group, _state(group), lr=lr, weight_decay=decay)
        except EquilibriaError as error:
            raise EquilibriaError(f"parameter group {index}: {error}") from None
        if not step.lr <= LARGEST["float32"]:
            raise EquilibriaError(
                f"got a folded learning rate of exp({step.log_lr:g}) for parameter group {index}; expected one that "
                "torch can multiply with: use renormalise=True"
            )
        return _Open(lr, decay, step, notes)

    def _next(
        self, group: Mapping[str, Any], state: FoldState, *, lr: float, weight_decay: float
    ) -> tuple[FoldStep, Mapping[str, Any]]:
        """The step of the recursion, and what else to note in the group."""
        return advance(state, lr, weight_decay=weight_decay, momentum=setting(group["momentum"])), {}

    def _advance(self, group: dict[str, Any], each: _Open) -> None:
        state, members = each.step.state, self._members(group)
        if setting(group["momentum"]) == 0:
            for _, buffer in self._buffers(members):
                buffer.mul_(each.step.alpha)  # a parked buffer stays what it is in the run with weight decay
        self._statistics.rescale(self._names_of(members), each.step.running_mean)
        shift = math.floor(state.log_scale / math.log(2)) - state.exponent
        if self._renormalise and shift >= 1:
            change = Renormalisation(shift)
            torch._foreach_mul_(members, change.weight)
            for _, buffer in self._buffers(members):
                buffer.mul_(change.buffer)
            self._statistics.rescale(self._names_of(members), change.weight)
            state = state.renormalised(shift)
        group[_LOG_SCALE], group[_Q], group[_EXPONENT] = state.log_scale, state.q, state.exponent
        group.update(each.notes)

    def _park(self, group: dict[str, Any]) -> None:
        """Take the decay's share out of the momentum buffers, which torch neither uses nor updates at momentum 0.

        ``buf~ = (buf - q w)/P`` stands for the same run at any q. At q = 0 it is that run's buffer over P, which comes
        back as it was once momentum does.
        """
        state = _state(group)
        if state.q != 0:
            share = state.q * math.exp(2 * (state.exponent * math.log(2) - state.log_scale))
            for weight, buffer in self._buffers(self._members(group)):
                buffer.add_(weight, alpha=share)
            group[_Q] = 0.0

    # ---- which weights

    def _moves(self, index: int) -> bool:
        """Whether the group's weights have gradients; all that ever moved, or none."""
        group = self.optimizer.param_groups[index]
        having = [at for at, weight in enumerate(group["params"]) if weight.grad is not None]
        if not having:
            return False
        members = group.setdefault(_MEMBERS, having)
        if having != members:
            changed = [group["params"][at] for at in sorted(set(having) ^ set(members))]
            raise EquilibriaError(
                f"got gradients for {len(having)} weights of parameter group {index}, for {len(members)} in the steps "
                "before; expected the same ones: a weight without gradient does not decay, and so leaves the scale "
                f"that its group shares. It is about {', '.join(self._names_of(changed))}: give it a group of its own, "
                "or unfold() and fold again"
            )
        return True

    def _members(self, group: Mapping[str, Any]) -> list[Tensor]:
        return [group["params"][at] for at in group.get(_MEMBERS, [])]

    def _names_of(self, members: list[Tensor]) -> list[str]:
        return [self._names[weight] for weight in members]

    def _buffers(self, members: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        held = ((weight, self.optimizer.state.get(weight, {}).get("momentum_buffer")) for weight in members)
        return [(weight, buffer) for weight, buffer in held if buffer is not None]


def _state(group: Mapping[str, Any]) -> FoldState:
    return FoldState(group.get(_LOG_SCALE, 0.0), group.get(_Q, 0.0), group.get(_EXPONENT, 0))


def _folded_groups(optimizer: Optimizer, weights: Mapping[Tensor, str]) -> list[int]:
    """The groups of scale-invariant weights; each has nothing else in it."""
    if not follows(optimizer, torch.optim.SGD):
        raise EquilibriaError(
            f"got {type(optimizer).__name__}; expected torch.optim.SGD: the equivalence needs an update linear in the "
            "gradient and coupled weight decay, which adaptive, sign-based and decoupled rules do not have"
        )
    found = []
    for index, group in enumerate(optimizer.param_groups):
        inside = sum(weight in weights for weight in group["params"])
        if inside not in (0, len(group["params"])):
            raise EquilibriaError(
                f"got parameter group {index} with {inside} scale-invariant weights among "
                f"{len(group['params'])} parameters; expected groups of these or of others, for they need different "
                'learning rates: torch.optim.SGD([{"params": invariant}, {"params": others}], ...), or the groups of '
                "eq.split_decay(model, weight_decay=..., symmetries=sym)"
            )
        if inside:
            found.append(index)
    return found


def _refuse_rescaling(scheduler: LRScheduler) -> None:
    """A folded momentum buffer holds a share of the weight, which a rescaling of weight and buffer does not know of."""
    while isinstance(scheduler, SchedulerWrapper):
        if isinstance(scheduler, RescaleOnDecay):
            raise EquilibriaError(
                "got a RescaleOnDecay inside of FoldedWeightDecay; expected one or the other: rescaled folded weights "
                "are no longer those of the run with weight decay"
            )
        scheduler = scheduler.scheduler


def refuse_unequal(group: Mapping[str, Any], index: int) -> None:
    """Say why a group's settings have no equivalent without weight decay."""
    if group["nesterov"]:
        raise EquilibriaError(
            f"got nesterov=True in parameter group {index}; expected False: the look-ahead update has no "
            "weight-decay-free equivalent with the same momentum"
        )
    if setting(group["dampening"]) != 0 and setting(group["momentum"]) != 0:
        raise EquilibriaError(
            f"got dampening={setting(group['dampening']):g} in parameter group {index}; expected 0: the recursion "
            "holds for gradient and decay that enter the momentum buffer with weight 1"
        )
