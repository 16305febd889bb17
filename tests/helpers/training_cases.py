"""A small recipe for the tests of the harness; the process that is killed imports this module too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.nets import BasicBlockResNet
from equilibria.lab.training import Evaluation, Recipe, decay_groups, drops

STEPS, DROP = 24, 12


class StoppedError(Exception):
    """Somebody pulled the plug."""


def stop_at(last: int):
    def progress(step: int) -> None:
        if step == last:
            raise StoppedError

    return progress


class Net(nn.Module):
    """With dropout, whose random numbers are part of a trajectory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = BasicBlockResNet(4, (1,))
        self.dropout = nn.Dropout(0.1)

    def forward(self, images):
        return self.dropout(self.body(images))


def invariant(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith("conv.weight")]


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = decay_groups(model, invariant(model), lr=0.1, weight_decay=5e-3, other_lr=0.05)
    if kind == "adam":
        for group in groups:
            group["lr"] /= 50
        return torch.optim.Adam(groups)
    return torch.optim.SGD(groups, momentum=0.9)


def recipe(kind: str = "sgd", *, rescale: bool = False, **changes) -> Recipe:
    digits = load_digits()

    def rescaled(scheduler, model):
        return RescaleOnDecay(scheduler, model=model, invariant=invariant(model), example=digits.train_images[:32])

    base = Recipe(
        model=Net,
        optimizer=lambda model: optimizer(kind, model),
        data=Batches(digits.train_images, digits.train_labels, batch_size=32, seed=5, crop=1, label_noise=0.1),
        steps=STEPS,
        seed=3,
        schedule=drops([DROP], 5),
        control=rescaled if rescale else None,
        measures={"test": Evaluation([digits.train_images[:64]], test=(digits.test_images, digits.test_labels))},
        measure_every=5,
        watch_every=3,
        watch_select=["*conv.weight"],
    )
    return replace(base, **changes)
