"""explr-stepdecay: step decay with weight decay, and the tapered-exponential schedule without, coincide (figure 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from equilibria.lab.harness.claim import Claim, Source
from equilibria.lab.harness.curves import Window, draw_over, mean_in
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.lab.harness.figures import THEORY, panels, title
from equilibria.lab.papers.explr import networks
from equilibria.lab.papers.explr.lines import (
    EPOCH,
    PAPER,
    SMOKE,
    demanded,
    exact_runs,
    judge_coincidence,
    judge_control,
    judge_rounding,
    judge_start,
    named,
    runs,
)
from equilibria.lab.papers.explr.networks import DECAY, FOLDED, ROUNDED, TEXP, Setting, Variant, load
from equilibria.theory.folding import fold

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ACROSS = "across"
DROP = 3
"""The step of the early drop: two more are taken before rounding parts two runs."""
_STEPS = 6


def variants(*drops_at: int) -> tuple[Variant, ...]:
    """The four runs for drops at these steps."""
    return tuple(Variant(way, way, drops_at=drops_at) for way in (DECAY, FOLDED, TEXP, ROUNDED))


def across(config: Setting) -> Setting:
    """The first steps alone, with a drop among them, every one of them watched."""
    return replace(config, variants=variants(DROP)[:3], steps=_STEPS, epoch=_STEPS, watch_every=1)


def across_key(variant: Variant, seed: int) -> str:
    """Name of a task across the drop."""
    return f"{_ACROSS}-{networks.key(variant, seed)}"


Task = tuple[str, tuple[int, int]]


def tasks(config: Setting) -> dict[str, Task]:
    """Which of the two settings, and the task in it."""
    few = across(config)
    return {
        **{key: ("", task) for key, task in networks.tasks(config).items()},
        **{
            across_key(variant, seed): (_ACROSS, (at, seed))
            for at, variant in enumerate(few.variants)
            for seed in few.seeds
        },
    }


def run_task(config: Setting, task: Task) -> Arrays:
    """One training."""
    which, within = task
    return networks.run_task(across(config) if which == _ACROSS else config, within)


_EXACT = Source("explr", "fig. 2, 4, theorem 2.5", law="folding.fold")
_TAPERED = Source(
    "explr",
    "fig. 2, theorem 2.4",
    corrected="the drop happens at the first step of the new phase, with the factor (lr_I/lr_{I-1})/(z_{I-1} z_I)",
    law="texp.texp",
)
LABELS = {
    DECAY: "weight decay",
    FOLDED: "folded: exact",
    TEXP: "T-EXP",
    ROUNDED: "weight decay, first weights rounded up",
}


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Two drops by ten; the late window is the last phase's."""

    variants: tuple[Variant, ...] = variants(1200, 1800)
    late: Window = (1900, 2400)


def collect(config: Config, found: Findings) -> Outcome:
    """The exact schedule and the approximate one, each against weight decay."""
    at = named(config)
    decay, folded, texp, rounded = (runs(config, found, at[way]) for way in (DECAY, FOLDED, TEXP, ROUNDED))
    exact = judge_coincidence("Folded", _EXACT, decay=decay, other=folded, late=config.late)
    claims = [
        judge_start("Folded", _EXACT, config, decay=decay, other=folded),
        judge_control("T-EXP", _TAPERED, config, decay=decay, other=texp),
        *_judge_across(config, found),
        judge_rounding("Folded", _EXACT, decay=decay, other=folded, rounded=rounded),
        *judge_coincidence("T-EXP", _TAPERED, decay=decay, other=texp, late=config.late),
    ]
    several = {DECAY: decay, FOLDED: folded, TEXP: texp, ROUNDED: rounded}
    numbers = {
        what: {way: [mean_in(run, what, config.late) for run in each] for way, each in several.items()}
        for what in ("test_accuracy", "train_accuracy", "loss")
    }
    return Outcome([*exact, *demanded(config, claims)], numbers)


def _judge_across(config: Config, found: Findings) -> list[Claim]:
    """The first steps once more, with a drop among them."""
    few = across(config)
    decay, folded, texp = ([found[across_key(variant, seed)] for seed in few.seeds] for variant in few.variants)
    label = f"lr / {few.variants[0].divisor:g} at step {DROP}"
    return [
        judge_start(f"Folded, {label}", _EXACT, few, decay=decay, other=folded),
        judge_control(f"T-EXP, {label}", _TAPERED, few, decay=decay, other=texp),
    ]


def draw(config: Config, found: Findings) -> dict[str, Figure]:
    """Training loss, accuracies and learning rate of three runs over each other."""
    at = named(config)
    lines = {LABELS[way]: runs(config, found, at[way]) for way in (DECAY, FOLDED, TEXP)}
    lines[LABELS[FOLDED]] = exact_runs(config, found, at[FOLDED])
    figure, axes = panels(2, 2, width=3.3, height=2.2)
    loss, train, test, rate = axes
    draw_over(loss, lines, "loss")
    loss.legend(loc="upper right")
    draw_over(train, lines, "train_accuracy", factor=100)
    draw_over(test, lines, "test_accuracy", factor=100)
    draw_over(rate, lines, "lr")
    base = at[DECAY]
    exact = fold(
        [config.lr * config.factor(base, t) for t in range(config.steps)], config.weight_decay, momentum=config.momentum
    )
    rate.plot(np.arange(1, config.steps + 1), exact.lr, color=THEORY, lw=0.8, ls=":", label="theorem 2.5, exact")
    rate.set(yscale="log")
    rate.legend(loc="center right")
    title(loss, "a", "training loss")
    title(train, "b", "training accuracy, %")
    title(test, "c", "test accuracy, %")
    title(rate, "d", "learning rate")
    return {"figure-2": figure}


EXPERIMENT = Experiment(
    id="explr-stepdecay",
    title="Step decay with weight decay and tapered-exponential learning rates without: the same curves",
    source="explr fig. 2",
    scales={
        "smoke": Config(**SMOKE, variants=variants(4, 8), late=(5, 10)),
        "desk": Config(),
        "paper": Config(
            **PAPER,
            variants=variants(80 * EPOCH, 120 * EPOCH),
            steps=160 * EPOCH,
            late=(150 * EPOCH, 160 * EPOCH),
        ),
    },
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=load,
)
