"""Normalisations without an eps that matters: their input is put to a variance of one first, channel by channel.

What a normalisation divides by cancels such a factor, so nothing else changes; and an eps beside it is as negligible
for a filter 1e-5 as large as its neighbours as for these. The factors are powers of two, which round nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_EPS = 1e-17  # beside a variance of one
# A variance this much smaller than the mean square is rounding (1e-32 of it, more where terms cancel): a constant
# channel, which stays constant instead of being blown up to one. It is scaled so far down that nothing of it is left,
# and what is left of it in another normalisation is known by being this much smaller than other channels.
_CONSTANT = 1e-24
_FAINT = 1e-100
_LEFT_OVER = 1e-60
_SMALLEST_VARIANCE = 1e-150  # for an input of zeros

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
    return torch.exp2(-size.clamp_min(_SMALLEST_VARIANCE).log2().round())


# A constant of this size that is added to a tensor is somebody's own eps.
_LARGEST_OWN_EPS = 1e-4
# In its place, relative to each element: it scales with the element, so it breaks no symmetry.
_NEGLIGIBLE = 1e-17
# An element this much smaller than the mean is rounding, of a variance (1e-32) or a standard deviation (1e-16), in a
# channel that is constant: it gets the mean for its eps, so that it is not blown up to one.
_ROUNDING = 1e-15
_SMALLEST = 1e-30  # for a tensor of zeros

_IN_PLACE = {"add_", "__iadd__"}
_ADDITIONS = {"add", "__add__", "__radd__"} | _IN_PLACE
_CONVERSIONS = {"float", "half", "bfloat16"}
_LOW = {torch.float32, torch.float16, torch.bfloat16}


class _Precise(TorchFunctionMode):
    """Changes what is passed to torch's functions: eps, the input beside it, and the types asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in NORMALISATIONS:
            return normalise(func, args, kwargs)
        if name in _ADDITIONS and (blurred := _beside_own_eps(args, swap=name not in _IN_PLACE)) is not None:
            args = (blurred, _negligible(blurred.detach().abs()), *args[2:])
        elif name in _CONVERSIONS and args and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(_high(each) for each in args)
        return func(*args, **{key: _high(each) for key, each in kwargs.items()})


@contextmanager
def precise() -> Iterator[None]:
    """Inside, torch computes in float64 throughout, with normalisations whose eps is negligible.

    Parameters have to require a gradient: a small number without history is taken for an eps.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Precise():
            yield
    finally:
        torch.set_default_dtype(before)


def _beside_own_eps(args: tuple[Any, ...], *, swap: bool) -> Tensor | None:
    """The tensor that somebody's own eps is added to, from the right or, with ``swap``, from the left."""
    if len(args) < 2:
        return None
    for tensor, other in (args[:2], args[1::-1]) if swap else (args[:2],):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and _is_own_eps(other):
            return tensor
    return None


def _is_own_eps(value: Any) -> bool:
    if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point() and not value.requires_grad:
        value = float(value)  # an eps in a buffer
    return isinstance(value, float) and 0 < value <= _LARGEST_OWN_EPS


def _negligible(beside: Tensor) -> Tensor:
    mean = beside.mean()
    constant = (beside > 0) & (beside <= _ROUNDING * mean)
    usual = _NEGLIGIBLE * torch.where(beside > 0, beside, mean)
    return torch.where(constant, mean, usual).clamp_min(_SMALLEST)


def _high(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value
