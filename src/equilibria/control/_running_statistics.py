"""BatchNorm's running statistics, rescaled together with the weights in front of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import unwrap_model
from equilibria.tensors.statistics import Behind, normalisations, statistics_behind


@dataclass(frozen=True, slots=True, eq=False)
class _Rescaling:
    """How statistics change when a given set of weights is multiplied by one factor.

    Attributes:
        in_proportion: modules whose whole mean is multiplied by the factor, and whose variance by its square.
        by_channel: module, exponent of the factor per channel, and the bias, which is not multiplied.
    """

    in_proportion: list[nn.Module]
    by_channel: list[tuple[nn.Module, Tensor, Tensor | None]]

    @classmethod
    def of(cls, behind: Iterable[Behind], names: frozenset[str]) -> _Rescaling:
        rescaling = cls([], [])
        for norm in behind:
            degrees = [degree.double() for name, degree in norm.degrees.items() if name in names]
            if not degrees:
                continue
            degree = torch.stack(degrees).sum(0)
            if norm.bias is None and bool((degree == 1).all()):
                rescaling.in_proportion.append(norm.module)
            else:
                rescaling.by_channel.append((norm.module, degree, norm.bias))
        return rescaling


class RunningStatistics:
    """The running statistics behind given weights, located on an example or at the first training forward pass.

    Args:
        model: the network.
        weights: the weights to be rescaled, by name, or sets of weights that are rescaled by one factor, by label.
        example: the arguments of one call of the model, a tensor or a tuple; None to use the model's first call in
            training mode.
    """

    _is_searching = False  # shared by all instances: several may wait for the first call of one model, and call it

    def __init__(
        self, model: nn.Module, weights: Mapping[str, Tensor | Sequence[Tensor]], *, example: Any = None
    ) -> None:
        self._model, self._weights = unwrap_model(model), dict(weights)
        self._behind: list[Behind] | None = None
        self._rescalings: dict[frozenset[str], _Rescaling] = {}
        self._handle: Any = None
        if not normalisations(self._model):
            self._behind = []
        elif example is not None:
            self._search(example if isinstance(example, tuple) else (example,), {})
        else:
            self._handle = self._model.register_forward_pre_hook(self._on_call, with_kwargs=True)

    def close(self) -> None:
        """Stop waiting for a forward pass."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def without(self) -> frozenset[str]:
        """The weights without statistics behind them, in a network that has some: hardly scale-invariant."""
        behind = {name for norm in self._behind or [] for name in norm.degrees}
        return frozenset(self._weights) - behind if self._behind else frozenset()

    def require(self) -> None:
        """Raise EquilibriaError if the statistics behind the weights have not been located yet."""
        if self._behind is None:
            raise EquilibriaError(
                "got no forward pass of the model in training mode before the first rescaling; expected one, to locate "
                "the BatchNorm statistics behind the weights: call the model itself (not a part of it), or pass "
                "example=, the arguments of one call"
            )

    @torch.no_grad()
    def rescale(self, names: Iterable[str], factor: float) -> None:
        """Change the statistics as multiplying the named weights or sets by ``factor`` would."""
        self.require()
        rescaling = self._rescaling(frozenset(names))
        if rescaling.in_proportion:  # buffers are looked up each time: moving a model to another device replaces them
            torch._foreach_mul_([_mean(module) for module in rescaling.in_proportion], factor)
            torch._foreach_mul_([_var(module) for module in rescaling.in_proportion], factor**2)
        for module, degree, bias in rescaling.by_channel:
            _rescale_channels(_mean(module), _var(module), factor**degree, bias=bias)

    def too_small(self, factors: Mapping[str, float], *, limit: float) -> list[str]:
        """The weights or sets whose factor would bring the variance in front of a norm below ``limit`` times its eps.

        The variance is the median over the channels. Factors count in their order, and those that are too small do not:
        several weights may be in front of one norm.
        """
        left = {norm.name: _variance_over_eps(norm.module) for norm in self._behind or []}
        refused = []
        for name, factor in factors.items():
            behind = [norm for norm in self._behind or [] if name in norm.degrees]
            after = {norm.name: left[norm.name] * factor ** (2 * int(norm.degrees[name].max())) for norm in behind}
            if factor < 1 and min(after.values(), default=math.inf) < limit:
                refused.append(name)
            else:
                left |= after
        return refused

    def _rescaling(self, names: frozenset[str]) -> _Rescaling:
        if names not in self._rescalings:
            self._rescalings[names] = _Rescaling.of(self._behind or [], names)
        return self._rescalings[names]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and not RunningStatistics._is_searching and self._belongs_to(module):
            self._search(args, kwargs)
            self.close()

    def _belongs_to(self, module: nn.Module) -> bool:
        """Whether the weights are those of the module: a copy, or a call with other parameters, has this hook, too."""
        present = {id(param) for param in module.parameters()}
        sets = ([entry] if isinstance(entry, Tensor) else entry for entry in self._weights.values())
        return all(id(weight) in present for tensors in sets for weight in tensors)

    def _search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        RunningStatistics._is_searching = True
        try:
            self._behind = statistics_behind(self._model, self._weights, args=args, kwargs=kwargs)
        finally:
            RunningStatistics._is_searching = False


def require_network(model: object) -> None:
    """Raise EquilibriaError if the model is not a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise EquilibriaError(f"got model of type {kind}; expected the network, a torch.nn.Module", argument="model")


def _mean(module: nn.Module) -> Tensor:
    return module.running_mean  # type: ignore[return-value]


def _variance_over_eps(module: nn.Module) -> float:
    return float(_var(module).median()) / max(float(module.eps), 1e-300)  # type: ignore[arg-type]


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
