"""Recognition by trial: which closed-form rule an optimizer follows whose class is not known.

A throw-away copy of the optimizer, with the settings of one parameter group, steps on small tensors with random
gradients. A rule is accepted only if it explains every step, under two settings of lr, weight decay and momentum, so
that the law still holds when a schedule changes them. Half of the gradients are orthogonal to the rows of the weight,
as those of scale-invariant weights are: AdamP, for one, moves like AdamW under all others.

The copy is that of `equilibria.optimizers.copies`: nothing of the user's is touched.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, described
from equilibria.optimizers.copies import (
    FOREIGN_KEYS,
    MANY_PROCESSES,
    CannotCopyError,
    Group,
    copy_of,
    decay_key,
    decay_of,
    isolated,
    many_processes,
    step_function,
)
from equilibria.theory.muon import orthogonalised
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, AdjustLr, ClosedRule, Lion, Muon

Array: TypeAlias = NDArray[np.float64]

_STEPS = 24  # an optimizer that does something special every 5 or 10 steps (Lookahead) does it within these
_STEPS_ON_LARGE = 6
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(24,)],
    2: [(48, 12), (12, 48)],
    3: [(6, 4, 5)],
    4: [(20, 2, 2, 2)],
}
_LARGE_SHAPE = (160, 160)  # Adafactor and 8-bit optimizers, for example, treat small tensors in a way of their own
_LARGE = 4096  # entries
_GRADIENT_SIZES = (1.0, 0.3, 3.0, 0.05)  # in turn: clipping, and maxima over the past, show
_WEIGHT_SIZE = 10.0  # of an entry: decay is a large part of every step, so that a wrong one shows
_PHASES = (
    (0.01, 0.2, 1.0),
    (0.03, 0.07, 0.9),
)  # lr, weight decay, factor on momentum and betas; half of the steps each
_ROUNDING = 1e-5  # largest error of an entry relative to the largest entry of the step; states may be float32
# Norm of the error relative to the orthogonalised update: Newton-Schulz in bfloat16 differs from that in float64 by 3
# to 4 % at every step; Nesterov in place of plain momentum, and another factor for the shape, by 40 % at some.
_ROUNDING_OF_MUON = 0.1

_ALIASES = {"momentum": "mu", "betas": "adamw_betas"}  # names of the same settings in some optimizers
_NUMBERS_OF_RULES = frozenset(("lr", "weight_decay", "wd", "momentum", "mu", "betas", "adamw_betas"))


@dataclass(frozen=True, slots=True)
class RuleReader:
    """Reads a rule from a parameter group.

    Attributes:
        kind: class of the rule.
        fixed: settings that the group does not have, as pairs of name and value.
    """

    kind: type[ClosedRule]
    fixed: tuple[tuple[str, Any], ...] = ()

    def settings(self, group: Group) -> dict[str, Any]:
        """The rule's settings at the group's present values."""
        settings: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": decay_of(group)}
        for field in dataclasses.fields(self.kind):
            key = field.name if field.name in group else _ALIASES.get(field.name, field.name)
            if key in group and field.name not in settings:
                settings[field.name] = _setting(field.name, group[key])
        return settings | dict(self.fixed)


@dataclass(frozen=True, slots=True)
class Recognition:
    """The rule that an optimizer follows in a trial, or the reason why none is known.

    Attributes:
        reader: of the rule, or None.
        reason: why there is no rule; "" if there is one.
        overwrites_gradient: whether a step leaves something else in ``.grad``.
    """

    reader: RuleReader | None
    reason: str = ""
    overwrites_gradient: bool = False


def recognise(optimizer: Any, group: Group) -> Recognition:
    """Find the rule that an optimizer follows on a parameter group, by trial; a second call looks it up.

    Args:
        optimizer: any torch optimizer; it is not changed.
        group: one of its parameter groups.
    """
    known, key = _KNOWN.setdefault(optimizer, {}), _structure(group)
    if key not in known:
        known[key] = _tried(optimizer, group)
    return known[key]


_KNOWN: WeakKeyDictionary[Any, dict[Any, Recognition]] = WeakKeyDictionary()


def _structure(group: Group) -> Any:
    """What a trial depends on: a group without the numbers that a reader takes from it at every step."""
    has_momentum = bool(group.get("momentum") or group.get("mu"))
    others = tuple((key, repr(group[key])) for key in group if key not in FOREIGN_KEYS | _NUMBERS_OF_RULES)
    return tuple(key for key in group if key in _NUMBERS_OF_RULES), has_momentum, others, _sizes(group)


def _sizes(group: Group) -> tuple[tuple[int, ...], bool]:
    """The numbers of axes of a group's tensors, and whether a matrix or vector among them is large."""
    params = list(group.get("params", ()))
    axes = {min(param.ndim, max(_SHAPES)) for param in params}
    return tuple(sorted(axes or {2})), any(param.numel() > _LARGE for param in params)


def _tried(optimizer: Any, group: Group) -> Recognition:
    if many_processes():
        return Recognition(None, MANY_PROCESSES)
    try:
        with isolated():
            return _try(optimizer, group)
    except CannotCopyError as error:
        return Recognition(None, str(error))
    except Exception as error:  # the optimizer is foreign code
        return Recognition(None, f"a copy of it cannot be tried ({described(error)})")


def _try(optimizer: Any, group: Group) -> Recognition:
    axes, is_large = _sizes(group)
    shapes = [shape for number in axes for shape in _SHAPES[number]]
    trial = _Trial(copy_of(optimizer, group, _tensors(shapes)), steps=_STEPS)
    reader = next((reader for reader in _candidates(group) if trial.follows(reader)), None)
    if reader is not None and is_large and reader.kind is not Muon:
        large = _Trial(copy_of(optimizer, group, _tensors([_LARGE_SHAPE])), steps=_STEPS_ON_LARGE)
        reader = reader if large.follows(reader) else None
    if reader is None:
        return Recognition(None, "its steps on trial tensors are not those of SGD, SGDW, AdamW, Adam, Lion or Muon")
    return Recognition(reader, overwrites_gradient=trial.overwrites_gradient)


# ---- the trial


def _tensors(shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    torch: Any = sys.modules["torch"]
    rng = np.random.default_rng(0)
    return [torch.nn.Parameter(torch.as_tensor(_WEIGHT_SIZE * rng.standard_normal(shape))) for shape in shapes]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A step of one tensor."""

    weight: Array
    gradient: Array
    step: Array


class _Trial:
    """Steps of a copy of the optimizer, and the settings of its group at each.

    Args:
        double: the copy.
        steps: their number.

    Attributes:
        overwrites_gradient: whether a step changes ``.grad``.
    """

    def __init__(self, double: Any, *, steps: int) -> None:
        torch: Any = sys.modules["torch"]
        (group,) = double.param_groups
        own, rng = dict(group), np.random.default_rng(1)
        self.overwrites_gradient = False
        self._groups: list[dict[str, Any]] = []
        self._moves: list[list[_Move]] = []
        for number in range(steps):
            _set_phase(group, own, _PHASES[number * len(_PHASES) // steps])
            before = [param.detach().numpy().copy() for param in group["params"]]
            gradients = [_gradient(weight, number, rng) for weight in before]
            for param, gradient in zip(group["params"], gradients, strict=True):
                param.grad = torch.as_tensor(gradient.copy())
            step_function(type(double))(double)
            after = [param.detach().numpy() for param in group["params"]]
            left = [param.grad for param in group["params"]]
            self.overwrites_gradient |= any(
                grad is None or not np.array_equal(grad.numpy(), gradient)
                for grad, gradient in zip(left, gradients, strict=True)
            )
            self._groups.append({key: value for key, value in group.items() if key != "params"})
            moved = zip(before, gradients, after, strict=True)
            self._moves.append([_Move(weight, gradient, new - weight) for weight, gradient, new in moved])

    def follows(self, reader: RuleReader) -> bool:
        """Whether a rule explains every step of every tensor."""
        memories: list[_Memory] = [{} for _ in self._moves[0]]
        for number, (group, moves) in enumerate(zip(self._groups, self._moves, strict=True)):
            try:
                rule: Any = reader.kind(**reader.settings(group))
            except (EquilibriaError, TypeError, ValueError, KeyError):  # settings that the rule does not have
                return False
            eps = float(group.get("eps", group.get("adamw_eps", 1e-8)))
            for move, memory in zip(moves, memories, strict=True):
                if not _explains(rule, move, memory, number=number + 1, eps=eps):
                    return False
        return True


def _set_phase(group: dict[str, Any], own: Group, phase: tuple[float, float, float]) -> None:
    lr, decay, factor = phase
    for key, value in (("lr", lr), (decay_key(own), decay)):
        if key in own:
            group[key] = own[key].new_tensor(value) if hasattr(own[key], "new_tensor") else value
    for key in ("momentum", "mu"):
        if isinstance(own.get(key), float):
            group[key] = own[key] * factor
    for key in ("betas", "adamw_betas"):
        if isinstance(own.get(key), tuple | list):
            group[key] = type(own[key])(beta * factor for beta in own[key])


def _gradient(weight: Array, number: int, rng: np.random.Generator) -> Array:
    """A random gradient; every second one is orthogonal to the weight, row by row."""
    gradient = _GRADIENT_SIZES[number % len(_GRADIENT_SIZES)] * rng.standard_normal(weight.shape)
    if number % 2 and weight.ndim:
        axes = tuple(range(1, weight.ndim)) or (0,)
        products, squares = ((weight * other).sum(axis=axes, keepdims=True) for other in (gradient, weight))
        gradient = gradient - products / squares * weight
    return np.asarray(gradient)


def _candidates(group: Group) -> Iterator[RuleReader]:
    """The rules whose settings a group has."""
    if isinstance(group.get("betas", group.get("adamw_betas")), tuple | list):
        yield from (RuleReader(kind) for kind in (AdamW, AdamL2, Lion))
    nesterov = [()] if "nesterov" in group else [(("nesterov", value),) for value in (False, True)]
    yield from (RuleReader(SGD, fixed) for fixed in nesterov)
    yield RuleReader(SGDW)
    if "momentum" in group or "mu" in group:
        gains = [(("adjust_lr_fn", name),) for name in get_args(AdjustLr)]
        yield from (RuleReader(Muon, (*fixed, *gain)) for fixed, gain in itertools.product(nesterov, gains))


def _setting(name: str, value: Any) -> Any:
    if name == "betas":
        return tuple(float(beta) for beta in value)
    if name == "nesterov":
        return bool(value)
    return value if isinstance(value, str) else float(value)


# ---- one step of each rule

_Memory: TypeAlias = dict[str, Any]


def _explains(rule: ClosedRule, move: _Move, memory: _Memory, *, number: int, eps: float) -> bool:
    """Whether a rule explains a step; ``memory`` holds the rule's own buffers."""
    if isinstance(rule, Muon):
        # Gradients are averaged or added up: the same updates, until momentum changes.
        summed = [one for one in memory.get("summed", (False, True)) if _is_muon_step(rule, move, memory, summed=one)]
        memory["summed"] = summed
        return bool(summed)
    if isinstance(rule, SGD | SGDW):
        expected = _sgd_step(rule, move, memory, first=number == 1)
    elif isinstance(rule, Lion):
        expected = _lion_step(rule, move, memory)
    else:
        expected = _adam_step(rule, move, memory, number=number, eps=eps)
    return bool(np.abs(move.step - expected).max() <= _ROUNDING * np.abs(expected).max())


def _sgd_step(rule: SGD | SGDW, move: _Move, memory: _Memory, *, first: bool) -> Array:
    coupled = isinstance(rule, SGD)
    gradient = move.gradient + (rule.weight_decay * move.weight if coupled else 0.0)
    kept = 1.0 if first or not isinstance(rule, SGD) else 1 - rule.dampening
    memory["buffer"] = buffer = rule.momentum * memory.get("buffer", 0.0) + kept * gradient
    update = gradient + rule.momentum * buffer if isinstance(rule, SGD) and rule.nesterov else buffer
    return np.asarray(-rule.lr * update - (0.0 if coupled else rule.decay_per_step * move.weight))


def _adam_step(rule: AdamW | AdamL2, move: _Move, memory: _Memory, *, number: int, eps: float) -> Array:
    first, second = rule.betas
    coupled = isinstance(rule, AdamL2)
    gradient = move.gradient + (rule.weight_decay * move.weight if coupled else 0.0)
    memory["first"] = first * memory.get("first", 0.0) + (1 - first) * gradient
    memory["second"] = second * memory.get("second", 0.0) + (1 - second) * gradient**2
    update = memory["first"] / (1 - first**number) / (np.sqrt(memory["second"] / (1 - second**number)) + eps)
    return np.asarray(-rule.lr * update - (0.0 if coupled else rule.decay_per_step * move.weight))


def _lion_step(rule: Lion, move: _Move, memory: _Memory) -> Array:
    first, second = rule.betas
    buffer = memory.get("first", 0.0)
    memory["first"] = second * buffer + (1 - second) * move.gradient
    update = np.sign(first * buffer + (1 - first) * move.gradient)
    return np.asarray(-rule.lr * update - rule.decay_per_step * move.weight)


def _is_muon_step(rule: Muon, move: _Move, memory: _Memory, *, summed: bool) -> bool:
    """Whether a step is the orthogonalised momentum times the factor of the shape; of all rows for many axes."""
    if move.weight.ndim < 2:
        return False
    key, share = ("sum", 1.0) if summed else ("average", 1 - rule.momentum)
    memory[key] = buffer = rule.momentum * memory.get(key, 0.0) + share * move.gradient
    update = share * move.gradient + rule.momentum * buffer if rule.nesterov else buffer
    matrix = update.reshape(len(update), -1)
    rows, columns = matrix.shape
    update = rule.gain((rows, columns)) * orthogonalised(matrix).reshape(update.shape)
    error = move.step + rule.decay_per_step * move.weight + rule.lr * update
    return bool(np.linalg.norm(error) <= _ROUNDING_OF_MUON * rule.lr * np.linalg.norm(update))
