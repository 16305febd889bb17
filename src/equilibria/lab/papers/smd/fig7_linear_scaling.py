"""smd-linear-scaling: the angle over n steps against one step with n times the batch and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibria.lab.harness.claim import Claim, Source, not_demanded
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import COLOURS, THEORY, panels, title
from equilibria.lab.harness.seeds import mean_near
from equilibria.lab.harness.task import scratch, tell_progress
from equilibria.lab.papers.smd.image_training import (
    IMAGENET,
    IMAGENET_DROPS,
    IMAGENET_EPOCH,
    IMAGENET_SGDM,
    IMAGENET_STEPS,
    RESNET50,
    Images,
    Network,
    Plan,
    Sgd,
    arrays,
    batches,
    load,
    recipe,
)
from equilibria.lab.papers.smd.layer_angles import Window, inside, layer
from equilibria.theory.angles import linear_scaling_ratio, n_step_angles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from equilibria.lab.data import ImageSet
    from equilibria.lab.training import Training


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
        from equilibria.lab.papers.smd.batch_gradients import convolutions

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
    from equilibria.lab.training import train

    place, factor, seed = task
    loaded = load(config.images)
    plan = config.plan(place, factor)
    if factor == 1:
        plan = replace(plan, measures={**plan.measures, "norms": _norms(config, loaded, seed=seed)})
    made = recipe(plan, loaded, seed=seed)
    trained = train(made, folder=scratch(), progress=tell_progress(made.steps))
    return arrays(trained, columns=("angle", "angle_equilibrium", "norm", "unit_grad_sq"))


def _norms(config: Config, loaded: ImageSet, *, seed: int) -> Any:
    from equilibria.lab.papers.smd.batch_gradients import GradientNorms

    taken = {}
    for factor in config.factors:
        size = factor * config.batch_size
        drawn = batches(config.images, loaded, batch_size=size, seed=seed + _OTHER_ORDER)
        taken[f"gradient_{factor}"] = list(islice(drawn, max(1, config.norms_images // size)))
    return GradientNorms(taken, every=config.norms_every)


Array = NDArray[np.float64]
_EXCESS = "the excess under momentum is intra-momentum correlation, not a failure of linear scaling"
_ANGLES = Source("smd", "fig. 7, §C.3", corrected=_EXCESS, law="angles.linear_scaling_ratio")
_LONG = Source("smd", "fig. 7, §C.3", corrected=_EXCESS, law="angles.n_step_angles")
_GRADIENTS = Source("smd", "fig. 8", law="noise.noise_split")
# The law takes gradients as uncorrelated. A mean gradient of a tenth of the noise, which is what smd-noise allows, adds
# up over n steps: 5 % of the angle, and as much for unit gradients that drift.
_NEAR = 0.10
# Squares of small angles that are as far off as that. Over many steps the angle itself says little: near 90 degrees it
# hardly grows any more, and so it is the diffusion behind it that is compared.
_NEAR_SQUARED = (1 + _NEAR) ** 2 - 1


def _rms(run: Arrays, name: str, steps: NDArray[np.int64], *, window: Window) -> Array:
    """Of every layer."""
    values = run[name][inside(steps, window)]
    found: Array = np.sqrt(np.nanmean(values**2, axis=0))
    return found


def _judged(config: Config, place: int, factor: int) -> Window:
    """The last half of the training, or of what is before the first drop."""
    end = min(config.steps[place], *config.drops, config.steps[place]) // factor
    return end // 2, end + 1


def _turned(config: Config, place: int, factor: int, span: int, run: Arrays) -> Array:
    """Root mean square angle over some steps, of every layer; a span counts if it begins in the judged half."""
    first, end = _judged(config, place, factor)
    if span == 1:
        return _rms(run, "angle", run["sampled_step"], window=(first, end - 1))
    return _rms(run, f"angle_{span}", run["step"], window=(first + span, end))


def _short_ratio(config: Config, found: Findings, place: int, factor: int, seed: int) -> float:
    """Median over layers of the angle over n steps over that of one step with n times the batch."""
    small = _turned(config, place, 1, factor, found[key(config, place, 1, seed)])
    large = _turned(config, place, factor, 1, found[key(config, place, factor, seed)])
    return float(np.median(small / large))


def diffusion(angles: Array) -> Array:
    """How far directions have diffused: -ln of the mean cosine over rows, which grows evenly with the steps taken.

    Example:
        >>> diffusion(np.full((3, 1), 0.1)).round(5)  # for small angles half their square
        array([0.00501])
    """
    found: Array = -np.log(np.nanmean(np.cos(angles), axis=0))
    return found


def _long_ratio(config: Config, found: Findings, place: int, factor: int, seed: int) -> float:
    """Median over layers of the diffusion over many images with the smallest batch over that with n times it."""
    ways = []
    for each in (1, factor):
        run, span = found[key(config, place, each, seed)], config.long // each
        first, end = _judged(config, place, each)
        ways.append(diffusion(run[f"angle_{span}"][inside(run["step"], (first + span, end))]))
    return float(np.median(ways[0] / ways[1]))


def _enlarged(config: Config, run: Arrays, place: int, factor: int) -> float:
    window = _judged(config, place, 1)
    large, small = (_rms(run, f"gradient_{each}", run["step"], window=window) for each in (factor, 1))
    return float(np.median(large / small))


def signal_share(grown: float, factor: int) -> float:
    """Squared mean of one batch's gradient over its variance, from how much the norm of a sum over batches grows."""
    return (grown**2 - factor) / (factor**2 - grown**2)


def enlargement(share: float, factor: int) -> float:
    """How much the norm of the gradient grows when it is summed over so many batches: noise as sqrt(n), signal as n."""
    return float(np.sqrt(factor * (1 + factor * share) / (1 + share)))


def collect(config: Config, found: Findings) -> Outcome:
    """Ratios of angles over equally many images, short and long; and what a larger batch does to the gradient."""
    claims: list[Claim] = []
    numbers: dict[str, dict[str, list[float]]] = {}
    for place, sgd in enumerate(config.rules):
        numbers[sgd.name] = {}
        for factor in config.factors[1:]:
            made = _judge(config, found, place, factor, numbers[sgd.name])
            claims += made
    return Outcome([not_demanded(claim) for claim in claims] if config.images.data == "digits" else claims, numbers)


def _judge(
    config: Config, found: Findings, place: int, factor: int, numbers: dict[str, list[float]]
) -> tuple[Claim, Claim, Claim]:
    sgd, rule = config.rules[place], config.rules[place].rule
    large = config.sgd(place, factor).rule
    short, long = (
        [ratio(config, found, place, factor, seed) for seed in config.seeds] for ratio in (_short_ratio, _long_ratio)
    )
    enlarged = [_enlarged(config, found[key(config, place, 1, seed)], place, factor) for seed in config.seeds]
    expected = [_expected(config, found[key(config, place, 1, seed)], place, factor) for seed in config.seeds]
    many = config.long // factor
    numbers |= {f"short_{factor}": short, f"long_{factor}": long, f"gradient_{factor}": enlarged}
    apart = [diffusion(n_step_angles(each, steps)[-1:]) for each, steps in ((rule, config.long), (large, many))]
    return (
        mean_near(
            f"{sgd.name}: angle over {factor} steps, over that of one step with {factor} times the batch and lr",
            _ANGLES,
            expected=linear_scaling_ratio(rule, factor),
            values=short,
            relative=_NEAR,
        ),
        mean_near(
            f"{sgd.name}: over {config.long} steps against {many}, where momentum's share is smaller: -ln of the mean "
            "cosine between both ends, ratio",
            _LONG,
            expected=float(apart[0] / apart[1]),
            values=long,
            relative=_NEAR_SQUARED,
        ),
        mean_near(
            f"{sgd.name}: norm of the gradient summed over {factor} times the batch, over that of one batch, over what "
            + (
                "noise alone leads to"
                if factor == config.factors[1]
                else f"noise and the mean gradient that a factor of {config.factors[1]} shows lead to, seed by seed"
            ),
            _GRADIENTS,
            expected=1.0,
            values=np.divide(enlarged, expected),
            relative=_NEAR,
        ),
    )


def _expected(config: Config, run: Arrays, place: int, factor: int) -> float:
    """For the first factor by noise alone; for the others also by the mean gradient that the first one showed."""
    first = config.factors[1]
    share = 0.0 if factor == first else max(signal_share(_enlarged(config, run, place, first), first), 0.0)
    return enlargement(share, factor)


def draw(config: Config, found: Findings) -> Mapping[str, Figure]:
    """Figures 7 and 8, of the first seed: a row per optimizer, a column per factor."""
    return {"angles": _draw_angles(config, found), "gradients": _draw_gradients(config, found)}


def _draw_angles(config: Config, found: Findings) -> Figure:
    factors = config.factors[1:]
    figure, axes = panels(len(config.rules), len(factors), width=3.0, height=2.0)
    letters = iter("abcdefgh")
    for place, sgd in enumerate(config.rules):
        for factor in factors:
            panel = axes[place * len(factors) + factors.index(factor)]
            _draw_pair(panel, config, found, place, factor)
            batch = factor * config.batch_size
            title(panel, next(letters), f"{sgd.name}: {config.batch_size} against {batch} images a batch")
    return figure


def _draw_pair(axes: Axes, config: Config, found: Findings, place: int, factor: int) -> None:
    seed = config.seeds[0]
    small, large = (found[key(config, place, each, seed)] for each in (1, factor))
    column = layer(small, config.layer)
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
    for angle in (n_step_angles(rule, factor)[-1], n_step_angles(scaled, 1)[-1]):
        axes.axhline(angle, color=THEORY, lw=0.8, ls="--")
    axes.set(xlabel="thousand images", ylabel="angle, rad")
    axes.set_ylim(0, 3.5 * float(np.nanmedian(small[f"angle_{factor}"][:, column])))
    axes.legend(loc="upper right")


def _draw_gradients(config: Config, found: Findings) -> Figure:
    factors = config.factors[1:]
    figure, axes = panels(1, len(factors), width=3.0, height=2.0)
    for panel, factor, letter in zip(axes, factors, "abcd", strict=False):
        for place, sgd in enumerate(config.rules):
            runs = [found[key(config, place, 1, seed)] for seed in config.seeds]
            column = layer(runs[0], config.layer)
            there = np.isfinite(runs[0]["gradient_1"][:, column])
            ratio = np.mean(
                [run[f"gradient_{factor}"][there, column] / run["gradient_1"][there, column] for run in runs], axis=0
            )
            panel.plot(runs[0]["step"][there], ratio, "o-", color=COLOURS[place], label=sgd.name)
        panel.axhline(factor**0.5, color=THEORY, lw=0.8, ls="--")
        panel.set_ylim(0, 2 * factor**0.5)
        panel.set_xlabel(f"steps with {config.batch_size} images")
        title(panel, letter, f"gradient of {factor * config.batch_size} images / of {config.batch_size}")
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
    rules=(replace(IMAGENET_SGDM, name="SGD", momentum=0.0), IMAGENET_SGDM),
    steps=(IMAGENET_STEPS, IMAGENET_STEPS),
    drops=IMAGENET_DROPS,
    batch_size=256,
    images=IMAGENET,
    network=RESNET50,
    layer="net.resnet.encoder.stages.0.layers.0.layer.1.convolution.weight",  # layer1.0.conv2
    norms_every=4 * IMAGENET_EPOCH,
    norms_images=8192,
)

EXPERIMENT = Experiment(
    id="smd-linear-scaling",
    title="The angle over n steps against one step with n times the batch and the learning rate",
    source="smd fig. 7, 8",
    scales={"smoke": _SMOKE, "desk": Config(), "paper": _PAPER},
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=needs,
)
