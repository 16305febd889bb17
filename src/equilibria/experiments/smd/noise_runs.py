"""Trainings of smd-noise: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.image_training import (
    RESNET8,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    batches,
    load,
    recipe,
)
from equilibria.experiments.task import scratch, tell_progress

_SMALL = Images(size=8)
# Layers turn as slowly as in smd-linear-scaling: where they turn fast, a mean gradient drives them back.
_SGDM = Sgd("SGDM", lr=0.02, weight_decay=5e-3, other_lr=0.002, momentum=0.9)
_OTHER_ORDER = 1000  # added to the seed of the batches that the noise is measured on


@dataclass(frozen=True)
class Config:
    """A training over three stages; every ``measure_every`` steps the gradients of ``count`` batches are compared.

    The measurements of a stage are averaged, but for the first ``skip`` of the training, when nothing is settled yet.
    """

    sgd: Sgd = _SGDM
    images: Images = _SMALL
    network: Network = RESNET8
    batch_size: int = 32
    drops: tuple[int, ...] = (2000, 3500)
    steps: int = 4000
    divisor: float = 10.0
    layer: str = "blocks.0.second.conv.weight"
    count: int = 64
    skip: int = 3
    settled: int = 1000
    measure_every: int = 200
    watch_every: int = 4
    seeds: tuple[int, ...] = (43, 44, 45)

    def plan(self) -> Plan:
        """The training, without what is measured."""
        return Plan(
            images=self.images,
            network=self.network,
            sgd=self.sgd,
            batch_size=self.batch_size,
            steps=self.steps,
            drops=self.drops,
            divisor=self.divisor,
            measure_every=self.measure_every,
            watch_every=self.watch_every,
        )


def run_task(config: Config, task: int) -> Arrays:
    """One training; the batches that are compared are drawn like those it is trained on, in another order."""
    from equilibria.experiments.smd.batch_gradients import NoiseMeasure
    from equilibria.training import train

    loaded = load(config.images)
    others = batches(config.images, loaded, batch_size=config.batch_size, seed=task + _OTHER_ORDER)
    plan = replace(config.plan(), measures={"noise": NoiseMeasure(list(islice(others, config.count)))})
    made = recipe(plan, loaded, seed=task)
    return arrays(train(made, folder=scratch(), progress=tell_progress(made.steps)))
