"""explr-v2: the benefit of the instant drop of the learning rate: T-EXP against T-EXP v2 (figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, demanded_if
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import (
    COLOURS,
    POINTS,
    THEORY,
    Array,
    Window,
    binned_angles,
    draw_over,
    label_panel,
    mark_drops,
    mean_in,
    panels,
    rms_angle,
)
from equilibria.lab.papers.explr import trainings
from equilibria.lab.papers.explr.trainings import (
    EPOCH,
    PAPER,
    SAME_ACCURACY,
    SMOKE,
    TEXP,
    TEXP_V2,
    Setting,
    Variant,
    jointly,
    runs_by_name,
    shows,
)
from equilibria.theory import SGD, evolve, settled
from equilibria.theory.schedules import MultiStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIGURE = Source("explr", "fig. 3, section 4.1, eq. (7)")
_ANGLE = Source("explr", "fig. 3, theorem B.2", law="texp.texp_without_drop")
LABELS = {TEXP: "T-EXP", TEXP_V2: "T-EXP v2, no instant drop"}


def variants(*drops_at: int) -> tuple[Variant, ...]:
    """T-EXP and T-EXP v2 with drops at these steps."""
    return tuple(Variant(way, way, drops_at=drops_at) for way in (TEXP, TEXP_V2))


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Growth of the learning rate divided by 10 at the first drop and by 100 at the second, as in the paper.

    Windows are in steps after a drop. At desk scale the first phase after a drop has 3.2 time constants (the paper's 70
    epochs are 5.5): by the law the angle of T-EXP v2 is back in equilibrium before the second drop comes, and that of
    T-EXP at 0.85 of it. After the second drop either would need longer than the training.
    """

    variants: tuple[Variant, ...] = variants(1200, 2800)
    steps: int = 3600
    at_once: Window = (5, 50)
    early: Window = (100, 500)
    late: tuple[Window, Window] = ((1200, 1600), (600, 800))

    def after(self, drop: int, window: Window) -> Window:
        """A window after a drop, in steps of the training."""
        first = self.variants[0].drops_at[drop]
        return window[0] + first, window[1] + first

    def divisor(self, drop: int) -> float:
        """Divisor of the growth from this drop on."""
        return float(self.variants[0].divisor ** (drop + 1))

    def rule(self, drop: int) -> SGD:
        """Settings with the equilibrium angle and time constant that both schedules have from this drop on."""
        return SGD(self.lr / self.divisor(drop), self.weight_decay, momentum=self.momentum)

    def equilibrium(self, drop: int) -> float:
        """Angle per step in equilibrium, radians."""
        return float(self.rule(drop).equilibrium().angle)

    def angle_course(self, way: str) -> Array:
        """Angle of every step if the unit gradient keeps its norm, radians; in equilibrium before the first drop.

        T-EXP is equivalent to step decay of the learning rate, T-EXP v2 to step decay of weight decay.
        """
        rule = SGD(self.lr, self.weight_decay, momentum=self.momentum)
        base = rule.lr if way == TEXP else rule.weight_decay
        falls = MultiStep(base, milestones=self.variants[0].drops_at, factor=1 / self.variants[0].divisor)
        lr, weight_decay = (falls, None) if way == TEXP else (None, falls)
        return evolve(rule, self.steps, start=settled(rule), lr=lr, weight_decay=weight_decay).angle


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the angle at once and later, and the gain in test accuracy from the instant drop."""
    lines = {way: jointly(seed_runs) for way, seed_runs in runs_by_name(config, results).items()}
    claims = [
        claim for drop in (0, 1) for claim in (*_judge_angles(config, drop, lines), *_judge_tests(config, drop, lines))
    ]
    numbers = {
        f"growth / {config.divisor(drop):g}": {
            way: {
                "angle_over_equilibrium_late": _ratios(config, seed_runs, drop, config.late[drop]),
                "angle_over_equilibrium_late_by_the_law": _predicted(config, way, drop, config.late[drop]),
                "test_accuracy_early": _accuracies(config, seed_runs, drop, config.early),
                "test_accuracy_late": _accuracies(config, seed_runs, drop, config.late[drop]),
            }
            for way, seed_runs in lines.items()
        }
        for drop in (0, 1)
    }
    return Outcome(demanded_if(shows(config), claims), numbers)


def _ratios(config: Config, seed_runs: Sequence[Arrays], drop: int, window: Window) -> list[float]:
    return [rms_angle(run, config.after(drop, window)) / config.equilibrium(drop) for run in seed_runs]


def _accuracies(config: Config, seed_runs: Sequence[Arrays], drop: int, window: Window) -> list[float]:
    return [mean_in(run, "test_accuracy", config.after(drop, window)) for run in seed_runs]


def _judge_angles(config: Config, drop: int, lines: dict[str, list[Arrays]]) -> list[Claim]:
    """Compare the angle at once and late in the phase with the law, in equilibrium or not.

    The law is that of a unit gradient of constant norm. After a drop it grows, as the network fits better, by an amount
    that nobody has bounded: the claims have no tolerance.
    """
    return [
        _ANGLE.says(
            f"Growth / {config.divisor(drop):g}: angle of {name} over its equilibrium, {window[0]} to {window[1]} "
            "steps after the drop, by the law for gradients as before the drop"
        ).equals(_predicted(config, way, drop, window), _ratios(config, lines[way], drop, window), ratio=True)
        for way, name in ((TEXP, "T-EXP"), (TEXP_V2, "T-EXP v2"))
        for window in (config.at_once, config.late[drop])
    ]


def _predicted(config: Config, way: str, drop: int, window: Window) -> float:
    """Root mean square over a window by the law, over the equilibrium angle."""
    course = config.angle_course(way)[slice(*config.after(drop, window))]
    return float(np.sqrt(np.mean(course**2)) / config.equilibrium(drop))


def _judge_tests(config: Config, drop: int, lines: dict[str, list[Arrays]]) -> list[Claim]:
    early, late = (
        np.subtract(_accuracies(config, lines[TEXP], drop, window), _accuracies(config, lines[TEXP_V2], drop, window))
        for window in (config.early, config.late[drop])
    )
    text = f"Growth / {config.divisor(drop):g}: test accuracy of T-EXP less that of T-EXP v2, "
    window = config.late[drop]
    texp, v2 = (_predicted(config, way, drop, window) for way in (TEXP, TEXP_V2))
    then = (
        f"{window[0]} to {window[1]} steps after it, their angles at {texp:.2f} and {v2:.2f} of equilibrium by the law"
    )
    sooner = _FIGURE.says(
        f"{text}{config.early[0]} to {config.early[1]} steps after the drop: it is there sooner"
    ).at_least(0.0, early, unit=POINTS)
    if drop > 0:
        behind = f"{text}{then}: T-EXP v2 is still behind"
        return [sooner, _FIGURE.says(behind).at_least(0.0, late, unit=POINTS)]
    same = _FIGURE.says(f"{text}{then}: equally good").near(0.0, late, absolute=SAME_ACCURACY, unit=POINTS)
    return [sooner, same]


def draw(config: Config, results: TaskResults) -> Figures:
    """Training loss, test accuracy, and the angle over its equilibrium with the theory's."""
    lines = {LABELS[way]: jointly(seed_runs) for way, seed_runs in runs_by_name(config, results).items()}
    figure, (loss, test, angle) = panels(1, 3, width=2.7, height=2.4)
    draw_over(loss, lines, "loss")
    draw_over(test, lines, "test_accuracy", factor=100)
    for drop in (0, 1):
        _draw_angles(angle, config, drop, list(lines.values()))
    for axis in (loss, test, angle):
        mark_drops(axis, config.variants[0].drops_at)
    angle.plot([], [], color=THEORY, lw=0.8, ls="--", label="theory")
    label_panel(loss, "a", "training loss, nats", legend=True)
    label_panel(test, "b", "test accuracy, %")
    label_panel(angle, "c", "angle / equilibrium", yscale="log", xlabel="step", legend=True)
    return {"figure-3": figure}


def _draw_angles(axis: Axes, config: Config, drop: int, lines: Sequence[Sequence[Arrays]]) -> None:
    first, last = (*config.variants[0].drops_at, config.steps)[drop : drop + 2]
    for colour, way, seed_runs in zip(COLOURS, LABELS, lines, strict=False):
        step, angle = binned_angles(seed_runs, bins=max(1, config.epoch // config.watch_every // 4))
        shown = (first <= step) & (step < last)
        axis.plot(step[shown], angle[shown] / config.equilibrium(drop), color=colour)
        course = config.angle_course(way)[first:last] / config.equilibrium(drop)
        axis.plot(np.arange(first, last), course, color=THEORY, lw=0.8, ls="--")


EXPERIMENT = Experiment(
    id="explr-v2",
    title="What the instant drop of the learning rate buys",
    source="explr fig. 3",
    scales={
        "smoke": Config(**SMOKE, variants=variants(2, 6), at_once=(0, 2), early=(2, 4), late=((2, 4), (2, 4))),
        "desk": Config(seeds=tuple(range(24, 32))),
        "paper": Config(
            **PAPER,
            variants=variants(80 * EPOCH, 160 * EPOCH),
            steps=200 * EPOCH,
            at_once=(5, EPOCH // 4),
            early=(2 * EPOCH, 10 * EPOCH),
            late=((70 * EPOCH, 80 * EPOCH), (30 * EPOCH, 40 * EPOCH)),
        ),
    },
    functions=(trainings.tasks, trainings.run_task, collect, draw),
    kind=NETWORKS,
    needs=trainings.load,
)
