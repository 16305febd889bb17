"""explr-stepdecay: step decay with weight decay coincides with the tapered exponential without it (figure 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, demanded_if
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import THEORY, Window, draw_over, label_panel, mean_in, panels
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.trainings import DECAY, EPOCH, FOLDED, PAPER, ROUNDED, SMOKE, TEXP, Setting, Variant
from equilibria.theory.folding import fold

_ACROSS = "across"
DROP = 3
"""The step of the early drop; two more steps follow before rounding separates two runs."""
_STEPS = 6


def variants(*drops_at: int) -> tuple[Variant, ...]:
    """The four runs for drops at these steps."""
    return tuple(Variant(way, way, drops_at=drops_at) for way in (DECAY, FOLDED, TEXP, ROUNDED))


def across(config: Setting) -> Setting:
    """The settings of a few first steps with a drop among them, all watched."""
    return replace(config, variants=variants(DROP)[:3], steps=_STEPS, epoch=_STEPS, watch_every=1)


def across_key(variant: Variant, seed: int) -> str:
    """Key of a task across the drop."""
    return f"{_ACROSS}-{trainings.key(variant, seed)}"


Task = tuple[str, tuple[int, int]]


def tasks(config: Setting) -> dict[str, Task]:
    """Trainings of all steps, and of the few across the drop: which of the two, and its task."""
    few = across(config)
    return {
        **{key: ("", task) for key, task in trainings.tasks(config).items()},
        **{
            across_key(variant, seed): (_ACROSS, (place, seed))
            for place, variant in enumerate(few.variants)
            for seed in few.seeds
        },
    }


def run_task(config: Setting, task: Task) -> Arrays:
    """Train once."""
    which, inner = task
    return trainings.run_task(across(config) if which == _ACROSS else config, inner)


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
    """Two drops by ten; the late window lies in the last phase."""

    variants: tuple[Variant, ...] = variants(1200, 1800)
    late: Window = (1900, 2400)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare the exact schedule and the approximate one with weight decay."""
    lines = trainings.runs_by_name(config, results)
    decay, folded, texp, rounded = (lines[way] for way in (DECAY, FOLDED, TEXP, ROUNDED))
    exact = trainings.judge_coincidence("Folded", _EXACT, decay=decay, other=folded, late=config.late)
    claims = [
        trainings.judge_start("Folded", _EXACT, config, decay=decay, other=folded),
        trainings.judge_start("T-EXP", _TAPERED, config, decay=decay, other=texp, same=False),
        *_judge_across(config, results),
        trainings.judge_rounding("Folded", _EXACT, decay=decay, other=folded, rounded=rounded),
        *trainings.judge_coincidence("T-EXP", _TAPERED, decay=decay, other=texp, late=config.late),
    ]
    numbers = {
        name: {way: [mean_in(run, name, config.late) for run in seed_runs] for way, seed_runs in lines.items()}
        for name in ("test_accuracy", "train_accuracy", "loss")
    }
    return Outcome([*exact, *demanded_if(trainings.shows(config), claims)], numbers)


def _judge_across(config: Config, results: TaskResults) -> list[Claim]:
    """Judge the few steps across the early drop."""
    few = across(config)
    decay, folded, texp = ([results[across_key(variant, seed)] for seed in few.seeds] for variant in few.variants)
    label = f"lr / {few.variants[0].divisor:g} at step {DROP}"
    return [
        trainings.judge_start(f"Folded, {label}", _EXACT, few, decay=decay, other=folded),
        trainings.judge_start(f"T-EXP, {label}", _TAPERED, few, decay=decay, other=texp, same=False),
    ]


def draw(config: Config, results: TaskResults) -> Figures:
    """Training loss, accuracies and learning rate of three runs."""
    variants, runs = trainings.variants_by_name(config), trainings.runs_by_name(config, results)
    lines = {LABELS[way]: runs[way] for way in (DECAY, FOLDED, TEXP)}
    lines[LABELS[FOLDED]] = trainings.exact_runs(config, results, variants[FOLDED])
    figure, (loss, train, test, apart_loss, rate, apart) = panels(2, 3, width=2.6, height=2.2)
    draw_over(loss, lines, "loss")
    others = {LABELS[way]: runs[way] for way in (FOLDED, TEXP, ROUNDED)}
    draw_over(apart, others, "test_accuracy", factor=100, less=runs[DECAY])
    draw_over(apart_loss, others, "loss", less=runs[DECAY], from_step=1)
    draw_over(train, lines, "train_accuracy", factor=100)
    draw_over(test, lines, "test_accuracy", factor=100)
    draw_over(rate, lines, "lr")
    rates = [config.lr * config.factor(variants[DECAY], step) for step in range(config.steps)]
    exact = fold(rates, config.weight_decay, momentum=config.momentum)
    rate.plot(np.arange(1, config.steps + 1), exact.lr, color=THEORY, lw=0.8, ls=":", label="theorem 2.5, exact")
    label_panel(loss, "a", "training loss, nats", legend=True)
    label_panel(apart, "c'", "difference from weight decay", ylabel="test accuracy, points", legend=True)
    label_panel(apart_loss, "a'", "difference from weight decay", ylabel="training loss, nats")
    label_panel(train, "b", "training accuracy, %")
    label_panel(test, "c", "test accuracy, %")
    label_panel(rate, "d", "learning rate", yscale="log", legend=True)
    return {"figure-2": figure}


EXPERIMENT = Experiment(
    id="explr-stepdecay",
    title="Step decay with weight decay and tapered-exponential learning rates without: the same curves",
    source="explr fig. 2",
    scales={
        "smoke": Config(**SMOKE, variants=variants(4, 8), late=(5, 10)),
        "desk": Config(),
        "paper": Config(
            **PAPER, variants=variants(80 * EPOCH, 120 * EPOCH), steps=160 * EPOCH, late=(150 * EPOCH, 160 * EPOCH)
        ),
    },
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.load,
)
