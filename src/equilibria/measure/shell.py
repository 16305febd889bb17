"""Copies of modules that share the tensors of the original, so that calling them disturbs nothing."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
