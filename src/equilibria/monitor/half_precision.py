"""Weights in 16 bits: float32 masters of them, and the update that rounding did not let happen.

A bfloat16 weight has 8 bits. An update below half an ulp of an entry is lost, or becomes a whole ulp by chance under
stochastic rounding, so that w' - w, though measured without an error, is the update that happened and not the one that
the optimizer intended: at small learning rates it is shorter or longer by large factors. Two things tell the latter.

- A master: a float32 tensor of the optimizer's state that, rounded, is the weight. It is what the optimizer moves, and
  what is measured instead. Its name in the state is no matter: nothing else rounds to the weight.
- Without one, a copy of the optimizer takes the step on float32 copies of a few coordinates, with the same gradient and
  state. For rules that treat each entry by itself its squared length estimates that of the intended update of the whole
  tensor without a bias; of 1,024 coordinates or more it scatters by about sqrt(2/k).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from equilibria.optimizers.copies import copy_of, isolated, step_function
from equilibria.optimizers.rules import GroupRule
from equilibria.tensors.device_queue import Sent
from equilibria.tensors.layout import local
from equilibria.tensors.parameters import HALVES, Watched
from equilibria.tensors.subsample import Subsample
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion

_BY_ENTRY = (SGD, SGDW, AdamW, AdamL2, Lion)  # rules that treat each entry by itself


def with_masters(watched: Sequence[Watched], optimizer: Optimizer) -> list[Watched]:
    """The tensors, with the masters that the optimizer's state holds by now."""
    return [replace(layer, master=_master(layer, optimizer)) if _lacks_master(layer) else layer for layer in watched]


def _lacks_master(layer: Watched) -> bool:
    return layer.master is None and layer.param.dtype in HALVES


def _master(layer: Watched, optimizer: Optimizer) -> Tensor | None:
    """The tensor of the state that rounds to the parameter; None of zeros, which anything may round to."""
    param = local(layer.param)
    for tensor in optimizer.state.get(layer.param, {}).values():
        if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32 or tensor.shape != layer.param.shape:
            continue
        if torch.equal(local(tensor).to(param.dtype), param) and bool(param.any()):
            return tensor
    return None


class Intended(NamedTuple):
    """The squared length of the update that an optimizer would make without rounding.

    Attributes:
        rows: the units.
        squares: its estimate for each of them, on their way to main memory.
    """

    rows: NDArray[np.int64]
    squares: Sent


class IntendedUpdates:
    """Estimates the intended updates of the tensors of 16 bits that have no master.

    Args:
        watched: the tensors of one optimizer; sharded ones are left out.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        halves = [index for index, layer in enumerate(watched) if _lacks_master(layer)]
        begins = np.cumsum([0, *(layer.units for layer in watched)])
        self._watched = [watched[index] for index in halves]
        self._sample = Subsample(self._watched) if halves else None
        units = np.concatenate([np.arange(0), *(np.arange(begins[k], begins[k + 1]) for k in halves)])
        self._rows = units[self._sample.rows] if self._sample else units
        self._can_copy = bool(self._sample and self._sample.tensors)

    def read(self, optimizer: Optimizer, laws: Sequence[GroupRule]) -> Intended | None:
        """The estimates for the coming step; NaN under other rules. None where there is nothing to estimate."""
        sample = self._sample
        if sample is None or not self._can_copy:
            return None
        weights = sample.weights()
        moved: Any = weights * np.nan
        members: dict[int, list[int]] = {}
        for index in sample.tensors:
            layer = self._watched[index]
            if isinstance(laws[layer.group].rule, _BY_ENTRY) and layer.param.grad is not None:
                members.setdefault(layer.group, []).append(index)
        try:
            for group, indices in members.items():
                before = [self._coordinates(index, self._watched[index].param) for index in indices]
                after = self._stepped(optimizer, group, indices, before)
                for index, old, new in zip(indices, before, after, strict=True):
                    move = new.double() - old.double()
                    moved[sample.slice_of(index)] = move.numpy() if isinstance(moved, np.ndarray) else move
        except Exception:  # an optimizer that cannot be copied, or whose copy cannot step
            self._can_copy = False
            return None
        squares = sample.sums(moved * moved)
        scale: Any = sample.scale if isinstance(squares, np.ndarray) else torch.as_tensor(sample.scale).to(squares)
        return Intended(self._rows, Sent(squares * scale))

    def _stepped(self, optimizer: Any, group: int, indices: Sequence[int], before: Sequence[Tensor]) -> list[Tensor]:
        """Coordinates after a step of a copy of the optimizer on float32 copies of them."""
        params = [torch.nn.Parameter(coordinates.clone()) for coordinates in before]
        with isolated():
            double = copy_of(optimizer, optimizer.param_groups[group], params)
            for index, param in zip(indices, params, strict=True):
                own = self._watched[index].param
                param.grad = self._coordinates(index, own.grad)
                double.state[param].update(self._state(index, optimizer.state.get(own, {})))
            with contextlib.suppress(AttributeError):  # of a fused optimizer under a GradScaler
                del double.found_inf, double.grad_scale
            step_function(type(double))(double)
        return [param.detach() for param in params]

    def _state(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        shape = self._watched[index].param.shape
        return {
            name: value
            if not isinstance(value, Tensor)
            else self._coordinates(index, value)
            if value.shape == shape
            else value.clone()
            for name, value in state.items()
        }

    def _coordinates(self, index: int, tensor: Any) -> Tensor:
        """The coordinates of a tensor of the same shape in float32, of its own memory."""
        assert self._sample is not None
        return torch.as_tensor(self._sample.coordinates(index, tensor)).float().clone()
