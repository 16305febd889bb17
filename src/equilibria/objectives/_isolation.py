"""Isolation of a loss from the model it came from: evaluating the loss leaves no trace in the model.

Three things make an evaluation a pure function of parameters and batch:

- `make_replica` copies the modules but shares the tensors. Modes, hooks and attributes of the replica can be changed
  without touching the model, and the replica follows the weights as training changes them.
- `without_gradient_checkpointing` turns recomputation into plain calls, because recomputation cannot be differentiated
  twice.
- `disable_dropout_modules` and `WithoutDropout` switch dropout off: in modules that drop by themselves, and in torch's
  functions, for every caller.

`preserved_rng` restores the random number generators that an evaluation may still advance.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from equilibria.errors import EquilibriaError

# ---- copies of the modules


def make_replica(module: nn.Module) -> nn.Module:
    """Copy the modules of a network around the same tensors.

    Raises:
        EquilibriaError: if ``copy.deepcopy`` cannot copy the module.
    """
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for submodule in module.modules():
        computed = (value for value in vars(submodule).values() if isinstance(value, Tensor) and not value.is_leaf)
        shared |= {id(value): value.detach() for value in computed}  # deepcopy rejects tensors with a graph
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:
        raise EquilibriaError(
            f"got a model of type {type(module).__name__} that cannot be copied ({type(error).__name__}: {error}); "
            "expected one that copy.deepcopy can copy: equilibria evaluates a copy, never the model itself"
        ) from error


def check_not_scripted(model: nn.Module) -> None:
    """Raise EquilibriaError if torch.jit has compiled the model or a part of it."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise EquilibriaError(
            f"got a model compiled by torch.jit ({scripted[0] or 'all of it'}), which cannot be called with other "
            "parameters; expected the module before compilation"
        )


def converted_module(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module, tensors included, and convert it as `converted` does."""
    copied = copy.deepcopy(module)
    copied._apply(lambda tensor: converted(tensor, dtype))  # type: ignore[no-untyped-call]  # Module.to has no complex
    return copied


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floating-point numbers to a type and complex ones to its complex type; leave other types as they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class IsolatedLoss:
    """A loss module, called on a replica so that its buffers and counters do not change.

    Args:
        replica: of the loss, from `make_replica`.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._replica = replica

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss, with the present parameters of the loss module."""
        buffers = {name: buffer.clone() for name, buffer in self._replica.named_buffers()}
        loss: Tensor = functional_call(self._replica, buffers, (output, target))
        return loss

    def to(self, dtype: torch.dtype) -> IsolatedLoss:
        """The same loss in another type, on a deep copy."""
        return IsolatedLoss(converted_module(self._replica, dtype))


# ---- gradient checkpointing


class _PlainCall:
    """Replaces the autograd function behind ``checkpoint(use_reentrant=True)``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _keep_activations(frame: object) -> AbstractContextManager[None]:
    """Replaces the hook with which ``checkpoint(use_reentrant=False)`` discards activations."""
    return nullcontext()


# Internals of torch.utils.checkpoint, not its public function: models import that one under names of their own.
_PLAIN: dict[str, Any] = {"CheckpointFunction": _PlainCall, "_checkpoint_hook": _keep_activations}


@contextmanager
def without_gradient_checkpointing() -> Iterator[None]:
    """Make ``torch.utils.checkpoint`` a plain call, whatever name a model has imported it by."""
    before = {name: getattr(torch_checkpoint, name) for name in _PLAIN}  # plain already if contexts are nested
    try:
        _patch_checkpoint(_PLAIN)
        yield
    finally:
        _patch_checkpoint(before)


def _patch_checkpoint(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(torch_checkpoint, name, function)


# ---- dropout

# Functions that return their input where nothing is dropped.
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
# Functions with a dropout probability among their arguments -> its position.
_PROBABILITY_POSITION: dict[Any, int] = {
    functional.scaled_dot_product_attention: 4,
    functional.multi_head_attention_forward: 10,
}


class WithoutDropout(TorchFunctionMode):
    """Context in which torch's functions drop nothing, whatever probability they are called with."""

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


def disable_dropout_modules(replica: nn.Module) -> None:
    """Switch off the modules of a replica that drop by themselves, by attributes of the modules alone.

    Modules that do nothing but drop (Dropout, DropPath, StochasticDepth) get eval mode; recurrent networks and networks
    that skip layers get the probability zero. `WithoutDropout` takes care of the functions that modules call. Configs
    stay as they are, because a model may share its config with others.
    """
    for module in replica.modules():
        if _only_drops(module):
            module.training = False
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if isinstance(vars(module).get("layerdrop"), float):
            vars(module)["layerdrop"] = 0.0


def _only_drops(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    is_leaf = next(module.children(), None) is None and next(module.parameters(), None) is None
    return is_leaf and ("drop" in name or "stochasticdepth" in name)


# ---- random numbers


@contextmanager
def preserved_rng(tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restore the random number generators on exit: of torch (also on the tensors' GPUs), numpy and Python."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    on_devices = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
        for device, state in on_devices.items():
            torch.cuda.set_rng_state(state, device)
