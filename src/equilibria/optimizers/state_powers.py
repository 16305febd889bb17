"""How the state of an optimizer grows with its gradients, measured on a copy: a momentum as |g|, Adam's v as |g|^2."""

from __future__ import annotations

import math
import sys
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.optimizers.copies import CannotCopyError, Group, copies_of, isolated, longest_memory, reference_lr
from equilibria.optimizers.walks import Conditions, Walk

_SHAPE = (48, 24)
_RMS, _GRADIENT = 0.1, 0.01  # root mean square entries of weight and gradient
_SLOW = 1e-4  # of the lr: the two walks stay together
_FEW, _MOST = 40, 2000  # steps
_NEAR = 0.02  # distance of a power from a multiple of a half


def state_powers(optimizer: Any, group: Group) -> dict[str, float]:
    """The powers of the gradient's length with which the tensors of a group's state grow.

    Two copies take the same gradients, those of one twice as long; without weight decay, at a small lr.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: one of its parameter groups.

    Raises:
        EquilibriaError: a tensor that is no power of the gradient, or a state that is more than tensors and numbers.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.RMSprop([torch.nn.Parameter(torch.ones(8, 8))], momentum=0.9)
        >>> state_powers(optimizer, optimizer.param_groups[0])
        {'square_avg': 2.0, 'momentum_buffer': 0.0}
    """
    name = type(optimizer).__name__
    try:
        with isolated():
            sizes = [_state_sizes(optimizer, group, factor) for factor in (1.0, 2.0)]
    except CannotCopyError as error:
        raise EquilibriaError(f"got {name}: {error}", argument="optimizer") from error
    powers = {key: math.log2(sizes[1][key] / size) for key, size in sizes[0].items() if size}
    for key, power in powers.items():
        if abs(power - round(2 * power) / 2) > _NEAR:
            raise EquilibriaError(
                f"got optimizer state {key!r} of {name}, which grows by {2**power:.3g} with gradients twice as long; "
                "expected a power of them",
                argument="optimizer",
            )
    return {key: round(2 * power) / 2 for key, power in powers.items()}


def _state_sizes(optimizer: Any, group: Group, factor: float) -> dict[str, float]:
    """Lengths of the state's tensors after their memories are full."""
    torch: Any = sys.modules["torch"]
    root = math.sqrt(math.prod(_SHAPE))
    at = Conditions(_SLOW * reference_lr(group), 0.0, _RMS * root, _GRADIENT * _RMS * root**2, _SHAPE)
    walk = Walk(copies_of(optimizer, group), at, twins=False)
    walk.gradient_factor = factor
    walk.advance(int(min(max(_FEW, longest_memory(group)), _MOST)), hold=True)
    state = walk.optimizer.state[walk.param]
    for key, value in state.items():
        if isinstance(value, list | tuple | dict):
            raise EquilibriaError(
                f"got optimizer state {key!r} of {type(optimizer).__name__}, a {type(value).__name__}; expected "
                "tensors and numbers: how it scales with the gradient is not known",
                argument="optimizer",
            )
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    return {key: float(value.double().norm()) for key, value in tensors.items()}
