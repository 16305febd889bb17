"""Trainings of smd-pseudo-overfitting: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equilibria.errors import EquilibriaError, one_of
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.task import device, scratch, tell_progress

if TYPE_CHECKING:
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.data import ImageSet
    from equilibria.nets import BasicBlockResNet
    from equilibria.training import Recipe, Trained

STANDARD, RESCALED = "standard", "rescaled"
BRANCHES = (STANDARD, RESCALED)
BEFORE = "before"
_WATCHED = "*.conv.weight"  # all convolutions: each has a BatchNorm behind it


@dataclass(frozen=True)
class Rule:
    """An optimizer: sgd (with or without momentum) or adam (with L2, as the paper's), and the seeds it is run with."""

    name: str
    optimizer: str
    lr: float
    weight_decay: float
    other_lr: float
    momentum: float = 0.0
    seeds: tuple[int, ...] = (20, 21, 22)


@dataclass(frozen=True)
class Config:
    """One drop of the learning rate. Windows are in steps after it; they were fixed before any of these seeds was run.

    At desk scale: four classes of CIFAR-10 at 8x8 pixels, a ResNet-8, and settings under which a layer needs 800 steps
    to return to equilibrium. The momentum of SGDM multiplies the learning rate by ten, so it is a tenth of SGD's.
    Adam's layers differ, and its equilibrium moves with the gradient's norm: in a trial with another seed and
    600 steps before the drop, the median layer was back at 0.9 of it after 300 steps, sooner than SGD's.
    """

    rules: tuple[Rule, ...] = (
        Rule("SGD", "sgd", lr=0.5, weight_decay=5e-3, other_lr=0.1, seeds=(20, 21, 22, 23)),
        Rule("SGDM", "sgd", lr=0.05, weight_decay=5e-3, other_lr=0.01, momentum=0.9),
        Rule("Adam", "adam", lr=3e-3, weight_decay=1e-3, other_lr=1e-3),
    )
    data: str = "cifar10"
    classes: tuple[int, ...] = (0, 1, 8, 9)
    size: int = 8
    width: int = 32
    blocks: tuple[int, ...] = (1, 1, 1)
    batch_size: int = 128
    flip: bool = True
    crop: int = 0
    steps_before: int = 2500
    steps_after: int = 1600
    divisor: float = 5.0
    at_once: tuple[int, int] = (10, 100)
    early: tuple[int, int] = (150, 600)
    late: tuple[int, int] = (950, 1600)
    measure_every: int = 50
    watch_every: int = 5
    statistics: tuple[int, int] = (8, 400)
    train_images: int = 3200

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits"])
        if self.late[1] > self.steps_after:
            raise EquilibriaError(
                f"got late={self.late}; expected it within the {self.steps_after} steps after the drop"
            )

    @property
    def steps(self) -> int:
        """Of one branch, from the first weights on."""
        return self.steps_before + self.steps_after


def key(rule: Rule, seed: int) -> str:
    """Name of a task."""
    return f"{rule.name.lower()}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the rule and seed: both branches and what is before them, so that they begin at the same weights."""
    return {key(rule, seed): (place, seed) for place, rule in enumerate(config.rules) for seed in rule.seeds}


def load(config: Config) -> ImageSet:
    """The images, standardised."""
    from equilibria.data import cifar10, load_digits

    return (
        load_digits()
        if config.data == "digits"
        else cifar10(size=config.size, classes=config.classes or None).standardised()
    )


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Train to the drop, then on from there in both ways."""
    from equilibria.training import train

    place, seed = task
    rule, images, folder = config.rules[place], load(config), scratch()
    tell = tell_progress(config.steps_before + len(BRANCHES) * config.steps_after)
    before = train(
        recipe(config, rule, seed=seed, images=images, steps=config.steps_before),
        folder=folder / BEFORE,
        progress=tell,
    )
    found = dict(_arrays(BEFORE, before))
    for number, branch in enumerate(BRANCHES):
        trained = train(
            recipe(config, rule, seed=seed, images=images, steps=config.steps, rescale=branch == RESCALED),
            folder=folder / branch,
            start=before.state,
            progress=lambda step, done=number * config.steps_after: tell(step + done),  # type: ignore[misc]
        )
        found |= _arrays(branch, trained)
    return found


def recipe(config: Config, rule: Rule, *, seed: int, images: ImageSet, steps: int, rescale: bool = False) -> Recipe:
    """Both branches have the same data in the same order: it depends on the seed alone."""
    import torch

    from equilibria.control.rescale_on_decay import RescaleOnDecay
    from equilibria.data import Batches
    from equilibria.training import Evaluation, Recipe, drops

    def rescaling(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        example = images.train_images[: config.batch_size].to(device())
        return RescaleOnDecay(scheduler, model, invariant=_invariant(model), example=example)

    count, size = config.statistics
    plain = torch.split(images.train_images[: count * size], size)
    some = (images.train_images[: config.train_images], images.train_labels[: config.train_images])
    return Recipe(
        model=lambda: _network(config, images),
        optimizer=lambda model: _optimizer(rule, model),
        data=Batches(
            images.train_images,
            images.train_labels,
            batch_size=config.batch_size,
            classes=images.classes,
            seed=seed,
            flip=config.flip,
            crop=config.crop,
        ),
        steps=steps,
        seed=seed,
        schedule=drops([config.steps_before], config.divisor),
        control=rescaling if rescale else None,
        measures={"sets": Evaluation(plain, test=(images.test_images, images.test_labels), train=some)},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        watch_select=[_WATCHED],
        device=device(),
    )


def _network(config: Config, images: ImageSet) -> BasicBlockResNet:
    from equilibria.nets import BasicBlockResNet

    channels = images.train_images.shape[1]
    return BasicBlockResNet(config.width, config.blocks, in_channels=channels, classes=images.classes)


def _invariant(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith(_WATCHED.removeprefix("*"))]


def _optimizer(rule: Rule, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.training import two_groups

    groups = two_groups(model, _invariant(model), lr=rule.lr, weight_decay=rule.weight_decay, other_lr=rule.other_lr)
    return torch.optim.SGD(groups, momentum=rule.momentum) if rule.optimizer == "sgd" else torch.optim.Adam(groups)


def _arrays(part: str, trained: Trained) -> Mapping[str, np.ndarray]:
    """Measurements and angles, named after the part of the training."""
    from equilibria.training import by_layer

    layers = by_layer(trained.samples, ["angle", "angle_equilibrium", "norm"])
    found = {**trained.curves, **layers.columns, "sampled_step": layers.step}
    return {f"{part}_{name}": values for name, values in found.items()}
