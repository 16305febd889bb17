"""Rescales weights, optimizer state and statistics to the new equilibrium whenever the learning rate changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.control._invariance_check import InvarianceCheck
from equilibria.control._running_statistics import RunningStatistics, require_network
from equilibria.control._scheduler import Hooked, SchedulerWrapper, closure_of, restoring_scheduler
from equilibria.errors import EquilibriaError, warn_caller
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import is_sharded
from equilibria.theory.rules import AdamL2, Rule
from equilibria.theory.states import RescaleFactors, rescale_factors

_FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
_SECOND_MOMENTS = ("exp_avg_sq",)
_COARSE = 1e-4  # a type with a larger eps is coarse
_SMALLEST_LOG_FACTOR = 0.05  # coarse types would round away a smaller change of the norm
_SMALLEST_VARIANCE_OVER_EPS = 1e3  # before a BatchNorm: eps then changes outputs by less than 0.1 %


class RescaleWarning(UserWarning):
    """A weight was not rescaled as the law asks."""


class RescaleOnDecay(Hooked, SchedulerWrapper):
    """Moves scale-invariant weights to their new equilibrium norm at every learning-rate change of a scheduler.

    After lr / k the equilibrium norm is smaller by r = k^(-1/4) (SGD, Nesterov, SGDW), k^(-1/2) (AdamW, Lion, Muon) or
    k^(-1/3) (Adam with L2). Left alone, weights need a time constant to get there and turn too slowly until then. This
    scheduler multiplies weights by r (from the exact fixed points), first moments by 1/r, second moments by 1/r^2, and
    rescales BatchNorm's running statistics behind the weights. The network computes the same as before, in training and
    in eval mode, up to the eps of its norms, and turns at its new speed from the next step on. Changes of weight decay
    or momentum by the scheduler count too. Without equilibrium (lr or weight decay 0) nothing is rescaled until there
    is one again.

    Args:
        scheduler: any torch scheduler. Call ``step()`` of this object in its place, after the optimizer's.
        model: the network.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is used.
        example: the arguments of one call of the model (a tensor, or a tuple), to locate the BatchNorm statistics
            behind the weights; without it, the first training batch is used.

    Raises:
        EquilibriaError: an optimizer without a law, weights without weight decay, optimizer state of unknown meaning.
            In the first twenty steps, a weight whose gradient shows that it is not scale-invariant (cosine with it
            above 0.05 and three times chance; not checked with closures).

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

    def __init__(
        self, scheduler: LRScheduler | Optimizer, *, model: nn.Module, invariant: Invariant, example: Any = None
    ) -> None:
        super().__init__(scheduler)
        require_network(model)
        self._weights = invariant_tensors(invariant, optimizer=self.optimizer, model=model)
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        self._group_of = {name: groups[id(weight)] for name, weight in self._weights.items()}
        for index in set(self._group_of.values()):
            self._check(index)
        self._last_settings: dict[int, list[float]] = {}  # lr and weight decay of the last equilibrium, by group
        self._statistics = RunningStatistics(model, self._weights, example=example)
        self.last_factors: dict[str, float] = {}
        self._owed: dict[str, float] = {}
        self._has_warned = False
        self._invariance = InvarianceCheck()
        self._attach()

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        return (self.optimizer.register_step_pre_hook(self._before_step),)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the wrapped scheduler, and rescale if it changed a group's settings; an error leaves all as it was."""
        before = self._rules()
        with restoring_scheduler(self.scheduler):
            super().step(*args, **kwargs)
            after = self._rules()
            if before == after:
                return
            factors = self._factors(before, after)
            totals = {name: self._owed.get(name, 1.0) * factor.weight for name, factor in factors.items()}
            waiting = self._waiting(totals)
        self._note_equilibria(before, after)
        due = {name: total for name, total in totals.items() if name not in waiting}
        self._owed = {name: total for name, total in {**self._owed, **waiting}.items() if name not in due}
        self._rescale(due)

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: numbers, and the state of the wrapped scheduler."""
        settled = {index: list(pair) for index, pair in self._last_settings.items()}
        return {**super().state_dict(), "settled": settled, "owed": dict(self._owed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; load the optimizer's as well."""
        super().load_state_dict(state_dict)
        self._last_settings = {int(index): list(pair) for index, pair in state_dict.get("settled", {}).items()}
        self._owed = dict(state_dict.get("owed", {}))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check gradients that belong to the present weights; a closure has yet to compute them."""
        if closure_of(args, kwargs) is None:
            self._invariance.check(self._weights)

    def _rules(self) -> dict[int, Rule]:
        rules = {}
        for index in set(self._group_of.values()):
            law = rule_of_group(self.optimizer, self.optimizer.param_groups[index])
            if law.rule is None:
                raise EquilibriaError(f"got parameter group {index}: {law.reason}; expected a rule with an equilibrium")
            rules[index] = law.rule
        return rules

    def _check(self, index: int) -> None:
        group = self.optimizer.param_groups[index]
        self._rules()
        if float(group["weight_decay"]) == 0:
            raise EquilibriaError(
                f"got weight_decay=0 in parameter group {index}, which has scale-invariant weights; expected more: "
                "without weight decay there is no equilibrium to rescale to. Leave these weights out of `invariant`",
                argument="invariant",
            )

    def _factors(self, before: Mapping[int, Rule], after: Mapping[int, Rule]) -> dict[str, RescaleFactors]:
        """The factors of each weight and its state; everything that can fail fails here, before any change."""
        factors: dict[str, RescaleFactors] = {}
        for index, new in after.items():
            old = self._last_equilibrium(index, before[index])
            if old is None or new.decay_per_step == 0 or old == new:
                continue
            inside = [name for name, group in self._group_of.items() if group == index and self._moves(name)]
            if isinstance(old, AdamL2):
                factors |= {name: rescale_factors(old, new, **self._scale(name, old)) for name in inside}
            else:
                factors |= dict.fromkeys(inside, rescale_factors(old, new))
            for name in inside:
                self._refuse_unknown_state(name)
        if factors:
            self._statistics.require()
        return factors

    def _moves(self, name: str) -> bool:
        """Whether a weight is trained: frozen weights have no equilibrium and stay as they are."""
        return self._weights[name].requires_grad

    def _last_equilibrium(self, index: int, rule: Rule) -> Rule | None:
        if rule.decay_per_step > 0:
            return rule
        if index not in self._last_settings:
            return None
        lr, decay = self._last_settings[index]
        return dataclasses.replace(rule, lr=lr, weight_decay=decay)

    def _note_equilibria(self, before: Mapping[int, Rule], after: Mapping[int, Rule]) -> None:
        for index, rule in after.items():
            if rule.decay_per_step == 0 and before[index].decay_per_step > 0:
                self._last_settings[index] = [before[index].lr, before[index].weight_decay]

    def _scale(self, name: str, rule: AdamL2) -> dict[str, float]:
        """L and the number of entries, from the optimizer's state; only Adam with L2 depends on them."""
        weight = self._weights[name]
        state = self.optimizer.state.get(weight, {})
        if "exp_avg_sq" not in state:
            return {}
        seen = 1 - rule.betas[1] ** float(state["step"])
        unit_grad_sq = _total(state["exp_avg_sq"]) / seen * _total(weight.detach().double().square())
        return {"unit_grad_sq": unit_grad_sq, "dim": float(weight.numel())} if unit_grad_sq > 0 else {}

    def _refuse_unknown_state(self, name: str) -> None:
        weight = self._weights[name]
        for key, value in self.optimizer.state.get(weight, {}).items():
            known = key in _FIRST_MOMENTS or key in _SECOND_MOMENTS
            if isinstance(value, Tensor) and value.shape == weight.shape and weight.ndim and not known:
                raise EquilibriaError(
                    f"got optimizer state {key!r} for {name!r}; expected one of "
                    f"{', '.join(_FIRST_MOMENTS + _SECOND_MOMENTS)}: how it scales with the gradient is not known",
                    argument="scheduler",
                )

    @torch.no_grad()
    def _rescale(self, factors: Mapping[str, float]) -> None:
        for name, factor in factors.items():
            weight = self._weights[name]
            weight.mul_(factor)
            if weight.grad is not None:
                weight.grad.mul_(1 / factor)
            for key, value in self.optimizer.state.get(weight, {}).items():
                if key in _FIRST_MOMENTS and value is not None:
                    value.mul_(1 / factor)
                elif key in _SECOND_MOMENTS:
                    value.mul_(1 / factor**2)
            self._statistics.rescale([name], factor)
        self.last_factors = dict(factors)

    def _waiting(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The factors that are postponed, and applied together with later ones.

        A factor that 16-bit weights would round away waits until it is large enough. A factor that would bring the
        variance before a BatchNorm down to its eps waits until lr rises again.
        """
        too_small = {name: total for name, total in totals.items() if self._reaches_eps(name, total)}
        self._warn_of(too_small)
        return too_small | {name: total for name, total in totals.items() if self._is_rounded_away(name, total)}

    def _reaches_eps(self, name: str, total: float) -> bool:
        return total < 1 and self._statistics.variance_over_eps(name) * total**2 < _SMALLEST_VARIANCE_OVER_EPS

    def _is_rounded_away(self, name: str, total: float) -> bool:
        return torch.finfo(self._weights[name].dtype).eps > _COARSE and abs(math.log(total)) < _SMALLEST_LOG_FACTOR

    def _warn_of(self, too_small: Mapping[str, float]) -> None:
        """Warn once that weights keep their norms."""
        if self._has_warned or not too_small:
            return
        self._has_warned = True
        name, total = next(iter(too_small.items()))
        warn_caller(
            f"{name} was not rescaled by {total:.3g}: the variance before its BatchNorm would fall below "
            f"{_SMALLEST_VARIANCE_OVER_EPS:g} times its eps, and the network would change. The weight keeps its norm "
            "until lr rises again, and turns more slowly than the equilibrium of lr and weight decay",
            RescaleWarning,
        )


def _total(tensor: Any) -> float:
    whole = tensor.full_tensor() if is_sharded(tensor) else tensor
    return float(whole.sum(dtype=torch.float64))
