"""smd-momentum: more momentum at one lr * wd: smaller steps, larger loss (smd+ appendix E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, demanded_if, over_seeds
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, Window, draw_seeds, label_panel, mean_in, panels
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.layer_angles import inside, rms_ratio, running_mean
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd

if TYPE_CHECKING:
    from equilibria.lab.training import Measure

_SMALL = Images(size=8)


@dataclass(frozen=True)
class Config:
    """One learning rate and weight decay of the convolutions, several momenta.

    The other parameters have no weight decay, and ``other_lr`` (1 - momentum), so that momentum does not speed them up
    and the convolutions alone differ. The window begins six time constants 1/(4 lr wd) after the start without
    momentum, where layers settle last; it was fixed before any of these seeds was run.

    Attributes:
        span: steps between two measurements, over which layers turn as far as the third panel shows.
    """

    momenta: tuple[float, ...] = (0.0, 0.5, 0.9)
    lr: float = 0.1
    weight_decay: float = 5e-3
    other_lr: float = 0.1
    images: Images = _SMALL
    network: Network = trainings.RESNET8
    batch_size: int = 128
    steps: int = 4000
    window: Window = (3000, 4000)
    span: int = 200
    watch_every: int = 5
    seeds: tuple[int, ...] = tuple(range(70, 78))

    def sgd(self, momentum: float) -> Sgd:
        """The optimizer with this momentum."""
        return Sgd(
            f"momentum {momentum:g}",
            lr=self.lr,
            weight_decay=self.weight_decay,
            other_lr=self.other_lr * (1 - momentum),
            momentum=momentum,
        )

    def training(self, momentum: float) -> ImageTraining:
        """The training with this momentum, without its measures."""
        return ImageTraining.of(self, sgd=self.sgd(momentum), measure_every=self.span)


def key(momentum: float, seed: int) -> str:
    """Key of a task."""
    return f"momentum-{momentum:g}-{seed}"


def tasks(config: Config) -> dict[str, tuple[float, int]]:
    """Momentum and seed: one training each."""
    return {key(momentum, seed): (momentum, seed) for momentum in config.momenta for seed in config.seeds}


def run_task(config: Config, task: tuple[float, int]) -> Arrays:
    """Train once; runs of one seed share their first weights and the order of the data."""
    from equilibria.lab.papers.smd.measures import SpanAngles

    momentum, seed = task
    evaluation = trainings.evaluation(trainings.load(config.images))
    measures: dict[str, Measure] = {"test": evaluation, "far": SpanAngles((config.span,))}
    training = replace(config.training(momentum), measures=measures)
    return trainings.run_training(training, seed=seed, columns=("angle", "angle_equilibrium"))


# ---- judging

_ANGLE = Source("smd+", "Appendix E, Theorem 3", law="equilibrium.heavy_ball")
_LOSS = Source("smd+", "Appendix E")
# The angle is off by the drift of the norm: 5 % for a unit gradient that grows by 10 % in a time constant.
_MEDIAN = 0.05


def _numbers(config: Config, run: Arrays) -> dict[str, float]:
    """One training: means over the window; angles of the median layer."""
    first, last = config.window
    step = np.sqrt(np.mean(run["angle"][inside(run["sampled_step"], (first, last))] ** 2, axis=0))
    far = run[f"angle_{config.span}"][(first < run["step"]) & (run["step"] <= last)]
    return {
        "angle": float(np.median(step)),
        "over_law": float(np.median(rms_ratio(run, (first, last)))),
        "range": float(np.median(np.sqrt(np.mean(far**2, axis=0)) / step)),
        "loss": mean_in(run, "loss", config.window),
        "test_loss": mean_in(run, "test_loss", config.window),
        "test_accuracy": mean_in(run, "test_accuracy", config.window),
    }


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angle of every momentum, and the losses of each against those of the smallest."""
    numbers = {
        f"{momentum:g}": over_seeds([_numbers(config, results[key(momentum, seed)]) for seed in config.seeds])
        for momentum in config.momenta
    }
    return Outcome(demanded_if(config.images.data != "digits", _judge(config, numbers)), numbers)


def _judge(config: Config, numbers: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Claim]:
    least, *more = numbers
    claims = [
        _ANGLE.says(
            f"Momentum {momentum}: angle of the median layer over sqrt(2 lr wd/(1 + momentum)), steps "
            f"{config.window[0]} to {config.window[1]}"
        ).near(1.0, seeds["over_law"], relative=_MEDIAN)
        for momentum, seeds in numbers.items()
    ]
    for momentum in more:
        here, there = numbers[momentum], numbers[least]
        than = f"than with momentum {least} at the same lr and wd"
        claims += [
            _ANGLE.says(f"Momentum {momentum}: a smaller angle {than}: ratio, seed by seed").at_most(
                1.0, np.divide(here["angle"], there["angle"])
            ),
            _LOSS.says(f"Momentum {momentum}: a larger training loss {than}: difference, seed by seed").at_least(
                0.0, np.subtract(here["loss"], there["loss"])
            ),
            _LOSS.says(f"Momentum {momentum}: a larger test loss {than}: difference, seed by seed").at_least(
                0.0, np.subtract(here["test_loss"], there["test_loss"])
            ),
            _LOSS.says(
                f"Momentum {momentum}: a larger range beside its step {than}: angle over {config.span} steps over that "
                "of one, median layer, ratio of the two, seed by seed"
            ).at_least(1.0, np.divide(here["range"], there["range"])),
        ]
    return claims


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Angle per step, angle over many steps, training and test loss of every momentum."""
    figure, (angle, far, loss, test) = panels(2, 2, width=3.2, height=2.2)
    bins = max(1, config.span // config.watch_every)
    for colour, momentum in zip(COLOURS, config.momenta, strict=False):
        runs = [results[key(momentum, seed)] for seed in config.seeds]
        label, style = f"momentum {momentum:g}", {"color": colour}
        smooth = [np.sqrt(running_mean(np.median(run["angle"], axis=1) ** 2, bins)) for run in runs]
        draw_seeds(angle, runs[0]["sampled_step"], smooth, label=label, **style)
        angle.axhline(float(config.sgd(momentum).rule.equilibrium().angle), color=THEORY, lw=0.8, ls="--")
        steps = runs[0]["step"]
        draw_seeds(far, steps[2:], [np.median(run[f"angle_{config.span}"], axis=1)[2:] for run in runs], **style)
        draw_seeds(loss, steps[1:], [run["loss"][1:] for run in runs], **style)
        draw_seeds(test, steps[1:], [run["test_loss"][1:] for run in runs], **style)
    angle.plot([], [], color=THEORY, lw=0.8, ls="--", label="theory")
    angle.set_ylim(bottom=0)
    far.set_ylim(bottom=0)
    for axes in (angle, far, loss, test):
        axes.set_xlabel("step")
    figure.legend(*angle.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    label_panel(angle, "a", "angle of a step, median layer", ylabel="rad")
    label_panel(far, "b", f"angle over {config.span} steps, median layer", ylabel="rad")
    label_panel(loss, "c", "training loss", ylabel="cross entropy (nats)")
    label_panel(test, "d", "test loss", ylabel="cross entropy (nats)")
    return {"momentum": figure}


_SMOKE = Config(
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1,)),
    batch_size=16,
    steps=24,
    window=(12, 24),
    span=4,
    watch_every=2,
    seeds=(0, 1, 2),
)
_PAPER = Config(  # the network and data of appendix F; the appendix gives no settings for this sentence
    weight_decay=5e-4,
    images=Images(size=32, crop=4),
    network=Network(width=64, blocks=(2, 2, 2, 2)),
    steps=200 * 390,
    window=(180 * 390, 200 * 390),
    span=390,
    watch_every=20,
)

EXPERIMENT = Experiment(
    id="smd-momentum",
    title="More momentum at one lr times weight decay: a smaller angle, a larger loss",
    source="smd+ appendix E",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)
