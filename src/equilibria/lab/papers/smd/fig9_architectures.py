"""smd-architectures: angles of depthwise and shuffled convolutions, and behind other normalisations (fig. 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.errors import EquilibriaError
from equilibria.lab.harness.claim import Claim, Source, demanded_if, diagnostic, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import label_panel, panels
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.layer_angles import draw_layers, explained_after_drop, law_after_drop, rms_ratio
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd

_SMALL = Images(size=8)


@dataclass(frozen=True)
class NamedNetwork:
    """A network with its name in the figure."""

    name: str
    network: Network


@dataclass(frozen=True)
class Config:
    """Networks of other blocks and normalisations, trained to equilibrium and over drops of the lr.

    Attributes:
        settled: number of judged steps before the first drop.
        at_once: window after the drop, in steps.
    """

    cases: tuple[NamedNetwork, ...] = (
        NamedNetwork("MobileNet-V2", Network("mobilenet", blocks=(1, 1, 1))),
        NamedNetwork("ShuffleNet-V2", Network("shufflenet", width=16, blocks=(2, 2, 2))),
        NamedNetwork("GroupNorm", Network(norm="group")),
        NamedNetwork("LayerNorm", Network(norm="layer")),
        NamedNetwork("WeightNorm", Network(norm="weight")),
    )
    sgd: Sgd = trainings.SGDM
    images: Images = _SMALL
    batch_size: int = 128
    drops: tuple[int, ...] = (1500,)
    steps: int = 1900
    divisor: float = 10.0
    settled: int = 500
    at_once: tuple[int, int] = (10, 100)
    watch_every: int = 2
    ghost: int = later(0)
    seeds: tuple[int, ...] = (60, 61, 62)

    def __post_init__(self) -> None:
        if not self.settled <= self.drops[0] < self.steps:
            raise EquilibriaError(f"got settled={self.settled}, drops={self.drops}; expected both before {self.steps}")

    def training(self, place: int) -> ImageTraining:
        """The training of one case."""
        return ImageTraining.of(self, network=self.cases[place].network)


def key(config: Config, place: int, seed: int) -> str:
    """Key of a task."""
    return f"{config.cases[place].name.lower().replace('+', '-plus')}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Index of the case, and seed."""
    return {key(config, place, seed): (place, seed) for place in range(len(config.cases)) for seed in config.seeds}


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Train once."""
    place, seed = task
    return trainings.run_training(config.training(place), seed=seed, columns=_COLUMNS)


# ---- judging

_COLUMNS = ("angle", "angle_equilibrium", "norm", "momentum_unit_grad_sq")
_FIGURE = Source("smd", "fig. 9, §C.4", law="equilibrium.heavy_ball")
_OTHERS = Source("smd", "§2; no figure", law="equilibrium.heavy_ball")
_LAGS = Source("smd", "fig. 9, §5.2", law="transient.evolve")
_IN_FIGURE = ("mobilenet", "shufflenet", "mobilenet-v2", "shufflenet-v2+")
# The angle is off by the drift of the norm: 5 % for a unit gradient that grows by 10 % in a time constant.
_MEDIAN = 0.05
# The smallest tensors, depthwise ones of 72 entries, are the noisiest.
_ANY_LAYER = 0.20
# Of a diagnostic: the scatter of the unit gradient over a hundred steps, which remains after its change is accounted
# for. The angle itself has no tolerance: nobody has bounded how much the unit gradient changes at a drop.
_EXPLAINED = 0.10


def _numbers(config: Config, run: Arrays) -> dict[str, float]:
    """Ratios of angles to their equilibrium in one training."""
    drop, (first, end) = config.drops[0], config.at_once
    settled = rms_ratio(run, (drop - config.settled, drop))
    at_once = rms_ratio(run, (drop + first, drop + end))
    depthwise = np.array([_is_depthwise(str(name)) for name in run["names"]])
    return {
        "median": float(np.median(settled)),
        "farthest": float(np.abs(settled - 1).max()),
        "depthwise": float(np.median(settled[depthwise])) if depthwise.any() else np.nan,
        "at_once": float(np.median(at_once)),
        "explained": explained_after_drop(run, at_once, drop=drop, window=config.at_once, start=config.divisor**-0.5),
    }


def _lagging(config: Config) -> float:
    """The law's value of "explained" for a constant unit gradient: 1, except that the norm begins to follow."""
    return law_after_drop(config.sgd.rule, config.divisor, config.at_once) * math.sqrt(config.divisor)


def _is_depthwise(name: str) -> bool:
    return "depthwise" in name


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angles of every network in equilibrium and right after the drop."""
    claims: list[Claim] = []
    numbers = {}
    for place, case in enumerate(config.cases):
        seeds = over_seeds([_numbers(config, results[key(config, place, seed)]) for seed in config.seeds])
        claims += _judge(config, case, seeds)
        numbers[case.name] = seeds
    return Outcome(demanded_if(config.images.data != "digits", claims), numbers)


def _judge(config: Config, case: NamedNetwork, seeds: Mapping[str, Sequence[float]]) -> list[Claim]:
    source = _FIGURE if case.network.kind in _IN_FIGURE else _OTHERS
    claims = [
        source.says(
            f"{case.name}: angle of the median layer over its theory, last {config.settled} steps before the drop"
        ).near(1.0, seeds["median"], relative=_MEDIAN),
        source.says(f"{case.name}: |angle / theory - 1| of the layer that is farthest off").at_most(
            _ANY_LAYER, seeds["farthest"]
        ),
        _LAGS.says(
            f"{case.name}: angle of the median layer over its new equilibrium, {config.at_once[0]} to "
            f"{config.at_once[1]} steps after lr / {config.divisor:g}, by the law for a constant unit gradient"
        ).equals(law_after_drop(config.sgd.rule, config.divisor, config.at_once), seeds["at_once"], ratio=True),
        diagnostic(
            _LAGS.says(
                f"{case.name}: the same angle over what its old norm and the unit gradient as it is then lead to"
            ).near(_lagging(config), seeds["explained"], relative=_EXPLAINED)
        ),
    ]
    if np.isfinite(seeds["depthwise"]).all():
        claims.append(
            source.says(f"{case.name}: depthwise convolutions alone, the median one").near(
                1.0, seeds["depthwise"], relative=_MEDIAN
            )
        )
    return claims


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Figure 9 for the first seed: angles of all layers and the theory's line, a panel per network."""
    columns = min(3, len(config.cases))
    figure, axes = panels(-(-len(config.cases) // columns), columns, width=2.4, height=2.0)
    for panel, place, letter in zip(axes, range(len(config.cases)), "abcdefgh", strict=False):
        run = results[key(config, place, config.seeds[0])]
        draw_layers(panel, run, average=5)
        law = run["angle_equilibrium"]
        panel.set(yscale="log", ylim=(float(law.min()) / 8, 4 * float(law.max())))
        label_panel(panel, letter, f"{config.cases[place].name}: angles, rad")
    axes[0].legend()
    for panel in axes[len(config.cases) :]:
        panel.set_axis_off()
    return {"architectures": figure}


_SMOKE = Config(
    cases=(
        NamedNetwork("MobileNet-V2", Network("mobilenet", width=4, blocks=(1,))),
        NamedNetwork("ShuffleNet-V2", Network("shufflenet", width=4, blocks=(1,))),
        NamedNetwork("GroupNorm", Network(width=4, blocks=(1,), norm="group")),
        NamedNetwork("LayerNorm", Network(width=4, blocks=(1,), norm="layer")),
        NamedNetwork("WeightNorm", Network(width=4, blocks=(1,), norm="weight")),
    ),
    sgd=trainings.SGDM,
    images=Images("digits", flip=False, label_noise=0.3),
    batch_size=32,
    drops=(12,),
    steps=20,
    settled=6,
    at_once=(2, 8),
)
_LARGER = 4  # batches of 1,024 images, as in the code of ShuffleNet-V2+, which has this lr and weight decay
_PAPER = Config(
    cases=(
        NamedNetwork("MobileNet-V2", Network("mobilenet-v2", width=32)),
        NamedNetwork("ShuffleNet-V2+", Network("shufflenet-v2+", width=68)),
    ),
    sgd=Sgd("SGDM", lr=0.5, weight_decay=4e-5, other_lr=0.5, momentum=0.9, other_decay=4e-5),
    images=trainings.IMAGENET,
    batch_size=_LARGER * 256,
    drops=tuple(drop // _LARGER for drop in trainings.IMAGENET_DROPS),
    steps=trainings.IMAGENET_STEPS // _LARGER,
    settled=trainings.IMAGENET_DROPS[0] // _LARGER // 4,
    watch_every=20,
    ghost=_LARGER * trainings.WORKER,  # eight workers, as for batches of 256
)

EXPERIMENT = Experiment(
    id="smd-architectures",
    title="Depthwise and shuffled convolutions, GroupNorm, LayerNorm and WeightNorm turn at the same rate",
    source="smd fig. 9",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)
