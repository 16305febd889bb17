"""Turning weights by an exact angle towards an update, their norm fixed.

A unit (a whole tensor, or one row of it) of norm n that is to have the norm r and turn by the angle a becomes

    w' = r (cos(a) w/n - sin(a) t/||t||),      t = u - (<u, w>/n^2) w   (- its mean, if centred),

which is ``A w + B u (+ C)`` with three numbers per unit: only inner products are formed besides the weight itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.tensors.inner_products import ProductsPass
from equilibria.tensors.layout import matrix

STRETCH = 1 << 18  # elements that stay in a processor's caches while several operations pass over them
_ILL = 0.1  # share of the update's square that is tangent, below which float32 leaves too few digits of it
_NOTHING = 1e-12  # the same below which there is no direction to turn to, even in float64


def write_units(tensor: Tensor, units: Tensor, *, axis: int | None) -> None:
    """Put the ``matrix`` of a tensor back where it had to be a copy; nothing to do where it is a view."""
    if units.data_ptr() != tensor.data_ptr():
        shape = tensor.shape if axis is None else tensor.movedim(axis, 0).shape
        tensor.copy_(units.view(shape) if axis is None else units.view(shape).movedim(0, axis))


def norms(units: Tensor, *, centred: bool = False) -> Tensor:
    """The norm of every unit, (units,); ``centred`` without its mean."""
    held = units - units.mean(1, keepdim=True) if centred else units
    found: Tensor = torch.linalg.vector_norm(held, dim=1, dtype=torch.float64).to(units.dtype)
    return found


def require_units(name: str, weight: Tensor, *, axis: int | None, centred: bool = False) -> None:
    """Refuse a tensor without rows, or with a unit that has no direction.

    Raises:
        EquilibriaError: naming the tensor, and the row.
    """
    held = weight.detach()
    if axis is not None and held.ndim < 2:
        raise EquilibriaError(f"got granularity='row' for {name} of shape {tuple(held.shape)}; expected 2 axes or more")
    sizes = norms(matrix(held, axis=axis, like=held), centred=centred)
    good = (sizes > 0) & torch.isfinite(sizes)
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise EquilibriaError(
            f"got {name}{'' if axis is None else f', row {row}'} of norm {float(sizes[row]):g}"
            f"{' without its mean' if centred else ''}; expected a finite one, not zero: it has no direction"
        )


def turn(weights: Tensor, updates: Tensor, *, angle: float, radius: Tensor, centred: bool) -> None:
    """Turn every unit by ``angle`` against its update, in place; a unit whose update has no tangent part stays.

    Args:
        weights: (units, entries), changed.
        updates: (units, entries), what the optimizer would subtract.
        angle: radians.
        radius: norm of every unit afterwards, (units,).
        centred: whether the update loses its mean; the weights are taken to have none.
    """
    height = max(1, STRETCH // weights.shape[1]) if weights.device.type == "cpu" else len(weights)
    for weight, update, size in zip(*(torch.split(each, height) for each in (weights, updates, radius)), strict=True):
        _turn_piece(weight, update, angle=angle, radius=size.double(), centred=centred)


def _turn_piece(weight: Tensor, update: Tensor, *, angle: float, radius: Tensor, centred: bool) -> None:
    """Units that fit into the cache together, or a single one."""
    uu, uw, ww, mean = _products(update, weight, centred=centred)
    share = 1 - (uw * uw / ww + weight.shape[1] * mean * mean) / uu  # NaN, which turns nothing, without an update
    if weight.dtype != torch.float64 and bool((share < _ILL).any()):
        fine = weight.double()
        _turn_piece(fine, update.double(), angle=angle, radius=radius, centred=centred)
        weight.copy_(fine)
        return
    turns = share > _NOTHING
    along = torch.where(turns, -radius * math.sin(angle) / torch.sqrt(uu * share), 0.0)
    kept = torch.where(turns, radius * math.cos(angle) / torch.sqrt(ww) - along * uw / ww, 1.0)
    offset = -along * mean if centred else None
    _combine(weight, update, kept, along, offset)


def _combine(weight: Tensor, update: Tensor, kept: Tensor, along: Tensor, offset: Tensor | None) -> None:
    """``weight = kept weight + along update + offset``, unit by unit; a large unit stretch by stretch."""
    a, b = (each.to(weight.dtype).unsqueeze(1) for each in (kept, along))
    width = STRETCH if weight.device.type == "cpu" else weight.shape[1]
    for held, change in zip(torch.split(weight, width, dim=1), torch.split(update, width, dim=1), strict=True):
        held.mul_(a).addcmul_(change, b)
        if offset is not None:
            held.add_(offset.to(weight.dtype).unsqueeze(1))


def _products(update: Tensor, weight: Tensor, *, centred: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """<u, u>, <u, w>, <w, w> and the mean of u, in float64."""
    sums = torch.zeros(len(weight), 6, dtype=torch.float64, device=weight.device)
    reading = ProductsPass(sums)
    reading.add(0, weight, update, None)
    reading.run()
    ww, uw, uu = sums[:, :3].unbind(1)
    mean = update.mean(1, dtype=torch.float64) if centred else torch.zeros_like(uu)
    return uu, uw, ww, mean
