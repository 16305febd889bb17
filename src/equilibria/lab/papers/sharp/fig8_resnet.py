"""sharp-resnet: sharpness reduction in ResNet-20, made scale-invariant and as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equilibria.lab.harness.claim import Claim, Source, mean_at_least, not_demanded
from equilibria.lab.harness.experiment import NETWORKS, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import COLOURS, THEORY, panels, title
from equilibria.lab.papers.sharp.courses import (
    FITTED,
    POINTS,
    Course,
    courses,
    draw_edge,
    draw_mean,
    mark_windows,
    numbers,
)
from equilibria.lab.papers.sharp.descents import (
    INVARIANT_RESNET,
    STANDARD_RESNET,
    Config,
    Part,
    Variant,
    load,
    run_task,
    tasks,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURES = {INVARIANT_RESNET: "fig. 8", STANDARD_RESNET: "fig. 9"}
# Test accuracy when every training image is right, and in the end.
_GAINS = {INVARIANT_RESNET: 77.4 - 60.8, STANDARD_RESNET: 80.4 - 67.5}
_HALVED = 2.0


def collect(config: Config, found: Findings) -> Outcome:
    """Both networks by the same measure."""
    claims = [
        claim for variant in config.variants for claim in _judge(config, variant, courses(config, variant, found))
    ]
    return Outcome(
        [not_demanded(claim) for claim in claims] if config.data == "digits" else claims, numbers(config, found)
    )


def _judge(config: Config, variant: Variant, each: Sequence[Course]) -> list[Claim]:
    source, windows = Source("sharp", _FIGURES[variant.network]), (config.early, config.late)
    part = " of its invariant part" if variant.network == STANDARD_RESNET else ""
    return [
        mean_at_least(
            f"{variant.name}: in the early window the training images are right",
            source,
            bound=FITTED,
            values=[one.mean("train", config.early) for one in each],
            unit="%",
            printed=100.0,
        ),
        mean_at_least(
            f"{variant.name}: after it spherical sharpness{part} falls: how many times, from the early to the late "
            "window",
            source,
            bound=_HALVED,
            values=[one.fall("sharpness", windows) for one in each],
        ),
        mean_at_least(
            f"{variant.name}: test accuracy rises meanwhile: from the early to the late window",
            source,
            bound=0.0,
            values=[one.rise("test", windows) for one in each],
            unit=POINTS,
            printed=_GAINS[variant.network],
        ),
    ]


def draw(config: Config, found: Findings) -> dict[str, Figure]:
    """Accuracy, sharpness and loss: fig. 8 above, fig. 9 below."""
    figure, axes = panels(len(config.variants), 3, width=2.4, height=2.0)
    for row, variant in enumerate(config.variants):
        accuracy, edge, loss = axes[3 * row : 3 * row + 3]
        each, colour = courses(config, variant, found), COLOURS[row]
        draw_mean(accuracy, each, "train", colour="grey", label="training")
        draw_mean(accuracy, each, "test", colour=colour, label="test")
        draw_edge(edge, each, colour=colour)
        draw_mean(loss, each, "excess", colour=colour)
        loss.set_yscale("log")
        for axis in (accuracy, edge, loss):
            mark_windows(axis, config)
        letters = "abcdef"[3 * row : 3 * row + 3]
        title(accuracy, letters[0], f"{variant.name}: accuracy, %")
        title(edge, letters[1], "spherical sharpness" + (", invariant part" if row else ""))
        title(loss, letters[2], "training loss" + ("" if row else " above its minimum"))
    axes[0].legend(loc="lower right")
    axes[1].plot([], [], color=THEORY, lw=0.8, ls="--", label="2 / effective lr")
    axes[1].legend(loc="best")
    return {"figures-8-9": figure}


def _variants(lr: float, weight_decay: float, *, parts: tuple[Part, ...]) -> tuple[Variant, ...]:
    return (
        Variant("scale-invariant", lr, weight_decay, parts, network=INVARIANT_RESNET),
        Variant("standard", lr, weight_decay, parts, network=STANDARD_RESNET),
    )


_SMOKE = Config(
    variants=_variants(0.05, 0.1, parts=((8, 4),)),
    seeds=(0, 1, 2),
    early=(4, 4),
    middle=(4, 4),
    late=(8, 8),
    data="digits",
    per_class=4,
    size=8,
    width=2,
    depth=8,
)
_DESK = Config(
    variants=_variants(0.1, 0.01, parts=((100, 50), (400, 100), (1200, 200), (1600, 100))),
    early=(200, 400),
    middle=(600, 1000),
    late=(1300, 1600),
    size=8,
)
_PAPER = Config(  # 50 ghost batches of 1,000 images; sharpness on the first 5,000
    variants=_variants(0.1, 5e-4, parts=((5000, 50), (100_000, 250))),
    seeds=(0, 1, 2),
    early=(4700, 6000),
    middle=(20_000, 40_000),
    late=(80_000, 100_000),
    classes=(),
    per_class=0,
    size=32,
    width=16,
    ghost=1000,
    hessian_images=5000,
)

EXPERIMENT = Experiment(
    id="sharp-resnet",
    title="Sharpness reduction in ResNet-20, scale-invariant and standard",
    source="sharp fig. 8, 9",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=load,
)
