"""What the recursion of angles takes from a run: settings, gradients and alignment of its layers over stretches.

    angle = lr u / ||w||^p,      change of ln ||w||^2 = -2 eps + G angle^2      per step

with eps the decay in force, u the length of an update per lr and G the growth gain (`equilibria.theory.gain`). Both are
split into what the optimizer makes of a gradient and what the gradients are like. With a the momentum (beta1), F the
growth gain of independent gradients, and n the squared length of an update per squared gradient length if they are
independent:

    u^2 = B n rho (1 + sigma (F - 1)),      G = gamma F

B is ||g||^2 ||w||^(2p - 2) under SGD and SGDW, the number of entries under Adam (1 if unknown); sigma is the
share of a gradient that persists over the memory of the momentum (0 for independent gradients, 1 for constant ones),
rho below 1 where successive gradients turn back. These numbers do not depend on the momentum, so that it can be
switched by itself.
Other optimizers have updates of one size: there B and n are 1 and sigma is 0, so that the momentum acts through F (1 if
unknown) alone, and rho and gamma hold all that is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria.diagnosis.run import SampledRun, decays
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES, RESCALED
from equilibria.theory._reals import Array
from equilibria.theory.gain import growth_gain
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Rule

MOST_STRETCHES = 48
_SAMPLES_PER_STRETCH = 4
_BETWEEN_STEPS = [NOTES.index(word) for word in (CHANGED_OUTSIDE, RESCALED)]
_LEAST = 1e-9  # of the largest squared gradient of a layer: a gradient of 0 counts as this
_NEIGHBOURS = 5  # gaps on either side that tell how fast a norm changed where something else changed it


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One run, stretches x layers; NaN where it has no sample.

    Attributes:
        angle: measured, root mean square over the steps that were taken.
        taken: share of the steps that were taken.
        lr: root mean square.
        weight_decay: as torch defines it.
        noise: n.
        gain: F.
        damping: the decay in force over lr wd that the momentum sets: 1 / (1 - a) for SGD.
        size: B.
        rho: as above.
        sigma: as above.
        gamma: as above, where it is positive.
        pull: -G angle^2 where G is negative: what the gradient pulls inward, per step.
        coupling: the decay in force over lr wd and ``damping``.
        jump: change of ln ||w||^2 between steps, by rescaling or by something else.
        start: ln ||w||^2 before the first stretch, one per layer.
    """

    angle: Array
    taken: Array
    lr: Array
    weight_decay: Array
    noise: Array
    gain: Array
    damping: Array
    size: Array
    rho: Array
    sigma: Array
    gamma: Array
    pull: Array
    coupling: Array
    jump: Array
    start: Array


_NEUTRAL = {"gamma": 0.0, "pull": 0.0, "jump": 0.0, "sigma": 0.0, "taken": 0.0}
NAMES = tuple(field.name for field in dataclasses.fields(Inputs))


def stretch_edges(runs: Sequence[SampledRun], names: Sequence[str]) -> NDArray[np.int64]:
    """The first steps of the stretches that all runs have sampled, and the step after the last; two at least."""
    steps = [run.series.of(run.series.names.index(name))["step"] for run in runs for name in names]
    first, last = max(int(step[0]) for step in steps), min(int(step[-1]) for step in steps) + 1
    samples = min(int(np.count_nonzero((step >= first) & (step < last))) for step in steps)
    count = max(1, min(MOST_STRETCHES, samples // _SAMPLES_PER_STRETCH, last - first))
    return np.unique(np.linspace(first, max(last, first + 1), count + 1).round().astype(np.int64))


def powers(run: SampledRun, names: Sequence[str]) -> Array:
    """p of every layer: 2 for a scale-invariant one under SGD, whose gradient goes as 1 / ||w||, otherwise 1."""
    positions = [run.series.names.index(name) for name in names]
    return np.array([_power(run.rules[each], run.invariant[each]) for each in positions])


def _power(rule: Rule | None, invariant: bool | None) -> float:
    return 2.0 if rule is not None and norm_power(rule) == 2 and invariant else 1.0


def read_inputs(run: SampledRun, names: Sequence[str], edges: NDArray[np.int64], power: Array) -> Inputs:
    """The inputs of the named layers over the stretches between ``edges``."""
    decay, weight = decays(run.series, run.entries), run.series.weights
    layers = []
    for name, p in zip(names, power.tolist(), strict=True):
        position = run.series.names.index(name)
        rows = slice(run.series.first[position], run.series.first[position + 1])
        columns = {key: run.series.columns[key][rows] for key in _COLUMNS} | {
            "decay": decay[rows],
            "weight": weight[rows],
        }
        columns["skipped"] = run.series.no_step[rows]
        layers.append(_of_layer(columns, run.rules[position], run.entries[position], edges, p))
    stacked = {key: np.stack([layer[key] for layer in layers], axis=-1) for key in NAMES}
    return Inputs(**stacked)


_COLUMNS = ("step", "lr", "weight_decay", "momentum", "norm", "grad_norm", "angle", "note")


def _of_layer(
    columns: Mapping[str, Array], rule: Rule | None, entry: Mapping[str, Any], edges: NDArray[np.int64], p: float
) -> dict[str, Array]:
    steps = np.diff(edges).astype(np.float64)
    place = np.searchsorted(edges, columns["step"], side="right") - 1
    inside = (place >= 0) & (place < len(steps))
    skipped = columns["skipped"].astype(bool)
    moves = inside & ~skipped & (columns["lr"] > 0) & np.isfinite(columns["angle"] * columns["norm"])
    every, taken = (_Means(place, chosen, columns["weight"], len(steps)) for chosen in (inside, moves))
    norm_sq, angle_sq = columns["norm"] ** 2, columns["angle"] ** 2
    lr_sq, angle_sq_mean = taken(columns["lr"] ** 2), taken(angle_sq)
    lr, wd = np.sqrt(lr_sq), taken(columns["weight_decay"])
    lr = np.where(np.isnan(lr), every(columns["lr"]), lr)
    share = every(np.where(skipped, 0.0, 1.0))
    a = np.nan_to_num(taken(columns["momentum"]))
    law = _momentum_law(rule, a)
    in_force = taken(columns["decay"])
    turned = angle_sq_mean * steps * share
    log_norm, jump = _log_norms(columns, edges, inside)
    grown = np.diff(log_norm) - jump + 2 * np.nan_to_num(in_force) * steps * share
    with np.errstate(all="ignore"):
        size = _size(rule, entry, taken(columns["grad_norm"] ** 2 * norm_sq ** (p - 1)))
        size = np.maximum(size, _LEAST * np.nanmax(size, initial=0.0))
        kappa = taken(angle_sq * norm_sq**p) / (lr_sq * size * law["noise"])
        gain = np.where(turned > 0, grown / turned, 0.0)
        coupling = in_force / (taken(columns["lr"]) * wd * law["damping"])
        adds_up = (law["gain"] > 1) & isinstance(rule, SGD | SGDW | AdamW | AdamL2)  # persistent gradients
        persistent = (kappa > 1) & adds_up
        sigma = np.where(persistent, (kappa - 1) / (law["gain"] - 1), np.where(adds_up, 0.0 * kappa, np.nan))
    return law | {
        "angle": np.sqrt(angle_sq_mean),
        "taken": share,
        "lr": lr,
        "weight_decay": wd,
        "size": size,
        "rho": np.where(persistent, 1.0, kappa),
        "sigma": sigma,
        "gamma": np.maximum(gain, 0.0) / law["gain"],
        "pull": np.maximum(-gain, 0.0) * angle_sq_mean,
        "coupling": coupling,
        "jump": jump,
        "start": np.asarray(log_norm[0]),
    }


class _Means:
    """Means of values over the chosen rows of each stretch, each for its steps; NaN for a stretch without."""

    def __init__(self, place: NDArray[np.int64], chosen: NDArray[np.bool_], weight: Array, count: int) -> None:
        self._place, self._chosen, self._weight, self._count = place, chosen, weight, count

    def __call__(self, values: Array) -> Array:
        known = self._chosen & np.isfinite(values)
        place, weight = self._place[known], self._weight[known]
        total = np.bincount(place, values[known] * weight, minlength=self._count)
        steps = np.bincount(place, weight, minlength=self._count)
        return np.asarray(np.divide(total, steps, out=np.full(self._count, np.nan), where=steps > 0))


def _momentum_law(rule: Rule | None, a: Array) -> dict[str, Array]:
    """n, F and the damping of the decay at momentum a."""
    one = np.ones_like(a)
    if isinstance(rule, SGD | SGDW):
        after = 1 + 2 * a - 2 * a**3 if isinstance(rule, SGD) and rule.nesterov else one
        damped = np.where(a > 0, 1 - rule.dampening, 1.0) if isinstance(rule, SGD) else one
        damping = damped / (1 - a) if isinstance(rule, SGD) else one
        return {
            "noise": damped**2 * after / (1 - a**2),
            "gain": (1 + a) / ((1 - a) * after),
            "damping": damping,
        }
    if isinstance(rule, AdamW | AdamL2):
        return {"noise": (1 - a) / (1 + a), "gain": (1 + a) / (1 - a), "damping": one}
    return {"noise": one, "gain": one * (1.0 if rule is None else growth_gain(rule)), "damping": one}


def _size(rule: Rule | None, entry: Mapping[str, Any], grad_sq: Array) -> Array:
    if isinstance(rule, SGD | SGDW):
        return grad_sq
    return np.full_like(grad_sq, float(entry.get("entries") or 1) if isinstance(rule, AdamW | AdamL2) else 1.0)


def _log_norms(
    columns: Mapping[str, Array], edges: NDArray[np.int64], inside: NDArray[np.bool_]
) -> tuple[Array, Array]:
    """ln ||w||^2 at the edges, and its change between steps in every stretch."""
    known = np.isfinite(columns["norm"])
    step, log_norm = columns["step"][known], 2 * np.log(columns["norm"][known])
    jump = np.zeros(len(edges) - 1)
    if not len(step):
        return np.full(len(edges), np.nan), jump
    changed = np.isin(columns["note"][known], _BETWEEN_STEPS)
    gap, grown = np.maximum(np.diff(step), 1), np.diff(log_norm)
    for row in np.flatnonzero(changed[1:]):
        near = slice(max(row - _NEIGHBOURS, 0), row + _NEIGHBOURS + 1)
        quiet = ~changed[1:][near]
        usual = float(np.median((grown / gap)[near][quiet])) if quiet.any() else 0.0
        place = int(np.searchsorted(edges, step[row + 1], side="right")) - 1
        if 0 <= place < len(jump):
            jump[place] += grown[row] - usual * gap[row]
    return np.interp(edges, step, log_norm), jump


def filled(a: Inputs, b: Inputs) -> tuple[Inputs, Inputs]:
    """Both runs without gaps: from the nearest stretch, else from the other run: that input then differs nowhere."""
    values: dict[str, tuple[Array, Array]] = {}
    for name in NAMES:
        first, second = (_from_neighbours(getattr(run, name)) for run in (a, b))
        first, second = np.where(np.isnan(first), second, first), np.where(np.isnan(second), first, second)
        neutral = _NEUTRAL.get(name, 1.0)
        values[name] = np.nan_to_num(first, nan=neutral), np.nan_to_num(second, nan=neutral)
    first_run, second_run = ({name: pair[side] for name, pair in values.items()} for side in (0, 1))
    return Inputs(**first_run), Inputs(**second_run)


def _from_neighbours(values: Array) -> Array:
    if values.ndim < 2 or not np.isnan(values).any():
        return values
    columns = []
    for column in values.T:
        known = np.flatnonzero(np.isfinite(column))
        columns.append(np.interp(np.arange(len(column)), known, column[known]) if len(known) else column)
    return np.stack(columns, axis=1)
