"""A floor and a ceiling on the relative update of every weight."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from equilibria.control._optimizer import OptimizerWrapper, require_optimizer, require_whole
from equilibria.control._units import Granularity, unit_axes, unit_norms, write_units
from equilibria.errors import EquilibriaError, within
from equilibria.findings import counted
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import matrix


class RelativeUpdateLimits(OptimizerWrapper):
    """Keeps ``||w' - w|| / ||w||`` of every step between a floor and a ceiling, per tensor or per row.

    The wrapped optimizer takes its step, weight decay included; where the relative update is outside, the step is made
    shorter or longer in its own direction. A step inside the limits is not changed by a single bit, nor is one of
    length 0, which has no direction. Per step this costs a copy of the weights that are limited and two norms of each.

    A floor at a falling learning rate keeps weights turning that would freeze; a ceiling bounds the first steps of a
    weight that starts small. In equilibrium the relative update is the angle, sqrt(2 lr wd / S): limits far from it act
    only in transients.

    It shares groups and state with the wrapped optimizer, which must no longer be stepped directly.

    Args:
        optimizer: any torch optimizer.
        low: the floor; None for none.
        high: the ceiling; None for none.
        params: names or tensors; by default all tensors of two axes or more.
        model: the network, to look up names and the axis that numbers a tensor's outputs (0 without it).
        granularity: "tensor", or "row": each output row has its own relative update.

    Attributes:
        limited: how many units the last step shortened or lengthened.

    Raises:
        EquilibriaError: no limit, a floor above the ceiling, or a weight that is spread over processes.

    Example:
        >>> w = nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = RelativeUpdateLimits(torch.optim.SGD([w], lr=1.0), high=0.01)
        >>> w.grad = torch.tensor([[0.0, 1.0]])
        >>> optimizer.step()
        >>> w.tolist(), optimizer.limited
        ([[3.0, 3.95...]], 1)
    """

    _attributes: ClassVar = ("plain", "low", "high", "axes", "limited")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        low: float | None = None,
        high: float | None = None,
        params: Invariant | None = None,
        model: nn.Module | None = None,
        granularity: Granularity = "tensor",
    ) -> None:
        require_optimizer(optimizer)
        self.low = 0.0 if low is None else within("low", low, low=0)
        self.high = float("inf") if high is None else within("high", high, above=0)
        if (not low and high is None) or self.low > self.high:
            raise EquilibriaError(
                f"got low={low}, high={high}; expected a floor above 0, a ceiling, or a floor below the ceiling",
                argument="low",
            )
        if params is None:
            params = [param for group in optimizer.param_groups for param in group["params"] if param.ndim >= 2]
        if isinstance(params, list) and not params:
            raise EquilibriaError("got no tensor of two axes or more; expected some, or params=", argument="params")
        weights = invariant_tensors(params, optimizer=optimizer, model=model)
        for name, weight in weights.items():
            require_whole(name, weight)
        axes = unit_axes(weights, invariant=params, model=model, granularity=granularity)
        self.axes = {weight: axes[name] for name, weight in weights.items()}
        self.limited = 0
        super().__init__(optimizer)

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        limits = [f"at least {self.low:g}"] * (self.low > 0) + [f"at most {self.high:g}"] * (self.high < float("inf"))
        return f"keeps the relative update of {counted(len(self.axes), 'weight')} {' and '.join(limits)}"

    def _move_all(self) -> None:
        before = {
            weight: weight.detach().clone()
            for _, weights in self._moving()
            for weight in weights
            if weight in self.axes
        }
        self.plain.step()
        self.limited = sum(self._limit(weight, old) for weight, old in before.items())

    def _limit(self, weight: Tensor, before: Tensor) -> int:
        """Bring the relative update of every unit inside the limits; how many were outside."""
        axis = self.axes[weight]
        taken = weight.detach() - before
        sizes, norms = (unit_norms(tensor, axis=axis, like=weight) for tensor in (taken, before))
        wanted = torch.clamp(sizes, self.low * norms, self.high * norms)
        outside = (sizes > 0) & (norms > 0) & (wanted != sizes)
        count = int(outside.sum())
        if count:
            units, old, step = (matrix(tensor, axis=axis, like=weight) for tensor in (weight, before, taken))
            factor = (wanted / sizes).to(units.dtype).unsqueeze(1)
            units[outside] = (old + factor * step)[outside]
            write_units(weight, units, axis=axis)
        return count
