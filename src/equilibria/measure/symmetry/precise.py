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
from torch.overrides import TorchFunctionMode

from equilibria.measure.symmetry.unit_input import NORMALISATIONS, normalise

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
