"""Weights in 16 bits: float32 masters of them, and the update that rounding did not let happen.

A bfloat16 weight has 8 bits. An update below half an ulp of an entry is lost, or becomes a whole ulp by chance under
stochastic rounding, so that w' - w, though measured without an error, is the update that happened and not the one that
the optimizer intended: at small learning rates it is shorter or longer by large factors. Two things tell the latter.

- A master: a float32 tensor of the optimizer's state that, rounded, is the weight. It is what the optimizer moves, and
  what is measured instead. Its name in the state is no matter: nothing else rounds to the weight.
- Without one, a copy of the optimizer takes the step on float64 copies of a few coordinates, with the same gradient and
  state. If it treats each entry by itself, which every other one of them alone shows, the squared length estimates that
  of the intended update of the whole tensor without a bias; from k coordinates, 1,024 mostly, it scatters by about
  sqrt(2/k). On a GPU one launch reads the coordinates, and the copy takes its step in main memory once they are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from equilibria.optimizers.copies import copy_of, isolated, step_function
from equilibria.tensors.device_queue import Sent, is_on_device
from equilibria.tensors.layout import PLAIN, local
from equilibria.tensors.parameters import HALVES, Watched
from equilibria.tensors.subsample import Subsample

Array = NDArray[np.float64]

_ALIKE: Any = {"rtol": 1e-6, "atol": 0.0, "equal_nan": True}  # moves of entries, whichever others are there


def lacks_master(layer: Watched) -> bool:
    """Whether what is measured is a weight in 16 bits."""
    return layer.master is None and layer.param.dtype in HALVES


def master_in(state: Mapping[str, Any], param: Tensor) -> Tensor | None:
    """The tensor of an optimizer's state that rounds to a 16-bit parameter; waits for the device if one may."""
    for tensor in state.values():
        if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32 or tensor.shape != param.shape:
            continue
        if torch.equal(local(tensor).to(param.dtype), local(param)):
            return tensor
    return None


class Intended(NamedTuple):
    """The squared length of the update that an optimizer would make without rounding.

    Attributes:
        rows: the units.
        squares: returns its estimate for each of them, NaN where there is none; waits for the device.
    """

    rows: NDArray[np.int64]
    squares: Callable[[], Array]


class _Number(NamedTuple):
    """A tensor of one number in an optimizer's state.

    Attributes:
        value: the number; of one on a device its place among those on their way to main memory.
        dtype: its type.
        is_sent: whether it is on a device.
    """

    value: float
    dtype: torch.dtype
    is_sent: bool


class _Member(NamedTuple):
    """A tensor that the coming step moves.

    Attributes:
        tensor: its place among those of the sample.
        group: its parameter group.
        names: of the tensors of its shape in the state.
        others: all else in the state, by name.
    """

    tensor: int
    group: int
    names: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]


class IntendedUpdates:
    """Estimates the intended updates of the tensors of 16 bits that have no master.

    Args:
        watched: the tensors of one optimizer; sharded ones are left out.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        halves = [index for index, layer in enumerate(watched) if lacks_master(layer)]
        begins = np.cumsum([0, *(layer.units for layer in watched)])
        self._watched = [watched[index] for index in halves]
        self._sample = Subsample(self._watched) if halves else None
        units = np.concatenate([np.arange(0), *(np.arange(begins[k], begins[k + 1]) for k in halves)])
        self._rows = units[self._sample.rows] if self._sample else units
        self._refused: set[int] = set()  # groups whose rule cannot be copied, or does not treat each entry by itself

    def read(self, optimizer: Optimizer) -> Intended | None:
        """Read what the coming step starts from, before it; None if there is nothing to estimate."""
        sample = self._sample
        if sample is None:
            return None
        on_device: list[Tensor] = []
        found = (self._member(index, optimizer, on_device) for index in sample.tensors)
        members = [member for member in found if member is not None and member.group not in self._refused]
        copies = {group: self._copies(optimizer, group) for group in sorted({member.group for member in members})}
        if not any(copies.values()):
            return None
        names = sorted({name for member in members for name in member.names})
        tensors: list[list[Tensor | None]] = [[None] * len(self._watched) for _ in range(2 + len(names))]
        for member in members:
            param = self._watched[member.tensor].param
            tensors[0][member.tensor], tensors[1][member.tensor] = param, param.grad
            for name in member.names:
                tensors[2 + names.index(name)][member.tensor] = optimizer.state[param][name]
        numbers = Sent(torch.stack(on_device)) if on_device else None
        return Intended(
            self._rows, partial(self._squares, copies, members, names, Sent(sample.gathered(tensors)), numbers)
        )

    def _member(self, index: int, optimizer: Optimizer, on_device: list[Tensor]) -> _Member | None:
        """What the step of a tensor starts from; None without a gradient, and of a state in an unusual form."""
        param = self._watched[index].param
        if param.grad is None or param.grad.layout != torch.strided:
            return None
        names: list[str] = []
        others: list[tuple[str, Any]] = []
        for name, value in optimizer.state.get(param, {}).items():
            if value is None or isinstance(value, bool | int | float | str):
                others.append((name, value))
            elif type(value) not in PLAIN:
                return None
            elif value.shape == param.shape and value.is_floating_point():
                names.append(name)
            elif value.numel() != 1:
                return None
            elif is_on_device(value):
                others.append((name, _Number(len(on_device), value.dtype, is_sent=True)))
                on_device.append(value.detach().reshape(()))
            else:
                others.append((name, _Number(value.item(), value.dtype, is_sent=False)))
        return _Member(index, self._watched[index].group, tuple(names), tuple(others))

    def _copies(self, optimizer: Any, group: int) -> list[Any]:
        """Two copies of the optimizer without tensors, with the settings of the coming step."""
        try:
            return [copy_of(optimizer, optimizer.param_groups[group], []) for _ in range(2)]
        except Exception:  # it holds more than can be copied
            self._refused.add(group)
            return []

    def _squares(
        self,
        copies: Mapping[int, Sequence[Any]],
        members: Sequence[_Member],
        names: Sequence[str],
        sent: Sent,
        numbers: Sent | None,
    ) -> Array:
        sample: Any = self._sample
        table, values = sent.read().astype(np.float64, copy=False), [] if numbers is None else numbers.read().tolist()
        moved = np.full(table.shape[1], np.nan)
        for group, pair in copies.items():
            # Tensors in the same state make one: the rule treats each entry by itself.
            alike: dict[Any, list[Any]] = {}
            for member in members:
                if member.group == group:
                    others = tuple((name, _value(other, values)) for name, other in member.others)
                    alike.setdefault((member.names, others), []).append(np.r_[sample.slice_of(member.tensor)])
            places = [np.concatenate(parts) for parts in alike.values()]
            starts = [
                _Start(table[[0, 1, *(2 + names.index(name) for name in kept)]][:, own], kept, others)
                for (kept, others), own in zip(alike, places, strict=True)
            ]
            try:
                whole, half = (_moves(copy, starts, every) for every, copy in enumerate(pair, 1))
            except Exception:  # of a rule for a GPU alone, or for matrices
                self._refused.add(group)
                continue
            if not np.allclose(np.concatenate([move[::2] for move in whole]), np.concatenate(half), **_ALIKE):
                self._refused.add(group)
                continue
            moved[np.concatenate(places)] = np.concatenate(whole)
        return np.asarray(sample.sums(moved * moved) * sample.scale)


class _Start(NamedTuple):
    """What the step of some coordinates starts from.

    Attributes:
        rows: the coordinates of weights, gradients and the tensors in the state, in float64.
        names: of the latter.
        others: all else in the state, by name.
    """

    rows: Array
    names: tuple[str, ...]
    others: tuple[tuple[str, Any], ...]


def _moves(double: Any, starts: Sequence[_Start], every: int) -> list[Array]:
    """How a copy of an optimizer moves every so many of the coordinates."""
    params = []
    with isolated():
        for start in starts:
            weight, gradient, *kept = torch.from_numpy(start.rows[:, ::every].copy())
            param = torch.nn.Parameter(weight)
            param.grad = gradient
            double.param_groups[0]["params"].append(param)
            double.state[param].update(zip(start.names, kept, strict=True))
            for name, other in start.others:
                is_number = isinstance(other, _Number)
                double.state[param][name] = torch.tensor(other.value, dtype=other.dtype) if is_number else other
            params.append(param)
        with contextlib.suppress(AttributeError):  # of a fused optimizer under a GradScaler
            del double.found_inf, double.grad_scale
        step_function(type(double))(double)
    moves = (param.detach().numpy() - start.rows[0, ::every] for param, start in zip(params, starts, strict=True))
    return list(moves)


def _value(other: Any, sent: Sequence[float]) -> Any:
    """An entry of a state, with what a device has sent."""
    if not isinstance(other, _Number):
        return other
    return _Number(sent[int(other.value)], other.dtype, is_sent=False) if other.is_sent else other
