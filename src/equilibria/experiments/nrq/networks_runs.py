"""Trainings of nrq-networks: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equilibria.errors import one_of
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.task import device, scratch, tell_progress

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.optimizer import Optimizer

    from equilibria.data import ImageSet
    from equilibria.training import Recipe

BASE, LOW, HIGH, LARGE, ADJUSTED = "base", "low-lr", "high-lr", "large", "adjusted"
_CONVOLUTIONS = ".conv.weight"  # each has a BatchNorm behind it


@dataclass(frozen=True)
class Line:
    """A line of the figure: settings of the convolutions, and their first weights over those of Kaiming He."""

    name: str
    lr: float
    weight_decay: float
    scale: float = 1.0


def lines(lr: float, weight_decay: float, *, ratio: float = 5.0, k: float = 10.0) -> tuple[Line, ...]:
    """The base; the same product of lr and weight decay by other factors; first weights k times as large."""
    return (
        Line(BASE, lr, weight_decay),
        Line(LOW, lr / ratio, weight_decay * ratio),
        Line(HIGH, lr * ratio, weight_decay / ratio),
        Line(LARGE, lr, weight_decay, k),
        Line(ADJUSTED, lr * k**2, weight_decay / k**2, k),
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """SGD without momentum, and lr / 5 once. Windows are in steps, fixed before any of these seeds was run.

    At desk scale CIFAR-10 at 8x8 pixels and a ResNet-8. What is not a convolution (scales, shifts, the linear layer)
    has a learning rate of its own and no weight decay, the same for all lines.
    """

    lines: tuple[Line, ...] = lines(0.5, 1e-2)
    seeds: tuple[int, ...] = (30, 31, 32)
    data: str = "cifar10"
    size: int = 8
    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_size: int = 128
    flip: bool = True
    crop: int = 0
    other_lr: float = 0.1
    steps: int = 2000
    drops_at: tuple[int, ...] = (1200,)
    divisor: float = 5.0
    first: tuple[int, int] = (0, 20)
    early: tuple[int, int] = (50, 200)
    settled: tuple[int, int] = (900, 1200)
    late: tuple[int, int] = (1700, 2000)
    measure_every: int = 50
    watch_every: int = 5
    statistics: tuple[int, int] = (8, 400)
    train_images: int = 3200

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits"])


def key(line: str, seed: int) -> str:
    """Name of a task."""
    return f"{line}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the line, and seed: one training each."""
    return {key(line.name, seed): (at, seed) for at, line in enumerate(config.lines) for seed in config.seeds}


def load(config: Config) -> ImageSet:
    """The images, standardised."""
    from equilibria.data import cifar10, load_digits

    return load_digits() if config.data == "digits" else cifar10(size=config.size).standardised()


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """One training: its curves, and angle and norm of every convolution."""
    from equilibria.training import by_layer, train

    at, seed = task
    trained = train(
        recipe(config, config.lines[at], seed=seed, images=load(config)),
        folder=scratch(),
        progress=tell_progress(config.steps),
    )
    layers = by_layer(trained.samples, ["angle", "norm"])
    return {
        **trained.curves,
        "layer_angle": layers.columns["angle"],
        "layer_norm": layers.columns["norm"],
        "sampled_step": layers.step,
    }


def recipe(config: Config, line: Line, *, seed: int, images: ImageSet) -> Recipe:
    """All lines of a seed have the same first weights, up to their scale, and the same data in the same order."""
    import torch

    from equilibria.data import Batches
    from equilibria.training import Evaluation, Recipe, drops

    count, size = config.statistics
    plain = torch.split(images.train_images[: count * size], size)
    some = (images.train_images[: config.train_images], images.train_labels[: config.train_images])
    return Recipe(
        model=lambda: _network(config, line, images),
        optimizer=lambda model: _optimizer(config, line, model),
        data=Batches(
            images.train_images,
            images.train_labels,
            batch_size=config.batch_size,
            classes=images.classes,
            seed=seed,
            flip=config.flip,
            crop=config.crop,
        ),
        steps=config.steps,
        seed=seed,
        schedule=drops(config.drops_at, config.divisor),
        measures={"sets": Evaluation(plain, test=(images.test_images, images.test_labels), train=some)},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        watch_select=["*" + _CONVOLUTIONS],
        device=device(),
    )


def _network(config: Config, line: Line, images: ImageSet) -> nn.Module:
    import torch
    from torch import nn

    from equilibria.nets import BasicBlockResNet

    channels = images.train_images.shape[1]
    model = BasicBlockResNet(config.width, config.blocks, in_channels=channels, classes=images.classes)
    for name, param in model.named_parameters():
        if name.endswith(_CONVOLUTIONS):
            nn.init.kaiming_normal_(param, nonlinearity="relu")
            with torch.no_grad():
                param.mul_(line.scale)
    return model


def _optimizer(config: Config, line: Line, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.training import two_groups

    invariant = [name for name, _ in model.named_parameters() if name.endswith(_CONVOLUTIONS)]
    groups = two_groups(model, invariant, lr=line.lr, weight_decay=line.weight_decay, other_lr=config.other_lr)
    return torch.optim.SGD(groups)
