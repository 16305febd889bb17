"""smd-noise: the mean of the unit gradient against its variance, through training (smd+ fig. 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, demanded_if, diagnostic, identity, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import COLOURS, THEORY, draw_seeds, label_panel, mark_drops, panels
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.layer_angles import inside, layer_column
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd

_SMALL = Images(size=8)
# Layers turn as slowly as in smd-linear-scaling: at high speed a mean gradient drives them back.
_SGDM = Sgd("SGDM", lr=0.02, weight_decay=5e-3, other_lr=0.002, momentum=0.9)
_OTHER_ORDER = 1000  # added to the seed for the batches on which the noise is measured


@dataclass(frozen=True)
class Config:
    """A training over three stages; every ``measure_every`` steps the gradients of ``count`` batches are compared.

    The measurements of a stage are averaged, except the first ``skip`` of the training, before the layers have settled.
    """

    sgd: Sgd = _SGDM
    images: Images = _SMALL
    network: Network = trainings.RESNET8
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
    ghost: int = later(0)
    seeds: tuple[int, ...] = tuple(range(43, 51))

    def training(self) -> ImageTraining:
        """The training, without its measures."""
        return ImageTraining.of(self)


def run_task(config: Config, task: int) -> Arrays:
    """Train once; the compared batches are drawn like the training batches, in another order."""
    from equilibria.lab.papers.smd.measures import NoiseMeasure

    others = trainings.batches(
        config.images, trainings.load(config.images), batch_size=config.batch_size, seed=task + _OTHER_ORDER
    )
    measure = NoiseMeasure(list(islice(others, config.count)))
    return trainings.run_training(replace(config.training(), measures={"noise": measure}), seed=task)


# ---- judging

_SPLIT = Source("smd+", "fig. 1, eq. (183)", law="fluctuation.noise_split")
_SDE = Source("smd+", "Lemma D.1, eq. (184)", law="rayleigh.sde_norm_fourth")
# "Much larger": ten times. It is then within 2.5 % to which norm the noise alone leads.
_MUCH = 0.1
# 2.5 % for what the mean gradient adds, 2.5 % for the drift of the unit gradient.
_NORM_OFF = 0.05
# Two estimates of E||g~||^2: dozens of batches at one time against the batches of the steps around it, and a unit
# gradient that drifts by as much between two measurements.
_SAME = 0.1


def _numbers(config: Config, run: Arrays) -> dict[str, Any]:
    """One seed: squared mean over variance in every stage, norm over that of the noise alone, two estimates of L."""
    column = layer_column(run, config.layer)
    bounds = [config.skip * config.measure_every, *config.drops, config.steps]
    stages = [inside(run["step"], (low + 1, high + 1)) for low, high in pairwise(bounds)]
    means = [(run["signal_sq"][stage].mean(axis=0), run["noise_sq"][stage].mean(axis=0)) for stage in stages]
    return {
        "stages": [float(signal[column] / noise[column]) for signal, noise in means],
        "all_layers": [float(np.median(signal / noise)) for signal, noise in means],
        "norm": _norm_by_noise(config, run, column),
        "same": _same(config, run, column),
    }


def _end_of_first_stage(config: Config, run: Arrays) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the measurements, and of the samples around them, as many before the first as after the last."""
    begin, end, half = config.drops[0] - config.settled, config.drops[0], config.measure_every // 2
    return inside(run["step"], (begin + 1, end)), inside(run["sampled_step"], (begin + half, end - half))


def _norm_by_noise(config: Config, run: Arrays, column: int) -> float:
    """Norm at the end of the first stage over the equilibrium norm of the variance alone."""
    measured, sampled = _end_of_first_stage(config, run)
    predicted = config.sgd.rule.equilibrium(unit_grad_sq=float(run["noise_sq"][measured, column].mean())).norm
    assert predicted is not None
    return float(run["norm"][sampled, column].mean() / predicted)


def _same(config: Config, run: Arrays, column: int) -> float:
    """Squared mean and variance together, over the mean squared unit gradient of the steps themselves."""
    measured, sampled = _end_of_first_stage(config, run)
    together = (run["signal_sq"] + run["noise_sq"])[measured, column].mean()
    return float(together / run["unit_grad_sq"][sampled, column].mean())


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge how much larger the variance is in every stage, and whether it alone fixes the norm."""
    seeds = over_seeds([_numbers(config, results[trainings.key(seed)]) for seed in config.seeds])
    return Outcome(demanded_if(config.images.data != "digits", _judge(config, seeds)), seeds)


def _judge(config: Config, seeds: Mapping[str, Sequence[Any]]) -> list[Claim]:
    return [
        *(
            _SPLIT.says(
                f"Stage {stage + 1}: squared mean of the unit gradient over its variance in batches of "
                f"{config.batch_size}, {config.layer}"
            ).at_most(_MUCH, [stages[stage] for stages in seeds["stages"]])
            for stage in range(len(config.drops) + 1)
        ),
        _SPLIT.says("All stages: the same for the median layer, in the stage where it is largest").at_most(
            _MUCH, [max(layers) for layers in seeds["all_layers"]]
        ),
        diagnostic(
            _SDE.says(
                "The noise alone fixes the norm: norm over the one that the variance leads to, end of stage 1"
            ).near(1.0, seeds["norm"], relative=_NORM_OFF)
        ),
        identity(
            Source("smd+", "eq. (182)", law="fluctuation.noise_split")
            .says("Squared mean and variance add up to the mean squared unit gradient of the steps themselves")
            .near(1.0, seeds["same"], relative=_SAME)
        ),
    ]


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Squared mean and variance of one layer through training; their ratio in all layers."""
    figure, (both, ratio) = panels(1, 2, width=3.0, height=2.3)
    runs = [results[trainings.key(seed)] for seed in config.seeds]
    steps, column = runs[0]["step"], layer_column(runs[0], config.layer)
    for colour, name, label in ((COLOURS[0], "noise_sq", "variance"), (COLOURS[1], "signal_sq", "squared mean")):
        draw_seeds(both, steps, [run[name][:, column] for run in runs], color=colour, label=label)
    label_panel(both, "a", f"{config.layer.removesuffix('.conv.weight')}: squared unit gradient", legend=True)
    ratios = np.mean([run["signal_sq"] / run["noise_sq"] for run in runs], axis=0)
    for place in range(ratios.shape[1]):
        ratio.plot(steps, ratios[:, place], color=COLOURS[place % len(COLOURS)], lw=0.7)
    ratio.axhline(0, color=THEORY, lw=0.5)
    label_panel(ratio, "b", "all layers: squared mean / variance")
    for axes in (both, ratio):
        axes.set_xlabel("step")
        mark_drops(axes, config.drops)
    return {"noise": figure}


_SMOKE = Config(
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1,)),
    batch_size=32,
    drops=(24, 36),
    steps=48,
    count=4,
    skip=1,
    settled=12,
    measure_every=6,
    seeds=(43, 44, 45),
)
_PAPER = Config(
    sgd=trainings.IMAGENET_SGDM,
    images=trainings.IMAGENET,
    network=trainings.RESNET50,
    batch_size=256,
    drops=trainings.IMAGENET_DROPS,
    steps=trainings.IMAGENET_STEPS,
    layer=trainings.RESNET50_LAYERS["layer1.0.conv2"],
    settled=5 * trainings.IMAGENET_EPOCH,
    measure_every=trainings.IMAGENET_EPOCH,
    watch_every=20,
    ghost=trainings.WORKER,
    seeds=(43, 44, 45),
)

EXPERIMENT = Experiment(
    id="smd-noise",
    title="The mean of the unit gradient against its variance, through training",
    source="smd+ fig. 1",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(trainings.tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)
