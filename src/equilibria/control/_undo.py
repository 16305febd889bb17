"""A scheduler step that fails leaves everything as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer


@contextmanager
def settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Put the settings of all parameter groups (lr, weight decay, momentum) back if what is inside fails."""
    held = [{key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        for group, settings in zip(optimizer.param_groups, held, strict=True):
            for key, value in settings.items():
                _put_back(group, key, value)
        raise


@contextmanager
def scheduler_kept(scheduler: LRScheduler) -> Iterator[None]:
    """Put a scheduler's state back, and the settings that it made, if what is inside fails."""
    state = _copy(scheduler.state_dict())
    with settings_kept(scheduler.optimizer):
        try:
            yield
        except BaseException:
            scheduler.load_state_dict(state)
            raise


def _copy(value: Any) -> Any:
    """Numbers, and what holds them; other objects as they are: a scheduler may hold a whole model."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copy(each) for each in value]
    if isinstance(value, dict):
        held = copy.copy(value)
        held.update({key: _copy(each) for key, each in value.items() if isinstance(each, Tensor | list | dict)})
        return held
    return value


def _put_back(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor) and isinstance(value, Tensor):
        group[key].copy_(value)  # a compiled step holds on to the tensor
    else:
        group[key] = value
