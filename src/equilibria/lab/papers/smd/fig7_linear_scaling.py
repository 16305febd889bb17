"""smd-linear-scaling: the angle over n steps against one step with n times the batch and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, demanded_if, diagnostic
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults, later
from equilibria.lab.harness.figures import COLOURS, THEORY, label_panel, panels
from equilibria.lab.papers.smd import trainings
from equilibria.lab.papers.smd.layer_angles import Window, inside, layer_column
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd
from equilibria.theory.angles import linear_scaling_ratio, n_step_angles
from equilibria.theory.correlation import measured_scaling_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from equilibria.lab.training import Measure


_OTHER_ORDER = 1000  # added to the seed for the batches on which gradients are measured
_SMALL = Images(size=8)
_NETWORK = Network()


@dataclass(frozen=True)
class Config:
    """Trainings on equally many images: with n times the batch, n times the learning rate and one n-th of the steps.

    Per image all have the same time constant, (1 - momentum) / (4 lr wd) steps, of which a training has six to sixteen.
    The last half is judged.

    Attributes:
        factors: n; 1 first.
        steps: of n = 1, by rule.
        drops: of n = 1, where the learning rate is divided by ten; only steps before the first one are judged.
        long: steps of n = 1 over which angles are compared for equally many images.
        norms_every: steps of n = 1 from one measurement of gradients at all batch sizes to the next.
        norms_images: images in all batches of one size that the gradients are measured on.
        ghost: images that a BatchNorm sees, whatever the batch; 0 for whole batches.
        warm_up: steps of n = 1 in which the learning rate of the others grows from that of n = 1 to n times it.
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
    ghost: int = later(0)
    warm_up: int = later(0)
    seeds: tuple[int, ...] = (50, 51, 52)

    def sgd(self, place: int, factor: int) -> Sgd:
        """The optimizer for ``factor`` times the batch."""
        base = self.rules[place]
        return replace(base, lr=factor * base.lr, other_lr=factor * base.other_lr)

    def spans(self, factor: int) -> tuple[int, ...]:
        """Numbers of steps over which angles are measured; those over one step are watched."""
        short = self.factors[1:] if factor == 1 else ()
        return (*short, self.long // factor)

    def training(self, place: int, factor: int) -> ImageTraining:
        """One training, without its measures."""
        return ImageTraining.of(
            self,
            sgd=self.sgd(place, factor),
            batch_size=factor * self.batch_size,
            steps=self.steps[place] // factor,
            drops=tuple(drop // factor for drop in self.drops),
            warm_up=self.warm_up // factor,
            warm_up_from=1 / factor,
            measure_every=min(self.spans(factor)),
            watch_every=max(1, 4 // factor),
        )


def key(config: Config, place: int, factor: int, seed: int) -> str:
    """Key of a task."""
    return f"{config.rules[place].name.lower()}-{factor}-{seed}"


def tasks(config: Config) -> dict[str, tuple[int, int, int]]:
    """Index of the rule, factor and seed."""
    return {
        key(config, place, factor, seed): (place, factor, seed)
        for place in range(len(config.rules))
        for factor in config.factors
        for seed in config.seeds
    }


def run_task(config: Config, task: tuple[int, int, int]) -> Arrays:
    """Train once; with the smallest batch, also measure gradients at all batch sizes."""
    from equilibria.lab.papers.smd.measures import SpanAngles

    place, factor, seed = task
    measures: dict[str, Measure] = {"spans": SpanAngles(config.spans(factor))}
    if factor == 1:
        measures["norms"] = _gradient_norms(config, seed=seed)
    return trainings.run_training(
        replace(config.training(place, factor), measures=measures), seed=seed, columns=_COLUMNS
    )


def _gradient_norms(config: Config, *, seed: int) -> Measure:
    from equilibria.lab.papers.smd.measures import GradientNorms

    loaded, by_size = trainings.load(config.images), {}
    for factor in config.factors:
        size = factor * config.batch_size
        drawn = trainings.batches(config.images, loaded, batch_size=size, seed=seed + _OTHER_ORDER)
        by_size[f"gradient_{factor}"] = list(islice(drawn, max(1, config.norms_images // size)))
    return GradientNorms(by_size, every=config.norms_every)


# ---- judging

Array = NDArray[np.float64]
_COLUMNS = ("angle", "angle_equilibrium", "norm", "unit_grad_sq")
_EXCESS = "the excess under momentum is intra-momentum correlation, not a failure of linear scaling"
_ANGLES = Source("smd", "fig. 7, §C.3", corrected=_EXCESS, law="angles.linear_scaling_ratio")
_LONG = Source("smd", "fig. 7, §C.3", corrected=_EXCESS, law="angles.n_step_angles")
_PREDICTED = Source("smd", "fig. 7, §C.3", corrected=_EXCESS, law="correlation.measured_scaling_ratio")
_GRADIENTS = Source("smd", "fig. 8", law="fluctuation.noise_split")
# The law assumes uncorrelated gradients. A mean gradient of a tenth of the noise, as smd-noise allows, adds up over n
# steps: 5 % of the angle, and as much for unit gradients that drift.
_NEAR = 0.10
# Of the ratio that the turning of the small steps predicts, which allows for correlated gradients: the promise of
# `correlation.measured_scaling_ratio`, for up to 32 steps.
_NEAR_MEASURED = 0.05
# _NEAR for squares of small angles. Over many steps the angle saturates near 90 degrees: the diffusion behind it
# is compared.
_NEAR_SQUARED = (1 + _NEAR) ** 2 - 1


def _rms(run: Arrays, name: str, steps: NDArray[np.int64], *, window: Window) -> Array:
    """Root mean square of every layer, without NaN."""
    rms: Array = np.sqrt(np.nanmean(run[name][inside(steps, window)] ** 2, axis=0))
    return rms


def _judged(config: Config, place: int, factor: int) -> Window:
    """The last half of the training, or of the steps before the first drop."""
    end = min(config.steps[place], *config.drops, config.steps[place]) // factor
    return end // 2, end + 1


def _turned(config: Config, place: int, factor: int, span: int, run: Arrays) -> Array:
    """Root mean square angle of every layer over ``span`` steps; a span counts if it begins in the judged half."""
    first, end = _judged(config, place, factor)
    if span == 1:
        return _rms(run, "angle", run["sampled_step"], window=(first, end - 1))
    return _rms(run, f"angle_{span}", run["step"], window=(first + span, end))


def _short_ratio(config: Config, results: TaskResults, place: int, factor: int, seed: int) -> float:
    """Median over layers of the angle over n steps over that of one step with n times the batch."""
    small = _turned(config, place, 1, factor, results[key(config, place, 1, seed)])
    large = _turned(config, place, factor, 1, results[key(config, place, factor, seed)])
    return float(np.median(small / large))


def _over_predicted(config: Config, results: TaskResults, place: int, factor: int, seed: int) -> float:
    """The same ratio over its prediction from the turning of the small steps, in the median layer.

    The turning over n small steps is in both, so that this is sqrt(n) times the angle of a small step over that of a
    large one: what remains of the law once it allows for correlated gradients.
    """
    run = results[key(config, place, 1, seed)]
    many, one = (_turned(config, place, 1, span, run) for span in (factor, 1))
    large = _turned(config, place, factor, 1, results[key(config, place, factor, seed)])
    squares = zip((many**2 / 2).tolist(), (one**2 / 2).tolist(), strict=True)  # D of small angles
    predicted = [measured_scaling_ratio(far, near, factor) for far, near in squares]
    return float(np.median(many / large / predicted))


def diffusion(angles: Array) -> Array:
    """Diffusion of directions: -ln of the mean cosine over rows, which grows in proportion to the steps.

    Example:
        >>> diffusion(np.full((3, 1), 0.1)).round(5)  # for small angles half their square
        array([0.00501])
    """
    spread: Array = -np.log(np.nanmean(np.cos(angles), axis=0))
    return spread


def _long_ratio(config: Config, results: TaskResults, place: int, factor: int, seed: int) -> float:
    """Median over layers of the diffusion over many images with the smallest batch over that with n times it."""
    spreads = []
    for times in (1, factor):
        run, span = results[key(config, place, times, seed)], config.long // times
        first, end = _judged(config, place, times)
        spreads.append(diffusion(run[f"angle_{span}"][inside(run["step"], (first + span, end))]))
    return float(np.median(spreads[0] / spreads[1]))


def _enlarged(config: Config, run: Arrays, place: int, factor: int) -> float:
    """Measured growth of the summed gradient's norm with ``factor`` times the batch: median layer."""
    window = _judged(config, place, 1)
    large, small = (_rms(run, f"gradient_{times}", run["step"], window=window) for times in (factor, 1))
    return float(np.median(large / small))


def signal_share(grown: float, factor: int) -> float:
    """Squared mean of one batch's gradient over its variance, from the growth of the norm of a sum over batches."""
    return (grown**2 - factor) / (factor**2 - grown**2)


def enlargement(share: float, factor: int) -> float:
    """Growth of the gradient's norm when it is summed over ``factor`` batches: noise as sqrt(n), signal as n."""
    return float(np.sqrt(factor * (1 + factor * share) / (1 + share)))


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge ratios of angles over equally many images, short and long, and the growth of the gradient."""
    claims: list[Claim] = []
    numbers: dict[str, dict[str, list[float]]] = {}
    for place, sgd in enumerate(config.rules):
        numbers[sgd.name] = {}
        for factor in config.factors[1:]:
            claims += _judge(config, results, place, factor, numbers[sgd.name])
    return Outcome(demanded_if(config.images.data != "digits", claims), numbers)


def _judge(
    config: Config, results: TaskResults, place: int, factor: int, numbers: dict[str, list[float]]
) -> list[Claim]:
    sgd, rule = config.rules[place], config.rules[place].rule
    large = config.sgd(place, factor).rule
    short, over_predicted, long = (
        [ratio(config, results, place, factor, seed) for seed in config.seeds]
        for ratio in (_short_ratio, _over_predicted, _long_ratio)
    )
    enlarged = [_enlarged(config, results[key(config, place, 1, seed)], place, factor) for seed in config.seeds]
    expected = [_expected(config, results[key(config, place, 1, seed)], place, factor) for seed in config.seeds]
    many = config.long // factor
    numbers |= {
        f"short_{factor}": short,
        f"short_over_predicted_{factor}": over_predicted,
        f"long_{factor}": long,
        f"gradient_{factor}": enlarged,
    }
    apart = [diffusion(n_step_angles(law, steps)[-1:]) for law, steps in ((rule, config.long), (large, many))]
    text = f"{sgd.name}: angle over {factor} steps, over that of one step with {factor} times the batch and lr"
    return [
        _ANGLES.says(f"{text}, by the law for independent gradients").near(
            linear_scaling_ratio(rule, factor), short, relative=_NEAR
        ),
        diagnostic(  # the turning over the small steps is in both
            _PREDICTED.says(f"{text}, over its prediction from the turning of the small steps, seed by seed").near(
                1.0, over_predicted, relative=_NEAR_MEASURED
            )
        ),
        _LONG.says(
            f"{sgd.name}: over {config.long} steps against {many}, where momentum's share is smaller: -ln of the mean "
            "cosine between both ends, ratio"
        ).near(float(apart[0] / apart[1]), long, relative=_NEAR_SQUARED),
        _GRADIENTS.says(
            f"{sgd.name}: norm of the gradient summed over {factor} times the batch, over that of one batch, over what "
            + (
                "noise alone leads to"
                if factor == config.factors[1]
                else f"noise and the mean gradient that a factor of {config.factors[1]} shows lead to, seed by seed"
            )
        ).near(1.0, np.divide(enlarged, expected), relative=_NEAR),
    ]


def _expected(config: Config, run: Arrays, place: int, factor: int) -> float:
    """Expected growth: of noise alone for the first factor; for the others, with the mean gradient it shows."""
    first = config.factors[1]
    share = 0.0 if factor == first else max(signal_share(_enlarged(config, run, place, first), first), 0.0)
    return enlargement(share, factor)


# ---- drawing


def draw(config: Config, results: TaskResults) -> Figures:
    """Figures 7 and 8 for the first seed: a row per optimizer, a column per factor."""
    return {"angles": _draw_angles(config, results), "gradients": _draw_gradients(config, results)}


def _draw_angles(config: Config, results: TaskResults) -> Figure:
    factors = config.factors[1:]
    figure, axes = panels(len(config.rules), len(factors), width=3.0, height=2.0)
    letters = iter("abcdefgh")
    for place, sgd in enumerate(config.rules):
        for factor in factors:
            panel = axes[place * len(factors) + factors.index(factor)]
            _draw_pair(panel, config, results, place, factor)
            batch = factor * config.batch_size
            label_panel(panel, next(letters), f"{sgd.name}: {config.batch_size} against {batch} images a batch")
    return figure


def _draw_pair(axes: Axes, config: Config, results: TaskResults, place: int, factor: int) -> None:
    seed = config.seeds[0]
    small, large = (results[key(config, place, times, seed)] for times in (1, factor))
    column = layer_column(small, config.layer)
    there = np.isfinite(small[f"angle_{factor}"][:, column])
    images = config.batch_size / 1000
    axes.plot(
        images * small["step"][there],
        small[f"angle_{factor}"][there, column],
        color=COLOURS[1],
        lw=0.5,
        label=f"{factor} steps",
    )
    axes.plot(
        factor * images * large["sampled_step"],
        large["angle"][:, column],
        color=COLOURS[0],
        lw=0.5,
        label=f"one step, {factor} times batch and lr",
    )
    rule, scaled = config.rules[place].rule, config.sgd(place, factor).rule
    laws = [float(n_step_angles(rule, factor)[-1]), float(n_step_angles(scaled, 1)[-1])]
    for angle in laws:
        axes.axhline(angle, color=THEORY, lw=0.8, ls="--")
    axes.plot([], [], color=THEORY, lw=0.8, ls="--", label="theory, both")
    axes.set(xlabel="thousand images", ylabel="angle, rad")
    both = np.concatenate([small[f"angle_{factor}"][there, column], large["angle"][:, column]])
    axes.set_ylim(0, 1.05 * max(float(np.quantile(both, 0.995)), *laws))
    axes.legend()


def _draw_gradients(config: Config, results: TaskResults) -> Figure:
    factors = config.factors[1:]
    figure, axes = panels(1, len(factors), width=3.0, height=2.0)
    for panel, factor, letter in zip(axes, factors, "abcd", strict=False):
        for place, sgd in enumerate(config.rules):
            runs = [results[key(config, place, 1, seed)] for seed in config.seeds]
            column = layer_column(runs[0], config.layer)
            there = np.isfinite(runs[0]["gradient_1"][:, column])
            ratio = np.mean(
                [run[f"gradient_{factor}"][there, column] / run["gradient_1"][there, column] for run in runs], axis=0
            )
            panel.plot(runs[0]["step"][there], ratio, "o-", color=COLOURS[place], label=sgd.name)
        panel.axhline(factor**0.5, color=THEORY, lw=0.8, ls="--")
        panel.set(ylim=(0, None), xlabel=f"steps with {config.batch_size} images")
        label_panel(panel, letter, f"{factor} times the batch: summed gradient / that of {config.batch_size} images")
    axes[0].legend()
    return figure


_SMOKE = Config(
    rules=(
        Sgd("SGD", lr=0.05, weight_decay=2e-2, other_lr=0.01),
        Sgd("SGDM", lr=0.02, weight_decay=1e-2, other_lr=0.002, momentum=0.9),
    ),
    steps=(64, 64),
    factors=(1, 2, 4),
    batch_size=16,
    long=8,
    images=Images("digits", flip=False, label_noise=0.3),
    network=Network(width=4, blocks=(1,)),
    norms_every=16,
    norms_images=64,
)
_PAPER = Config(
    rules=(replace(trainings.IMAGENET_SGDM, name="SGD", momentum=0.0), trainings.IMAGENET_SGDM),
    steps=(trainings.IMAGENET_STEPS, trainings.IMAGENET_STEPS),
    drops=trainings.IMAGENET_DROPS,
    batch_size=256,
    images=trainings.IMAGENET,
    network=trainings.RESNET50,
    layer=trainings.RESNET50_LAYERS["layer1.0.conv2"],
    norms_every=4 * trainings.IMAGENET_EPOCH,
    norms_images=8192,
    ghost=trainings.WORKER,
    warm_up=5 * trainings.IMAGENET_EPOCH,
)

EXPERIMENT = Experiment(
    id="smd-linear-scaling",
    title="The angle over n steps against one step with n times the batch and the learning rate",
    source="smd fig. 7, 8",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.needs,
)
