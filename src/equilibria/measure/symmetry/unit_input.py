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

_AFFINE, _RUNNING = ("weight", "bias"), ("running_mean", "running_var")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    functional.batch_norm: ("input", *_RUNNING, *_AFFINE, "training", "momentum", "eps"),
    functional.instance_norm: ("input", *_RUNNING, *_AFFINE, "use_input_stats", "momentum", "eps"),
    functional.layer_norm: ("input", "normalized_shape", *_AFFINE, "eps"),
    functional.group_norm: ("input", "num_groups", *_AFFINE, "eps"),
    functional.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    functional.normalize: ("input", "p", "dim", "eps", "out"),
    torch.batch_norm: ("input", *_AFFINE, *_RUNNING, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: ("input", *_AFFINE, *_RUNNING, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
    torch.layer_norm: ("input", "normalized_shape", *_AFFINE, "eps", "cudnn_enable"),
    torch.group_norm: ("input", "num_groups", *_AFFINE, "eps", "cudnn_enabled"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}
NORMALISATIONS = frozenset(_ARGUMENTS)


def normalise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call one of `NORMALISATIONS` so that its eps does not matter.

    BatchNorm's running statistics are brought up to date as ever; InstanceNorm's become those of the changed input.
    """
    given = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
    factor = _factor(func.__name__, given)
    if factor is None:
        return func(*args, **kwargs)
    changed = {**given, "input": given["input"] * factor, "eps": _EPS}
    kept = [name for name in ("running_mean", "running_var") if given.get(name) is not None]
    if func.__name__ != "batch_norm" or not kept:
        return func(**changed)
    scales = {"running_mean": factor.flatten(), "running_var": factor.flatten().square()}
    statistics = {name: given[name] * scales[name] for name in kept}
    result = func(**{**changed, **statistics})
    for name in kept:
        given[name].copy_(statistics[name] / scales[name])
    return result


def _factor(name: str, given: dict[str, Any]) -> Tensor | None:
    """What to multiply an input by; None where its statistics are not used, so that eps is a constant of many."""
    held = given["input"].detach()
    if name == "batch_norm":
        return _of_sets(held, [0, *range(2, held.ndim)]) if given.get("training", False) else None
    if name == "instance_norm":
        return _of_sets(held, [*range(2, held.ndim)]) if given.get("use_input_stats", True) else None
    if name == "group_norm":
        by_group = _of_sets(held.reshape(len(held), given["num_groups"], -1), [2])
        by_channel = by_group.repeat_interleave(held.shape[1] // given["num_groups"], dim=1)
        return by_channel.reshape(*held.shape[:2], *[1] * (held.ndim - 2))
    if name == "normalize":
        axis = given.get("dim", 1)
        return _of_sets(held, [axis] if isinstance(axis, int) else list(axis), centred=False)
    return _of_sets(held, list(range(-len(given["normalized_shape"]), 0)), centred=name == "layer_norm")


def _of_sets(held: Tensor, axes: list[int], *, centred: bool = True) -> Tensor:
    """One over the standard deviation of the numbers along some axes, or over their root mean square."""
    variance, mean = torch.var_mean(held, axes, correction=0, keepdim=True)
    square = variance + mean.abs().square()
    variance = variance if centred else square
    overall = square.mean()
    constant = (variance <= _CONSTANT * square) | (variance <= _LEFT_OVER * overall)
    size = torch.where(constant, torch.maximum(square, overall).sqrt() / _FAINT, variance.sqrt())
    return torch.exp2(-size.clamp_min(_SMALLEST).log2().round())
