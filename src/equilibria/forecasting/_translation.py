"""`translate`: settings with the same dynamics elsewhere, and how far a larger batch keeps those of a recorded run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from equilibria.diagnosis.gradient_size import late_from
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import SETTINGS
from equilibria.diagnosis.turning import Turning, independent_turning, measured_turning
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import counted
from equilibria.forecasting._layers import RunLike, as_run
from equilibria.forecasting._paths import NINETY
from equilibria.theory._reals import Array
from equilibria.theory.identified import Identified
from equilibria.theory.rules import AdamL2, AdjustLr, Rule, check_rule
from equilibria.theory.schedules import ScheduleLike
from equilibria.theory.sphere import SphereTranslation, to_sphere
from equilibria.theory.translation import (
    Match,
    Translatable,
    Translation,
    translate_batch,
    translate_decay,
    translate_optimizer,
    translate_scale,
)

_LOST = 0.1  # share of the angle that steps which pull back may take before scaling counts as broken
_BEYOND = 2  # times the longest measured distance, to which turning is extrapolated as a power: within 10 % on networks
_SPARSE = 0.25  # of the pairs of a longer distance: with fewer, a power of n between its neighbours is closer
_ONE = 1e-6  # relative difference of settings within one stretch
_RAMP = 5  # samples with another lr each: a schedule that changes it all the time


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """Present and scaled settings of one layer, over as many samples as a batch of the scaled settings has.

    Attributes:
        name: of the layer.
        pairs: of weights in the stretch, at the nearest distance from which ``now`` was measured.
        now: angle over the ``batch`` steps of the present settings, radians; measured.
        scaled: angle of one step of the scaled settings, radians; predicted.
        independent: ``now / scaled`` by the law for independent gradients: 1 for plain SGD, more with momentum.
        kept: ``now / scaled`` over ``independent``; below 1 where steps pull back.
        error: standard error of ``kept``: the scatter between pairs and between single steps, and the coordinates that
            are not read. NaN where no distance has two pairs.
        breaks_at: factor of the batch size from which on ``kept`` is 0.9 or less: the present steps turn the layer 10 %
            less against the scaled step than independent gradients would. None if that is beyond twice the longest
            measured distance.
        breaks_between: ends of its 90 % interval: where ``kept`` less 1.64 standard errors, and plus them, is 0.9; None
            for an end beyond twice the longest measured distance. None without standard errors.
    """

    name: str
    pairs: int
    now: float
    scaled: float
    independent: float
    kept: float
    error: float
    breaks_at: int | None
    breaks_between: tuple[int | None, int | None] | None


@dataclass(frozen=True, slots=True)
class BatchScaling(Translation):
    """A batch translation of a run's own settings, with the prediction for every layer of it.

    Attributes:
        present: the settings of the run in the stretch; of several, those of the most layers.
        batch: factor of the batch size.
        first: first step that was used: the middle of the last stretch with one lr, weight decay and momentum, so that
            norms had time to settle.
        last: last sampled step.
        longest: longest distance in steps over which turning was measured in it.
        layers: in the order of the run.
        refused: why there is no prediction, by layer.
    """

    present: Rule | None = None
    batch: int = 1
    first: int = 0
    last: int = 0
    longest: int = 1
    layers: tuple[LayerScaling, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def translate(
    rule: Rule | None = None,
    *,
    scale: float | None = None,
    batch: float | None = None,
    weight_decay: float | None = None,
    to: Translatable | Identified | Literal["sphere"] | None = None,
    match: Match | None = None,
    unit_grad_sq: float | None = None,
    dim: float | None = None,
    shape: tuple[int, int] | None = None,
    momentum: float | None = None,
    dampening: float | None = None,
    nesterov: bool | None = None,
    betas: tuple[float, float] | None = None,
    adjust_lr_fn: AdjustLr | None = None,
    schedule: ScheduleLike | None = None,
    steps: int | None = None,
    init_norm: float | None = None,
    norm: ArrayLike | None = None,
    scale_gradients: bool | None = None,
    run: RunLike | None = None,
) -> Translation:
    """Settings with the same dynamics at another scale, batch size, weight decay or optimizer; give exactly one.

    With ``run`` and ``batch`` the settings are the run's, and the result also says how far their scaling holds for each
    of its layers. A batch n times as large replaces n steps by one. By the laws of `theory.translation` that one step
    turns a layer by ``sqrt(n)`` times its present angle per step. The n present steps turn it by the measured
    ``D(n) = -ln cos(w_t, w_{t+n})``, which is less than n D(1) where steps pull back.

    Args:
        rule: the present settings; not with ``run``.
        scale: initial weights this many times as large; see `translate_scale`.
        batch: batch this many times as large; see `translate_batch`.
        weight_decay: another weight decay at the same angle; see `translate_decay`.
        to: another optimizer, or a measured law (`equilibria.identify(optimizer).rule`); see `translate_optimizer`,
            which takes the arguments below. "sphere": the same optimizer with the norm held, as
            `equilibria.control.Hyperball` does, at learning rates that turn the weight alike at every step; see
            `theory.sphere.to_sphere`, and `from_sphere` for the way back.
        match: with ``to``: "angle" (default), "diffusion" or "time_constant".
        unit_grad_sq: with ``to``: L, where it is needed.
        dim: with ``to``: number of entries, where it is needed.
        shape: with ``to``: (rows, columns), needed from and to Muon.
        momentum: with ``to``: momentum of the new optimizer, like the four settings below.
        dampening: of the new optimizer.
        nesterov: of the new optimizer.
        betas: of the new optimizer.
        adjust_lr_fn: of the new optimizer, if that is Muon.
        schedule: with ``to="sphere"``: learning rate of every step; by default the rule's.
        steps: with ``to="sphere"``: their number.
        init_norm: with ``to="sphere"``: ||w|| at the start, which is held; by default the equilibrium of the first lr.
        norm: with ``to="sphere"``: ||w|| before every step, as a run with weight decay measured it; by default the
            predicted one.
        scale_gradients: with ``to="sphere"``: whether you multiply the gradient of every step by ``gradient`` of the
            result, which makes AdamW's averages those with weight decay.
        run: a watched or recorded run, or its directory; with ``batch``, a whole number from 2.

    Returns:
        The new settings, with the quantities that they keep and change; with ``run`` a `BatchScaling`, to a sphere a
        `SphereTranslation`.

    Raises:
        EquilibriaError: none or several of the four are given, others without ``to``, or a run from which turning over
            many steps is not known.

    Example:
        >>> from equilibria.theory import SGD
        >>> translate(SGD(0.1, 5e-4, momentum=0.9), batch=2).rule.lr
        0.2
    """
    targets = {"scale": scale, "batch": batch, "weight_decay": weight_decay, "to": to}
    of_optimizer = {
        "match": match,
        "unit_grad_sq": unit_grad_sq,
        "dim": dim,
        "shape": shape,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "betas": betas,
        "adjust_lr_fn": adjust_lr_fn,
    }
    of_sphere = {
        "schedule": schedule,
        "steps": steps,
        "init_norm": init_norm,
        "norm": norm,
        "scale_gradients": scale_gradients,
    }
    chosen = [name for name, value in targets.items() if value is not None]
    only_with_to = [name for name, value in (of_optimizer | of_sphere).items() if value is not None]
    if run is not None:
        if rule is not None or chosen != ["batch"] or only_with_to:
            others = [*(["rule"] if rule is not None else []), *(n for n in chosen if n != "batch"), *only_with_to]
            raise EquilibriaError(
                f"got run with {', '.join(others) or 'no batch'}; expected run and batch alone: a run has its own "
                "settings",
                argument=others[0] if others else "batch",
            )
        return _scale_run(run, whole("batch", batch, low=2))
    if rule is None:
        raise EquilibriaError("got neither a rule nor a run; expected one of them: SGD(...), or run=", argument="rule")
    check_rule(rule)
    if len(chosen) != 1:
        raise EquilibriaError(
            f"got {' and '.join(chosen) or 'none of them'}; expected exactly one of: {', '.join(targets)}",
            argument=chosen[1] if chosen else None,
        )
    if only_with_to and to is None:
        raise EquilibriaError(
            f"got {', '.join(only_with_to)} with {chosen[0]}; expected {'it' if len(only_with_to) == 1 else 'these'} "
            "only with to, another optimizer",
            argument=only_with_to[0],
        )
    if to == "sphere":
        return _to_sphere(rule, of_optimizer, of_sphere)
    if to is not None:
        for name, value in of_sphere.items():
            if value is not None:
                raise EquilibriaError(f"got {name} with to={to!r}; expected it only with to='sphere'", argument=name)
        given: dict[str, Any] = {name: value for name, value in of_optimizer.items() if value is not None}
        return translate_optimizer(rule, to, **given)
    if scale is not None:
        return translate_scale(rule, scale)
    if batch is not None:
        return translate_batch(rule, batch)
    assert weight_decay is not None
    return translate_decay(rule, weight_decay)


def _to_sphere(rule: Rule, of_optimizer: Mapping[str, Any], of_sphere: Mapping[str, Any]) -> SphereTranslation:
    """The same path with the norm held; raises for settings that it does not need."""
    if of_sphere["steps"] is None:
        raise EquilibriaError("got no steps; expected their number with to='sphere'", argument="steps")
    for name, value in of_optimizer.items():
        if value is not None and name not in ("dim", "shape"):
            raise EquilibriaError(
                f"got {name} with to='sphere'; expected it only with another optimizer", argument=name
            )
    others = {name: value for name, value in of_sphere.items() if name != "schedule" and value is not None}
    scale = {name: of_optimizer[name] for name in ("dim", "shape")}
    return to_sphere(rule, rule.lr if of_sphere["schedule"] is None else of_sphere["schedule"], **others, **scale)


# ---- a run


_HOW = "eq.watch(model, optimizer, log_dir=...) of this version measures it in every 1,024 steps"


def _scale_run(run: RunLike, batch: int) -> BatchScaling:
    """The batch translation of a run's settings, with a prediction for every layer."""
    source = as_run(run)
    read = getattr(source, "diffusion", None)
    table = None if read is None else read()
    if table is None or not table.num_rows:
        raise EquilibriaError(
            "got a run without the table diffusion, which holds how far layers turn over many steps; expected a run "
            f"that has it: {_HOW}",
            argument="run",
        )
    sampled = sampled_run(source.samples(), metadata=source.metadata)
    taken = sampled.taken
    found = [_stretch(taken.of(position)) for position in range(len(taken.names))]
    limits = np.array([stretch[:2] for stretch in found], dtype=np.int64).reshape(-1, 2).T
    turning = measured_turning(table, taken.names, first=limits[0], last=limits[1], entries=sampled.entries)
    layers: list[LayerScaling] = []
    rules: list[Rule] = []
    refused: dict[str, str] = {}
    stretches, longest = [], 1
    for position, (name, stretch) in enumerate(zip(taken.names, found, strict=True)):
        measured = _Kept.measured(turning[position], stretch, sampled.rules[position])
        reason = _refusal(sampled, position, measured, batch)
        if reason:
            refused[name] = reason
            continue
        rule = sampled.rules[position]
        assert rule is not None and measured is not None
        layers.append(_layer(name, measured, batch))
        rules.append(rule)
        stretches.append((stretch[0], stretch[1]))
        longest = max(longest, int(measured.distance[-1]))
    if not layers:
        reason, count = Counter(refused.values()).most_common(1)[0] if refused else ("it has no layer", 0)
        raise EquilibriaError(
            f"got a run without a layer whose scaling can be predicted: {reason} ({counted(count, 'layer')})",
            argument="run",
        )
    present = Counter(rules).most_common(1)[0][0]
    new = translate_batch(present, batch)
    others = sum(rule != present for rule in rules)
    changed = new.changed
    if others:
        changed = (*changed, f"{counted(others, 'layer')} with other settings: predicted with those, not with these")
    first, last = max(start for start, _ in stretches), max(end for _, end in stretches)
    return BatchScaling(
        new.rule, new.weight, new.kept, changed, new.alternative,
        present=present, batch=batch, first=first, last=last, longest=longest, layers=tuple(layers), refused=refused,
    )  # fmt: skip


def _stretch(columns: Mapping[str, Array]) -> tuple[int, int, float, float]:
    """First and last step of the later half of the last stretch with one setting; D(1) in it and its relative error.

    D(1) comes from the angles of the samples, which are many; NaN without samples.
    """
    steps = columns["step"]
    if not len(steps):
        return 0, 0, np.nan, np.nan
    same = np.ones(len(steps), dtype=bool)
    for name in SETTINGS:
        last = columns[name][-1]
        same &= np.isclose(columns[name], last, rtol=_ONE, atol=0, equal_nan=True)
    begin = len(steps) - int(np.argmin(same[::-1])) if not same.all() else 0
    late = math.ceil(late_from(steps[begin], steps[-1]))
    angles = columns["angle"][steps >= late]
    apart = 2 * np.sin(angles[np.isfinite(angles)] / 2) ** 2
    if not len(apart):
        return late, int(steps[-1]), np.nan, np.nan
    mean = float(np.mean(apart))
    error = float(np.std(apart, ddof=1) / np.sqrt(len(apart)) / mean) if len(apart) > 1 and mean > 0 else np.nan
    return late, int(steps[-1]), float(-np.log1p(-mean)), error


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """D(n) of one layer in a stretch over that of independent gradients, 1 at n = 1 and at the measured distances.

    Attributes:
        one_step: D(1).
        independent: D(n)/(n D(1)) of independent gradients for n = 1, 2, ... up to the reach.
        distance: 1 and the measured distances.
        ratio: D(n)/(n D(1)) over the independent one.
        error: relative standard errors of it.
        pairs: of weights at each distance; of one step none.
    """

    one_step: float
    independent: Array
    distance: Array
    ratio: Array
    error: Array
    pairs: Array

    @classmethod
    def measured(cls, turning: Turning, stretch: tuple[int, int, float, float], rule: Rule | None) -> _Kept | None:
        """None if there are no pairs in the stretch, no angles of single steps, or no law of the rule."""
        _, _, one_step, error = stretch
        most = np.append(np.maximum.accumulate(turning.pairs[::-1])[::-1][1:], 0)  # at longer distances
        used = (turning.distance > 1) & (turning.pairs >= _SPARSE * most)
        if not used.any() or not one_step > 0 or not _has_law(rule):
            return None
        assert rule is not None
        distance = turning.distance[used]
        independent = independent_turning(rule, int(_BEYOND * distance[-1]))
        ratio = turning.turned[used] / (distance * one_step * independent[distance.astype(np.int64) - 1])
        return cls(
            one_step,
            independent,
            np.append(1.0, distance),
            np.append(1.0, ratio),
            np.append(0.0, np.hypot(turning.error[used], error)),
            np.append(0, turning.pairs[used]),
        )

    @property
    def reach(self) -> int:
        """Largest number of steps for which D is known: twice the longest measured distance."""
        return int(_BEYOND * self.distance[-1])

    def at(self, steps: Array) -> Array:
        """The ratio over numbers of steps up to the reach: a power of n between measured distances and beyond."""
        x, y = np.log(self.distance), np.log(self.ratio)
        inside = np.interp(np.log(steps), x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.exp(np.where(np.log(steps) > x[-1], y[-1] + slope * (np.log(steps) - x[-1]), inside))

    def error_at(self, steps: Array) -> Array:
        """Relative standard errors of `at`; beyond the measured distances also that of the slope."""
        x = np.log(self.distance)
        beyond = np.maximum(np.log(steps) - x[-1], 0) / (x[-1] - x[-2])
        inside = np.interp(np.log(steps), x, self.error)
        return np.where(beyond > 0, np.hypot((1 + beyond) * self.error[-1], beyond * self.error[-2]), inside)

    def breaks_at(self, deviations: float = 0.0) -> int | None:
        """The least number of steps from which on the root of the ratio is 0.9 or less; None beyond the reach.

        Args:
            deviations: standard errors to add to the root.
        """
        steps = np.arange(1.0, self.reach + 1)
        shift = 1 + deviations / 2 * self.error_at(steps) if deviations else 1.0  # of a root
        kept = np.flatnonzero(np.sqrt(self.at(steps)) * shift > 1 - _LOST)
        after = int(kept[-1]) + 2 if len(kept) else 1
        return after if after <= self.reach else None


def _has_law(rule: Rule | None) -> bool:
    return rule is not None and not isinstance(rule, AdamL2) and rule.weight_decay * rule.lr > 0


def _refusal(run: SampledRun, position: int, measured: _Kept | None, batch: int) -> str:
    """Why the scaling of a layer cannot be predicted, "" if it can."""
    rule = run.rules[position]
    if rule is None:
        return str(run.entries[position].get("no_law") or "no law for its optimizer and settings")
    if not _has_law(rule):
        kind = "Adam with coupled L2, whose angle depends on the gradients" if isinstance(rule, AdamL2) else "no decay"
        return f"{kind}: no law says how far a scaled step turns it"
    if not run.invariant[position]:
        if run.invariant[position] is None:
            return "undecided whether it is scale-invariant: label it, eq.watch(..., invariant=eq.symmetries(...))"
        return "not scale-invariant: the laws do not hold for it"
    if measured is None:
        return _unsettled(run.taken.of(position))
    if batch > measured.reach:
        return (
            f"its turning was measured over up to {measured.distance[-1]:,.0f} steps, from which {batch:,} cannot be "
            f"predicted, only {measured.reach:,}"
        )
    return ""


def _unsettled(columns: Mapping[str, Array]) -> str:
    """Why a layer has no pairs of weights at its last settings, and what would give some."""
    steps, lr = columns["step"], columns["lr"]
    before = lr[: len(lr) - 1][-_RAMP:]
    if len(before) and np.all(np.abs(np.diff(np.append(before, lr[-1]))) > _ONE * lr[-1]):
        return (
            f"lr changes from sample to sample, last from {before[-1]:.3g} to {lr[-1]:.3g} at step {steps[-1]:,.0f}; "
            "how far a scaled step turns a layer follows from settings at which its norm has settled: watch some 2,048 "
            "steps with lr held at the value that is to be scaled, such as the peak of the schedule, and give that run"
        )
    return (
        "no turning over many steps was measured in the later half of the steps since lr, weight decay or momentum "
        "last changed: watch some 2,048 steps without a change"
    )


def _layer(name: str, measured: _Kept, batch: int) -> LayerScaling:
    at = np.array([float(batch)])
    own, error = float(np.sqrt(measured.at(at))[0]), float(measured.error_at(at)[0]) / 2  # of a root
    independent = measured.independent[batch - 1]
    scaled = batch * measured.one_step
    nearest = int(np.argmin(np.abs(np.log(measured.distance[1:] / batch)))) + 1
    known = bool(np.isfinite(measured.error).all())
    return LayerScaling(
        name=name,
        pairs=int(measured.pairs[nearest]),
        now=float(np.arccos(np.exp(-scaled * own**2 * independent))),
        scaled=float(np.arccos(np.exp(-scaled))),
        independent=float(np.sqrt(independent)),
        kept=own,
        error=own * error,
        breaks_at=measured.breaks_at(),
        breaks_between=(measured.breaks_at(-NINETY), measured.breaks_at(NINETY)) if known else None,
    )
