"""A forward pass in exact arithmetic, as far as float64 goes: no eps in normalisations, no step back to float32.

Symmetries are blurred by two habits of networks: a normalisation adds eps to a variance, and code converts to float32
for a while "for stability". Both are undone at the level of torch's functions, so that it does not matter who wrote
the module or how it calls its eps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# An eps of this size relative to the variance it is added to: it scales with the input, so it breaks no
# symmetry, and a constant channel, whose variance is rounding (1e-32 of its square), stays constant.
_RELATIVE = 1e-17
_SMALLEST = 1e-30  # for an input of zeros
# A constant of this size that is added to a tensor is somebody's own eps.
_LARGEST_OWN_EPS = 1e-4

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
_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_CONVERSIONS = {"float", "half", "bfloat16"}
_LOW = {torch.float32, torch.float16, torch.bfloat16}


class _Precise(TorchFunctionMode):
    """Changes what is passed to torch's functions: eps, and the types asked for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _EPS_POSITION:
            eps = _negligible(_variance(name, args[0] if args else kwargs["input"]))
            args, kwargs = _with_eps(eps, _EPS_POSITION[func], args, kwargs)
        elif name in _ADDITIONS and _adds_eps(args):
            args = (args[0], _negligible(args[0].detach().abs()), *args[2:])
        elif name in _CONVERSIONS and args and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(_high(each) for each in args)
        return func(*args, **{key: _high(each) for key, each in kwargs.items()})


@contextmanager
def precise() -> Iterator[None]:
    """Inside, torch computes in float64 throughout, with normalisations whose eps is negligible."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Precise():
            yield
    finally:
        torch.set_default_dtype(before)


def _with_eps(
    eps: float, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > position:
        return (*args[:position], eps, *args[position + 1 :]), kwargs
    return args, {**kwargs, "eps": eps}


def _variance(normalisation: str, of: Tensor) -> Tensor:
    """What eps is added to, roughly: what a normalisation subtracts first must not count."""
    held = of.detach()
    if normalisation == "batch_norm":
        return held.transpose(0, 1).flatten(1).var(1, correction=0)
    return held.flatten(2).var(2, correction=0) if normalisation == "instance_norm" else held.square()


def _negligible(beside: Tensor) -> float:
    return max(_RELATIVE * float(beside.mean()), _SMALLEST)


def _adds_eps(args: tuple[Any, ...]) -> bool:
    if len(args) < 2 or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return False
    other = args[1]
    if isinstance(other, Tensor) and other.ndim == 0 and other.is_floating_point() and not other.requires_grad:
        other = float(other)  # an eps in a buffer
    return isinstance(other, float) and 0 < other <= _LARGEST_OWN_EPS


def _high(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value
