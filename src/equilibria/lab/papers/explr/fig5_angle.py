"""explr-angle: in the long run the angle per epoch depends on the product of lr and weight decay only (figure 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.lab.harness.claim import Claim, Source, demanded_if
from equilibria.lab.harness.experiment import NETWORKS, Arrays, Experiment, Figures, Outcome, TaskResults
from equilibria.lab.harness.figures import COLOURS, THEORY, Array, Window, draw_seeds, label_panel, panels, rms_angle
from equilibria.lab.papers.explr.trainings import (
    EPOCH,
    PAPER,
    SMOKE,
    Setting,
    Variant,
    jointly,
    load,
    run_task,
    runs_by_name,
    shows,
    tasks,
    variants_by_name,
)
from equilibria.theory import SGD, evolve, settled
from equilibria.theory.angles import n_step_angles

_FIGURE = Source("explr", "fig. 5")
_DROP = Source("explr", "fig. 5", law="transient.evolve")
_EPOCH = Source("explr", "fig. 5", law="angles.n_step_angles")
_LAW = Source("explr", "theorem B.2, fig. 5", law="norms.window_identity")
KEEPS, FALLS, LESS_DECAY = "keeps-product", "lr-falls", "decay-falls"
LABELS = {KEEPS: "lr / 10, wd x 10", FALLS: "lr / 10", LESS_DECAY: "wd / 10"}
# Root mean square angle per step in equilibrium; the gradient's norm still changes while the network learns: a unit
# gradient that grows by a fifth in a time constant gives a tenth. Other angles have no tolerance: nobody has bounded
# the change of the unit gradient at a drop, nor how far steps within an epoch pull each other back.
_SETTLED = 0.1


def variants(first: int, second: int) -> tuple[Variant, ...]:
    """The paper's two variants, the first with two drops, and one with a drop of weight decay in place of lr."""
    return (
        Variant(KEEPS, drops_at=(first, second), raises_decay=True),
        Variant(FALLS, drops_at=(first,)),
        Variant(LESS_DECAY, drops_at=(first,), keeps_lr=True),
    )


@dataclass(frozen=True, kw_only=True)
class Config(Setting):
    """Windows are in steps: before the first drop, and the last epochs, when all have settled again."""

    variants: tuple[Variant, ...] = variants(1000, 2000)
    steps: int = 4000
    before: Window = (700, 1000)
    late: Window = (3500, 4000)

    @property
    def first(self) -> int:
        """The step of the first drop."""
        return self.variants[0].drops_at[0]

    def rule(self, variant: Variant, *, drops: int) -> SGD:
        """Settings of a variant after so many drops."""
        factor = variant.divisor**-drops
        decay = {KEEPS: 1 / factor, FALLS: 1.0, LESS_DECAY: factor}[variant.name]
        return SGD(self.lr * (1.0 if variant.keeps_lr else factor), self.weight_decay * decay, momentum=self.momentum)


def _epoch_angle(run: Arrays, window: Window) -> float:
    """Mean angle per epoch over a window, degrees."""
    inside = (window[0] < run["step"]) & (run["step"] <= window[1])
    return math.degrees(float(run["epoch_angle"][inside].mean()))


def collect(config: Config, results: TaskResults) -> Outcome:
    """Judge the fall of the angle at the drop, and its return to the value that lr * wd gives."""
    variants = variants_by_name(config)
    lines = {name: jointly(runs) for name, runs in runs_by_name(config, results).items()}
    before, late = (
        {name: np.array([_epoch_angle(run, window) for run in runs]) for name, runs in lines.items()}
        for window in (config.before, config.late)
    )
    claims = [
        *_judge_drop(config, lines),
        _FIGURE.says("lr / 10, wd x 10, twice: angle per epoch in the end, over that before the first drop").equals(
            1.0, late[KEEPS] / before[KEEPS], ratio=True
        ),
        _FIGURE.says("lr / 10 against wd / 10: the same product, the same angle per epoch in the end; ratio").equals(
            1.0, late[FALLS] / late[LESS_DECAY], ratio=True
        ),
        *_judge_steps(config, lines),
        *_judge_epochs(config, before, late),
    ]
    numbers = {
        "degrees_per_epoch_before": before,
        "degrees_per_epoch_late": late,
        "of_pure_noise": {
            name: [_of_noise(config, variant, drops=drops) for drops in (0, len(variant.drops_at))]
            for name, variant in variants.items()
        },
    }
    return Outcome(demanded_if(shows(config), claims), numbers)


def _of_noise(config: Config, variant: Variant, *, drops: int) -> float:
    """Degrees per epoch if gradients were pure noise."""
    return math.degrees(float(n_step_angles(config.rule(variant, drops=drops), config.epoch)[-1]))


def _judge_drop(config: Config, lines: dict[str, list[Arrays]]) -> list[Claim]:
    """Judge the fall at the drop, and the recovery within an epoch."""
    first_epoch = (config.first, config.first + config.epoch)
    return [
        _DROP.says(
            f"{LABELS[name]}: root mean square angle per step in the first epoch after the drop, over that before it: "
            "the law's, from equilibrium"
        ).equals(
            _fall(config, variants_by_name(config)[name]),
            [rms_angle(run, first_epoch) / rms_angle(run, config.before) for run in lines[name]],
            ratio=True,
        )
        for name in (KEEPS, FALLS)
    ]


def _fall(config: Config, variant: Variant) -> float:
    """The law's ratio: the new settings from the old equilibrium of norm and momentum buffer."""
    old, new = (config.rule(variant, drops=drops) for drops in (0, 1))
    course = evolve(new, config.epoch, start=settled(old)).angle
    return float(np.sqrt(np.mean(course**2)) / old.equilibrium().angle)


def _judge_steps(config: Config, lines: dict[str, list[Arrays]]) -> list[Claim]:
    variants = variants_by_name(config)
    return [
        _LAW.says(
            f"{LABELS[name]}: root mean square angle per step in the end, over sqrt(2 lr wd/(1 + momentum))"
        ).near(
            1.0,
            _over_law(runs, config.rule(variants[name], drops=len(variants[name].drops_at)), config.late),
            relative=_SETTLED,
        )
        for name, runs in lines.items()
    ]


def _judge_epochs(config: Config, before: Mapping[str, Array], late: Mapping[str, Array]) -> list[Claim]:
    """Judge the degrees per epoch themselves, by the law for independent gradients."""
    variants = variants_by_name(config)
    text = "angle per epoch over the law for independent gradients"
    return [
        _EPOCH.says(f"Before the first drop: {text}").equals(
            1.0, before[KEEPS] / _of_noise(config, variants[KEEPS], drops=0), ratio=True
        ),
        *(
            _EPOCH.says(f"{LABELS[name]}, in the end: {text}").equals(
                1.0, values / _of_noise(config, variants[name], drops=len(variants[name].drops_at)), ratio=True
            )
            for name, values in late.items()
        ),
    ]


def _over_law(runs: Sequence[Arrays], rule: SGD, window: Window) -> list[float]:
    law = math.sqrt(2 * rule.lr * rule.weight_decay / (1 + rule.momentum))
    return [rms_angle(run, window) / law for run in runs]


def draw(config: Config, results: TaskResults) -> Figures:
    """Average angle between the weights of consecutive epochs."""
    variants, lines = variants_by_name(config), runs_by_name(config, results)
    figure, (axis,) = panels(1, 1, width=4.6, height=2.9)
    for colour, name in zip(COLOURS[1::-1] + COLOURS[2:], LABELS, strict=False):
        curves = [np.degrees(run["epoch_angle"][1:]) for run in lines[name]]
        draw_seeds(axis, lines[name][0]["step"][1:], curves, color=colour, label=LABELS[name])
    for drops in (0, 1):
        axis.axhline(_of_noise(config, variants[FALLS], drops=drops), color=THEORY, lw=0.8, ls="--")
    axis.plot([], [], color=THEORY, lw=0.8, ls="--", label="pure noise, at both products")
    axis.set(xlabel="step", ylabel="degrees per epoch", ylim=(0, None))
    axis.legend()
    label_panel(axis, "5", f"angle between all weights {config.epoch} steps apart")
    return {"figure-5": figure}


EXPERIMENT = Experiment(
    id="explr-angle",
    title="In the long run the angle per epoch depends on lr times weight decay only",
    source="explr fig. 5",
    scales={
        "smoke": Config(**SMOKE, variants=variants(5, 8), before=(0, 5), late=(6, 10)),
        "desk": Config(),
        "paper": Config(
            **PAPER,
            variants=variants(80 * EPOCH, 120 * EPOCH),
            steps=200 * EPOCH,
            before=(60 * EPOCH, 80 * EPOCH),
            late=(180 * EPOCH, 200 * EPOCH),
        ),
    },
    functions=(tasks, run_task, collect, draw),
    kind=NETWORKS,
    needs=load,
)
