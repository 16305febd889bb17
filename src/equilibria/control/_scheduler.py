"""A learning-rate scheduler around another one: what the controllers of this folder share."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.errors import EquilibriaError
from equilibria.tensors.parameters import unwrap_optimizer


class Hooked:
    """Hooks that survive ``copy.deepcopy`` and pickle: torch's optimizers leave theirs behind.

    A copy is made together with its optimizer and its model, or in one call with them: ``copy.deepcopy((model,
    optimizer, scheduler))``. A subclass says in `_hooks` what to register, and calls `_attach` when it is complete.
    """

    _handles: tuple[RemovableHandle, ...] = ()

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        """Register the hooks."""
        raise NotImplementedError

    def _attach(self) -> None:
        self._handles = self._hooks()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _handles=())
        if state["_handles"]:
            self._attach()

    def __copy__(self) -> NoReturn:
        raise EquilibriaError(
            f"got copy.copy of {type(self).__name__}; expected copy.deepcopy, of it together with the model and the "
            "optimizer: two of them would act on one optimizer"
        )


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


class SchedulerWrapper(LRScheduler):
    """Takes a scheduler's place: it steps it, and has the methods that training loops and loggers call.

    Args:
        scheduler: any torch scheduler, another wrapper, or an optimizer whose learning rate stays as it is.
    """

    def __init__(self, scheduler: LRScheduler | Optimizer) -> None:
        # Not the constructor of the base class: it would set the learning rates once more.
        if not isinstance(scheduler, LRScheduler):
            if isinstance(scheduler, type) or not hasattr(scheduler, "param_groups"):
                raise EquilibriaError(
                    f"got scheduler={_shown(scheduler)}; expected a torch.optim.lr_scheduler, or an optimizer whose "
                    "learning rate stays as it is"
                )
            scheduler = ConstantLR(unwrap_optimizer(scheduler), factor=1.0, total_iters=0)
        self.scheduler = scheduler
        self.optimizer: Optimizer = unwrap_optimizer(scheduler.optimizer)

    @property
    def last_epoch(self) -> int:
        """How often the scheduler was stepped."""
        return self.scheduler.last_epoch

    @last_epoch.setter
    def last_epoch(self, _: int) -> None:  # SequentialLR and its like reset those that they chain
        raise EquilibriaError(
            f"got {type(self).__name__} inside of another scheduler; expected it outermost: wrap the SequentialLR "
            f"instead, {type(self).__name__}(SequentialLR(...), ...)"
        )

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The learning rates that the schedule started from."""
        return self.scheduler.base_lrs

    def get_lr(self) -> list[float | Tensor]:
        """The learning rates now, one per parameter group."""
        return copies(group["lr"] for group in self.optimizer.param_groups)

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates last set, one per parameter group."""
        return self.scheduler.get_last_lr()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler; arguments, such as ReduceLROnPlateau's metric, are handed on."""
        self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; numbers, and the scheduler's own state."""
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint; load the optimizer's as well."""
        if "scheduler" not in state_dict:
            raise EquilibriaError(
                f"got a state with {', '.join(map(str, state_dict)) or 'nothing'}; expected the state_dict() of a "
                f"{type(self).__name__}, which holds that of the scheduler inside as 'scheduler'"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])


def _shown(given: object) -> str:
    """A short name: a whole model would fill pages."""
    return f"the class {given.__name__}" if isinstance(given, type) else f"an object of type {type(given).__name__}"


def copies(values: Any) -> list[float | Tensor]:
    """Settings as they are; tensors as copies, so that nobody changes the optimizer's by accident."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def unshare_lr(optimizer: Optimizer) -> None:
    """Give each group a learning rate of its own: a tensor lr given to an optimizer is one tensor in all its groups."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in seen:
            group["lr"] = group["lr"].clone()
        seen.add(id(group["lr"]))


def set_value(group: dict[str, Any], key: str, value: float) -> None:
    """Set a group's setting; a tensor is filled, because a compiled step holds on to it."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
