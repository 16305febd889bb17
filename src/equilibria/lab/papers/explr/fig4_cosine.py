"""explr-cosine: the cosine schedule and its exponential counterpart coincide (figure 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equilibria.lab.harness.claim import Source, demanded_if
from equilibria.lab.harness.experiment import NETWORKS, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import POINTS, Window, draw_over, label_panel, mean_in, panels
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.trainings import COSINE, DECAY, EPOCH, FOLDED, PAPER, ROUNDED, SMOKE, Setting, Variant

_EXACT = Source("explr", "fig. 4, theorem 2.5", law="folding.fold")
_BETTER = Source("explr", "fig. 4, section 4.2")
_STEP_DECAY, _STEP_FOLDED = "step-decay", "step-folded"
LABELS = {
    DECAY: "cosine, weight decay",
    FOLDED: "cosine, exponential",
    _STEP_DECAY: "step decay, weight decay",
    _STEP_FOLDED: "step decay, exponential",
}


def variants(*drops_at: int) -> tuple[Variant, ...]:
    """The cosine in three ways, and step decay with drops at these steps in two."""
    return (
        *(Variant(way, way, schedule=COSINE) for way in (DECAY, FOLDED, ROUNDED)),
        Variant(_STEP_DECAY, DECAY, drops_at=drops_at),
        Variant(_STEP_FOLDED, FOLDED, drops_at=drops_at),
    )


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """The cosine over the whole training, and step decay as in explr-stepdecay; the late window is the last tenth."""

    variants: tuple[Variant, ...] = variants(1200, 1800)
    late: Window = (2200, 2400)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Compare both schedules with their counterparts, and with each other.

    The first steps are not judged again: the first epoch is that of explr-stepdecay.
    """
    lines = trainings.runs_by_name(config, results)
    late = {name: [mean_in(run, "test_accuracy", config.late) for run in runs] for name, runs in lines.items()}
    exact = [
        *trainings.judge_coincidence("Cosine", _EXACT, decay=lines[DECAY], other=lines[FOLDED], late=config.late),
        *trainings.judge_coincidence(
            "Step decay", _EXACT, decay=lines[_STEP_DECAY], other=lines[_STEP_FOLDED], late=config.late
        ),
    ]
    claims = [
        trainings.judge_rounding("Cosine", _EXACT, decay=lines[DECAY], other=lines[FOLDED], rounded=lines[ROUNDED]),
        _BETTER.says(
            "Test accuracy of the exponential cosine less that of exponential step decay, seed by seed"
        ).at_least(0.0, np.subtract(late[FOLDED], late[_STEP_FOLDED]), unit=POINTS),
    ]
    return Outcome([*exact, *demanded_if(trainings.shows(config), claims)], {"test_accuracy": late})


def draw(config: Config, results: TaskResults) -> Figures:
    """Training loss, test accuracy and learning rate of four runs."""
    variants, runs = trainings.variants_by_name(config), trainings.runs_by_name(config, results)
    lines = {label: runs[name] for name, label in LABELS.items()}
    lines |= {LABELS[name]: trainings.exact_runs(config, results, variants[name]) for name in (FOLDED, _STEP_FOLDED)}
    figure, (loss, test, rate, apart_loss, apart, apart_steps) = panels(2, 3, width=2.6, height=2.2)
    draw_over(loss, lines, "loss")
    cosine = {LABELS[FOLDED]: runs[FOLDED], "cosine, first weights rounded up": runs[ROUNDED]}
    draw_over(apart_loss, cosine, "loss", less=runs[DECAY], from_step=1)
    draw_over(apart, cosine, "test_accuracy", factor=100, less=runs[DECAY])
    stepped = {LABELS[_STEP_FOLDED]: runs[_STEP_FOLDED]}
    draw_over(apart_steps, stepped, "test_accuracy", factor=100, less=runs[_STEP_DECAY])
    draw_over(test, lines, "test_accuracy", factor=100)
    draw_over(rate, lines, "lr", from_step=1)
    label_panel(loss, "a", "training loss, nats")
    label_panel(apart_loss, "a'", "difference from weight decay", ylabel="training loss, nats", legend=True)
    label_panel(apart, "b'", "difference from weight decay", ylabel="test accuracy, points")
    label_panel(apart_steps, "b''", "step decay: difference", ylabel="test accuracy, points", legend=True)
    label_panel(test, "b", "test accuracy, %")
    label_panel(rate, "c", "learning rate", yscale="log", legend=True)
    return {"figure-4": figure}


EXPERIMENT = Experiment(
    id="explr-cosine",
    title="The cosine schedule and its exponential counterpart: the same curves",
    source="explr fig. 4",
    scales={
        "smoke": Config(**SMOKE, variants=variants(4, 8), late=(5, 10)),
        "desk": Config(),
        "paper": Config(
            **PAPER, variants=variants(80 * EPOCH, 120 * EPOCH), steps=160 * EPOCH, late=(155 * EPOCH, 160 * EPOCH)
        ),
    },
    functions=(trainings.tasks, trainings.run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.load,
)
