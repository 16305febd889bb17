"""What one step does to one tensor, read before and after it.

torch's SGD moves a weight by a known combination of weight, gradient and momentum buffer, so that one look before the
step says all, without a copy (`sgd_combination`). For every other optimizer the weights are copied before the step and
compared after it (`CopyProbe`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equilibria.tensors.inner_products import MovesPass, ProductsPass
from equilibria.tensors.layout import copy_of, densify, flat, local, matrix
from equilibria.tensors.parameters import Watched

_SAMPLE = 64  # numbers that are compared to see whether a copy is still what it was


@dataclass(frozen=True, slots=True)
class Combination:
    """How an update is combined: w' - w = gradient * g + buffer * v - shrink * w."""

    gradient: float
    buffer: float
    shrink: float


def sgd_combination(group: Mapping[str, Any], *, first: bool) -> Combination:
    """The update of torch's SGD; ``first`` while there is no momentum buffer yet.

    Example:
        >>> group = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": True,
        ...          "maximize": False}
        >>> sgd_combination(group, first=False)
        Combination(gradient=-0.19, buffer=-0.081..., shrink=0.0019)
    """
    lr, wd = float(group["lr"]), float(group["weight_decay"])
    momentum = float(group["momentum"])
    taken = 1.0 if first else 1.0 - float(group["dampening"])
    own, kept = (taken, momentum) if momentum else (1.0, 0.0)  # without momentum torch ignores dampening
    if group["nesterov"]:
        own, kept = 1.0 + momentum * taken, momentum * momentum
    sign = -1.0 if group["maximize"] else 1.0
    return Combination(-lr * own * sign, -lr * kept, lr * own * wd)


def add_products(one_pass: ProductsPass, place: int, watched: Watched, gradient: Tensor, buffer: Tensor | None) -> None:
    """Let a pass read weight, gradient and buffer."""
    weight = local(watched.param)
    one_pass.add(place, *_matrices(watched, weight, local(gradient), None if buffer is None else local(buffer)))


class CopyProbe:
    """Copies the weight before a step and compares after it: one copy of the weight, made when first needed."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._copy: Tensor | None = None
        self._made_for: tuple[object, ...] = ()
        self._copied_at = -1

    def remember(self) -> bool:
        """Make sure that the copy is the weight as it is now.

        Returns:
            False if somebody changed the weight since the last step.
        """
        param = local(self._watched.param)
        layout = param.shape, param.stride(), param.dtype, param.device
        if self._copy is None or self._made_for != layout:
            self._copy, self._made_for = copy_of(param), layout
            return True
        expected = self._copied_at >= 0
        if expected and self._copied_at == self._watched.param._version and self._looks_the_same(param):
            return True
        self._copy.copy_(param)
        return not expected

    def compare(
        self, one_pass: MovesPass, place: int, gradient: Tensor | None, *, shrink: float, refresh: bool
    ) -> None:
        """Let a pass read how the step moved the weight.

        Args:
            one_pass: what forms the products.
            place: the first row of its table for them.
            gradient: None if it was read before the step, or if there is none.
            shrink: share of the weight that decay took away.
            refresh: whether the next step is compared too, so that the copy is brought up to date on the way.
        """
        assert self._copy is not None  # remember() came before
        param = local(self._watched.param)
        self._copied_at = self._watched.param._version if refresh else -1
        dense = None if gradient is None else local(densify(gradient))
        now, before, given = _matrices(self._watched, param, self._copy, dense)
        in_place = before.data_ptr() == self._copy.data_ptr()
        one_pass.add(place, before, now, given, shrink=shrink, refresh=refresh and in_place)
        if refresh and not in_place:
            self._copy.copy_(param)  # ``before`` is another copy already

    def _looks_the_same(self, param: Tensor) -> bool:
        if param.device.type != "cpu":  # asking would wait for the device
            return False
        return torch.equal(_sample(param, like=param), _sample(self._copy, like=param))  # type: ignore[arg-type]


def _matrices(watched: Watched, weight: Tensor, *others: Tensor | None) -> Any:
    """All of them as matrices, their numbers in the order in which the weight keeps its own."""
    return [None if tensor is None else matrix(tensor, axis=watched.axis, like=weight) for tensor in (weight, *others)]


def _sample(vector: Tensor, *, like: Tensor) -> Tensor:
    """A few entries from all over a tensor."""
    held = flat(vector, like=like)
    return held[:: max(1, len(held) // _SAMPLE)]
