"""The moment recursion of the theory over a few steps with different settings, and its equilibrium.

`equilibria.theory.transient.evolve` runs the same recursions over long schedules. A sample needs a few steps of many
weights: there the checks and the trajectory of `evolve` would cost more than the recursion itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError
from equilibria.theory import equilibrium
from equilibria.theory.identified import Identified, identified_point, identified_step
from equilibria.theory.memory import muon_memory
from equilibria.theory.moments import adam_step, angle_from_chord_sq
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, nesterov_angle_factor
from equilibria.theory.states import State, memory_size, step_of
from equilibria.theory.targets import Targets, targets
from equilibria.theory.transient import evolve

Array = NDArray[np.float64]

_TINY = 1e-200  # stands for an empty moment


def run_recursion(
    rules: Sequence[Rule],
    state: State,
    unit_grad_sq: Array,
    *,
    sizes: Array,
    entries: Array,
    correlation: Array,
    recall: Array | float,
) -> tuple[State, tuple[Array, Array], Array]:
    """Run the recursion over all steps.

    Args:
        rules: the rule at every step, all of one kind.
        state: before the first step.
        unit_grad_sq: L, steps x weights.
        sizes: entries of every weight; for Muon the mean square of its update per lr^2, for a measured law that of its
            update over the law's.
        entries: of every weight.
        correlation: E<v, g> / E||g||^2 of every weight, on which Nesterov's recursion depends.
        recall: share of the momentum's memory that Muon's updates keep.

    Returns:
        The state after all steps, ||w||^2 before and after the last of them, and its ||w' - w||^2.
    """
    if isinstance(rules[0], SGD | SGDW):
        return _run_buffer(rules, state, unit_grad_sq, correlation)
    if isinstance(rules[0], AdamW | AdamL2):
        return _run_adam(rules, _fitted(state, rules[0]), unit_grad_sq, sizes)
    if isinstance(rules[0], Muon):
        return _run_muon(rules, state, sizes, recall)
    if isinstance(rules[0], Identified):
        return _run_identified(rules, state, unit_grad_sq, sizes, entries)
    done = 0
    for _, alike in groupby(rules, key=_without_schedule):
        stretch = list(alike)
        path = evolve(
            stretch[0],
            len(stretch),
            start=_fitted(state, stretch[0]),
            unit_grad_sq=unit_grad_sq[done : done + len(stretch)],
            dim=sizes,
            lr=[rule.lr for rule in stretch],
            weight_decay=[rule.weight_decay for rule in stretch],
        )
        done += len(stretch)
        state = path.final
    return state, (path.norm_sq[-2], path.norm_sq[-1]), path.moved_sq[-1]


def _run_buffer(
    rules: Sequence[Rule], state: State, unit_grad_sq: Array, correlation: Array
) -> tuple[State, tuple[Array, Array], Array]:
    """Run rules with a momentum buffer. Nesterov's depends on each weight's correlation, which `evolve` cannot take."""
    p, q, r = state.norm_sq, state.radial, state.buffer_sq
    for rule, grad_sq in zip(rules, unit_grad_sq, strict=True):
        assert isinstance(rule, SGD | SGDW)
        before, stale = p, (q * (1 - rule.decay_per_step), r)
        step, lr, wd, a, own = step_of(rule, rule.lr, rule.weight_decay, rule.momentum, correlation=correlation)
        if isinstance(rule, SGD) and rule.dampening:
            own = np.where(r > 0, own, 1.0)  # torch does not damp the first buffer
        p, q, r, moved_sq = step(p, q, r, grad_sq / p, lr, wd, a, own)
        if not a:
            q, r = stale  # without momentum torch leaves the buffer as it is
    done = state.steps_done + len(rules)
    return dataclasses.replace(state, norm_sq=p, radial=q, buffer_sq=r, steps_done=done), (before, p), moved_sq


def _run_muon(
    rules: Sequence[Rule], state: State, sizes: Array, recall: Array | float
) -> tuple[State, tuple[Array, Array], Array]:
    """Run Muon, whose orthogonalisation leaves each matrix another share of its memory."""
    p, traces = state.norm_sq, state.memory
    for rule in rules:
        assert isinstance(rule, Muon)
        before, lr, lost, memory = p, rule.lr, rule.decay_per_step, rule.memory
        pull = recall * remembered(rule, traces)
        moved_sq = lost * lost * p + (lr - 2 * lost * pull) * lr * sizes
        p = (1 - lost) ** 2 * p + (lr + 2 * (1 - lost) * pull) * lr * sizes
        traces = lr + (1 - lost) * np.reshape(memory.decay, (-1, 1)) * traces
    done = state.steps_done + len(rules)
    return dataclasses.replace(state, norm_sq=p, memory=traces, steps_done=done), (before, p), moved_sq


def _run_identified(
    rules: Sequence[Rule], state: State, unit_grad_sq: Array, sizes: Array, entries: Array
) -> tuple[State, tuple[Array, Array], Array]:
    """Run a measured law."""
    p, traces = state.norm_sq, list(state.memory)
    for rule, grad_sq in zip(rules, unit_grad_sq, strict=True):
        assert isinstance(rule, Identified)
        before = p
        p, moved_sq, traces = identified_step(
            rule, p, traces, grad_sq, entries, rule.lr, rule.weight_decay, size=np.sqrt(sizes)
        )
    done = state.steps_done + len(rules)
    memory = np.array(traces).reshape(state.memory.shape)
    return dataclasses.replace(state, norm_sq=p, memory=memory, steps_done=done), (before, p), moved_sq


def remembered(rule: Muon, traces: Array) -> Array:
    """-<w, u> / ||u||^2 of the next update u, if it were the momentum itself, from the traces of past updates."""
    total: Array = np.asarray(rule.memory.first) @ traces
    return total


@lru_cache(maxsize=1024)
def recall_of_shape(momentum: float, nesterov: bool, shape: tuple[int, int]) -> float:
    """Share of its momentum's memory that Muon's update of a matrix keeps under Gaussian gradients."""
    whole = muon_memory(momentum, nesterov=nesterov).total() - 1
    kept: float = (muon_memory(momentum, nesterov=nesterov, shape=shape).total() - 1) / whole if whole else 1.0
    return kept


def _run_adam(
    rules: Sequence[Rule], state: State, unit_grad_sq: Array, sizes: Array
) -> tuple[State, tuple[Array, Array], Array]:
    """Run Adam."""
    p, q, r, v, done = state.norm_sq, state.radial, state.buffer_sq, state.second, state.steps_done
    for rule, grad_sq in zip(rules, unit_grad_sq, strict=True):
        assert isinstance(rule, AdamW | AdamL2)
        (b1, b2), before, done = rule.betas, p, done + 1
        step_size = rule.lr * math.sqrt(1 - b2**done) / (1 - b1**done)
        lost, coupled = (rule.decay_per_step, 0.0) if isinstance(rule, AdamW) else (0.0, rule.weight_decay)
        p, q, r, v, moved_sq = adam_step(p, q, r, v, grad_sq, (1 - b2) / sizes, step_size, lost, coupled, b1, b2)
    after = dataclasses.replace(state, norm_sq=p, radial=q, buffer_sq=r, second=v, steps_done=done)
    return after, (before, p), moved_sq


def _fitted(state: State, rule: Rule) -> State:
    """The state in the form that `evolve` accepts.

    With other betas, Lion keeps more or fewer of the small terms of its memory. `evolve` rejects all-zero moments after
    the first step, which weights without a gradient so far have, so a tiny value is used.
    """
    memory = np.zeros((memory_size(rule), *state.memory.shape[1:]))
    memory[: len(state.memory)] = state.memory[: len(memory)]
    state = dataclasses.replace(state, memory=memory)
    if state.steps_done and isinstance(rule, AdamW | AdamL2):
        return dataclasses.replace(state, second=np.maximum(state.second, _TINY))
    if state.steps_done and isinstance(rule, Lion):
        return dataclasses.replace(state, buffer_sq=np.maximum(state.buffer_sq, _TINY))
    return state


def _without_schedule(rule: Rule) -> Rule:
    """A rule without the settings that `evolve` takes as schedules."""
    return dataclasses.replace(rule, lr=0.0, weight_decay=0.0)


def group_equilibrium(
    rule: Rule, unit_grad_sq: Array, correlation: Array, *, sizes: Array, entries: Array, recall: Array | float
) -> tuple[Array, Array]:
    """Angle and norm in equilibrium; NaN where the rule has none.

    Args:
        rule: of the group.
        unit_grad_sq: L of every weight.
        correlation: <v, g> / ||g||^2 of gradient and momentum.
        sizes: as in `run_recursion`.
        entries: of every weight.
        recall: share of the momentum's memory that Muon's updates keep.
    """
    nothing = np.full(len(unit_grad_sq), np.nan)
    if rule.decay_per_step == 0:
        return nothing, nothing
    if isinstance(rule, AdamL2):
        return _adam_l2(rule, unit_grad_sq, sizes)
    if isinstance(rule, Identified):
        point = identified_point(
            rule, rule.lr, rule.weight_decay, unit_grad_sq=unit_grad_sq, dim=entries, size=np.sqrt(sizes)
        )
        return angle_from_chord_sq(2 * point.one_minus_cos) + 0 * sizes, np.sqrt(point.norm_sq)
    unit = _targets(rule)
    if unit is None:
        return nothing, nothing
    if isinstance(rule, Muon):
        point = equilibrium.constant_update_point(rule.lr, rule.weight_decay, rule.memory, recall=recall)
        return angle_from_chord_sq(2 * point.one_minus_cos), np.sqrt(point.norm_sq * sizes)
    angle = np.full(len(unit_grad_sq), float(unit.angle))
    if isinstance(rule, SGD) and rule.nesterov:
        angle = angle * nesterov_angle_factor(rule.momentum, correlation=correlation)
    norm = np.sqrt(unit.norm_sq * (np.sqrt(unit_grad_sq) if isinstance(rule, SGD | SGDW) else sizes))
    return angle, np.where(norm > 0, norm, np.nan)


def _adam_l2(rule: AdamL2, unit_grad_sq: Array, entries: Array) -> tuple[Array, Array]:
    """Angle and norm of Adam with L2: both depend on the gradient of each weight."""
    point = equilibrium.adam_l2_point(rule.lr, rule.weight_decay, rule.betas[0], dim=entries, unit_grad_sq=unit_grad_sq)
    good = np.asarray((unit_grad_sq > 0) & (point.norm_sq > 0))
    angle, norm = angle_from_chord_sq(2 * point.one_minus_cos), np.sqrt(point.norm_sq)
    return np.where(good, angle, np.nan), np.where(good, norm, np.nan)


@lru_cache(maxsize=1024)
def _targets(rule: Rule) -> Targets | None:
    try:
        return targets(rule, rule.lr)
    except (EquilibriaError, ArithmeticError):
        return None
