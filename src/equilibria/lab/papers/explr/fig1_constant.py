"""explr-constant: a PreResNet trained without weight decay at an exponentially growing learning rate (figure 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, demanded_if, identity
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, Window, draw_over, label_panel, mean_in, panels
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.trainings import DECAY, EPOCH, FOLDED, PAPER, ROUNDED, SMOKE, Setting, Variant
from equilibria.theory.exponential import constant_schedule, decay_roots

_FIGURE = Source(
    "explr",
    "fig. 1, theorem 2.1",
    corrected="from an empty buffer the lr is not a pure power alpha^(-2t-1); here the exact one is used",
    law="exponential.constant_schedule",
)
_PAPER_GROWTH, _PAPER_EPOCH = 1.481, 391
# Of a squared norm of a few thousand weights in equilibrium, mean over a window.
_SAME_NORM = 0.05


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Constant learning rate; the late window is where the norm has settled.

    In equilibrium ||w||^2 / lr is constant as far as the unit gradient is: the squared norm goes with the root of its
    mean square. Nobody has bounded how much it grows in the window, so that the claim has no tolerance.
    """

    variants: tuple[Variant, ...] = (Variant(DECAY, DECAY), Variant(FOLDED, FOLDED), Variant(ROUNDED, ROUNDED))
    seeds: tuple[int, ...] = tuple(range(24, 32))
    steps: int = 1500
    renormalise: bool = False  # the growing numbers themselves
    late: Window = (800, 1500)


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the training against that with weight decay, and the growth of the squared norm against that of the lr."""
    lines = trainings.runs_by_name(config, results)
    decay, folded, rounded = (lines[name] for name in (DECAY, FOLDED, ROUNDED))
    exact = trainings.judge_coincidence("Exponential lr", _FIGURE, decay=decay, other=folded, late=config.late)
    claims = [
        trainings.judge_start("Exponential lr", _FIGURE, config, decay=decay, other=folded),
        trainings.judge_rounding("Exponential lr", _FIGURE, decay=decay, other=folded, rounded=rounded),
        _judge_growth(config, folded[0]),
        _FIGURE.says(
            "Exponential lr: ||w||^2 / lr of the shown layer is constant: end over start of the late window, by the "
            "line through its logarithm"
        ).equals(1.0, [_change(config, run) for run in folded], ratio=True),
        _FIGURE.says("Exponential lr: ||w||^2 / lr, over the same of the run with weight decay, late window").near(
            1.0, [_relative_norm(config, *pair) for pair in zip(folded, decay, strict=True)], relative=_SAME_NORM
        ),
    ]
    numbers = {
        "last_lr": float(folded[0]["lr"][-1]),
        "last_norm_sq": [float(run["norm_sq"][-1]) for run in folded],
        "test_accuracy": {
            name: [mean_in(run, "test_accuracy", config.late) for run in seed_runs] for name, seed_runs in lines.items()
        },
    }
    return Outcome([*exact, *demanded_if(trainings.shows(config), claims)], numbers)


def _judge_growth(config: Config, run: Arrays) -> Claim:
    """Compare the growth per epoch with the paper's number, at the paper's settings."""
    grown = run["lr"][-1] / run["lr"][len(run["lr"]) // 2]
    passed = run["step"][-1] - run["step"][len(run["lr"]) // 2]
    roots = decay_roots(config.lr, config.weight_decay, momentum=config.momentum)
    is_theirs = (config.lr, config.weight_decay, config.momentum) == (0.1, 5e-4, 0.9)
    growth = _FIGURE.says(f"Growth of the lr in {_PAPER_EPOCH} steps, in the second half of the training").near(
        float(roots.z1) ** (-2 * _PAPER_EPOCH),
        float(grown ** (_PAPER_EPOCH / passed)),
        relative=1e-6,  # the transient of the start is gone, to rounding
        printed=_PAPER_GROWTH if is_theirs else None,
    )
    return identity(growth)  # a recursion and its root: the settings alone decide


def _inside(config: Config, run: Arrays) -> np.ndarray:
    return (config.late[0] <= run["step"]) & (run["step"] <= config.late[1])


def _change(config: Config, run: Arrays) -> float:
    inside = _inside(config, run)
    step, logarithm = run["step"][inside], np.log((run["norm_sq"] / run["lr"])[inside])
    return float(np.exp(np.polyfit(step, logarithm, 1)[0] * (step[-1] - step[0])))


def _relative_norm(config: Config, folded: Arrays, decay: Arrays) -> float:
    inside = _inside(config, folded)
    here, there = (np.mean((run["norm_sq"] / run["lr"])[inside]) for run in (folded, decay))
    return float(here / there)


def draw(config: Config, results: TaskResults) -> Figures:
    """Accuracy of both runs; the learning rate; the norm of a layer and its ratio to the learning rate."""
    runs = trainings.runs_by_name(config, results)
    folded = runs[FOLDED]
    lines = {"weight decay, constant lr": runs[DECAY], "no weight decay, exponential lr": folded}
    figure, (accuracy, apart, rate, norm) = panels(2, 2, width=3.0, height=2.2)
    draw_over(accuracy, lines, "test_accuracy", factor=100)
    others = {"no weight decay, exponential lr": folded, "weight decay, first weights rounded up": runs[ROUNDED]}
    draw_over(apart, others, "test_accuracy", factor=100, less=runs[DECAY])
    step = folded[0]["step"]
    theory = constant_schedule(config.lr, config.weight_decay, step=np.maximum(step - 1, 0), momentum=config.momentum)
    rate.plot(step, folded[0]["lr"], color=COLOURS[1])
    rate.plot(step, theory.lr, color=THEORY, lw=0.8, ls="--", label="theorem 2.1, exact")
    for run in folded:
        norm.plot(step, run["norm_sq"], color=COLOURS[1], lw=0.7)
        norm.plot(step, run["norm_sq"] / run["lr"], color=COLOURS[2], lw=0.7)
    norm.plot([], [], color=COLOURS[1], label=r"$\|w\|^2$")
    norm.plot([], [], color=COLOURS[2], label=r"$\|w\|^2$ / lr")
    label_panel(accuracy, "a", "both trainings", ylabel="test accuracy, %", legend=True)
    label_panel(apart, "a'", "difference from weight decay", ylabel="test accuracy, points", legend=True)
    label_panel(rate, "b", "learning rate", yscale="log", xlabel="step", ylabel="lr", legend=True)
    label_panel(
        norm,
        "c",
        "first convolution, second block: squared norm; and over lr",
        yscale="log",
        xlabel="step",
        legend=True,
    )
    return {"figure-1": figure}


EXPERIMENT = Experiment(
    id="explr-constant",
    title="A PreResNet trains without weight decay at an exponentially growing learning rate",
    source="explr fig. 1",
    scales={
        "smoke": Config(**SMOKE, late=(5, 10)),
        "desk": Config(),
        "paper": Config(**PAPER, steps=80 * EPOCH, late=(40 * EPOCH, 80 * EPOCH)),  # the first phase of the training
    },
    functions=(trainings.tasks, trainings.run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.load,
)
