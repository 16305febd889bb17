"""Keeps BatchNorm's running statistics in step with weights that are rescaled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import unwrap_model
from equilibria.tensors.statistics import Behind, normalisations, statistics_behind


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What to do when certain weights are rescaled together.

    Attributes:
        in_proportion: modules whose whole mean is multiplied by the factor, whose variance by its square.
        by_channel: module, exponent of the factor per channel, and the bias that stays.
    """

    in_proportion: list[nn.Module]
    by_channel: list[tuple[nn.Module, Tensor, Tensor | None]]

    @classmethod
    def of(cls, found: Iterable[Behind], names: frozenset[str]) -> _Plan:
        plan = cls([], [])
        for each in found:
            degrees = [degree.double() for name, degree in each.degrees.items() if name in names]
            if not degrees:
                continue
            degree = torch.stack(degrees).sum(0)
            if each.bias is None and bool((degree == 1).all()):
                plan.in_proportion.append(each.module)
            else:
                plan.by_channel.append((each.module, degree, each.bias))
        return plan


class RunningStatistics:
    """The running statistics behind some weights, found on an example or at the first training forward pass.

    Args:
        model: the network.
        weights: the weights that will be rescaled, by name.
        example: what the model is called with, a tensor or a tuple of arguments; None to look at the first call of the
            model in training mode.
    """

    _is_looking = False  # for all of them: several may wait for the first call of one model

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], *, example: Any = None) -> None:
        self._model, self._weights = unwrap_model(model), dict(weights)
        self._found: list[Behind] | None = None
        self._plans: dict[frozenset[str], _Plan] = {}
        self._handle: Any = None
        if not normalisations(self._model):
            self._found = []
        elif example is not None:
            self._look(example if isinstance(example, tuple) else (example,), {})
        else:
            self._handle = self._model.register_forward_pre_hook(self._on_call, with_kwargs=True)

    def close(self) -> None:
        """Look no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def require(self) -> None:
        """Refuse to go on before it is known which statistics stand behind the weights."""
        if self._found is None:
            raise EquilibriaError(
                "got no forward pass of the model in training mode before the first rescaling; expected one, to see "
                "which BatchNorm statistics stand behind the weights: call the model itself (not a part of it), or "
                "give example=, the arguments of one call"
            )

    @torch.no_grad()
    def rescale(self, names: Iterable[str], factor: float) -> None:
        """Multiply the statistics as if the weights of these names had been multiplied by ``factor``."""
        self.require()
        plan = self._plan(frozenset(names))
        if plan.in_proportion:  # looked up each time: moving a model to another device replaces its buffers
            torch._foreach_mul_([_mean(module) for module in plan.in_proportion], factor)
            torch._foreach_mul_([_var(module) for module in plan.in_proportion], factor**2)
        for module, degree, bias in plan.by_channel:
            _rescale_channels(_mean(module), _var(module), factor**degree, bias=bias)

    def variance_over_eps(self, name: str) -> float:
        """The smallest median running variance of a normalisation behind a weight, over its eps; infinite if none."""
        behind = [each.module for each in self._found or [] if name in each.degrees]
        ratios = (float(_var(module).median()) / max(float(module.eps), 1e-300) for module in behind)  # type: ignore[arg-type]
        return min(ratios, default=math.inf)

    def _plan(self, names: frozenset[str]) -> _Plan:
        if names not in self._plans:
            self._plans[names] = _Plan.of(self._found or [], names)
        return self._plans[names]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and not RunningStatistics._is_looking:  # a search calls the model, too, its own or another's
            self._look(args, kwargs)
            self.close()

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        RunningStatistics._is_looking = True
        try:
            self._found = statistics_behind(self._model, self._weights, args=args, kwargs=kwargs)
        finally:
            RunningStatistics._is_looking = False


def refuse_no_network(model: object) -> None:
    """Say so if the model is none."""
    if not isinstance(model, nn.Module):
        raise EquilibriaError(f"got model of type {type(model).__name__}; expected the network, a torch.nn.Module")


def _mean(module: nn.Module) -> Tensor:
    return module.running_mean  # type: ignore[return-value]


def _var(module: nn.Module) -> Tensor:
    return module.running_var  # type: ignore[return-value]


def _rescale_channels(mean: Tensor, var: Tensor, factor: Tensor, *, bias: Tensor | None) -> None:
    mean_factor = factor.to(mean)
    if bias is None:
        mean.mul_(mean_factor)
    else:
        fixed = bias.to(mean)
        mean.sub_(fixed).mul_(mean_factor).add_(fixed)
    var.mul_((factor**2).to(var))
