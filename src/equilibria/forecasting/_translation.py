"""`translate`: settings with the same dynamics elsewhere, and how far a larger batch keeps those of a recorded run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equilibria.diagnosis.gradient_size import late_from
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import SETTINGS
from equilibria.errors import EquilibriaError, whole
from equilibria.findings import counted
from equilibria.forecasting._layers import RunLike, as_run
from equilibria.theory._reals import Array
from equilibria.theory.angles import n_step_angles
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
_RIGHT_ANGLE = 1e-12  # cosine that stands for one, which no measured turning reaches
_ONE = 1e-6  # relative difference of settings within one stretch


@dataclass(frozen=True, slots=True)
class LayerScaling:
    """Present and scaled settings of one layer, over as many samples as a batch of the scaled settings has.

    Attributes:
        name: of the layer.
        references: weights in the stretch from which turning was measured.
        now: angle over the ``batch`` steps of the present settings, radians; measured.
        scaled: angle of one step of the scaled settings, radians; predicted.
        independent: ``now / scaled`` by the law for independent gradients: 1 for plain SGD, more with momentum.
        kept: ``now / scaled`` over ``independent``; below 1 where steps pull back.
        error: standard error of ``kept`` from the scatter between references; NaN with a single one.
        breaks_at: factor of the batch size from which on ``kept`` is 0.9 or less; None if that is beyond twice the
            longest measured distance.
    """

    name: str
    references: int
    now: float
    scaled: float
    independent: float
    kept: float
    error: float
    breaks_at: int | None


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
    of_sphere = {"schedule": schedule, "steps": steps, "init_norm": init_norm}
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
    schedule = rule.lr if of_sphere["schedule"] is None else of_sphere["schedule"]
    scale = {name: of_optimizer[name] for name in ("dim", "shape")}
    return to_sphere(rule, schedule, steps=of_sphere["steps"], init_norm=of_sphere["init_norm"], **scale)


# ---- a run


_HOW = "eq.watch(model, optimizer, log_dir=...) of this version measures it again every 1,024 steps"


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
    turned = _by_layer(table)
    layers: list[LayerScaling] = []
    rules: list[Rule] = []
    refused: dict[str, str] = {}
    stretches, longest = [], 1
    for position, name in enumerate(sampled.taken.names):
        stretch = _stretch(sampled.taken.of(position))
        measured = _Turning.measured(turned.get(name), stretch)
        reason = _refusal(sampled, position, measured, batch)
        if reason:
            refused[name] = reason
            continue
        rule = sampled.rules[position]
        assert rule is not None and measured is not None
        layers.append(_layer(name, rule, measured, batch))
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


def _by_layer(table: Any) -> dict[str, dict[str, NDArray[Any]]]:
    """The columns of the table for every parameter; NaN where a weight turned by more than a right angle."""
    names = np.asarray(table["param"].to_pylist(), dtype=object)
    columns = {
        "step": table["step"].to_numpy(),
        "distance": table["distance"].to_numpy(),
        "turned": table["turned"].to_numpy(),
    }
    return {str(name): {key: values[names == name] for key, values in columns.items()} for name in np.unique(names)}


def _stretch(columns: Mapping[str, Array]) -> tuple[int, int, float]:
    """First and last step of the later half of the last stretch with one setting, and D(1) in it; NaN without samples.

    D(1) comes from the angles of the samples, which are many; a reference gives one step of every 1,024.
    """
    steps = columns["step"]
    if not len(steps):
        return 0, 0, np.nan
    same = np.ones(len(steps), dtype=bool)
    for name in SETTINGS:
        last = columns[name][-1]
        same &= np.isclose(columns[name], last, rtol=_ONE, atol=0, equal_nan=True)
    begin = len(steps) - int(np.argmin(same[::-1])) if not same.all() else 0
    late = math.ceil(late_from(steps[begin], steps[-1]))
    angles = columns["angle"][steps >= late]
    angles = angles[np.isfinite(angles)]
    one_step = float(-np.log1p(-np.mean(2 * np.sin(angles / 2) ** 2))) if len(angles) else np.nan
    return late, int(steps[-1]), one_step


@dataclass(frozen=True, slots=True, eq=False)
class _Turning:
    """D(n) of one layer in a stretch: distances, 1 first, and -ln of the mean cosine over each.

    ``error`` is the relative standard error of D from the scatter between references.
    """

    distance: Array
    turned: Array
    error: Array
    references: int

    @classmethod
    def measured(cls, rows: Mapping[str, NDArray[Any]] | None, stretch: tuple[int, int, float]) -> _Turning | None:
        """From the rows that begin and end in the stretch; None if there are none, or no angles of single steps."""
        first, last, one_step = stretch
        if rows is None or not one_step > 0:
            return None
        inside = (rows["step"] >= first) & (rows["step"] + rows["distance"] <= last + 1) & (rows["distance"] > 1)
        distance, turned = rows["distance"][inside], rows["turned"][inside]
        known = [(1.0, one_step, 0.0)]
        for n in np.unique(distance):
            each = turned[distance == n]
            mean = -np.log(np.mean(np.exp(-each)))
            if not np.isfinite(mean):  # a weight beyond a right angle: D is not known, nor farther on
                break
            error = np.std(each, ddof=1) / np.sqrt(len(each)) / mean if len(each) > 1 else np.nan
            known.append((float(n), float(mean), float(error)))
        if len(known) < 2:
            return None
        distances, means, errors = np.array(known).T
        return cls(distances, means, errors, references=len(np.unique(rows["step"][inside])))

    @property
    def reach(self) -> int:
        """Largest number of steps for which D is known: twice the longest measured distance."""
        return int(_BEYOND * self.distance[-1])

    def at(self, steps: Array) -> Array:
        """D over numbers of steps up to the reach: a power of n between measured distances, and beyond the last."""
        x, y = np.log(self.distance), np.log(self.turned)
        inside = np.interp(np.log(steps), x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.exp(np.where(np.log(steps) > x[-1], y[-1] + slope * (np.log(steps) - x[-1]), inside))


def _refusal(run: SampledRun, position: int, measured: _Turning | None, batch: int) -> str:
    """Why the scaling of a layer cannot be predicted, "" if it can."""
    rule = run.rules[position]
    if rule is None:
        return str(run.entries[position].get("no_law") or "no law for its optimizer and settings")
    if isinstance(rule, AdamL2) or not rule.weight_decay * rule.lr > 0:
        kind = "Adam with coupled L2, whose angle depends on the gradients" if isinstance(rule, AdamL2) else "no decay"
        return f"{kind}: no law says how far a scaled step turns it"
    if not run.invariant[position]:
        if run.invariant[position] is None:
            return "undecided whether it is scale-invariant: label it, eq.watch(..., invariant=eq.symmetries(...))"
        return "not scale-invariant: the laws do not hold for it"
    if measured is None:
        return (
            "no turning over many steps was measured in the later half of the steps since lr, weight decay or momentum "
            "last changed"
        )
    if batch > measured.reach:
        return (
            f"its turning was measured over up to {measured.distance[-1]:,.0f} steps, from which {batch:,} cannot be "
            f"predicted, only {measured.reach:,}"
        )
    return ""


def _layer(name: str, rule: Rule, measured: _Turning, batch: int) -> LayerScaling:
    steps = np.arange(1.0, measured.reach + 1)
    independent = np.sqrt(_independent(rule, measured.reach))
    ratio = np.sqrt(measured.at(steps) / (steps * measured.turned[0]))
    kept = ratio / independent
    last_whole = int(steps[kept > 1 - _LOST][-1])
    now, scaled = measured.at(np.array([batch]))[0], batch * measured.turned[0]
    error = np.interp(np.log(batch), np.log(measured.distance), measured.error) / 2  # of a root
    return LayerScaling(
        name=name,
        references=measured.references,
        now=float(np.arccos(np.exp(-now))),
        scaled=float(np.arccos(np.exp(-scaled))),
        independent=float(independent[batch - 1]),
        kept=float(kept[batch - 1]),
        error=float(kept[batch - 1] * error),
        breaks_at=last_whole + 1 if last_whole < measured.reach else None,
    )


@lru_cache(maxsize=64)
def _independent(rule: Rule, steps: int) -> Array:
    """D(n) / (n D(1)) of independent gradients for n = 1..steps; layers of a group share it."""
    turned = -np.log(np.maximum(np.cos(n_step_angles(rule, steps)[1:]), _RIGHT_ANGLE))
    return np.asarray(turned / (np.arange(1, steps + 1) * turned[0]))
