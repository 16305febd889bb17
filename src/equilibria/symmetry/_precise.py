"""Computing in float64 with a negligible eps, so that symmetries hold exactly.

A normalisation first scales its input to a variance of one, channel by channel. The normalisation itself cancels such a
factor, so nothing else changes, and eps becomes equally negligible for a filter 1e-5 as large as its neighbours. The
factors are powers of two, which round nothing. An eps that a model adds by hand becomes relative to each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_EPS = 1e-17  # next to a variance of one
# A variance this much smaller than the mean square is rounding (1e-32 of it, more where terms cancel): the channel is
# constant and must stay so instead of being amplified to variance one. It is scaled down until nothing of it is left;
# in a later normalisation its remains are recognised by being this much smaller than other channels.
_CONSTANT = 1e-24
_FAINT = 1e-100
_REMAINS = 1e-60
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
    """Call one of `NORMALISATIONS` with a negligible eps.

    BatchNorm's running statistics are updated as usual; InstanceNorm's become those of the scaled input.
    """
    arguments = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **kwargs}
    factor = _factor(func.__name__, arguments)
    if factor is None:
        return func(*args, **kwargs)
    changed = {**arguments, "input": arguments["input"] * factor, "eps": _EPS}
    running = [name for name in _RUNNING if arguments.get(name) is not None]
    if func.__name__ != "batch_norm" or not running:
        return func(**changed)
    scales = {"running_mean": factor.flatten(), "running_var": factor.flatten().square()}
    statistics = {name: arguments[name] * scales[name] for name in running}
    result = func(**{**changed, **statistics})
    for name in running:
        arguments[name].copy_(statistics[name] / scales[name])
    return result


def _factor(name: str, arguments: dict[str, Any]) -> Tensor | None:
    """Factor that brings an input to variance one; None if the function does not use the input's statistics."""
    values = arguments["input"].detach()
    if name == "batch_norm":
        return _inverse_size(values, [0, *range(2, values.ndim)]) if arguments.get("training", False) else None
    if name == "instance_norm":
        return _inverse_size(values, [*range(2, values.ndim)]) if arguments.get("use_input_stats", True) else None
    if name == "group_norm":
        groups = arguments["num_groups"]
        by_group = _inverse_size(values.reshape(len(values), groups, -1), [2])
        by_channel = by_group.repeat_interleave(values.shape[1] // groups, dim=1)
        return by_channel.reshape(*values.shape[:2], *[1] * (values.ndim - 2))
    if name == "normalize":
        axis = arguments.get("dim", 1)
        return _inverse_size(values, [axis] if isinstance(axis, int) else list(axis), centred=False)
    return _inverse_size(values, list(range(-len(arguments["normalized_shape"]), 0)), centred=name == "layer_norm")


def _inverse_size(values: Tensor, axes: list[int], *, centred: bool = True) -> Tensor:
    """One over the standard deviation along some axes (or the root mean square), rounded to a power of two."""
    variance, mean = torch.var_mean(values, axes, correction=0, keepdim=True)
    square = variance + mean.abs().square()
    variance = variance if centred else square
    overall = square.mean()
    constant = (variance <= _CONSTANT * square) | (variance <= _REMAINS * overall)
    size = torch.where(constant, torch.maximum(square, overall).sqrt() / _FAINT, variance.sqrt())
    return torch.exp2(-size.clamp_min(_SMALLEST_VARIANCE).log2().round())


# A constant of up to this size that a model adds to a tensor is taken for an eps.
_LARGEST_OWN_EPS = 1e-4
# It becomes this, relative to each element: it scales with the element, so it breaks no symmetry.
_NEGLIGIBLE = 1e-17
# An element this much smaller than the mean is rounding, of a variance (1e-32) or a standard deviation (1e-16), in a
# constant channel: its eps becomes the mean, so that it is not amplified to one.
_ROUNDING = 1e-15
_SMALLEST = 1e-30  # for a tensor of zeros

_IN_PLACE = {"add_", "__iadd__"}
_ADDITIONS = {"add", "__add__", "__radd__"} | _IN_PLACE
_CONVERSIONS = {"float", "half", "bfloat16"}
_LOW = {torch.float32, torch.float16, torch.bfloat16}


class _Precise(TorchFunctionMode):
    """Changes the arguments of torch's functions: eps, the input of normalisations, and requested types."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in NORMALISATIONS:
            return normalise(func, args, kwargs)
        if name in _ADDITIONS and (tensor := _plus_own_eps(args, swap=name not in _IN_PLACE)) is not None:
            args = (tensor, _negligible_eps(tensor.detach().abs()), *args[2:])
        elif name in _CONVERSIONS and args and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(_high(value) for value in args)
        return func(*args, **{key: _high(value) for key, value in kwargs.items()})


@contextmanager
def precise() -> Iterator[None]:
    """Make torch compute in float64 throughout, with normalisations whose eps is negligible.

    Parameters must require a gradient: a small number without a graph is taken for an eps.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Precise():
            yield
    finally:
        torch.set_default_dtype(before)


def _plus_own_eps(args: tuple[Any, ...], *, swap: bool) -> Tensor | None:
    """The tensor to which an addition adds an eps, from the right or, with ``swap``, from the left; else None."""
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


def _negligible_eps(sizes: Tensor) -> Tensor:
    mean = sizes.mean()
    constant = (sizes > 0) & (sizes <= _ROUNDING * mean)
    usual = _NEGLIGIBLE * torch.where(sizes > 0, sizes, mean)
    return torch.where(constant, mean, usual).clamp_min(_SMALLEST)


def _high(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value
