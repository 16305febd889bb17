"""smd-correlation: gradient and momentum buffer at the paper's learning rate and weight decay (fig. 2 (d))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, demanded_if, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import COLOURS, THEORY, draw_seeds, label_panel, panels
from equilibria.lab.papers.smd import layer_angles as angles
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd

_SMALL = Images(size=8)
# Momentum multiplies the effective rate of the parameters that do not decay by ten: theirs is a tenth.
_PAPERS = Sgd("SGDM", lr=0.2, weight_decay=1e-4, other_lr=0.02, momentum=0.9)


@dataclass(frozen=True)
class Config:
    """SGDM at the paper's learning rate 0.2 and weight decay 1e-4, with two batch sizes.

    The time constant (1 - momentum)/(4 lr wd) is 1,250 steps, so that the training has eight of them; the last quarter
    is judged. `smd-fixed-lr` has 25 times the paper's lr * wd at desk scale.

    Attributes:
        average: number of steps in running means of the unit gradient.
    """

    sgd: Sgd = _PAPERS
    images: Images = _SMALL
    network: Network = trainings.RESNET8
    batch_sizes: tuple[int, ...] = (128, 32)
    steps: int = 10_000
    layer: str = "blocks.1.second.conv.weight"
    average: int = 400
    watch_every: int = 4
    ghost: int = later(0)
    seeds: tuple[int, ...] = tuple(range(40, 46))

    def training(self, batch_size: int) -> ImageTraining:
        """The training with this batch size."""
        return ImageTraining.of(self, batch_size=batch_size)

    @property
    def judged(self) -> angles.Window:
        """The last quarter."""
        return self.steps * 3 // 4, self.steps

    @property
    def average_samples(self) -> int:
        """Number of samples in running means."""
        return max(1, self.average // self.watch_every)


def key(batch_size: int, seed: int) -> str:
    """Key of a task."""
    return f"batch-{batch_size}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int]]:
    """Batch size and seed: one training each."""
    return {key(size, seed): (size, seed) for size in config.batch_sizes for seed in config.seeds}


def run_task(config: Config, task: tuple[int, int]) -> Arrays:
    """Train once."""
    batch_size, seed = task
    return trainings.run_training(config.training(batch_size), seed=seed)


# ---- judging

Array = NDArray[np.float64]
_CORRELATION = Source("smd", "fig. 2 (d), assumption 5", law="rules.momentum_unit_grad_sq")
_ANGLE = Source("smd", "fig. 2 (c), Thm 3", law="equilibrium.heavy_ball")
# smd calls the correlation of gradient and buffer "very close to 0"; 2.5 % of the norm allow a tenth.
_UNCORRELATED = 0.10
# A unit gradient that grows by 10 % in a time constant gives 5 % in the angle; for single layers, the smallest of
# 128 entries, twice that.
_MEDIAN, _ANY_LAYER = 0.05, 0.10


def with_buffer(run: Arrays, window: angles.Window) -> Array:
    """Mean of h~ over the mean squared unit gradient, by layer: 1 if gradient and buffer are uncorrelated."""
    chosen = angles.inside(run["sampled_step"], window)
    ratio: Array = run["momentum_unit_grad_sq"][chosen].mean(axis=0) / run["unit_grad_sq"][chosen].mean(axis=0)
    return ratio


def _numbers(config: Config, run: Arrays) -> dict[str, float]:
    """One training: the median layer and the layer that is farthest off, last quarter."""
    ratio, turned = with_buffer(run, config.judged), angles.rms_ratio(run, config.judged)
    return {
        "correlated": float(np.median(ratio)),
        "shown_layer": float(ratio[angles.layer_column(run, config.layer)]),
        "angle": float(np.median(turned)),
        "farthest_angle": float(np.abs(turned - 1).max()),
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the correlation and the angle for each batch size."""
    numbers = {
        f"batch {size}": over_seeds([_numbers(config, results[key(size, seed)]) for seed in config.seeds])
        for size in config.batch_sizes
    }
    claims = [claim for name, seeds in numbers.items() for claim in _judge(config, name, seeds)]
    return Outcome(demanded_if(config.images.data != "digits", claims), numbers)


def _judge(config: Config, name: str, seeds: Mapping[str, Sequence[float]]) -> list[Claim]:
    setting = f"lr {config.sgd.lr:g}, wd {config.sgd.weight_decay:g}, {name}"
    hardly = "gradient and buffer are hardly correlated: mean h~ over mean squared unit gradient"
    return [
        _CORRELATION.says(f"{setting}: {hardly}, median layer").near(1.0, seeds["correlated"], relative=_UNCORRELATED),
        _CORRELATION.says(f"{setting}: the same for {config.layer}").near(
            1.0, seeds["shown_layer"], relative=_UNCORRELATED
        ),
        _ANGLE.says(f"{setting}: angle of the median layer over its theory").near(
            1.0, seeds["angle"], relative=_MEDIAN
        ),
        _ANGLE.says(f"{setting}: |angle / theory - 1| of the layer that is farthest off").at_most(
            _ANY_LAYER, seeds["farthest_angle"]
        ),
    ]


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Figure 2 (d) for the first seed, the ratio of both lines of all seeds, and the angle over its theory."""
    figure, axes = panels(len(config.batch_sizes), 3, width=2.6, height=2.1)
    for row, size in enumerate(config.batch_sizes):
        runs = [results[key(size, seed)] for seed in config.seeds]
        both, ratio, angle = axes[3 * row : 3 * row + 3]
        column, count = angles.layer_column(runs[0], config.layer), config.average_samples
        angles.draw_unit_gradients(both, runs[0], column, average=count)
        both.legend(loc="upper left")
        steps, keep = runs[0]["sampled_step"], slice(count, None, max(1, count // 10))
        draw_seeds(ratio, steps[keep], [_median_ratio(run, count)[keep] for run in runs], color=COLOURS[0])
        draw_seeds(angle, steps[keep], [_median_angle(run, count)[keep] for run in runs], color=COLOURS[1])
        for panel in (ratio, angle):
            panel.axhline(1, color=THEORY, lw=0.9, ls="--")
            panel.set_xlabel("step")
            panel.set_ylim(bottom=0)
        letters = "abcdef"[3 * row :]
        label_panel(both, letters[0], f"batch {size}: unit gradient, one layer")
        label_panel(ratio, letters[1], "$\\tilde h$ / $\\|\\tilde g\\|^2$, median layer")
        label_panel(angle, letters[2], "angle / theory, median layer")
    return {"correlation": figure}


def _median_ratio(run: Arrays, count: int) -> Array:
    means = (angles.running_mean(run[name], count) for name in ("momentum_unit_grad_sq", "unit_grad_sq"))
    return np.asarray(np.median(np.divide(*means), axis=1))


def _median_angle(run: Arrays, count: int) -> Array:
    squares = angles.running_mean((run["angle"] / run["angle_equilibrium"]) ** 2, count)
    return np.asarray(np.median(np.sqrt(squares), axis=1))


_SMOKE = Config(
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1, 1)),
    batch_sizes=(32, 16),
    steps=32,
    average=8,
    watch_every=2,
    seeds=(0, 1, 2),
)
_PAPER = Config(
    sgd=Sgd("SGDM", lr=0.2, weight_decay=1e-4, other_lr=0.2, momentum=0.9, other_decay=1e-4),
    images=trainings.IMAGENET,
    network=trainings.RESNET50,
    batch_sizes=(256,),
    steps=trainings.IMAGENET_STEPS,
    layer=trainings.RESNET50_LAYERS["layer2.0.conv2"],
    average=200,
    watch_every=20,
    ghost=trainings.WORKER,
)

EXPERIMENT = Experiment(
    id="smd-correlation",
    title="Gradient and momentum buffer are hardly correlated at the paper's learning rate and weight decay",
    source="smd fig. 2 (d)",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)
