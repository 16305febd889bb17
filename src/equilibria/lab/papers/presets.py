"""The trainings of every `paper` scale: each hyper-parameter beside its source, and the recipe that has it.

``docs/papers/presets.md`` is written from `presets`; a test builds every recipe and compares its `facts` with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Recipe

Settings = Mapping[str, tuple[Any, str]]
"""Name of a hyper-parameter -> its value, and where the value is from."""
SCHEDULE = "factor of the lr from a step on"
CONTROL = "weights rescaled at drops, or decay folded into the lr"
CONVOLUTIONS, LINEAR, BIAS, NORMS = "of convolutions", "of linear layers", "of their biases", "of normalisations"


@dataclass(frozen=True, slots=True)
class Preset:
    """One training of an experiment's `paper` scale.

    Attributes:
        experiment: its id.
        name: of the training among those of the experiment.
        recipe: the images -> the training.
        settings: every hyper-parameter with its source.
    """

    experiment: str
    name: str
    recipe: Callable[[ImageSet], Recipe]
    settings: Settings

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which the table gives a factor of the learning rate."""
        return tuple(self.settings[SCHEDULE][0])


def differences() -> dict[str, tuple[str, ...]]:
    """Known differences between an experiment's trainings and its document, in sentences, by experiment."""
    from equilibria.lab.papers.explr import presets as explr
    from equilibria.lab.papers.nrq import presets as nrq

    return {**explr.DIFFERENCES, **nrq.DIFFERENCES}


def presets() -> tuple[Preset, ...]:
    """All of them; imports their experiments."""
    from equilibria.lab.papers.explr import presets as explr
    from equilibria.lab.papers.nrq import presets as nrq
    from equilibria.lab.papers.sharp import presets as sharp
    from equilibria.lab.papers.smd import presets as smd

    return (*smd.presets(), *nrq.presets(), *explr.presets(), *sharp.presets())


def facts(recipe: Recipe, steps: Iterable[int]) -> dict[str, Any]:
    """The hyper-parameters of a recipe, read from the network, optimizer and data that it makes.

    Args:
        recipe: of a training.
        steps: at which the learning rate changes, or is worth knowing; a step without a change is left out.
    """
    import torch

    torch.manual_seed(recipe.seed)
    model = recipe.model()
    return {
        **_network(model),
        **_optimizer(model, recipe.optimizer(model)),
        SCHEDULE: {step: float(f"{recipe.schedule(step):.4g}") for step in steps if _changes(recipe, step)},
        "steps": recipe.steps,
        CONTROL: recipe.control is not None,
        **_batches(recipe),
        "loss": getattr(recipe.loss, "__name__", str(recipe.loss)),
    }


def _changes(recipe: Recipe, step: int) -> bool:
    return step == 0 or recipe.schedule(step) != recipe.schedule(step - 1)


def _network(model: nn.Module) -> dict[str, Any]:
    from torch import nn

    modules = list(model.modules())
    norms = [module for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    closed = [norm for norm in norms if norm.weight is not None and not bool(norm.weight.any())]
    return {
        "network": type(getattr(model, "net", model)).__name__,
        "parameters": sum(param.numel() for param in model.parameters()),
        "first weights": _first_weights(model),
        "BatchNorms that begin at 0": len(closed),
        "BatchNorm's momentum": _only(norm.momentum for norm in norms),
        "BatchNorm's eps": _only(norm.eps for norm in norms),
        "dropout": max((module.p for module in modules if isinstance(module, nn.Dropout)), default=0.0),
    }


def _first_weights(model: nn.Module) -> str:
    """The law of the convolutions' first weights: the one whose deviations all large ones have."""
    from torch import nn

    weights = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Conv2d)]
    large = [weight for weight in weights if weight.numel() > _LARGE]
    off = {name: max(abs(float(each.std()) / law(each) - 1) for each in large) for name, law in _FIRST.items()}
    return next((name for name, largest in off.items() if largest < _SAME_DEVIATION), "its own")


# The deviation of so many normal numbers is off by 1 / sqrt(2 * 4000), 1.1 per cent; five times that.
_LARGE, _SAME_DEVIATION = 4000, 0.055
_FIRST: Mapping[str, Callable[[Any], float]] = {
    "He, by outputs": lambda weight: math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel())),
    "He, by inputs": lambda weight: math.sqrt(2 / weight[0].numel()),
    "He, by inputs, times 10": lambda weight: 10 * math.sqrt(2 / weight[0].numel()),
    "torch's": lambda weight: math.sqrt(1 / (3 * weight[0].numel())),
}


def _optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    kinds = _kinds(model)
    owned = [(kinds[id(param)], group) for group in optimizer.param_groups for param in group["params"]]
    found = {"optimizer": type(optimizer).__name__}
    for name, key in (("lr", "lr"), ("weight decay", "weight_decay")):
        found |= by_kind(name, {kind: group[key] for kind, group in owned})
    group = optimizer.param_groups[0]
    return found | {
        name: group[name] for name in ("momentum", "dampening", "nesterov", "betas", "eps") if name in group
    }


def by_kind(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A setting of each kind of parameter, or of all if they agree.

    Example:
        >>> by_kind("lr", {CONVOLUTIONS: 0.1, NORMS: 0.1}), by_kind("lr", {CONVOLUTIONS: 0.1, NORMS: 0.2})
        ({'lr': 0.1}, {'lr of convolutions': 0.1, 'lr of normalisations': 0.2})
    """
    first, *others = values.values()
    if all(value == first for value in others):
        return {name: first}
    return {f"{name} {kind}": value for kind, value in values.items()}


def _kinds(model: nn.Module) -> dict[int, str]:
    """What each parameter is part of, by its id."""
    from torch import nn

    kinds = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            linear = isinstance(module, nn.Linear)
            matrix = LINEAR if linear else CONVOLUTIONS if isinstance(module, nn.Conv2d) else NORMS
            kinds[id(param)] = BIAS if linear and name == "bias" else matrix
    return kinds


def _batches(recipe: Recipe) -> dict[str, Any]:
    size = getattr(recipe.data, "batch_size", None)
    drawn = {name: getattr(recipe.data, name, False) for name in ("label_noise", "flip", "crop", "resized")}
    return {
        "images in a batch": size or "all",
        "images that a BatchNorm sees": recipe.chunk or size or "all",
        "augmentation": {name: value for name, value in drawn.items() if value},
    }


def _only(values: Iterable[Any]) -> Any:
    """The single value that all have, or all of them."""
    different = sorted(set(values))
    return different[0] if len(different) == 1 else different
