"""Trainings of smd-architectures: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.errors import EquilibriaError
from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.image_training import SGDM, Images, Network, Plan, Sgd, arrays, load, recipe
from equilibria.experiments.task import scratch, tell_progress

_SMALL = Images(size=8)


@dataclass(frozen=True)
class Case:
    """A network with its name on the figure."""

    name: str
    network: Network


@dataclass(frozen=True)
class Config:
    """Networks of other blocks and with other normalisations, trained to equilibrium and over drops of the lr.

    Attributes:
        settled: steps before the first drop that are judged.
        at_once: window after it, in steps.
    """

    cases: tuple[Case, ...] = (
        Case("MobileNet-V2", Network("mobilenet", blocks=(1, 1, 1))),
        Case("ShuffleNet-V2", Network("shufflenet", width=16, blocks=(2, 2, 2))),
        Case("GroupNorm", Network(norm="group")),
        Case("LayerNorm", Network(norm="layer")),
        Case("WeightNorm", Network(norm="weight")),
    )
    sgd: Sgd = SGDM
    images: Images = _SMALL
    batch_size: int = 128
    drops: tuple[int, ...] = (1500,)
    steps: int = 1900
    divisor: float = 10.0
    settled: int = 500
    at_once: tuple[int, int] = (10, 100)
    watch_every: int = 2
    seeds: tuple[int, ...] = (60, 61, 62)

    def __post_init__(self) -> None:
        if not self.settled <= self.drops[0] < self.steps:
            raise EquilibriaError(f"got settled={self.settled}, drops={self.drops}; expected both before {self.steps}")

    def plan(self, place: int) -> Plan:
        """The training of one case."""
        return Plan(
            images=self.images,
            network=self.cases[place].network,
            sgd=self.sgd,
            batch_size=self.batch_size,
            steps=self.steps,
            drops=self.drops,
            divisor=self.divisor,
            watch_every=self.watch_every,
        )


def key(config: Config, place: int, seed: int) -> str:
    """Name of a task."""
    return f"{config.cases[place].name.lower()}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Place of the case, and seed."""
    return {key(config, place, seed): (place, seed) for place in range(len(config.cases)) for seed in config.seeds}


def needs(config: Config) -> object:
    """Loads the images."""
    return load(config.images)


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """One training."""
    from equilibria.training import train

    place, seed = task
    made = recipe(config.plan(place), load(config.images), seed=seed)
    trained = train(made, folder=scratch(), progress=tell_progress(made.steps))
    return arrays(trained, columns=("angle", "angle_equilibrium", "norm", "momentum_unit_grad_sq"))
