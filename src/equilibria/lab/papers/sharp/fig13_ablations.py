"""sharp-ablations: how weight decay, the first effective learning rate and the last BatchNorm's scale matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, mean_at_least, mean_at_most, mean_near, not_demanded
from equilibria.lab.harness.experiment import NETWORKS, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import COLOURS, THEORY, panels, title
from equilibria.lab.papers.sharp.courses import (
    POINTS,
    Course,
    courses,
    draw_edge,
    draw_mean,
    mark_windows,
    numbers,
    returns,
)
from equilibria.lab.papers.sharp.descents import FINAL_SCALE, Config, Variant, load, run_task, tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "base"
# Variants whose names begin so belong together in a figure, all beside the base.
_DECAY, _RATE, _SCALE = "wd", "lr", "scale"
_FIGURE_13, _FIGURE_14 = Source("sharp", "fig. 13"), Source("sharp", "fig. 14")
_FIGURE_15, _FIGURE_18 = Source("sharp", "fig. 15"), Source("sharp", "fig. 18")
_HALVED = 2.0
# Of the sharpness without weight decay, as for sharp-vgg; and of accuracy, whose standard error is 0.8 points. In the
# trial that fixed these settings, of another seed, it fell by three points while the fit became closer still.
_STAYS, _STUCK = 0.25, 1.0
# Sharpness of the present weights is above that of the minimiser by 5 to 30 per cent, which comes and goes.
_SAME_CLOCK = 0.3
# The paper's best accuracies differ by 1.9 points between first learning rates that differ by a million.
_SAME_ACCURACY = 2.0
# Late in a run small bursts move the norm by up to 40 per cent and with it the edge of stability.
_SAME_LEVEL = 0.5
# Macroscopic bursts are far larger than the oscillation at the edge, which moves the loss by a factor of about two: in
# a trial of another seed (0) with the scale twice, most raised means over 200 steps by factors of 17 to 350.
_BURST = 10.0


def collect(config: Config, found: Findings) -> Outcome:
    """A variant after the other, beside the base."""
    each = {variant.name: courses(config, variant, found) for variant in config.variants}
    claims = [
        *_judge_decay(config, each),
        *(claim for variant in _of(config, _RATE) for claim in _judge_rate(config, variant, each)),
        *(_judge_scale(config, variant, each) for variant in _of(config, _SCALE)),
        _judge_bursts(config, each),
    ]
    return Outcome(
        [not_demanded(claim) for claim in claims] if config.data == "digits" else claims,
        {
            **numbers(config, found),
            "bursts": {name: [_bursts(config, one) for one in some] for name, some in each.items()},
        },
    )


def _of(config: Config, group: str) -> list[Variant]:
    return [variant for variant in config.variants if variant.name.startswith(group)]


def _judge_decay(config: Config, each: dict[str, list[Course]]) -> list[Claim]:
    windows = config.early, config.late
    claims = []
    for variant in _of(config, _DECAY):
        some = each[variant.name]
        claims += (
            _judge_no_decay(config, some, each[BASE])
            if variant.weight_decay == 0
            else [
                mean_at_least(
                    f"{variant.name}: spherical sharpness falls too: how many times, from the early to the late window",
                    _FIGURE_14,
                    bound=_HALVED,
                    values=[one.fall("sharpness", windows) for one in some],
                ),
                _judge_clock(config, variant, some, each[BASE]),
            ]
        )
    return claims


def _judge_no_decay(config: Config, some: Sequence[Course], base: Sequence[Course]) -> list[Claim]:
    windows = config.early, config.late
    return [
        mean_near(
            "wd 0: spherical sharpness stays: late over early window",
            _FIGURE_13,
            expected=1.0,
            values=[1 / one.fall("sharpness", windows) for one in some],
            relative=_STAYS,
        ),
        mean_at_most(
            "wd 0: test accuracy does not rise: from the early to the late window",
            _FIGURE_13,
            bound=_STUCK,
            values=[one.rise("test", windows) for one in some],
            unit=POINTS,
        ),
        mean_at_least(
            "what weight decay gains: test accuracy of base less that of wd 0, seed by seed; ours in the late window, "
            "the paper's the best of each run",
            _FIGURE_14,
            bound=0.0,
            values=_apart("test", config, base, some),
            unit=POINTS,
            printed=55.1 - 48.9,
        ),
    ]


def _judge_clock(config: Config, variant: Variant, some: Sequence[Course], base: Sequence[Course]) -> Claim:
    """The speed is lr * wd: after as many steps more as it is smaller, sharpness is the same."""
    (first,) = _of(config, BASE)
    share = variant.intrinsic_lr / first.intrinsic_lr
    earlier = round(config.late[0] * share), round(config.late[1] * share)
    return mean_near(
        f"{variant.name}: but more slowly: sharpness in the late window over that of base at the same lr * wd * steps",
        _FIGURE_14,
        expected=1.0,
        values=[
            one.mean("sharpness", config.late) / other.mean("sharpness", earlier)
            for one, other in zip(some, base, strict=True)
        ],
        relative=_SAME_CLOCK,
    )


def _judge_rate(config: Config, variant: Variant, each: dict[str, list[Course]]) -> list[Claim]:
    some, base = each[variant.name], each[BASE]
    return [
        mean_near(
            f"{variant.name}: with the same lr * wd as many steps lead to the same test accuracy: difference from base",
            _FIGURE_15,
            expected=0.0,
            values=_apart("test", config, some, base),
            absolute=_SAME_ACCURACY,
            unit=POINTS,
        ),
        mean_near(
            f"{variant.name}: and to the same level of sharpness: over that of base",
            _FIGURE_15,
            expected=1.0,
            values=[
                one.mean("sharpness", config.late) / other.mean("sharpness", config.late)
                for one, other in zip(some, base, strict=True)
            ],
            relative=_SAME_LEVEL,
        ),
    ]


def _judge_scale(config: Config, variant: Variant, each: dict[str, list[Course]]) -> Claim:
    return mean_at_least(
        f"{variant.name}: spherical sharpness falls too: how many times, from the early to the late window",
        _FIGURE_18,
        bound=_HALVED,
        values=[one.fall("sharpness", (config.early, config.late)) for one in each[variant.name]],
    )


def _judge_bursts(config: Config, each: dict[str, list[Course]]) -> Claim:
    """One more at least, as none at all would be no fewer than none."""
    scales = sorted([*_of(config, BASE), *_of(config, _SCALE)], key=lambda variant: variant.scale)
    small, large = (np.array([_bursts(config, one) for one in each[scales[at].name]]) for at in (0, -1))
    return mean_at_least(
        f"{scales[-1].name}: bursts are more frequent: how many more than with {scales[0].name} times the training "
        f"loss, above its minimum, rises by a factor of {_BURST:g} after a fall by it, seed by seed",
        _FIGURE_18,
        bound=1.0,
        values=large - small,
    )


def _apart(what: str, config: Config, some: Sequence[Course], others: Sequence[Course]) -> list[float]:
    """Differences in the late window, seed by seed."""
    return [
        one.mean(what, config.late) - other.mean(what, config.late) for one, other in zip(some, others, strict=True)
    ]


def _bursts(config: Config, one: Course) -> int:
    """After the early window; the loss is a mean over all steps, so that none is missed between two measurements."""
    return returns(one.loss[one.since((config.early[1], config.late[1]))], factor=_BURST)


def draw(config: Config, found: Findings) -> dict[str, Figure]:
    """A figure per group of variants: sharpness, accuracy and loss."""
    figures = {"figure-14": _DECAY, "figure-15": _RATE, "figure-18": _SCALE}
    return {name: _draw_group(config, found, group) for name, group in figures.items()}


def _draw_group(config: Config, found: Findings, group: str) -> Figure:
    figure, (edge, accuracy, loss) = panels(1, 3, width=2.4, height=2.1)
    for colour, variant in zip(COLOURS, [*_of(config, BASE), *_of(config, group)], strict=False):
        each = courses(config, variant, found)
        label = {_DECAY: f"wd = {variant.weight_decay:g}", _RATE: f"lr = {variant.lr:g}"}.get(
            group, f"scale {variant.scale:.3g}"
        )
        draw_edge(edge, each, colour=colour, edge_colour=colour)  # in black nobody could tell whose edge it is
        draw_mean(accuracy, each, "test", colour=colour, label=label)
        draw_mean(loss, each, "excess", colour=colour)
    loss.set_yscale("log")
    for axis in (edge, accuracy, loss):
        mark_windows(axis, config)
    accuracy.legend(loc="lower right")
    edge.plot([], [], color=THEORY, lw=0.8, ls="--", label="2 / effective lr")
    edge.legend(loc="lower left")
    title(edge, "a", "spherical sharpness")
    title(accuracy, "b", "test accuracy, %")
    title(loss, "c", "training loss above its minimum")
    return figure


def _variants(lr: float, weight_decay: float, *, parts: tuple[tuple[int, int], ...]) -> tuple[Variant, ...]:
    """Half the decay and none; learning rates apart by 10, lr * wd kept; half and twice the scale."""
    base = Variant(BASE, lr, weight_decay, parts)
    return (
        base,
        replace(base, name="wd 0", weight_decay=0.0),
        replace(base, name="wd half", weight_decay=weight_decay / 2),
        replace(base, name="lr small", lr=lr / 2.5, weight_decay=weight_decay * 2.5),
        replace(base, name="lr large", lr=lr * 4, weight_decay=weight_decay / 4),
        replace(base, name="scale half", scale=FINAL_SCALE / 2),
        replace(base, name="scale twice", scale=FINAL_SCALE * 2),
    )


def _paper_variants() -> tuple[Variant, ...]:
    base = Variant(BASE, 0.1, 5e-4, ((2000, 20), (400_000, 500)))
    shorter = replace(base, parts=((2000, 20), (200_000, 500)))
    return (
        base,
        replace(base, name="wd 0", weight_decay=0.0),
        replace(base, name="wd 5e-5", weight_decay=5e-5),
        replace(base, name="wd 1e-4", weight_decay=1e-4),
        replace(shorter, name="lr 1e-5", lr=1e-5, weight_decay=5.0),
        replace(shorter, name="lr 1e-3", lr=1e-3, weight_decay=5e-2),
        replace(shorter, name="lr 10", lr=10.0, weight_decay=5e-6),
        replace(base, name="scale half", scale=FINAL_SCALE / 2),
        replace(base, name="scale twice", scale=FINAL_SCALE * 2),
    )


_SMOKE = Config(
    variants=tuple(
        variant for variant in _variants(0.05, 0.1, parts=((32, 16),)) if variant.name not in ("lr large", "scale half")
    ),
    seeds=(0, 1, 2),
    early=(16, 16),
    middle=(16, 16),
    late=(32, 32),
    data="digits",
    per_class=6,
    size=8,
    width=2,
    stages=(1, 1),
)
# Closely within the windows that are compared, less so between them, as sharpness is what costs most.
_PARTS = ((100, 50), (800, 400), (1200, 200), (2000, 400), (3000, 200), (5000, 400), (6000, 200))
_DESK = Config(
    variants=_variants(0.005, 0.1, parts=_PARTS),
    early=(800, 1200),
    middle=(2000, 3000),
    late=(5000, 6000),
    size=8,
    stages=(1, 1, 2),
)
_PAPER = Config(  # CIFAR-10-2k, all of it in one BatchNorm
    variants=_paper_variants(),
    seeds=(0, 1, 2),
    early=(1000, 2000),
    middle=(50_000, 100_000),
    late=(180_000, 200_000),
    data="cifar10-2k",
    classes=(),
    per_class=0,
    size=32,
    width=64,
    stages=(1, 1, 2, 2, 2),
)

EXPERIMENT = Experiment(
    id="sharp-ablations",
    title="Sharpness reduction without weight decay, from other learning rates, with other targets",
    source="sharp fig. 13, 14, 15, 18",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=load,
)
