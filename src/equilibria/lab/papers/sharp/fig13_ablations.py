"""sharp-ablations: effects of weight decay, the first effective lr and the scale of the last BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.experiment import NETWORKS, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, POINTS, Window, panels
from equilibria.lab.papers.sharp import full_batch
from equilibria.lab.papers.sharp.full_batch import FINAL_SCALE, Config, Descent, DescentVariant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "base"
# First words of variants' names; those with the same share a figure with the base.
_DECAY, _RATE, _SCALE = "wd", "lr", "scale"
_FIGURE_13, _FIGURE_14 = Source("sharp", "fig. 13"), Source("sharp", "fig. 14")
_FIGURE_15, _FIGURE_18 = Source("sharp", "fig. 15"), Source("sharp", "fig. 18")
_BEST_14 = {"wd 0": 48.9, "wd 5e-5": 51.1, "wd 1e-4": 52.5, BASE: 55.1}  # within 400,000 steps
_BEST_15 = {"lr 1e-5": 52.7, "lr 1e-3": 53.7, "lr 10": 54.6}  # within 200,000 steps; base is in figure 14
# Of accuracy without weight decay, whose standard error is 0.8 points. In the trial that fixed these settings, of
# another seed, it fell by three points while the fit became closer still.
_STUCK = 1.0
# Sharpness of the present weights is above that of the minimiser by 5 to 30 per cent, which comes and goes.
_SAME_CLOCK = 0.3
# The paper's best accuracies differ by 1.9 points between first learning rates that differ by a million.
_SAME_ACCURACY = 2.0
# Late in a run small bursts move the norm by up to 40 per cent and with it the edge of stability.
_SAME_LEVEL = 0.5
# Macroscopic bursts are far larger than the oscillation at the edge, which moves the loss by a factor of about two: in
# a trial of another seed (0) with the scale twice, most raised means over 200 steps by factors of 17 to 350.
_BURST = 10.0


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare every variant with the base."""
    descents = {variant.name: full_batch.read_descents(config, variant, results) for variant in config.variants}
    claims = [
        *(claim for variant in _of(config, _DECAY) for claim in _judge_decay(config, variant, descents)),
        *(claim for variant in _of(config, _RATE) for claim in _judge_rate(config, variant, descents)),
        *(
            full_batch.judge_fall(
                config, descents[variant.name], _FIGURE_18, f"{variant.name}: spherical sharpness falls too"
            )
            for variant in _of(config, _SCALE)
        ),
        _judge_bursts(config, descents),
        *full_batch.judge_accuracies(config, _BEST_14, results, _FIGURE_14),
        *full_batch.judge_accuracies(config, _BEST_15, results, _FIGURE_15),
    ]
    bursts = {name: [_bursts(config, descent) for descent in runs] for name, runs in descents.items()}
    return full_batch.outcome(config, results, claims, bursts=bursts)


def _of(config: Config, group: str) -> list[DescentVariant]:
    return [variant for variant in config.variants if variant.name.startswith(group)]


def _judge_decay(config: Config, variant: DescentVariant, descents: Mapping[str, Sequence[Descent]]) -> list[Claim]:
    runs, base = descents[variant.name], descents[BASE]
    if variant.weight_decay:
        fall = full_batch.judge_fall(config, runs, _FIGURE_14, f"{variant.name}: spherical sharpness falls too")
        return [fall, _judge_clock(config, variant, runs, base)]
    return [
        full_batch.judge_constant(config, runs, _FIGURE_13, "wd 0: spherical sharpness stays"),
        _FIGURE_13.says("wd 0: test accuracy does not rise: from the early to the late window").at_most(
            _STUCK, [descent.rise("test", (config.early, config.late)) for descent in runs], unit=POINTS
        ),
        _FIGURE_14.says(
            "the gain from weight decay: test accuracy of base less that of wd 0, seed by seed; ours in the late "
            "window, the paper's the best of each run"
        ).at_least(0.0, _accuracy_differences(config, base, runs), unit=POINTS, printed=55.1 - 48.9),
    ]


def _judge_clock(config: Config, variant: DescentVariant, runs: Sequence[Descent], base: Sequence[Descent]) -> Claim:
    """Claim that sharpness depends on lr * wd * steps."""
    (first,) = _of(config, BASE)
    share = variant.intrinsic_lr / first.intrinsic_lr
    earlier = round(config.late[0] * share), round(config.late[1] * share)
    return _FIGURE_14.says(
        f"{variant.name}: but more slowly: sharpness in the late window over that of base at the same lr * wd * steps"
    ).near(1.0, _sharpness_ratios(config, runs, base, base_window=earlier), relative=_SAME_CLOCK)


def _judge_rate(config: Config, variant: DescentVariant, descents: Mapping[str, Sequence[Descent]]) -> list[Claim]:
    runs, base = descents[variant.name], descents[BASE]
    return [
        _FIGURE_15.says(
            f"{variant.name}: with the same lr * wd as many steps lead to the same test accuracy: difference from base"
        ).near(0.0, _accuracy_differences(config, runs, base), absolute=_SAME_ACCURACY, unit=POINTS),
        _FIGURE_15.says(f"{variant.name}: and to the same level of sharpness: over that of base").near(
            1.0, _sharpness_ratios(config, runs, base, base_window=config.late), relative=_SAME_LEVEL
        ),
    ]


def _judge_bursts(config: Config, descents: Mapping[str, Sequence[Descent]]) -> Claim:
    """Claim that the largest scale has at least one burst more than the smallest, which may have none."""
    scales = sorted([*_of(config, BASE), *_of(config, _SCALE)], key=lambda variant: variant.scale)
    small, large = scales[0].name, scales[-1].name
    counts = {name: np.array([_bursts(config, descent) for descent in descents[name]]) for name in (small, large)}
    return _FIGURE_18.says(
        f"{large}: bursts are more frequent: how many more than with {small} times the training "
        f"loss, above its minimum, rises by a factor of {_BURST:g} after a fall by it, seed by seed"
    ).at_least(1.0, counts[large] - counts[small])


def _accuracy_differences(config: Config, runs: Sequence[Descent], others: Sequence[Descent]) -> list[float]:
    """Differences of test accuracy in the late window, seed by seed."""
    return [
        descent.mean("test", config.late) - other.mean("test", config.late)
        for descent, other in zip(runs, others, strict=True)
    ]


def _sharpness_ratios(
    config: Config, runs: Sequence[Descent], base: Sequence[Descent], *, base_window: Window
) -> list[float]:
    """Sharpness in the late window over that of the base in its window, seed by seed."""
    return [
        descent.mean("sharpness", config.late) / other.mean("sharpness", base_window)
        for descent, other in zip(runs, base, strict=True)
    ]


def _bursts(config: Config, descent: Descent) -> int:
    """Number of bursts after the early window; the loss is a mean over all steps, so none is missed."""
    return full_batch.returns(descent.loss[descent.since((config.early[1], config.late[1]))], factor=_BURST)


def draw(config: Config, results: TaskResults) -> Figures:
    """Draw a figure per group of variants: sharpness, accuracy and loss."""
    figures = {"figure-14": _DECAY, "figure-15": _RATE, "figure-18": _SCALE}
    return {name: _draw_group(config, results, group) for name, group in figures.items()}


def _draw_group(config: Config, results: TaskResults, group: str) -> Figure:
    figure, (edge, accuracy, loss) = panels(1, 3, width=2.4, height=2.1)
    for colour, variant in zip(COLOURS, [*_of(config, BASE), *_of(config, group)], strict=False):
        descents = full_batch.read_descents(config, variant, results)
        label = {_DECAY: f"wd = {variant.weight_decay:g}", _RATE: f"lr = {variant.lr:g}"}.get(
            group, f"scale {variant.scale:.3g}"
        )
        full_batch.draw_edge(edge, descents, colour=colour, edge_colour=colour)  # every variant has another edge
        full_batch.draw_curves(accuracy, descents, "test", colour=colour, label=label)
        full_batch.draw_curves(loss, descents, "excess", colour=colour)
    loss.set_yscale("log")
    for axis in (edge, accuracy, loss):
        full_batch.mark_windows(axis, config)
    accuracy.legend()
    full_batch.label_edge(edge)
    full_batch.title_panels(accuracy, edge, loss, letters="bac")
    return figure


def _variants(lr: float, weight_decay: float, *, parts: tuple[tuple[int, int], ...]) -> tuple[DescentVariant, ...]:
    """No and half the weight decay; lr over a factor of 10 at the same lr * wd; half and twice the scale."""
    base = DescentVariant(BASE, lr, weight_decay, parts)
    return (
        base,
        replace(base, name="wd 0", weight_decay=0.0),
        replace(base, name="wd half", weight_decay=weight_decay / 2),
        replace(base, name="lr small", lr=lr / 2.5, weight_decay=weight_decay * 2.5),
        replace(base, name="lr large", lr=lr * 4, weight_decay=weight_decay / 4),
        replace(base, name="scale half", scale=FINAL_SCALE / 2),
        replace(base, name="scale twice", scale=FINAL_SCALE * 2),
    )


def _paper_variants() -> tuple[DescentVariant, ...]:
    base = DescentVariant(BASE, 0.1, 5e-4, ((2000, 20), (400_000, 500)))
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
# More often within the compared windows than between them: sharpness costs most.
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
    cited_weights=True,
)

EXPERIMENT = Experiment(
    id="sharp-ablations",
    title="Sharpness reduction without weight decay, from other learning rates, with other targets",
    source="sharp fig. 13, 14, 15, 18",
    scales={"smoke": _SMOKE, "desk": _DESK, "paper": _PAPER},
    functions=(full_batch.tasks, full_batch.run_task, collect, draw),
    kind=NETWORKS,
    needs=full_batch.load,
)
