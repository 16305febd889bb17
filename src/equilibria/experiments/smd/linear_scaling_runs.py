"""Trainings of smd-linear-scaling: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.experiment import Arrays
from equilibria.experiments.smd.image_training import Images, Network, Plan, Sgd, arrays, batches, load, recipe
from equilibria.experiments.task import scratch, tell_progress

if TYPE_CHECKING:
    from equilibria.data import ImageSet
    from equilibria.training import Training

_OTHER_ORDER = 1000  # added to the seed of the batches that gradients are measured on
_SMALL = Images(size=8)
_NETWORK = Network()


@dataclass(frozen=True)
class Config:
    """Trainings on equally many images: with n times the batch, n times the learning rate and one n-th of the steps.

    Per image all have the same time constant, (1 - momentum) / (4 lr wd) steps: six to sixteen of them go by. The last
    half is judged.

    Attributes:
        factors: n; 1 first.
        steps: of n = 1, by rule.
        drops: of n = 1, when the learning rate is divided by ten; what is before the first one is judged.
        long: steps of n = 1 that angles over equally many images are compared over.
        norms_every: steps of n = 1 from one measurement of gradients at all batch sizes to the next.
        norms_images: images in all the batches of one size that these are taken from.
    """

    rules: tuple[Sgd, ...] = (
        Sgd("SGD", lr=0.05, weight_decay=5e-3, other_lr=0.01),
        Sgd("SGDM", lr=0.02, weight_decay=5e-3, other_lr=0.002, momentum=0.9),
    )
    steps: tuple[int, ...] = (6144, 4096)
    factors: tuple[int, ...] = (1, 4, 16)
    drops: tuple[int, ...] = ()
    batch_size: int = 32
    long: int = 1024
    images: Images = _SMALL
    network: Network = _NETWORK
    layer: str = "blocks.0.second.conv.weight"
    norms_every: int = 512
    norms_images: int = 2048
    seeds: tuple[int, ...] = (50, 51, 52)

    def sgd(self, place: int, factor: int) -> Sgd:
        """The optimizer with so many times the batch."""
        base = self.rules[place]
        return replace(base, lr=factor * base.lr, other_lr=factor * base.other_lr)

    def spans(self, factor: int) -> tuple[int, ...]:
        """Over how many steps angles are measured; those over one step are watched."""
        short = self.factors[1:] if factor == 1 else ()
        return (*short, self.long // factor)

    def plan(self, place: int, factor: int) -> Plan:
        """One training, without what is measured."""
        spans = self.spans(factor)
        return Plan(
            images=self.images,
            network=self.network,
            sgd=self.sgd(place, factor),
            batch_size=factor * self.batch_size,
            steps=self.steps[place] // factor,
            drops=tuple(drop // factor for drop in self.drops),
            measure_every=min(spans),
            watch_every=max(1, 4 // factor),
            measures={"spans": SpanAngles(spans)},
        )


class SpanAngles:
    """A `Measure`: by how much every convolution has turned over the last n steps, every n steps; NaN in between."""

    def __init__(self, spans: tuple[int, ...]) -> None:
        self._spans = spans
        self._held: dict[str, list[Any]] = {}

    def __call__(self, training: Training) -> dict[str, NDArray[np.float64]]:
        """See `Measure`."""
        from equilibria.experiments.smd.batch_gradients import convolutions

        weights = convolutions(training)
        found = {}
        for span in self._spans:
            found[f"angle_{span}"] = np.full(len(weights), np.nan)
            if training.step % span == 0:
                before = self._held.get(str(span))
                if before is not None:
                    found[f"angle_{span}"] = np.array([_angle(*pair) for pair in zip(before, weights, strict=True)])
                self._held[str(span)] = [weight.detach().clone() for weight in weights]
        return found

    def state_dict(self) -> dict[str, list[Any]]:
        """The weights that the next angles begin at."""
        return dict(self._held)

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Go on from there."""
        self._held = dict(state)


def _angle(one: Any, other: Any) -> float:
    """By the chord: a cosine has no digits for small angles."""
    first, second = (each.detach().double() / each.detach().double().norm() for each in (one, other))
    return 2 * float(np.arcsin(min(float((second - first).norm()) / 2, 1.0)))


def key(config: Config, place: int, factor: int, seed: int) -> str:
    """Name of a task."""
    return f"{config.rules[place].name.lower()}-{factor}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int, int]]:
    """Place of the rule, factor and seed."""
    return {
        key(config, place, factor, seed): (place, factor, seed)
        for place in range(len(config.rules))
        for factor in config.factors
        for seed in config.seeds
    }


def needs(config: Config) -> object:
    """Loads the images."""
    return load(config.images)


def run_task(config: Config, task: tuple[int, int, int]) -> Arrays:
    """One training; the one with the smallest batch tells the gradients at all batch sizes."""
    from equilibria.training import train

    place, factor, seed = task
    loaded = load(config.images)
    plan = config.plan(place, factor)
    if factor == 1:
        plan = replace(plan, measures={**plan.measures, "norms": _norms(config, loaded, seed=seed)})
    made = recipe(plan, loaded, seed=seed)
    trained = train(made, folder=scratch(), progress=tell_progress(made.steps))
    return arrays(trained, columns=("angle", "angle_equilibrium", "norm", "unit_grad_sq"))


def _norms(config: Config, loaded: ImageSet, *, seed: int) -> Any:
    from equilibria.experiments.smd.batch_gradients import GradientNorms

    taken = {}
    for factor in config.factors:
        size = factor * config.batch_size
        drawn = batches(config.images, loaded, batch_size=size, seed=seed + _OTHER_ORDER)
        taken[f"gradient_{factor}"] = list(islice(drawn, max(1, config.norms_images // size)))
    return GradientNorms(taken, every=config.norms_every)
