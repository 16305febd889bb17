"""Trainings of smd-fixed-lr: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.errors import EquilibriaError
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.image_training import (
    IMAGES,
    RESNET8,
    SGDM,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    load,
    recipe,
)
from equilibria.experiments.task import scratch, tell_progress


@dataclass(frozen=True)
class Config:
    """SGD and SGDM at one learning rate and weight decay, so that momentum alone makes the difference.

    At desk scale lr * wd is 5e-4: a layer needs a few times 500 steps to its equilibrium under SGD, a few times 50
    under SGDM. The last quarter of each training is judged.

    average: how many steps the mean of the unit gradient is over.
    """

    rules: tuple[Sgd, ...] = (
        Sgd("SGD", lr=0.1, weight_decay=5e-3, other_lr=0.1),
        SGDM,
    )
    steps: tuple[int, ...] = (6000, 2000)
    images: Images = IMAGES
    network: Network = RESNET8
    batch_size: int = 128
    layer: str = "blocks.1.second.conv.weight"
    average: int = 200
    watch_every: int = 2
    seeds: tuple[int, ...] = (20, 21, 22)

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.rules):
            raise EquilibriaError(f"got steps={self.steps}; expected one number for each of {len(self.rules)} rules")

    def plan(self, place: int) -> Plan:
        """The training of one rule."""
        return Plan(
            images=self.images,
            network=self.network,
            sgd=self.rules[place],
            batch_size=self.batch_size,
            steps=self.steps[place],
            watch_every=self.watch_every,
        )


def key(config: Config, place: int, seed: int) -> str:
    """Name of a task."""
    return f"{config.rules[place].name.lower()}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the rule, and seed."""
    return {key(config, place, seed): (place, seed) for place in range(len(config.rules)) for seed in config.seeds}


def needs(config: Config) -> object:
    """Loads the images."""
    return load(config.images)


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """One training."""
    from equilibria.training import train

    place, seed = task
    made = recipe(config.plan(place), load(config.images), seed=seed)
    return arrays(train(made, folder=scratch(), progress=tell_progress(made.steps)))
