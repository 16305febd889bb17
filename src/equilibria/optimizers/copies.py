"""Throw-away copies of an optimizer, to be tried on tensors of their own.

Nothing of the user's is touched: a copy gets numbers, words and functions only, and tensors of its own; global
optimizer hooks do not see it, and `isolated` restores the random number generators. Torch is looked up in
``sys.modules``, as in `equilibria.optimizers.rules`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import io
import math
import random
import sys
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from equilibria.optimizers.controllers import CONTROL_LOG

Group: TypeAlias = Mapping[str, Any]

# Keys and attributes that others than the optimizer write.
FOREIGN_KEYS = frozenset(
    ("params", "param_names", "step", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
)
_FOREIGN_ATTRIBUTES = frozenset(
    ("state", "param_groups", "defaults", "step", "_step_count", "_opt_called", CONTROL_LOG)
)

MakeCopy: TypeAlias = Callable[[list[Any], dict[str, Any]], Any]
"""Makes a copy of an optimizer on some tensors, with some of its settings replaced."""

_ENTRIES = 2048
_LARGEST = 1 << 20  # entries of it

MANY_PROCESSES = "an unknown optimizer is not tried where several processes train: it may wait for them"


class CannotCopyError(Exception):
    """The optimizer holds more than numbers and words outside its groups."""


def decay_key(group: Group) -> str:
    """What a group calls its weight decay: Moonshot's Muon says 'wd'."""
    return "wd" if "wd" in group and "weight_decay" not in group else "weight_decay"


def decay_of(group: Group) -> float:
    """The weight decay of a group; 0 without the setting."""
    return float(group.get(decay_key(group), 0.0))


def rule_groups(optimizer: Any) -> list[Any]:
    """An optimizer's parameter groups; one whose tensors have different flags in their state, one view for each.

    Moonshot's Muon has matrices for Muon and all others for AdamW in one group; ``use_muon`` distinguishes them.
    """
    groups: list[Any] = []
    for group in optimizer.param_groups:
        by_flags: dict[tuple[tuple[str, bool], ...], list[Any]] = {}
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            flags = ((key, value) for key, value in state.items() if isinstance(value, bool) and _is_flag(key))
            by_flags.setdefault(tuple(flags), []).append(param)
        views = [ChainMap({"params": params, **dict(flags)}, group) for flags, params in by_flags.items()]
        groups += views if len(views) > 1 else [group]
    return groups


def _is_flag(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("use_")


def copy_of(optimizer: Any, group: Group, params: Sequence[Any]) -> Any:
    """An optimizer of the same class, attributes and settings on other tensors, made without its constructor.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: the parameter group whose settings the copy gets.
        params: the tensors of the copy.

    Raises:
        CannotCopyError: the optimizer keeps tensors or objects that cannot be copied safely.
    """
    torch: Any = sys.modules["torch"]
    settings = {key: _copied(key, value) for key, value in group.items() if key not in FOREIGN_KEYS}
    settings |= {key: False for key in ("capturable", "fused") if settings.get(key)}  # the same rule, for GPUs
    defaults = {key: _copied(key, value) for key, value in getattr(optimizer, "defaults", {}).items()}
    double = object.__new__(type(optimizer))
    torch.optim.Optimizer.__init__(double, [{"params": list(params), **settings}], defaults)
    for name, value in vars(optimizer).items():
        if name not in _FOREIGN_ATTRIBUTES and name not in vars(double):
            setattr(double, name, _copied(name, value))
    if callable(getattr(double, "train", None)):  # schedule-free ones refuse to step while they evaluate
        double.train()
    for param in params:  # words about a tensor that a constructor writes, such as Moonshot's use_muon
        double.state[param].update(_common_flags(optimizer, group))
    return double


def _common_flags(optimizer: Any, group: Group) -> dict[str, bool | str]:
    states = [optimizer.state[param] for param in group.get("params", ()) if param in optimizer.state]
    flags = [{key: value for key, value in state.items() if isinstance(value, bool | str)} for state in states]
    if any(other != flags[0] for other in flags):
        raise CannotCopyError("the tensors of one parameter group follow different rules")
    return flags[0] if flags else {}


def _copied(name: str, value: Any) -> Any:
    torch: Any = sys.modules["torch"]
    if not _is_plain(value, torch):
        raise CannotCopyError(f"a copy of it cannot be tried, because it keeps a {type(value).__name__} as {name!r}")
    return copy.deepcopy(value)


def _is_plain(value: Any, torch: Any) -> bool:
    if isinstance(value, tuple | list | set | frozenset):
        return all(_is_plain(item, torch) for item in value)
    if isinstance(value, Mapping):
        return all(_is_plain(item, torch) for item in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, field.name), torch) for field in dataclasses.fields(value))
    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad)
    plain = (bool, int, float, complex, str, enum.Enum, np.generic, torch.dtype, torch.device)
    return value is None or isinstance(value, (*plain, types.FunctionType, types.BuiltinFunctionType, type))


def copies_of(optimizer: Any, group: Group) -> MakeCopy:
    """A function that makes copies of an optimizer; by its constructor if a copy made without it cannot step."""
    torch: Any = sys.modules["torch"]

    def plain(params: list[Any], settings: Mapping[str, float]) -> Any:
        return copy_of(optimizer, {**group, **_given(group, settings)}, params)

    def constructed(params: list[Any], settings: Mapping[str, float]) -> Any:
        own = {key: value for key, value in group.items() if key in getattr(optimizer, "defaults", {})}
        double = type(optimizer)(params, **{**own, **_given(group, settings)})
        if not settings_outside_groups(optimizer).items() <= settings_outside_groups(double).items():
            raise CannotCopyError("its constructor, called with the settings of its group, makes another optimizer")
        return double

    def failure(make: MakeCopy) -> Exception | None:
        param = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        try:
            double = make([param], {})
            for _ in range(2):
                param.grad = torch.full_like(param, 0.1)
                step_function(type(double))(double)
        except Exception as error:
            return error
        return None

    first = failure(plain)
    if first is None or failure(constructed) is not None:
        if isinstance(first, CannotCopyError):
            raise first
        return plain
    return constructed


def settings_outside_groups(optimizer: Any) -> dict[str, str]:
    """The attributes of an optimizer that are numbers, words or functions, or contain nothing else, as text."""
    torch: Any = sys.modules["torch"]
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _FOREIGN_ATTRIBUTES}
    return {
        name: repr(value)
        for name, value in attributes.items()
        if not name.startswith("_optimizer_") and _is_plain(value, torch)
    }


def _given(group: Group, settings: Mapping[str, float]) -> dict[str, Any]:
    """Settings in the form that the group has: a learning rate may be a tensor."""
    named = {decay_key(group) if key == "weight_decay" else key: value for key, value in settings.items()}
    return {
        key: group[key].new_tensor(value) if hasattr(group[key], "new_tensor") else value
        for key, value in named.items()
        if key in group
    }


def tried_shape(group: Group, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """A shape cut to a million entries; by default that of a group's largest tensor, matrices before vectors."""
    shapes = [tuple(param.shape) for param in group.get("params", ())]
    shape = shape or max(shapes, key=lambda shape: (len(shape) > 1, math.prod(shape)), default=()) or (1,)
    return shape if math.prod(shape) <= _LARGEST else _resized(shape, _LARGEST)


def probe_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A small shape with the axes and, up to 16:1, the aspect ratio of another one."""
    if len(shape) < 2:
        return (_ENTRIES,)
    rows, columns, *window = shape
    ratio = min(max(rows / columns, 1 / 16), 16.0)
    return _resized((round(1000 * ratio), 1000, *(min(length, 3) for length in window)), _ENTRIES)


def _resized(shape: tuple[int, ...], entries: int) -> tuple[int, ...]:
    first, *others = shape
    if not others:
        return (entries,)
    factor = math.sqrt(entries / math.prod(shape))
    return (max(2, round(first * factor)), max(2, round(others[0] * factor)), *others[1:])


def reference_lr(group: Group) -> float:
    """The lr of the experiment: before a scheduler changed it, if one did."""
    return float(group.get("initial_lr", group["lr"])) or float(group["lr"])


def longest_memory(group: Group) -> float:
    """Steps over which the group's momenta and betas average, of the longest."""
    flat = [item for value in group.values() for item in (value if isinstance(value, tuple | list) else (value,))]
    rates = [float(item) for item in flat if isinstance(item, float) and 0.5 < item < 1]
    return max((1 / (1 - rate) for rate in rates), default=1.0)


def step_function(kind: type) -> Any:
    """The step function of a class, without torch's wrapper, which would call global hooks."""
    step: Any = getattr(kind, "step", None)
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def many_processes() -> bool:
    """Whether several processes train together."""
    torch: Any = sys.modules["torch"]
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Restore the random number generators afterwards; no output, no warnings, gradients and numbers as by default."""
    torch: Any = sys.modules["torch"]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.compiler.set_stance("force_eager"),  # compiling a step for a trial would take seconds
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
