"""explr-v2: what the instant drop of the learning rate buys: T-EXP against T-EXP v2 (figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equilibria.experiments.claim import Claim, Source
from equilibria.experiments.curves import POINTS, Array, Window, binned_angles, draw_over, mean_in, rms_angle
from equilibria.experiments.experiment import NETWORKS, Arrays, Experiment, Findings, Outcome
from equilibria.experiments.explr.lines import EPOCH, PAPER, SAME_ACCURACY, SMOKE, demanded, named, runs
from equilibria.experiments.explr.networks import TEXP, TEXP_V2, Setting, Variant, load, run_task, tasks
from equilibria.experiments.figures import COLOURS, THEORY, panels, title
from equilibria.experiments.seeds import mean_at_least, mean_at_most, mean_near
from equilibria.theory import SGD
from equilibria.theory.settling import relaxation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIGURE = Source("explr", "fig. 3, section 4.1, eq. (7)")
_ANGLE = Source(
    "explr",
    "fig. 3, theorem B.2",
    law="texp.texp_without_drop",
)
LABELS = {TEXP: "T-EXP", TEXP_V2: "T-EXP v2, no instant drop"}
# The theory here is for a unit gradient of constant norm. It grows after a drop, as the network fits better: by a fifth
# in a trial with another seed, at once with T-EXP, later with T-EXP v2.
_COURSE = 0.2


def name(way: str, divisor: float) -> str:
    """Of a variant."""
    return f"{way}-{divisor:g}"


def variants(drop_at: int, divisors: Sequence[float] = (10.0, 100.0)) -> tuple[Variant, ...]:
    """Both ways for each divisor of the growth."""
    return tuple(
        Variant(name(way, divisor), way, drops_at=(drop_at,), divisor=divisor)
        for divisor in divisors
        for way in (TEXP, TEXP_V2)
    )


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """One drop; windows are in steps after it. Growth divided by 10 settles again within the training, by 100 not."""

    variants: tuple[Variant, ...] = variants(1200)
    steps: int = 2800
    at_once: Window = (5, 50)
    early: Window = (100, 500)
    late: Window = (1200, 1600)

    @property
    def drop_at(self) -> int:
        """The step of the drop."""
        return self.variants[0].drops_at[0]

    @property
    def divisors(self) -> list[float]:
        """In the order of the variants."""
        return list(dict.fromkeys(variant.divisor for variant in self.variants))

    def after(self, window: Window) -> Window:
        """In steps of the training."""
        return window[0] + self.drop_at, window[1] + self.drop_at

    def equilibrium(self, divisor: float) -> float:
        """Angle per step after the drop, once settled, radians; the same for both ways."""
        return float(SGD(self.lr / divisor, self.weight_decay, momentum=self.momentum).equilibrium().angle)

    def angle_course(self, way: str, divisor: float, steps: Array) -> Array:
        """Angle over its equilibrium so many steps after the drop, if the unit gradient keeps its norm."""
        rule = SGD(self.lr / divisor, self.weight_decay, momentum=self.momentum)
        start = divisor ** (0.25 if way == TEXP else -0.25)  # the norm, over that of equilibrium
        return np.asarray(relaxation(rule).angle_ratio(start, steps))


def collect(config: Config, found: Findings) -> Outcome:
    """The angle at once and later, and what test accuracy is worth it."""
    claims, numbers = [], {}
    for divisor in config.divisors:
        lines = {way: runs(config, found, named(config)[name(way, divisor)]) for way in (TEXP, TEXP_V2)}
        claims += [*_judge_angles(config, divisor, lines), *_judge_tests(config, divisor, lines)]
        numbers[f"{divisor:g}"] = {
            way: {
                "angle_over_equilibrium_late": _ratios(config, each, divisor, config.late),
                "test_accuracy_early": _accuracies(config, each, config.early),
                "test_accuracy_late": _accuracies(config, each, config.late),
            }
            for way, each in lines.items()
        }
    return Outcome(demanded(config, claims), numbers)


def _ratios(config: Config, several: Sequence[Arrays], divisor: float, window: Window) -> list[float]:
    return [rms_angle(run, config.after(window)) / config.equilibrium(divisor) for run in several]


def _accuracies(config: Config, several: Sequence[Arrays], window: Window) -> list[float]:
    return [mean_in(run, "test_accuracy", config.after(window)) for run in several]


def _judge_angles(config: Config, divisor: float, lines: dict[str, list[Arrays]]) -> list[Claim]:
    """T-EXP v2 begins with the unit gradient it had; that of T-EXP, which fits at once, is larger than in theory."""
    claims = [
        mean_near(
            f"Growth / {divisor:g}: angle of T-EXP v2 over its equilibrium, {window[0]} to {window[1]} steps after it",
            _ANGLE,
            expected=_predicted(config, TEXP_V2, divisor, window),
            values=_ratios(config, lines[TEXP_V2], divisor, window),
            relative=_COURSE,
        )
        for window in (config.at_once, config.late)
    ]
    instant = mean_at_most(
        f"Growth / {divisor:g}: angle of T-EXP over its equilibrium, {config.at_once[0]} to {config.at_once[1]} steps "
        f"after it: below; {divisor**-0.5:.3g} for the gradients of before",
        _ANGLE,
        bound=1.0,
        values=_ratios(config, lines[TEXP], divisor, config.at_once),
    )
    return [instant, *claims]


def _predicted(config: Config, way: str, divisor: float, window: Window) -> float:
    """Root mean square over a window."""
    course = config.angle_course(way, divisor, np.arange(*window, dtype=np.float64))
    return float(np.sqrt(np.mean(course**2)))


def _judge_tests(config: Config, divisor: float, lines: dict[str, list[Arrays]]) -> list[Claim]:
    early, late = (
        np.subtract(_accuracies(config, lines[TEXP], window), _accuracies(config, lines[TEXP_V2], window))
        for window in (config.early, config.late)
    )
    text = f"Growth / {divisor:g}: test accuracy of T-EXP less that of T-EXP v2, "
    first = mean_at_least(
        f"{text}{config.early[0]} to {config.early[1]} steps after the drop",
        _FIGURE,
        bound=0.0,
        values=early,
        unit=POINTS,
    )
    if divisor == config.divisors[0]:
        text += "once both are in equilibrium again, "
        second = mean_near(
            f"{text}{config.late[0]} to {config.late[1]} steps after it",
            _FIGURE,
            expected=0.0,
            values=late,
            absolute=SAME_ACCURACY,
            unit=POINTS,
        )
    else:
        second = mean_at_least(
            f"{text}{config.late[0]} to {config.late[1]} steps after it", _FIGURE, bound=0.0, values=late, unit=POINTS
        )
    return [first, second]


def draw(config: Config, found: Findings) -> dict[str, Figure]:
    """A row per divisor: training loss, test accuracy, and the angle over its equilibrium, with the theory's."""
    figure, axes = panels(len(config.divisors), 3, width=2.6, height=2.1)
    for row, divisor in enumerate(config.divisors):
        lines = {LABELS[way]: runs(config, found, named(config)[name(way, divisor)]) for way in (TEXP, TEXP_V2)}
        loss, test, angle = axes[3 * row : 3 * row + 3]
        draw_over(loss, lines, "loss")
        draw_over(test, lines, "test_accuracy", factor=100)
        _draw_angles(angle, config, divisor, lines)
        letters = "abcdefghi"[3 * row : 3 * row + 3]
        title(loss, letters[0], f"growth / {divisor:g}: training loss")
        title(test, letters[1], "test accuracy, %")
        title(angle, letters[2], "angle / equilibrium")
    axes[0].legend(loc="lower left")
    return {"figure-3": figure}


def _draw_angles(axis: Axes, config: Config, divisor: float, lines: dict[str, list[Arrays]]) -> None:
    steps = np.linspace(0, config.steps - config.drop_at, 200)
    for colour, way, several in zip(COLOURS, LABELS, lines.values(), strict=False):
        step, angle = binned_angles(several, bins=max(1, config.epoch // config.watch_every // 4))
        shown = step >= config.drop_at
        axis.plot(step[shown], angle[shown] / config.equilibrium(divisor), color=colour)
        axis.plot(steps + config.drop_at, config.angle_course(way, divisor, steps), color=THEORY, lw=0.8, ls="--")
    axis.plot([], [], color=THEORY, lw=0.8, ls="--", label="theory")
    axis.set(yscale="log", xlabel="step")
    axis.legend(loc="upper right")


EXPERIMENT = Experiment(
    id="explr-v2",
    title="What the instant drop of the learning rate buys",
    source="explr fig. 3",
    scales={
        "smoke": Config(**SMOKE, variants=variants(4), at_once=(0, 3), early=(1, 3), late=(3, 6)),
        "desk": Config(),
        "paper": Config(
            # every trained weight has to take part: the post-activation form of the paper's network
            **{**PAPER, "network": "resnet"},
            variants=variants(80 * EPOCH),
            steps=200 * EPOCH,
            at_once=(5, EPOCH // 4),
            early=(2 * EPOCH, 20 * EPOCH),
            late=(80 * EPOCH, 120 * EPOCH),
        ),
    },
    tasks=tasks,
    run_task=run_task,
    collect=collect,
    draw=draw,
    kind=NETWORKS,
    needs=load,
)
