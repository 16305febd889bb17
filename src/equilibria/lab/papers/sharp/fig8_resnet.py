"""sharp-resnet: sharpness reduction in ResNet-20, scale-invariant and standard."""

from __future__ import annotations

from collections.abc import Sequence

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import NETWORKS, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, label_panel, panels
from equilibria.lab.papers.sharp import full_batch
from equilibria.lab.papers.sharp.full_batch import (
    INVARIANT_RESNET,
    STANDARD_RESNET,
    Config,
    Descent,
    DescentVariant,
    Part,
)

_FIGURES = {INVARIANT_RESNET: "fig. 8", STANDARD_RESNET: "fig. 9"}
# The paper's test accuracy in the end, less that when every training image is right.
_GAINS = {INVARIANT_RESNET: 77.4 - 60.8, STANDARD_RESNET: 80.4 - 67.5}
_BEST = {"scale-invariant": 77.4, "standard": 80.4}


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge both networks by the same claims."""
    claims = [
        claim
        for variant in config.variants
        for claim in _judge(config, variant, full_batch.read_descents(config, variant, results))
    ]
    claims += full_batch.judge_accuracies(config, _BEST, results, Source("sharp", "fig. 8, 9"))
    return full_batch.outcome(config, results, claims)


def _judge(config: Config, variant: DescentVariant, descents: Sequence[Descent]) -> list[Claim]:
    source, label = Source("sharp", _FIGURES[variant.network]), f"{variant.name}: "
    part = " of its invariant part" if variant.network == STANDARD_RESNET else ""
    return [
        full_batch.judge_fit(config, descents, source, label=label),
        full_batch.judge_fall(config, descents, source, f"{label}after it spherical sharpness{part} falls"),
        full_batch.judge_rise(config, descents, source, printed=_GAINS[variant.network], label=label),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw accuracy, sharpness and loss: fig. 8 above, fig. 9 below."""
    figure, axes = panels(len(config.variants), 3, width=2.4, height=2.0)
    for row, variant in enumerate(config.variants):
        accuracy, edge, loss = axes[3 * row : 3 * row + 3]
        descents, colour = full_batch.read_descents(config, variant, results), COLOURS[row]
        full_batch.draw_curves(accuracy, descents, "train", colour="grey", label="training")
        full_batch.draw_curves(accuracy, descents, "test", colour=colour, label="test")
        full_batch.draw_edge(edge, descents, colour=colour)
        full_batch.draw_curves(loss, descents, "excess", colour=colour)
        loss.set_yscale("log")
        for axis in (accuracy, edge, loss):
            full_batch.mark_windows(axis, config)
        letters = "abcdef"[3 * row : 3 * row + 3]
        label_panel(accuracy, letters[0], f"{variant.name}: accuracy, %")
        label_panel(edge, letters[1], f"{variant.name}: spherical sharpness" + (", invariant part" if row else ""))
        label_panel(
            loss, letters[2], f"{variant.name}: training loss" + (", nats" if row else " above its minimum, nats")
        )
    axes[0].legend()
    full_batch.label_edge(axes[1])
    return {"figures-8-9": figure}


def _variants(lr: float, weight_decay: float, *, parts: tuple[Part, ...]) -> tuple[DescentVariant, ...]:
    return (
        DescentVariant("scale-invariant", lr, weight_decay, parts, network=INVARIANT_RESNET),
        DescentVariant("standard", lr, weight_decay, parts, network=STANDARD_RESNET),
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
    cited_weights=True,
)

EXPERIMENT = Experiment(
    id="sharp-resnet",
    title="Sharpness reduction in ResNet-20, scale-invariant and standard",
    source="sharp fig. 8, 9",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    functions=(full_batch.tasks, full_batch.run_task, collect, draw),
    kind=NETWORKS,
    needs=full_batch.load,
)
