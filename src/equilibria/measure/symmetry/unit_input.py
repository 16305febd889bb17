"""Normalisations without an eps that matters: their input is put to a variance of one first, channel by channel.

What a normalisation divides by cancels such a factor, so nothing else changes; and an eps beside it is as negligible
for a filter 1e-5 as large as its neighbours as for these. The factors are powers of two, which round nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_EPS = 1e-17  # beside a variance of one
# A variance this much smaller than the mean square is rounding (1e-32 of it, more where terms cancel): a constant
# channel, which stays constant instead of being blown up to one. It is scaled so far down that nothing of it is left,
# and what is left of it in another normalisation is known by being this much smaller than other channels.
_CONSTANT = 1e-24
_FAINT = 1e-100
_LEFT_OVER = 1e-60
_SMALLEST = 1e-150  # for an input of zeros

_EPS_POSITION: dict[Any, int] = {
    functional.batch_norm: 7,
    functional.instance_norm: 7,
    functional.layer_norm: 4,
    functional.group_norm: 4,
    functional.rms_norm: 3,
    functional.normalize: 3,
    torch.batch_norm: 7,
    torch.instance_norm: 7,
    torch.layer_norm: 4,
    torch.group_norm: 4,
    torch.rms_norm: 3,
}
NORMALISATIONS = frozenset(_EPS_POSITION)


def with_unit_input(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of `NORMALISATIONS`, so changed that its eps does not matter.

    Statistics that it keeps become those of the changed input: nothing may be read from them afterwards.
    """
    held = args[0] if args else kwargs["input"]
    factor = _factor(func.__name__, held.detach(), args, kwargs)
    if factor is None:
        return args, kwargs
    args = (held * factor, *args[1:])
    kwargs = {name: value for name, value in kwargs.items() if name != "input"}
    position = _EPS_POSITION[func]
    if len(args) > position:
        return (*args[:position], _EPS, *args[position + 1 :]), kwargs
    return args, {**kwargs, "eps": _EPS}


def _factor(name: str, held: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What to multiply an input by; None where its statistics are not used, so that eps is a constant of many."""
    if name == "batch_norm":
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return _of_sets(held, [0, *range(2, held.ndim)]) if training else None
    if name == "instance_norm":
        by_input = args[5] if len(args) > 5 else kwargs.get("use_input_stats", True)
        return _of_sets(held, [*range(2, held.ndim)]) if by_input else None
    if name == "group_norm":
        groups = args[1] if len(args) > 1 else kwargs["num_groups"]
        by_group = _of_sets(held.reshape(len(held), groups, -1), [2])
        by_channel = by_group.repeat_interleave(held.shape[1] // groups, dim=1)
        return by_channel.reshape(*held.shape[:2], *[1] * (held.ndim - 2))
    if name == "normalize":
        axis = args[2] if len(args) > 2 else kwargs.get("dim", 1)
        return _of_sets(held, [axis] if isinstance(axis, int) else list(axis), centred=False)
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return _of_sets(held, list(range(-len(shape), 0)), centred=name == "layer_norm")


def _of_sets(held: Tensor, axes: list[int], *, centred: bool = True) -> Tensor:
    """One over the standard deviation of the numbers along some axes, or over their root mean square."""
    variance, mean = torch.var_mean(held, axes, correction=0, keepdim=True)
    square = variance + mean.abs().square()
    variance = variance if centred else square
    overall = square.mean()
    constant = (variance <= _CONSTANT * square) | (variance <= _LEFT_OVER * overall)
    size = torch.where(constant, torch.maximum(square, overall).sqrt() / _FAINT, variance.sqrt())
    return torch.exp2(-size.clamp_min(_SMALLEST).log2().round())
