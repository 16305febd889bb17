"""Trainings of smd-multistage: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equilibria.errors import EquilibriaError
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.image_training import (
    RESNET8,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    evaluation,
    load,
    recipe,
)
from equilibria.experiments.task import scratch, tell_progress

STANDARD, RESCALED = "standard", "rescaled"
BRANCHES = (STANDARD, RESCALED)
BEFORE = "before"
# Norms go with sqrt(lr / wd): three drops leave them far above BatchNorm's eps.
_SGDM = Sgd("SGDM", lr=0.5, weight_decay=5e-4, other_lr=0.01, momentum=0.9)
_SMALL = Images(size=8)


@dataclass(frozen=True)
class Config:
    """A learning rate that is divided by ``divisor`` at each of the ``drops``, with and without rescaled weights.

    At desk scale the stages have about the lengths of the paper's, in units of their own time constants (1 - momentum)
    / (4 lr wd): many in the first, five in the second, a fraction of one in the others.

    Attributes:
        at_once: window after a drop, in steps.
        settled: steps at the end of the second stage that are judged.
        last: measurements at the end whose accuracy is averaged.
    """

    sgd: Sgd = _SGDM
    images: Images = _SMALL
    network: Network = RESNET8
    batch_size: int = 128
    drops: tuple[int, ...] = (1200, 6200, 7000)
    steps: int = 7400
    divisor: float = 10.0
    layer: str = "blocks.0.second.conv.weight"
    at_once: tuple[int, int] = (10, 100)
    settled: int = 1000
    last: int = 4
    average: int = 200
    measure_every: int = 200
    watch_every: int = 2
    seeds: tuple[int, ...] = (30, 31, 32)

    def __post_init__(self) -> None:
        if len(self.drops) != 3 or not 0 < self.drops[0] < self.drops[1] < self.drops[2] < self.steps:
            raise EquilibriaError(f"got drops={self.drops}; expected three, one after the other, before {self.steps}")

    def plan(self) -> Plan:
        """The training without rescaled weights, to its end."""
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
    """Train to the first drop, then on from there in both ways."""
    from equilibria.training import train

    loaded, folder = load(config.images), scratch()
    after = config.steps - config.drops[0]
    tell = tell_progress(config.drops[0] + len(BRANCHES) * after)
    plan = replace(config.plan(), measures={"test": evaluation(loaded)})
    before = train(
        recipe(replace(plan, steps=config.drops[0]), loaded, seed=task), folder=folder / BEFORE, progress=tell
    )
    found = arrays(before, part=f"{BEFORE}_")
    for number, branch in enumerate(BRANCHES):
        trained = train(
            recipe(replace(plan, rescale=branch == RESCALED), loaded, seed=task),
            folder=folder / branch,
            start=before.state,
            progress=lambda step, done=number * after: tell(step + done),  # type: ignore[misc]
        )
        found |= arrays(trained, part=f"{branch}_")
    return found
