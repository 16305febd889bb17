"""Weights in 16 bits: float32 masters of them, and the update that rounding did not let happen.

A bfloat16 weight has 8 bits. An update below half an ulp of an entry is lost, or becomes a whole ulp by chance under
stochastic rounding, so that w' - w, though measured without an error, is the update that happened and not the one that
the optimizer intended: at small learning rates it is shorter or longer by large factors. Two things tell the latter.

- A master: a float32 tensor of the optimizer's state that, rounded, is the weight. It is what the optimizer moves, and
  what is measured instead. Its name in the state is no matter: nothing else rounds to the weight.
- Without one, a copy of the optimizer takes the step on float64 copies of a few coordinates, with the same gradient and
  state. If it treats each entry by itself, which every other one of them alone shows, the squared length estimates that
  of the intended update of the whole tensor without a bias; from k coordinates, 1,024 mostly, it scatters by about
  sqrt(2/k).
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
from equilibria.tensors.device_queue import Sent
from equilibria.tensors.layout import local
from equilibria.tensors.parameters import HALVES, Watched
from equilibria.tensors.subsample import Subsample


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
        self._by_entry: dict[int, bool] = {}  # whether the rule of a group treats each entry by itself

    def read(self, optimizer: Optimizer) -> Intended | None:
        """The estimates for the coming step; NaN where there is none. None without 16-bit weights."""
        sample = self._sample
        if sample is None or not sample.tensors:
            return None
        moved: Any = sample.weights() * np.nan
        members: dict[int, list[int]] = {}
        for index in sample.tensors:
            if self._watched[index].param.grad is not None:
                members.setdefault(self._watched[index].group, []).append(index)
        for group, indices in members.items():
            if group not in self._by_entry:
                self._by_entry[group] = self._treats_each_entry(optimizer, group, indices)
            for index, move in self._moves(optimizer, group, indices) if self._by_entry[group] else ():
                moved[sample.slice_of(index)] = move.numpy() if isinstance(moved, np.ndarray) else move
        squares = sample.sums(moved * moved)
        scale: Any = sample.scale if isinstance(squares, np.ndarray) else torch.as_tensor(sample.scale).to(squares)
        return Intended(self._rows, Sent(squares * scale))

    def _treats_each_entry(self, optimizer: Optimizer, group: int, indices: Sequence[int]) -> bool:
        """Whether entries move alike if only every other one is there; False if no copy can step."""
        try:
            pairs = zip(*(self._moves(optimizer, group, indices, every=every) for every in (1, 2)), strict=True)
            return all(torch.allclose(move[::2], half, rtol=1e-6, atol=0.0) for (_, move), (_, half) in pairs)
        except Exception:
            return False

    def _moves(self, optimizer: Any, group: int, indices: Sequence[int], *, every: int = 1) -> list[tuple[int, Tensor]]:
        """By tensor, how a copy of the optimizer moves float64 copies of its coordinates, or every other of them."""
        before = [self._coordinates(index, self._watched[index].param)[::every] for index in indices]
        params = [torch.nn.Parameter(coordinates.clone()) for coordinates in before]
        with isolated():
            double = copy_of(optimizer, optimizer.param_groups[group], params)
            for index, param in zip(indices, params, strict=True):
                own = self._watched[index].param
                param.grad = self._coordinates(index, own.grad)[::every].clone()
                double.state[param].update(self._state(index, optimizer.state.get(own, {}), every))
            with contextlib.suppress(AttributeError):  # of a fused optimizer under a GradScaler
                del double.found_inf, double.grad_scale
            step_function(type(double))(double)
        moves = (new.detach() - old for new, old in zip(params, before, strict=True))
        return list(zip(indices, moves, strict=True))

    def _state(self, index: int, state: Mapping[str, Any], every: int) -> dict[str, Any]:
        shape = self._watched[index].param.shape
        return {
            name: value
            if not isinstance(value, Tensor)
            else self._coordinates(index, value)[::every].clone()
            if value.shape == shape
            else value.clone()
            for name, value in state.items()
        }

    def _coordinates(self, index: int, tensor: Any) -> Tensor:
        """The coordinates of a tensor of the same shape in float64, in memory of their own."""
        assert self._sample is not None
        return torch.as_tensor(self._sample.coordinates(index, tensor)).double().clone()
