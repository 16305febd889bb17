"""Predictions for imported samples, with the predictors of a watched run.

A weight that the caller calls scale-invariant is predicted by the recursion of its law if the log has what the law
needs: SGD's norm depends on the gradient, so that gradient norms must be logged; the updates of Adam and Lion have a
length of their own, so that the number of entries is enough; those of Muon are measured. Where no gradient is logged,
its length on the unit sphere counts as constant. The optimizer's memory before the first sample is empty at step 0, and
as in equilibrium at a later one. Of other matrices the growth gain is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.importing._history import Course, History
from equilibria.monitor.gain import GainPredictor
from equilibria.monitor.predictor import OptimizerMemory, Prediction, Predictor
from equilibria.monitor.reading import MeasuredStep
from equilibria.monitor.recursion import group_equilibrium
from equilibria.monitor.sample_rows import StateLabels
from equilibria.records.tables import GAIN_LAW, INVARIANT_LAW
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, ClosedRule, Lion, Muon, Rule

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

NUMBERS = (
    "angle_predicted",
    "norm_predicted",
    "angle_equilibrium",
    "norm_equilibrium",
    "steps_to_settle",
    "gain",
    "gain_error",
)


@dataclass(frozen=True)
class Cohort:
    """Parameters that were sampled at the same steps, with the same settings.

    Attributes:
        names: of the parameters.
        histories: of the parameters.
        lr: at every step.
        weight_decay: at every step.
        rule: the optimizer's; its lr and weight decay do not count.
        invariant: whether each is scale-invariant, None if nobody said so.
        matrix: whether each is a matrix.
    """

    names: tuple[str, ...]
    histories: tuple[History, ...]
    lr: Course
    weight_decay: Course
    rule: ClosedRule
    invariant: tuple[bool | None, ...]
    matrix: tuple[bool, ...]


def predict(cohort: Cohort) -> dict[str, NDArray[Any]]:
    """The predicted columns of a cohort, (samples, parameters): `NUMBERS`, state and law."""
    steps, rule = cohort.histories[0].step, cohort.rule
    stacked = {
        name: np.stack([getattr(history, name) for history in cohort.histories], axis=1)
        for name in ("norm", "after", "moved", "angle", "grad_norm")
    }
    entries = np.array([history.entries or np.nan for history in cohort.histories], dtype=np.float64)
    labels = np.array([bool(label) for label in cohort.invariant])
    by_law = labels & _enough(rule, stacked, entries)
    shapes = [_matrix(history.shape) for history in cohort.histories]
    law, nothing = Predictor(entries, invariant=by_law.astype(np.float64), shapes=shapes), _nothing(len(entries))
    gains, states = GainPredictor(entries), StateLabels(len(entries))
    measures = ~by_law & np.array(cohort.matrix)
    jumps = np.union1d(cohort.lr.jumps, cohort.weight_decay.jumps)
    rows: dict[str, list[Any]] = {name: [] for name in (*NUMBERS, "state", "law")}
    last = int(steps[0]) - 1
    for row, step in enumerate(steps.tolist()):
        rules = _rules(cohort, np.arange(last + 1, step + 1))
        measured = _measured({name: values[row] for name, values in stacked.items()}, by_law, rule)
        memory = _memory(rule, measured, entries, steps_done=float(step)) if row == 0 else None
        with np.errstate(all="ignore"):
            invariant = law.predict(step, measured, rules, memory=memory, skipped=False) if by_law.any() else nothing
            changed = np.zeros(len(entries), dtype=bool)
            gain = gains.predict(step, measured, rules, changed=changed, skipped=False)
        numbers = {
            "angle_predicted": np.where(measures, gain.angle, invariant.angle),
            "norm_predicted": np.where(measures, gain.norm, invariant.norm),
            "angle_equilibrium": np.where(measures, gain.angle_equilibrium, invariant.angle_equilibrium),
            "norm_equilibrium": np.where(measures, gain.norm_equilibrium, invariant.norm_equilibrium),
            "steps_to_settle": np.where(measures, gain.steps_to_settle, invariant.steps_to_settle),
            "gain": np.where(np.array(cohort.matrix), gain.gain, np.nan),
            "gain_error": np.where(np.array(cohort.matrix), gain.gain_error, np.nan),
        }
        for name, values in numbers.items():
            rows[name].append(values)
        settled = np.where(measures, gain.settled, invariant.settled)
        jumped = np.full(len(entries), bool(np.any((jumps > last) & (jumps <= step))))
        balanced = np.isfinite(numbers["norm_equilibrium"])
        words = states.update(settled, changed=jumped, balanced=balanced)
        known = np.isfinite(numbers["angle_predicted"]) | np.isfinite(numbers["angle_equilibrium"])
        rows["state"].append(
            [word if turns else None for word, turns in zip(words, _turned(stacked, row), strict=True)]
        )
        laws = np.where(measures, GAIN_LAW, INVARIANT_LAW).tolist()
        rows["law"].append([word if has else None for word, has in zip(laws, known.tolist(), strict=True)])
        last = step
    columns = {
        name: np.array(values, dtype=object if name in ("state", "law") else np.float64)
        for name, values in rows.items()
    }
    return columns | {"angle_equilibrium": _with_closed_form(cohort, columns["angle_equilibrium"], labels, steps)}


def _nothing(count: int) -> Prediction:
    unknown, no = np.full(count, np.nan), np.zeros(count, dtype=bool)
    return Prediction(
        *(no if field.name in ("settled", "invariant") else unknown for field in dataclasses.fields(Prediction))
    )


def _enough(rule: Rule, stacked: Mapping[str, Array], entries: Array) -> Flags:
    """Whether the log has what the law of invariant weights needs."""
    has = {name: np.isfinite(stacked[name]).any(axis=0) for name in ("grad_norm", "moved")}
    if isinstance(rule, SGD | SGDW):
        return np.asarray(has["grad_norm"])
    if isinstance(rule, AdamL2):
        return np.asarray(has["grad_norm"] & np.isfinite(entries))
    if isinstance(rule, AdamW | Lion):
        return np.isfinite(entries)
    return np.asarray(has["moved"] if isinstance(rule, Muon) else np.zeros(len(entries), dtype=bool))


def _turned(stacked: Mapping[str, Array], row: int) -> list[bool]:
    """Whether an angle was measured up to a sample: without one no state is known."""
    turned: list[bool] = np.asarray(np.isfinite(stacked["angle"][: row + 1]).any(axis=0)).tolist()
    return turned


def _rules(cohort: Cohort, steps: NDArray[np.int64]) -> list[Rule]:
    """The rule at every one of some steps."""
    rules: list[Rule] = []
    settings = None
    for lr, weight_decay in zip(cohort.lr.at(steps).tolist(), cohort.weight_decay.at(steps).tolist(), strict=True):
        if (lr, weight_decay) != settings:
            settings = lr, weight_decay
            rule = dataclasses.replace(cohort.rule, lr=lr, weight_decay=weight_decay)
        rules.append(rule)
    return rules


def _measured(row: Mapping[str, Array], by_law: Flags, rule: Rule) -> MeasuredStep:
    """A sample as the inner products of a watched step; the angle is the stated one."""
    norm, after = row["norm"], row["after"]
    with np.errstate(invalid="ignore"):
        chord = 2 * np.sin(row["angle"] / 2)
        moved_sq = (after - norm) ** 2 + norm * after * chord**2
        gradient_sq = row["grad_norm"] ** 2
        constant = by_law & (not isinstance(rule, SGD | SGDW | AdamL2))  # on the unit sphere
        gradient_sq = np.where(np.isfinite(gradient_sq) | ~constant, gradient_sq, 1 / norm**2)
        along = ((after - norm) * (after + norm) - moved_sq) / 2
    nothing = np.full(len(norm), np.nan)
    return MeasuredStep(
        ww=norm**2, wg=nothing, gg=gradient_sq, we=along, ee=moved_sq, vg=nothing, shrink=np.zeros(len(norm))
    )


def _memory(rule: ClosedRule, measured: MeasuredStep, entries: Array, *, steps_done: float) -> OptimizerMemory:
    """What the optimizer remembers before the first sample."""
    count, started = len(entries), steps_done > 0
    first = rule.betas[1 if isinstance(rule, Lion) else 0] if isinstance(rule, AdamW | AdamL2 | Lion) else rule.momentum
    share = (1 - first) / (1 + first) if isinstance(rule, AdamW | AdamL2 | Lion) else 1 / (1 - first**2)
    gradient_sq = np.nan_to_num(measured.gg) * started
    second = gradient_sq / np.nan_to_num(entries, nan=1.0)
    if isinstance(rule, AdamW | AdamL2):
        second = second * (1 - rule.betas[1] ** steps_done)
    return OptimizerMemory(np.zeros(count), share * gradient_sq, second, steps_done, np.ones(count, dtype=bool))


def _with_closed_form(cohort: Cohort, angles: Array, labels: Flags, steps: NDArray[np.int64]) -> Array:
    """The equilibrium angle of invariant weights that no recursion and no gain reaches, where it needs no gradient."""
    blank = labels & ~np.isfinite(angles).any(axis=0)
    if not blank.any() or isinstance(cohort.rule, AdamL2 | Muon):
        return angles
    one = np.ones(1)
    closed = [
        group_equilibrium(rule, one, 0 * one, sizes=one, entries=one, recall=1.0)[0] for rule in _rules(cohort, steps)
    ]
    return np.where(blank, np.array(closed), angles)


def _matrix(shape: Sequence[int] | None) -> tuple[int, int]:
    """(rows, columns) of a weight as a matrix."""
    rows, *others = shape or (1,)
    return rows, int(np.prod(others, dtype=np.int64))
