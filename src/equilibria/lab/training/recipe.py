"""A training as a value: `Recipe`, the pieces that recipes are made of, and the fingerprint that identifies one."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.objectives._isolation import preserved_rng
from equilibria.tensors.parameters import Select

if TYPE_CHECKING:
    from equilibria.lab.training.training import Training

LRFactor = Callable[[int], float]
"""Step -> factor of all learning rates."""
Batch = tuple[Tensor, Tensor]
_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_DEVICES = ("cpu", "cuda")  # sums are kept in float64, which other devices lack


class Measure(Protocol):
    """Measures a training between steps and leaves it unchanged.

    A measure with state also has ``state_dict()`` and ``load_state_dict(state)``, so that a training that is resumed
    after a kill gives the same numbers.
    """

    def __call__(self, training: Training) -> Mapping[str, float | NDArray[Any]]:
        """Numbers, or arrays of one shape, by name; the same names each time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Everything a training consists of; equal recipes give equal weights, bit for bit, on one kind of machine.

    This holds on the CPU; some GPU kernels sum in another order each time.

    Attributes:
        model: function that makes the network; called once, after torch's generator was seeded. The network is put
            into training mode; a module that stays in evaluation mode must override its own ``train()``.
        optimizer: function that makes the optimizer of that network; see `decay_groups`.
        data: batches (inputs, targets) without end, the same each time it is iterated: `equilibria.lab.data.Batches`,
            or a `FullBatch`. Two recipes with equal data train on the same batches in the same order, whatever else
            differs.
        steps: in all, from the first weights on.
        seed: of the first weights, and of random numbers in the network, such as dropout.
        loss: outputs, targets -> their mean loss.
        schedule: step, counted from 0 -> factor of the learning rates of all groups in that step; not negative.
        control: scheduler, model -> the scheduler wrapped, such as `equilibria.control.RescaleOnDecay`.
        chunk: samples per backward pass; None for the whole batch at once. The gradient is that of the mean loss over
            the batch, unless the samples of a chunk are coupled, as by BatchNorm: see `Trained.covers`.
        measures: by name; no two may give numbers of one name.
        measure_every: steps from one measurement to the next; also before the first step and after the last one.
        watch_every: steps from one sample of `equilibria.watch` to the next; None to watch nothing.
        watch_select: which parameters are watched, as for `equilibria.watch`.
        device: "cpu", "cuda" or "cuda:1". The network is made on the CPU and moved, so that its first weights are the
            same on every device; batches are moved one by one.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    data: Iterable[Batch]
    steps: int
    seed: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    schedule: LRFactor = lambda step: 1.0
    control: Callable[[LRScheduler, nn.Module], LRScheduler] | None = None
    chunk: int | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)
    measure_every: int = 100
    watch_every: int | None = None
    watch_select: Select | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise EquilibriaError(
                f"got model={_kind(self.model)}; expected a function that makes the network, called when the seed is "
                "set: model=lambda: ..."
            )
        if isinstance(self.optimizer, Optimizer | type) or not callable(self.optimizer):
            raise EquilibriaError(
                f"got optimizer={_kind(self.optimizer)}; expected a function that makes it for the network: "
                "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=...)"
            )
        self._make_whole("steps", low=1)
        self._make_whole("seed", low=0)
        self._make_whole("measure_every", low=1)
        if self.chunk is not None:
            self._make_whole("chunk", low=1)
        if self.watch_every is not None:
            self._make_whole("watch_every", low=1)
        named_device(self.device)

    def _make_whole(self, name: str, *, low: int) -> None:
        object.__setattr__(self, name, whole(name, getattr(self, name), low=low))

    def is_measured(self, step: int) -> bool:
        """Whether there is a measurement after this number of steps."""
        return step % self.measure_every == 0 or step == self.steps


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"


def drops(steps: Sequence[int], factor: float) -> LRFactor:
    """Divide the learning rate by ``factor`` at each of these steps: a schedule.

    Example:
        >>> schedule = drops([2500], 5)
        >>> schedule(2499), schedule(2500)
        (1.0, 0.2)
    """
    places, divisor = sorted(whole("steps", step) for step in steps), positive("factor", factor)
    return lambda step: divisor ** -float(bisect_right(places, step))


def warmed_up(schedule: LRFactor, steps: int, *, start: float) -> LRFactor:
    """Let the learning rate grow linearly, step by step, from ``start`` times its first value: a schedule.

    Args:
        schedule: that follows.
        steps: of the growth; 0 for none.
        start: factor of the first step.

    Example:
        >>> schedule = warmed_up(drops([2500], 5), 100, start=0.25)
        >>> schedule(0), schedule(50), schedule(100), schedule(2500)
        (0.25, 0.625, 1.0, 0.2)
    """
    length, first = whole("steps", steps), within("start", start, low=0, high=1)
    return lambda step: schedule(step) * (first + (1 - first) * step / length if step < length else 1.0)


def decay_groups(
    model: nn.Module,
    invariant: Collection[str],
    *,
    lr: float,
    weight_decay: float,
    other_lr: float,
    other_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: scale-invariant weights, then all others without weight decay.

    With ``other_decay`` the others are two groups: normalisations, which do not decay, and the rest.

    Args:
        model: the network.
        invariant: names of its scale-invariant weights, as in ``model.named_parameters()``.
        lr: of the scale-invariant weights.
        weight_decay: of the scale-invariant weights.
        other_lr: of the other parameters, such as BatchNorm's scales and the last layer.
        other_decay: weight decay of the others that are no normalisation's, such as the last layer.

    Raises:
        EquilibriaError: a name that the model does not have, a string in place of a list, or a negative number.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
        >>> groups = decay_groups(net, ["0.weight"], lr=0.5, weight_decay=5e-3, other_lr=0.1)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
        [(1, 0.5, 0.005), (2, 0.1, 0.0)]
    """
    if isinstance(invariant, str):
        raise EquilibriaError(f"got invariant={invariant!r}; expected a list of names: [{invariant!r}]")
    params = dict(model.named_parameters())
    chosen = dict.fromkeys(invariant)
    unknown = [name for name in chosen if name not in params]
    if unknown:
        raise EquilibriaError(
            f"got invariant={unknown[0]!r}, which the model lacks; expected names such as {next(iter(params))!r}"
        )
    others = [param for name, param in params.items() if name not in chosen]
    norms = {id(param) for module in model.modules() if isinstance(module, _NORMS) for param in module.parameters()}
    decay = within("other_decay", other_decay, low=0) > 0
    decaying = [param for param in others if decay and id(param) not in norms]
    resting = [param for param in others if not decay or id(param) in norms]
    first = {
        "params": [params[name] for name in params if name in chosen],
        "lr": within("lr", lr, low=0),
        "weight_decay": within("weight_decay", weight_decay, low=0),
    }
    rest = [
        {"params": group, "lr": within("other_lr", other_lr, low=0), "weight_decay": group_decay}
        for group, group_decay in ((decaying, other_decay), (resting, 0.0))
    ]
    return [first, *(group for group in rest if group["params"])]


class FullBatch:
    """All samples at every step, as the data of a `Recipe`: gradient descent. ``Recipe.chunk`` bounds its memory.

    With ``torch.optim.SGD(lr=lr, weight_decay=wd)`` a step is ``w <- (1 - lr wd) w - lr g`` with the gradient g of the
    mean loss over all samples. In chunks this holds if the samples are independent. BatchNorm couples the samples of a
    chunk: the loss is then the mean over chunks, each normalised by itself (ghost batches), and `Trained.covers` says
    so.

    Args:
        inputs: one sample per row, in the precision to train in.
        targets: one per sample.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets) or not len(inputs):
            raise EquilibriaError(f"got {len(inputs)} inputs and {len(targets)} targets; expected one target per input")
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.inputs, self.targets


def named_device(name: str) -> torch.device:
    """The torch device with this name, whether or not this machine has it.

    Raises:
        EquilibriaError: neither "cpu" nor a "cuda" device.

    Example:
        >>> named_device("cuda:1")
        device(type='cuda', index=1)
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in _DEVICES:
        raise EquilibriaError(f"got device={name!r}; expected 'cpu', 'cuda', or one of several such as 'cuda:1'")
    return device


def present_device(name: str) -> torch.device:
    """The torch device with this name.

    Raises:
        EquilibriaError: not a device, or this machine does not have it.
    """
    device = named_device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise EquilibriaError(
                f"got device={name!r}, but torch {torch.__version__} finds {count or 'no'} GPU{'s'[: count != 1]} "
                "here; expected one that is there, or 'cpu'"
            )
    return device


# ---- fingerprint: short texts, kept in checkpoints, that distinguish one training from another


_SEED, _FIRST_BATCH = "seed", "first batch"
_DRAWN = ("label_noise", "flip", "crop", "resized")  # settings of `Batches` that the first batch may not reveal
_LOSS, _CONTROL, _CHUNK, _FACTORS = "loss", "control", "chunk", "schedule in steps"
_DATA = "data's"
_MAY_BRANCH = (_SEED, _FIRST_BATCH, _LOSS, _CONTROL, _CHUNK, _FACTORS, _DATA)
_LONGEST = 120  # characters in a message
_BLOCK = 50  # steps whose factors are compared together


def fingerprint(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """The parts of a training as texts, by the name of the part.

    A loss or a control is represented by its name and its plain values; the code of a function is not compared.

    Args:
        recipe: of the training.
        model: as the recipe made it.
        optimizer: as the recipe made it, before a scheduler or control changed its settings.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    parts = {_SEED: str(recipe.seed)}
    parts |= {f"shape of {name}": str(list(param.shape)) for name, param in model.named_parameters()}
    for place, group in enumerate(optimizer.param_groups):
        parts[f"parameters of group {place}"] = ", ".join(names.get(id(param), "another") for param in group["params"])
        shown = {key: _shown(value) for key, value in group.items() if key != "params"}
        parts |= {f"{key} of group {place}": value for key, value in shown.items() if value is not None}
    parts |= {_LOSS: _named(recipe.loss), _CONTROL: _named(recipe.control), _CHUNK: str(recipe.chunk)}
    parts |= {f"{_DATA} {name}": str(getattr(recipe.data, name)) for name in _DRAWN if hasattr(recipe.data, name)}
    return {**parts, **_factors(recipe), _FIRST_BATCH: _hash(first_batch(recipe))}


def fingerprint_difference(saved: Mapping[str, str], present: Mapping[str, str], *, branch: bool) -> str | None:
    """The first difference between two fingerprints in words, or None.

    Args:
        saved: of a checkpoint.
        present: of the training that loads it.
        branch: whether the training may differ in everything that only later steps depend on.
    """
    for part in dict.fromkeys([*saved, *present]):
        if branch and part.startswith(_MAY_BRANCH):
            continue
        if part.startswith((_FACTORS, _DATA)) and not (part in saved and part in present):
            continue  # one training has more steps, or its data are of another type
        there, here = saved.get(part, "none"), present.get(part, "none")
        if there != here:
            return f"{part} is {there} there and {here} here"
    return None


def first_batch(recipe: Recipe) -> Batch:
    """The first batch of the data, read without changing random numbers.

    Raises:
        EquilibriaError: data that can be iterated only once, or hold nothing.
    """
    with preserved_rng():  # a DataLoader draws a random number whenever it is iterated
        batches = iter(recipe.data)
        if batches is recipe.data:
            raise EquilibriaError(
                f"got data of type {type(recipe.data).__name__}, which can be gone through only once; expected batches "
                "that are the same each time: a training that goes on takes them from the first one on"
            )
        batch = next(batches, None)
    if batch is None:
        raise EquilibriaError(f"got data without a batch; expected {recipe.steps}, one for each step")
    return batch


def _factors(recipe: Recipe) -> dict[str, str]:
    """The learning-rate factors in blocks: a training that is continued beyond its end keeps the first blocks."""
    blocks = {}
    for first in range(0, recipe.steps, _BLOCK):
        steps = range(first, min(first + _BLOCK, recipe.steps))
        values = [str(_shown(recipe.schedule(step))) for step in steps]
        same = len(set(values)) == 1
        words = values[0] if same else f"{values[0]} to {values[-1]} ({_digest(', '.join(values))})"
        blocks[f"{_FACTORS} {steps[0]} to {steps[-1]}"] = words
    return blocks


def _named(function: Any) -> str:
    """The name of a function or of an object's type, with its plain values."""
    if function is None:
        return "none"
    if isinstance(function, partial):
        values: dict[str, Any] = {str(place): value for place, value in enumerate(function.args)} | function.keywords
        name = _named(function.func)
    elif isinstance(function, FunctionType):
        code = function.__code__
        written = [value for value in code.co_consts if value is not None and value != function.__doc__]
        values = {str(place): value for place, value in enumerate([*written, *(function.__defaults__ or ())])}
        values |= function.__kwdefaults__ or {}
        values |= dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
        name = f"{function.__module__}.{function.__qualname__}"
    else:
        values = {key: value for key, value in getattr(function, "__dict__", {}).items() if not key.startswith("_")}
        kind = function if isinstance(function, type) else type(function)
        name = f"{kind.__module__}.{kind.__qualname__}"
    shown = {key: _shown(value) for key, value in values.items()}
    text = ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None)
    return f"{name}({text if len(text) <= _LONGEST else _digest(text)})"


def _shown(value: Any) -> str | None:
    """A setting as text that is the same in every process; None if it has none, such as a function."""
    if isinstance(value, Tensor | np.generic):
        value = value.tolist()
    if isinstance(value, tuple | list):
        parts = [_shown(item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else None


def _hash(batch: Batch) -> str:
    digest = hashlib.sha256()
    for part in batch:
        digest.update(f"{part.dtype} {list(part.shape)}".encode())
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]
