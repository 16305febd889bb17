"""Computing in one floating-point type with a negligible eps, so that symmetries hold exactly.

The type is float64, or float32 for models that insist on it; `Precision` has the thresholds of each.

A normalisation first scales its input to a variance of one, channel by channel. The normalisation itself cancels such a
factor, so nothing else changes, and eps becomes equally negligible for a filter 1e-5 as large as its neighbours. The
factors are powers of two, which round nothing. An eps that a model adds by hand becomes relative to each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_EPS = 1e-17  # next to a variance of one


@dataclass(frozen=True, slots=True)
class Precision:
    """A floating-point type to compute in, and what its rounding lets one tell apart.

    Attributes:
        dtype: the type.
        noise: rounding: a smaller singular value or share of the gradient says no more than this.
        largest_zero: of a relative radial derivative; anything larger is a reaction of the loss, whatever the gap.
        fraction: distance of an exponent from the fraction that it is taken for.
        silent: a gradient this much smaller than the largest, times the weight, counts as none.
        silent_row: the same for a row among the rows of its tensor.
        unchanged: change of outputs relative to their spread; a scaling that is no symmetry changes them by 1e-3 and
            more.
        same_loss: relative change of a loss that counts as none.
        losses_differ: relative difference between batches: a loss that is the same on all of them proves nothing.
        smallest_spread: outputs may hardly depend on the sample (deep networks with small gradients). Their spread then
            counts as at least this part of their size: rounding, relative to the size, must stay far below a change
            that counts.
        largest_log: base-2 logarithm of the largest factor on a number.
        constant: a variance this much smaller than the mean square is rounding (the square of ``noise``, more where
            terms cancel): the channel is constant and must stay so instead of being amplified to variance one.
        faint: a constant channel is scaled down by this, until nothing of it is left.
        remains: of constant channels, are recognised in a later normalisation by being this much smaller than others.
        smallest_variance: for an input of zeros.
        tiny_share: an element this much smaller than the mean is rounding, of a variance or a standard deviation, in a
            constant channel: its eps becomes the mean, so that it is not amplified to one.
    """

    dtype: torch.dtype
    noise: float
    largest_zero: float
    fraction: float
    silent: float
    silent_row: float
    unchanged: float
    same_loss: float
    losses_differ: float
    smallest_spread: float
    largest_log: float
    constant: float
    faint: float
    remains: float
    smallest_variance: float
    tiny_share: float


DOUBLE = Precision(
    torch.float64,
    noise=1e-16,
    largest_zero=1e-6,
    fraction=1e-5,
    silent=1e-9,
    silent_row=1e-11,
    unchanged=1e-7,
    same_loss=1e-9,
    losses_differ=1e-6,
    smallest_spread=1e-6,
    largest_log=1000.0,
    constant=1e-24,
    faint=1e-100,
    remains=1e-60,
    smallest_variance=1e-150,
    tiny_share=1e-15,
)
SINGLE = Precision(
    torch.float32,
    noise=1e-7,
    largest_zero=1e-4,
    fraction=2e-3,
    silent=1e-6,
    silent_row=1e-6,
    unchanged=1e-4,
    same_loss=1e-5,
    losses_differ=1e-4,
    smallest_spread=1e-2,
    largest_log=100.0,
    constant=1e-11,
    faint=1e-30,
    remains=1e-24,
    smallest_variance=1e-36,
    tiny_share=1e-6,
)
PRECISIONS = {precision.dtype: precision for precision in (DOUBLE, SINGLE)}


def precision_of(tensor: Tensor) -> Precision:
    """The precision that a tensor is computed in; complex numbers have that of their parts."""
    return PRECISIONS.get(tensor.dtype.to_real(), DOUBLE)


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
    precision = precision_of(values)
    variance, mean = torch.var_mean(values, axes, correction=0, keepdim=True)
    square = variance + mean.abs().square()
    variance = variance if centred else square
    overall = square.mean()
    constant = (variance <= precision.constant * square) | (variance <= precision.remains * overall)
    size = torch.where(constant, torch.maximum(square, overall).sqrt() / precision.faint, variance.sqrt())
    return torch.exp2(-size.clamp_min(precision.smallest_variance).log2().round())


# A constant of up to this size that a model adds to a tensor is taken for an eps.
_LARGEST_OWN_EPS = 1e-4
# It becomes this, relative to each element: it scales with the element, so it breaks no symmetry.
_NEGLIGIBLE = 1e-17
_SMALLEST = 1e-30  # for a tensor of zeros

_IN_PLACE = {"add_", "__iadd__"}
_ADDITIONS = {"add", "__add__", "__radd__"} | _IN_PLACE
_CONVERSIONS = {"float", "half", "bfloat16"}
_TYPES_BY_PRECISION = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Precise(TorchFunctionMode):
    """Changes the arguments of torch's functions: eps, the input of normalisations, and requested types.

    Args:
        dtype: the type to compute in; requests for one with fewer digits get this one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._lower = frozenset(_TYPES_BY_PRECISION[_TYPES_BY_PRECISION.index(dtype) + 1 :])

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
            return args[0].to(self._dtype)
        args = tuple(self._high(value) for value in args)
        return func(*args, **{key: self._high(value) for key, value in kwargs.items()})

    def _high(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in self._lower else value


@contextmanager
def precise(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Make torch compute in one type throughout, with normalisations whose eps is negligible.

    Parameters must require a gradient: a small number without a graph is taken for an eps.

    Args:
        dtype: float64 or float32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Precise(dtype):
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
    constant = (sizes > 0) & (sizes <= precision_of(sizes).tiny_share * mean)
    usual = _NEGLIGIBLE * torch.where(sizes > 0, sizes, mean)
    return torch.where(constant, mean, usual).clamp_min(_SMALLEST)
