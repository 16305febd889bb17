"""The result of `plan`: phases, curves, findings, and the inputs they follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibria._display import Printable, renderer
from equilibria.findings import Finding, counted
from equilibria.theory import SGD, SGDW, AdamW, Identified, Lion, Rule
from equilibria.theory._reals import Array

WeightDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Number formats in which weights may be stored."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of the plan.

    Attributes:
        step: optimizer step.
        lr: learning rate.
        weight_decay: weight decay.
        angle: predicted angle, radians.
        angle_equilibrium: equilibrium angle of this lr and wd, radians; 0 at lr 0 or wd 0.
        norm: predicted ||w||, in units of L^(1/4) or sqrt(d) where those were not given.
        norm_equilibrium: equilibrium norm of this lr and wd; NaN at lr 0 or wd 0.
    """

    step: int
    lr: float
    weight_decay: float
    angle: float
    angle_equilibrium: float
    norm: float
    norm_equilibrium: float

    @property
    def angle_ratio(self) -> float | None:
        """Angle / equilibrium angle; None at lr 0 or wd 0."""
        return self.angle / self.angle_equilibrium if self.angle_equilibrium > 0 else None

    @property
    def norm_ratio(self) -> float | None:
        """Norm / equilibrium norm; None at lr 0 or wd 0."""
        return self.norm / self.norm_equilibrium if self.norm_equilibrium > 0 else None


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the schedule.

    Attributes:
        number: from 1.
        first_step: its first optimizer step.
        steps: its length in steps.
        flat: lr and wd are constant.
        jump: it begins with a jump of lr or wd.
        start: first step.
        middle: middle step.
        end: last step.
        time_constant: steps per factor e near equilibrium, at the settings of its end; None at lr 0 or wd 0.
        monotone: no oscillation near equilibrium; None at lr 0 or wd 0.
        settle_steps: steps it needs until the angle stays within the tolerance; None for a ramp, whose equilibrium
            moves, and at lr 0 or wd 0.
        settles: the angle is within the tolerance at its end.
    """

    number: int
    first_step: int
    steps: int
    flat: bool
    jump: bool
    start: PlannedStep
    middle: PlannedStep
    end: PlannedStep
    time_constant: float | None
    monotone: bool | None
    settle_steps: int | None
    settles: bool

    @property
    def shown_steps(self) -> tuple[PlannedStep, PlannedStep, PlannedStep]:
        """Its first, middle and last step."""
        return self.start, self.middle, self.end


@dataclass(frozen=True, slots=True)
class Curve:
    """The plan as curves, thinned to a few hundred points.

    Attributes:
        step: optimizer steps.
        lr: learning rate.
        weight_decay: weight decay.
        angle: predicted angle, radians.
        angle_equilibrium: equilibrium angle of lr x wd.
        angle_by_lr: the angle that the lr alone suggests: the largest equilibrium angle times lr / largest lr; in a run
            without weight decay the angle at the initial norm.
        norm: predicted norm.
        norm_equilibrium: equilibrium norm; NaN at lr 0 or wd 0.
    """

    step: NDArray[np.int64]
    lr: Array
    weight_decay: Array
    angle: Array
    angle_equilibrium: Array
    angle_by_lr: Array
    norm: Array
    norm_equilibrium: Array


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of a plan, for findings and pages.

    Attributes:
        rule: the optimizer at the largest lr x wd (in a run without weight decay: at the largest lr).
        start_rule: the optimizer at the first lr above 0, or at the lr that a warm-up ends at (smooth, or in stairs
            from 0); without weight decay the same as ``rule``.
        start_norm: its equilibrium norm, where training starts if no initial norm is given; None without weight decay.
        steps: length of the run.
        steps_per_epoch: None if time is shown in steps.
        tolerance: relative distance from equilibrium that counts as settled.
        init_norm: initial norm, or None for a start in equilibrium.
        unit_grad_sq: L (1 if not given).
        dim: number of entries (1 if not given); for Muon the squared length of its update, from the shape.
        dtype: number format of the weights.
        rescale: weights and optimizer state are rescaled at every change of lr or wd.
    """

    rule: Rule
    start_rule: Rule
    start_norm: float | None
    steps: int
    steps_per_epoch: int | None
    tolerance: float
    init_norm: float | None
    unit_grad_sq: float
    dim: float
    dtype: WeightDtype
    rescale: bool = False

    @property
    def norm_power(self) -> float:
        """A step turns as lr / ||w||^norm_power: 1 for steps of a fixed length, 2 if the gradient goes as 1 / ||w||."""
        if isinstance(self.rule, Identified):
            return 1 - self.rule.step.radial
        return 2 if isinstance(self.rule, SGD | SGDW) else 1

    @property
    def norm_name(self) -> str:
        """The name of this plan's norms: for a single entry they are its root mean square."""
        return "rms entry" if isinstance(self.rule, AdamW | Lion) and self.dim == 1 else "||w||"

    def time(self, steps: float) -> str:
        """Steps in the unit that people read: epochs if their length is known."""
        if self.steps_per_epoch is None:
            return f"{steps:,.0f} steps"
        epochs = steps / self.steps_per_epoch
        return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


@dataclass(frozen=True, slots=True)
class Plan:
    """The effect of a schedule, predicted before it runs.

    Attributes:
        phases: its phases.
        curve: angle and norm over the run.
        findings: notable facts in plain sentences, warnings first.
        settled_share: share of the steps with the angle within the tolerance of equilibrium.
        travelled: sum of the angles of all steps, radians: the distance on the sphere.
        situation: the inputs.
    """

    phases: tuple[Phase, ...]
    curve: Curve
    findings: tuple[Finding, ...]
    settled_share: float
    travelled: float
    situation: Situation

    def __repr__(self) -> str:
        parts = (("phase", self.phases), ("finding", self.findings), ("curve point", self.curve.step))
        names = ", ".join(counted(len(values), noun) for noun, values in parts)
        rule = self.situation.rule
        name = rule.name if isinstance(rule, Identified) else type(rule).__name__
        return f"<Plan of {name} over {self.situation.steps:,} steps: {names}>"

    def __str__(self) -> str:
        return "\n".join([str(self.table()), *(f"- {finding}" for finding in self.findings)])

    def _repr_html_(self) -> str:
        shown: str = renderer("plan.tables.plan_card")(self)
        return shown

    def table(self) -> Printable:
        """One line per phase: its settings, predicted angle over equilibrium, and the time it needs to settle."""
        shown: Printable = renderer("plan.tables.plan_table")(self)
        return shown
