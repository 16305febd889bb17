"""Tensors of every layout and type, and slow float64 geometry to compare with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

LAYOUTS = ("contiguous", "channels_last", "transposed", "strided", "transposed and strided")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers in a fresh memory of another layout."""
    if layout == "contiguous":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "channels_last" and values.ndim == 4:
        return values.clone(memory_format=torch.channels_last)
    if layout in ("channels_last", "transposed"):
        return values.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "strided":
        wide = values.new_zeros(*values.shape[:-1], 2 * values.shape[-1])
        view = wide[..., ::2]
        return view.copy_(values)
    wide = values.new_zeros(2 * values.shape[-1], *values.shape[:-1]).movedim(0, -1)
    view = wide[..., ::2]
    return view.copy_(values)


def exact(tensor: Tensor) -> np.ndarray:
    """As a float64 vector of real numbers, row by row, in numpy."""
    held = tensor.detach()
    held = held.to_dense() if held.layout != torch.strided else held
    held = torch.view_as_real(held.resolve_conj()) if held.is_complex() else held
    return held.double().contiguous().numpy().reshape(-1)


def slow_angle(first: np.ndarray, second: np.ndarray) -> float:
    """By the chord of the unit vectors, in long double."""
    a, b = (vector.astype(np.longdouble) for vector in (first, second))
    a, b = (vector / np.sqrt((vector * vector).sum()) for vector in (a, b))
    apart = a - b
    return 2 * math.asin(float(np.sqrt((apart * apart).sum())) / 2)


def tangent(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction orthogonal to the weight, as long as the weight, in float64."""
    w = weight.double()
    u = torch.randn(w.shape, generator=generator, dtype=torch.float64)
    u -= (u * w).sum() / (w * w).sum() * w
    return u * (w.norm() / u.norm())
