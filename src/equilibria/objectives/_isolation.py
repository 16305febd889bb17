"""Copies of modules that share the tensors of the original, so that calling them disturbs nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from equilibria.errors import EquilibriaError


def shell_of(model: nn.Module) -> nn.Module:
    """Modules of their own around the very tensors of the model."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for module in model.modules():
        computed = (value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach() for value in computed}  # torch refuses to copy a tensor with history
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise EquilibriaError(
            f"got a model of type {type(model).__name__} that cannot be copied ({type(error).__name__}: {error}); "
            "expected one that copy.deepcopy can copy: the model itself is never touched"
        ) from error


def refuse_scripted(model: nn.Module) -> None:
    """Refuse what torch.jit has compiled.

    Raises:
        EquilibriaError: if the model or a part of it is such a module.
    """
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise EquilibriaError(
            f"got a model compiled by torch.jit ({scripted[0] or 'all of it'}), which cannot be called with other "
            "parameters; expected the module that it was made from"
        )


def double_module(module: nn.Module) -> nn.Module:
    """A deep copy in float64."""
    copied = copy.deepcopy(module)
    copied._apply(to_double)  # type: ignore[no-untyped-call]  # also complex ones, which Module.double leaves alone
    return copied


def to_double(tensor: Tensor) -> Tensor:
    """A tensor of floating-point numbers in float64, or complex128; another as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class PrivateLoss:
    """A loss that is a module, called on a shell of it: its own buffers and counters stay as they are.

    Args:
        shell: of `shell_of`.
    """

    def __init__(self, shell: nn.Module) -> None:
        self._shell = shell

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss, with its parameters as they are now."""
        buffers = {name: buffer.clone() for name, buffer in self._shell.named_buffers()}
        found: Tensor = functional_call(self._shell, buffers, (output, target))
        return found

    def double(self) -> PrivateLoss:
        """The same in float64, on a deep copy."""
        return PrivateLoss(double_module(self._shell))


class _PlainCall:
    """In place of the function of torch that computes anew, for ``use_reentrant=True``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _no_hook(frame: object) -> AbstractContextManager[None]:
    """In place of what forgets activations, for ``use_reentrant=False``."""
    return nullcontext()


_PLAIN: dict[str, Any] = {"CheckpointFunction": _PlainCall, "_checkpoint_hook": _no_hook}


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint`` is a plain call, by whatever name a model has imported it."""
    before = {name: getattr(torch_checkpoint, name) for name in _PLAIN}  # plain already, if this is inside another
    try:
        _replace(_PLAIN)
        yield
    finally:
        _replace(before)


def _replace(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(torch_checkpoint, name, function)


# Functions that are their input where nothing is dropped.
_DROPOUTS: set[Any] = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
}
_PROBABILITY_POSITION: dict[Any, int] = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}


class WithoutDropout(TorchFunctionMode):
    """Inside, torch's functions drop nothing, whoever calls them and with whatever probability."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _PROBABILITY_POSITION:
            position = _PROBABILITY_POSITION[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


def switch_off_dropout(copied: nn.Module) -> None:
    """Switch off the modules of a copy that drop by themselves; only attributes of the modules are written.

    Modules that are nothing but dropout (Dropout, DropPath, StochasticDepth) get eval mode, recurrent networks and
    those that skip layers the probability zero. Functions that such modules call are the matter of `WithoutDropout`.
    """
    for module in copied.modules():
        if _only_drops(module):
            module.training = False
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if isinstance(vars(module).get("layerdrop"), float):
            vars(module)["layerdrop"] = 0.0


def _only_drops(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    bare = next(module.children(), None) is None and next(module.parameters(), None) is None
    return bare and ("drop" in name or "stochasticdepth" in name)
