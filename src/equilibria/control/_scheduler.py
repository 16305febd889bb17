"""Base classes of the controllers that are schedulers: wrapping a scheduler, hooks that survive copies, undoing."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR, CyclicLR, LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from equilibria.errors import EquilibriaError
from equilibria.optimizers.controllers import announce, withdraw
from equilibria.tensors.parameters import unwrap_optimizer
from equilibria.theory.identified import Identified
from equilibria.theory.rules import Rule


class SchedulerWrapper(LRScheduler):
    """Takes a scheduler's place: steps it, and has the methods that training loops and loggers call.

    Args:
        scheduler: any torch scheduler, another wrapper, or an optimizer: then the lr counts that its groups have
            right before each step.

    Attributes:
        unscheduled: the parameter groups whose lr no scheduler has noted as its first.
    """

    unscheduled: Set[int] = frozenset()

    def __init__(self, scheduler: LRScheduler | Optimizer) -> None:
        # The base class's constructor would set the learning rates once more, so it is not called.
        if not isinstance(scheduler, LRScheduler):
            if isinstance(scheduler, type) or not hasattr(scheduler, "param_groups"):
                raise EquilibriaError(
                    f"got scheduler={_kind(scheduler)}; expected a torch.optim.lr_scheduler, or an optimizer",
                    argument="scheduler",
                )
            inner = unwrap_optimizer(scheduler)
            self.unscheduled = {i for i, group in enumerate(inner.param_groups) if "initial_lr" not in group}
            scheduler = ConstantLR(inner, factor=1.0, total_iters=0)
        elif isinstance(scheduler, SchedulerWrapper):
            self.unscheduled = set(scheduler.unscheduled)
        self.scheduler = scheduler
        self.optimizer: Optimizer = unwrap_optimizer(scheduler.optimizer)

    @property
    def last_epoch(self) -> int:
        """Number of steps the scheduler has taken."""
        return self.scheduler.last_epoch

    @last_epoch.setter
    def last_epoch(self, _: int) -> None:  # SequentialLR and similar schedulers reset those that they chain
        raise EquilibriaError(
            f"got {type(self).__name__} inside another scheduler; expected it outermost: wrap the SequentialLR "
            f"instead, {type(self).__name__}(SequentialLR(...), ...)"
        )

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The learning rates that the schedule started from."""
        return self.scheduler.base_lrs

    def get_lr(self) -> list[float | Tensor]:
        """The present learning rates, one per parameter group."""
        return copies(group["lr"] for group in self.optimizer.param_groups)

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates last set, one per parameter group."""
        return self.scheduler.get_last_lr()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, passing on arguments such as ReduceLROnPlateau's metric."""
        self.scheduler.step(*args, **kwargs)

    def typed_settings(self, index: int) -> dict[str, Any]:
        """The settings of a parameter group that a user typed: a warm-up may have changed them already.

        For OneCycleLR and CyclicLR, which replace the learning rate, that of their peak, and the momentum there.
        """
        inner = self.scheduler
        return inner.typed_settings(index) if isinstance(inner, SchedulerWrapper) else _typed_settings(inner, index)

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: numbers, and the state of the wrapped scheduler."""
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint; load the optimizer's as well."""
        if "scheduler" not in state_dict:
            raise EquilibriaError(
                f"got a state with {', '.join(map(str, state_dict)) or 'nothing'}; expected the state_dict() of a "
                f"{type(self).__name__}, which has the wrapped scheduler's state as 'scheduler'",
                argument="state_dict",
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])


def _kind(value: object) -> str:
    """A short name: the repr of a model would fill pages."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


class Hooked:
    """A controller with hooks on its optimizer, on which it announces itself.

    Hooks are registered again after ``copy.deepcopy`` and pickle, because torch's optimizers do not copy theirs. Copy a
    controller in one call with its model and optimizer: ``copy.deepcopy((model, optimizer, scheduler))``. A subclass
    registers its hooks in `_hooks` and calls `_attach` at the end of its constructor.
    """

    optimizer: Optimizer
    follows_settings = False  # whether it acts on what lr and weight decay are, rather than on them
    _handles: tuple[RemovableHandle, ...] = ()

    @property
    def promise(self) -> str:
        """What it does, in a few words that follow its name."""
        raise NotImplementedError

    def _hooks(self) -> tuple[RemovableHandle, ...]:
        """Register the hooks."""
        raise NotImplementedError

    def _attach(self) -> None:
        self._handles = self._hooks()
        announce(self.optimizer, self)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()
        withdraw(self.optimizer, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _handles=())
        if state["_handles"]:
            self._attach()

    def __copy__(self) -> NoReturn:
        raise EquilibriaError(
            f"got copy.copy of {type(self).__name__}; expected copy.deepcopy, of it together with the model and the "
            "optimizer: two controllers would act on one optimizer"
        )


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments that a step hook received; None without one."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


# ---- undoing a step that fails


@contextmanager
def restoring_settings(optimizer: Optimizer) -> Iterator[None]:
    """Restore the settings of all parameter groups (lr, weight decay, momentum) if the body raises."""
    before = [
        {key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    try:
        yield
    except BaseException:
        for group, settings in zip(optimizer.param_groups, before, strict=True):
            for key, value in settings.items():
                _restore(group, key, value)
        raise


@contextmanager
def restoring_scheduler(scheduler: LRScheduler) -> Iterator[None]:
    """Restore a scheduler's state and the optimizer settings that it made if the body raises."""
    state = _copy(scheduler.state_dict())
    with restoring_settings(scheduler.optimizer):
        try:
            yield
        except BaseException:
            scheduler.load_state_dict(state)
            raise


def _copy(value: Any) -> Any:
    """Copy numbers and their containers; other objects are shared, because a scheduler may refer to a whole model."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copy(item) for key, item in value.items() if isinstance(item, Tensor | list | dict)})
        return copied
    return value


def _restore(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group[key], Tensor) and isinstance(value, Tensor):
        group[key].copy_(value)  # a compiled step refers to this tensor
    else:
        group[key] = value


# ---- settings of parameter groups, which may be tensors


def _typed_settings(scheduler: LRScheduler, index: int) -> dict[str, Any]:
    """The settings of a parameter group before a schedule moved them: initial_lr, or the peak of a cycle."""
    group = scheduler.optimizer.param_groups[index]
    if isinstance(scheduler, CyclicLR):
        peak = scheduler.max_lrs[index]
    elif "max_lr" in group:  # OneCycleLR
        peak = group["max_lr"]
    else:
        return {"lr": group.get("initial_lr", group["lr"])}
    if "base_momentum" not in group:
        return {"lr": peak}
    momentum = group["base_momentum"]
    moved = {"betas": (momentum, *group["betas"][1:])} if "betas" in group else {"momentum": momentum}
    return {"lr": peak, **moved}


def resumed(rule: Rule, settings: Mapping[str, Any]) -> Rule:
    """A rule with its settings from a checkpoint: JSON turns pairs into lists; a measured law is measured again."""
    known: dict[str, Any] = dict(settings)
    known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    if isinstance(rule, Identified):
        known = {name: known[name] for name in ("lr", "weight_decay")}
    return dataclasses.replace(rule, **known)


def copies(values: Iterable[float | Tensor]) -> list[float | Tensor]:
    """Settings with tensors copied, so that callers cannot change the optimizer's."""
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def unshare_lr(optimizer: Optimizer) -> None:
    """Give each group its own learning rate: torch puts one tensor lr into all groups of an optimizer."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in seen:
            group["lr"] = group["lr"].clone()
        seen.add(id(group["lr"]))


def set_value(group: dict[str, Any], key: str, value: float) -> None:
    """Set a group's setting; a tensor is filled, because a compiled step refers to it."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
