"""Rescales weights, optimizer state and statistics to the new equilibrium whenever the learning rate changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._running_statistics import RunningStatistics, require_network
from equilibria.control._scheduler import (
    Hooked,
    SchedulerWrapper,
    closure_of,
    restoring_scheduler,
    resumed,
)
from equilibria.errors import EquilibriaError, warn_in_training
from equilibria.findings import counted, joined
from equilibria.optimizers.controllers import control_log
from equilibria.optimizers.rules import rule_of_group
from equilibria.optimizers.state_powers import state_powers
from equilibria.tensors.invariance import InvariantSet, JointlyInvariant, invariant_sets
from equilibria.tensors.layout import is_sharded
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.states import RescaleFactors, rescale_factors

_POWERS = {"momentum_buffer": 1.0, "exp_avg": 1.0, "exp_avg_sq": 2.0}  # of the gradient, in the state of closed laws
_COARSE = 1e-4  # a type with a larger eps is coarse
_SMALLEST_LOG_FACTOR = 0.05  # coarse types would round away a smaller change of the norm
_FAR_OFF = 2.0  # a norm that many times its equilibrium, or that part of it, is worth a warning
_SMALLEST_VARIANCE_OVER_EPS = 1e3  # before a BatchNorm: eps then changes outputs by less than 0.1 %


class RescaleWarning(UserWarning):
    """A weight was not rescaled as the law asks."""


class RescaleOnDecay(Hooked, SchedulerWrapper):
    """Moves scale-invariant weights to their new equilibrium norm at every change of the learning rate.

    After lr / k the equilibrium norm is smaller by r = k^(-1/4) (SGD, Nesterov, SGDW), k^(-1/2) (AdamW, Lion, Muon) or
    k^(-1/3) (Adam with L2); a measured law has its own. Left alone, weights need a time constant to get there and turn
    too slowly until then. This scheduler multiplies weights by r (from the exact fixed points), gradients and first
    moments by 1/r, second moments by 1/r^2, and rescales BatchNorm's running statistics behind the weights. The network
    computes the same as before, in training and in eval mode, up to the eps of its norms, and turns at its new speed
    from the next step on. Changes of weight decay or momentum count too. Without equilibrium (lr or weight decay 0)
    nothing is rescaled until there is one again.

    It acts when its ``step()`` changes the settings, and right before an optimizer step if something else did, such as
    ``group["lr"] = ...`` in the training loop.

    The factors are ratios of equilibria: it keeps weights in equilibrium, but does not bring them there
    (`start_in_equilibrium` does). They are taken to be in the equilibrium of the lr that `start_in_equilibrium` used,
    else of the lr that the optimizer was made with (under OneCycleLR and CyclicLR of max_lr), or, if the optimizer has
    stepped already, of its present lr. Without a scheduler the lr that the optimizer was made with is that of its
    ``defaults``, or the group's own if that is higher, because the training loop may have set a small first lr already.
    A warm-up to that lr leaves the norms alone: weights turn in proportion to lr, as in any warm-up, and rescaling
    begins when lr has arrived there, or falls. The equilibrium norm of a small first lr would be so small that the eps
    of normalisations would matter. Every later rise is followed like a fall.

    A set that is invariant only jointly is, for SGD and SGDW, one weight: the vector of all its tensors has the
    equilibrium norm of the law, if they have one lr and weight decay, and r is the same. The norms of its tensors, for
    which there is no such law, keep their ratios. Other optimizers divide each gradient by a scale of its own, so that
    the radial parts within a set no longer cancel: there such a set has no equilibrium of this kind.

    Args:
        scheduler: any torch scheduler, of which ``step()`` of this object takes the place, after the optimizer's; or an
            optimizer whose settings the training loop changes itself, and then ``step()`` need not be called.
        model: the network.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`. A list of names
            or tensors inside the list is a set that is invariant only jointly, and is rescaled by one factor; from
            symmetries, these are the sets of ``sym.uniform_sets()`` that have such a factor.
        example: the arguments of one call of the model (a tensor, or a tuple), to locate the BatchNorm statistics
            behind the weights; without it, the first training batch is used.

    Raises:
        EquilibriaError: an optimizer without a law, closed or measured, weights without weight decay, optimizer state
            of unknown meaning, a joint set that the caller named without one factor (not in one parameter group; not
            SGD or SGDW). In the first twenty steps, a weight whose gradient shows that it is not scale-invariant
            (cosine with it above 0.05 and three times chance; above 0.01 for one without a BatchNorm behind it in a
            network that has some), or a joint set whose radial gradients do not cancel; not checked with closures.

    Warns:
        RescaleWarning: once for a weight that keeps its norm because the eps of its BatchNorm would matter, and once
            for weights whose norm is twice that of the equilibrium or more, or half of it or less (AdamW, Lion and
            Muon, whose equilibrium norm does not depend on the gradient).

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        >>> drop = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.2)
        >>> scheduler = RescaleOnDecay(drop, model=net, invariant=["0.weight"])
        >>> net(torch.randn(8, 3)).square().sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
        >>> {name: round(factor, 3) for name, factor in scheduler.last_factors.items()}
        {'0.weight': 0.669}
    """

    follows_settings = True

    def __init__(
        self, scheduler: LRScheduler | Optimizer, *, model: nn.Module, invariant: JointlyInvariant, example: Any = None
    ) -> None:
        super().__init__(scheduler)
        require_network(model)
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        sets = self._with_one_factor(invariant_sets(invariant, optimizer=self.optimizer, model=model), groups)
        # By the label of a set, which is the name of a weight that is invariant alone.
        self._tensors = {one.label: tuple(one.tensors.values()) for one in sets}
        self._group_of = {label: groups[id(tensors[0])] for label, tensors in self._tensors.items()}
        self._weights = {name: weight for one in sets for name, weight in one.tensors.items()}
        self._names = {one.label: tuple(one.tensors) for one in sets}
        for index in set(self._group_of.values()):
            self._check(index)
        # By group: the rule in whose equilibrium the weights are taken to be, and the one that a warm-up has reached.
        self._equilibria = {index: self._first_equilibrium(index) for index in set(self._group_of.values())}
        self._warming_up = {i: rule for i, rule in self._rules().items() if rule.lr < self._equilibria[i].lr}
        self._statistics = RunningStatistics(model, self._tensors, example=example)
        self.last_factors: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._has_warned, self._has_warned_norms, self._rescalings = False, False, 0
        self._has_stepped = False
        self._powers = {index: self._state_powers(index) for index in self._equilibria}
        self._invariance = InvarianceCheck([names for names in self._names.values() if len(names) > 1])
        self._attach()

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        return f"rescales {counted(len(self._weights), 'weight')} to the equilibrium of every lr and weight decay"

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        return (
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_load_state_dict_post_hook(self._on_load),
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler, and rescale if it changed a group's settings; an error leaves all as it was."""
        with restoring_scheduler(self.scheduler):
            super().step(*args, **kwargs)
            change = self._change()
        self._apply(change)

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: numbers, and the state of the wrapped scheduler."""
        return {
            **super().state_dict(),
            "equilibria": {index: dataclasses.asdict(rule) for index, rule in self._equilibria.items()},
            "warming_up": {index: dataclasses.asdict(rule) for index, rule in self._warming_up.items()},
            "owed": dict(self._owed),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; load the optimizer's as well."""
        super().load_state_dict(state_dict)
        rules = self._rules()
        self._equilibria = {index: rule for index, rule in rules.items() if rule.decay_per_step > 0}
        for index, (lr, decay) in state_dict.get("settled", {}).items():  # of earlier versions, for groups at lr 0
            self._equilibria.setdefault(int(index), dataclasses.replace(rules[int(index)], lr=lr, weight_decay=decay))
        self._equilibria |= _rules_in(state_dict.get("equilibria", {}), rules)
        self._warming_up = _rules_in(state_dict.get("warming_up", {}), rules)
        self._owed = dict(state_dict.get("owed", {}))
        self._has_stepped = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check gradients that belong to the present weights, and rescale if the settings changed since the last time.

        A closure has yet to compute the gradients. A step without gradients moves nothing, and nothing is rescaled.
        """
        has_closure = closure_of(args, kwargs) is not None
        if not has_closure:
            self._invariance.check(self._weights, doubtful=self._statistics.without)
        if has_closure or any(weight.grad is not None for weight in self._weights.values()):
            self._begin_warm_up()
            self._apply(self._change())

    def _begin_warm_up(self) -> None:
        """Take an lr below that of the equilibrium at the very first step for a warm-up that the training loop does."""
        if self._has_stepped:
            return
        self._has_stepped = True
        state = self.optimizer.state
        fresh = [label for label, tensors in self._tensors.items() if not any(state.get(weight) for weight in tensors)]
        groups = {self._group_of[label] for label in fresh}
        for index, rule in self._rules().items():
            if index in groups and rule.lr < self._equilibria[index].lr:
                self._warming_up.setdefault(index, rule)

    def _on_load(self, _optimizer: Optimizer) -> None:
        """Take loaded weights to be in the equilibrium of the loaded settings, wherever the schedule was before."""
        self._equilibria |= {
            index: rule
            for index, rule in self._rules().items()
            if rule.decay_per_step > 0 and index not in self._warming_up
        }

    def _first_equilibrium(self, index: int) -> Rule:
        """The rule in whose equilibrium the weights of a group are when this object is made."""
        group, log = self.optimizer.param_groups[index], control_log(self.optimizer)
        weights = [weight for label, of in self._group_of.items() if of == index for weight in self._tensors[label]]
        started = [log.equilibrium_lr[id(weight)] for weight in weights if id(weight) in log.equilibrium_lr]
        if self.scheduler.last_epoch > 0 or any(self.optimizer.state.get(weight) for weight in weights):
            return self._rule(index, group)
        typed = {"lr": started[0]} if started else self.typed_settings(index)
        made_with = self.optimizer.defaults.get("lr")
        if not started and index in self.unscheduled and made_with is not None:
            typed["lr"] = max(float(typed["lr"]), float(made_with))
        return self._rule(index, {**group, **typed})

    # ---- a change of the settings

    def _change(self) -> _Change:
        """What has to be done about the present settings; everything that can fail fails here, before any change."""
        rules = self._rules()
        equilibria, warming_up = dict(self._equilibria), dict(self._warming_up)
        for index, highest in self._warming_up.items():
            if rules[index].lr >= equilibria[index].lr:
                del warming_up[index]
            elif rules[index].lr < highest.lr:  # it falls before it has arrived
                equilibria[index] = highest
                del warming_up[index]
            else:
                warming_up[index] = rules[index]
        acting = {index: rule for index, rule in rules.items() if index not in warming_up and rule.decay_per_step > 0}
        factors = self._factors(equilibria, acting)
        totals = {name: self._owed.get(name, 1.0) * factor.weight for name, factor in factors.items()}
        waiting = self._waiting(totals)
        self._warn_norms(equilibria, factors)
        return _Change(equilibria | acting, warming_up, totals, waiting)

    def _apply(self, change: _Change) -> None:
        self._equilibria, self._warming_up = change.equilibria, change.warming_up
        due = {name: total for name, total in change.totals.items() if name not in change.waiting}
        self._owed = {name: total for name, total in {**self._owed, **change.waiting}.items() if name not in due}
        if change.totals:
            self._rescale(due)

    def _rules(self) -> dict[int, Rule]:
        groups = self.optimizer.param_groups
        return {index: self._rule(index, groups[index]) for index in set(self._group_of.values())}

    def _rule(self, index: int, group: dict[str, Any]) -> Rule:
        law = rule_of_group(self.optimizer, group, measure=True)
        if law.rule is None:
            raise EquilibriaError(f"got parameter group {index}: {law.reason}; expected a rule with an equilibrium")
        return law.rule

    def _state_powers(self, index: int) -> dict[str, float]:
        """The powers of the gradient with which the state of a group's tensors grows."""
        measured = isinstance(self._equilibria[index], Identified)
        return state_powers(self.optimizer, self.optimizer.param_groups[index]) if measured else _POWERS

    def _with_one_factor(self, sets: list[InvariantSet], groups: Mapping[int, int]) -> list[InvariantSet]:
        """The sets that have one factor: weights that are invariant alone, and joint sets of one group with one law.

        Raises EquilibriaError for a joint set without it that the caller named, and if no set is left.
        """
        reasons = {one.label: self._lacks_one_factor(one, groups) for one in sets if one.is_joint}
        usable = [one for one in sets if reasons.get(one.label) is None]
        for one in sets:
            reason = reasons.get(one.label)
            if reason is not None and (one.is_requested or not usable):
                raise EquilibriaError(
                    f"got {one.label}, scale-invariant only jointly, {reason}; expected all of the set in one "
                    "parameter group of SGD or SGDW, with weight decay: one factor rescales all of it",
                    argument="invariant",
                )
        return usable

    def _lacks_one_factor(self, one: InvariantSet, groups: Mapping[int, int]) -> str | None:
        """Why a joint set has no common factor; None if it has."""
        if one.missing:
            return f"together with {joined(one.missing, most=3)}, which the optimizer does not train"
        indices = sorted({groups[id(weight)] for weight in one.tensors.values()})
        if len(indices) > 1:
            return f"in parameter groups {', '.join(map(str, indices))}"
        group = self.optimizer.param_groups[indices[0]]
        if not isinstance(rule_of_group(self.optimizer, group).rule, SGD | SGDW):
            return f"with {type(self.optimizer).__name__}"
        return "with weight_decay=0" if float(group["weight_decay"]) == 0 else None

    def _check(self, index: int) -> None:
        group = self.optimizer.param_groups[index]
        self._rules()
        if float(group["weight_decay"]) == 0:
            raise EquilibriaError(
                f"got weight_decay=0 in parameter group {index}, which has scale-invariant weights; expected more: "
                "without weight decay there is no equilibrium to rescale to. Leave these weights out of `invariant`",
                argument="invariant",
            )

    def _factors(self, equilibria: Mapping[int, Rule], rules: Mapping[int, Rule]) -> dict[str, RescaleFactors]:
        """The factors of each set and its state from one equilibrium to the other."""
        factors: dict[str, RescaleFactors] = {}
        for index, new in rules.items():
            old = equilibria.get(index)
            if old is None or old.decay_per_step == 0 or old == new:
                continue
            inside = [label for label, group in self._group_of.items() if group == index and self._moves(label)]
            if isinstance(old, AdamL2):
                factors |= {name: rescale_factors(old, new, **self._scale(name, old)) for name in inside}
            else:
                factors |= dict.fromkeys(inside, rescale_factors(old, new))
            for label in inside:
                for name in self._names[label]:
                    self._refuse_unknown_state(label, name)
        if factors:
            self._statistics.require()
        return factors

    def _moves(self, label: str) -> bool:
        """Whether all of a set is trained: frozen weights have no equilibrium and stay as they are."""
        return all(weight.requires_grad for weight in self._tensors[label])

    def _scale(self, name: str, rule: AdamL2) -> dict[str, float]:
        """L and the number of entries, from the optimizer's state; only Adam with L2 depends on them."""
        weight = self._weights[name]
        state = self.optimizer.state.get(weight, {})
        if "exp_avg_sq" not in state:
            return {}
        seen = 1 - rule.betas[1] ** float(state["step"])
        unit_grad_sq = _total(state["exp_avg_sq"]) / seen * _total(weight.detach().double().square())
        return {"unit_grad_sq": unit_grad_sq, "dim": float(weight.numel())} if unit_grad_sq > 0 else {}

    def _refuse_unknown_state(self, label: str, name: str) -> None:
        known = self._powers[self._group_of[label]]
        for key, value in self.optimizer.state.get(self._weights[name], {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and key not in known:
                raise EquilibriaError(
                    f"got optimizer state {key!r} for {name!r}; expected {' or '.join(known) or 'none'}: how it scales "
                    "with the gradient is not known",
                    argument="scheduler",
                )

    @torch.no_grad()
    def _rescale(self, factors: Mapping[str, float]) -> None:
        for label, factor in factors.items():
            for weight in self._tensors[label]:
                self._rescale_one(weight, factor, self._powers[self._group_of[label]])
            self._statistics.rescale([label], factor)
        self.last_factors = {name: factor for label, factor in factors.items() for name in self._names[label]}

    def _rescale_one(self, weight: Tensor, factor: float, powers: Mapping[str, float]) -> None:
        weight.mul_(factor)
        control_log(self.optimizer).note_rescaling(weight, factor)
        if weight.grad is not None:
            weight.grad.mul_(1 / factor)
        for key, value in self.optimizer.state.get(weight, {}).items():
            if value is not None and powers.get(key):
                value.mul_(factor ** -powers[key])

    def _waiting(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The factors that are postponed, and applied together with later ones.

        A factor that 16-bit weights would round away waits until it is large enough. A factor that would bring the
        variance before a BatchNorm down to its eps waits until lr rises again.
        """
        refused = self._statistics.too_small(totals, limit=_SMALLEST_VARIANCE_OVER_EPS) if totals else []
        too_small = {label: totals[label] for label in refused}
        self._warn_of(too_small)
        return too_small | {label: total for label, total in totals.items() if self._is_rounded_away(label, total)}

    def _is_rounded_away(self, label: str, total: float) -> bool:
        is_coarse = any(torch.finfo(weight.dtype).eps > _COARSE for weight in self._tensors[label])
        return is_coarse and abs(math.log(total)) < _SMALLEST_LOG_FACTOR

    def _warn_of(self, too_small: Mapping[str, float]) -> None:
        """Warn once that weights keep their norms."""
        if self._has_warned or not too_small:
            return
        self._has_warned = True
        is_one, smallest = len(too_small) == 1, min(too_small.values())
        warn_in_training(
            f"{joined(list(too_small), most=3)} {'was' if is_one else 'were'} not rescaled by "
            f"{'' if is_one else 'as little as '}{smallest:.3g}: the variance before a BatchNorm behind "
            f"{'it' if is_one else 'them'} would fall below {_SMALLEST_VARIANCE_OVER_EPS:g} times its eps, and the "
            "network would change. A weight that is not rescaled keeps its norm until lr rises again, and turns more "
            "slowly than the equilibrium of lr and weight decay",
            RescaleWarning,
        )

    # ---- weights that are not in equilibrium

    def _warn_norms(self, equilibria: Mapping[int, Rule], factors: Mapping[str, RescaleFactors]) -> None:
        """Warn once if norms are not those of the equilibrium that the weights are taken to be in.

        Reading all norms costs about as much as rescaling: it is done at the 1st, 2nd, 4th, 8th, ... rescaling.
        """
        if not factors:
            return
        self._rescalings += 1
        if self._has_warned_norms or self._rescalings & (self._rescalings - 1):
            return
        ratios = {name: self._norm_over_equilibrium(name, equilibria[self._group_of[name]]) for name in factors}
        off = {name: ratio for name, ratio in ratios.items() if ratio >= _FAR_OFF or 0 < ratio <= 1 / _FAR_OFF}
        if not off:
            return
        self._has_warned_norms = True
        name = max(off, key=lambda name: abs(math.log(off[name])))
        rule = equilibria[self._group_of[name]]
        others = f" ({len(off)} of {len(ratios)} weights are off by a factor of {_FAR_OFF:g} or more)" * (len(off) > 1)
        warn_in_training(
            f"the norm of {name} is {off[name]:.2g} times that of the equilibrium of lr={rule.lr:g} and "
            f"weight_decay={rule.weight_decay:g}, from which RescaleOnDecay rescales it{others}: "
            f"rescaling keeps that ratio, and the weight turns about {1 / off[name]:.2g} times as far per step as in "
            "equilibrium until weight decay has corrected it. start_in_equilibrium, before training, puts it there",
            RescaleWarning,
        )

    def _norm_over_equilibrium(self, name: str, rule: Rule) -> float:
        """||w|| over its equilibrium, with the factor it is owed; NaN if the equilibrium depends on the gradient."""
        if isinstance(rule, SGD | SGDW):
            return math.nan
        weight = self._weights[name]
        if isinstance(rule, AdamW | Lion):
            norm: Any = rule.equilibrium(dim=float(weight.numel())).norm
        elif isinstance(rule, Muon) and weight.ndim == 2:
            norm = rule.equilibrium(shape=(weight.shape[0], weight.shape[1])).norm
        else:
            return math.nan
        present = math.sqrt(_total(weight.detach().double().square()))
        return present * self._owed.get(name, 1.0) / float(norm)


@dataclass(frozen=True, slots=True)
class _Change:
    """The response to a change of the settings, ready to be applied.

    Attributes:
        equilibria: by group, the rule in whose equilibrium the weights are afterwards.
        warming_up: by group, the rule with the highest lr so far of a warm-up that has not arrived.
        totals: by set, the factor that is due, with what was postponed before.
        waiting: those of them that are postponed.
    """

    equilibria: dict[int, Rule]
    warming_up: dict[int, Rule]
    totals: dict[str, float]
    waiting: dict[str, float]


def _rules_in(saved: Mapping[Any, Mapping[str, Any]], rules: Mapping[int, Rule]) -> dict[int, Rule]:
    """Rules by group from a checkpoint; JSON makes keys text."""
    return {int(index): resumed(rules[int(index)], settings) for index, settings in saved.items()}


def _total(tensor: Any) -> float:
    whole = tensor.full_tensor() if is_sharded(tensor) else tensor
    return float(whole.sum(dtype=torch.float64))
