"""Dropout switched off without writing to anything that the user's model may share: a config, a class, a default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

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
