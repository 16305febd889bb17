"""How a weight gets to its equilibrium: the moment recursion of every rule under any schedule, vectorised over layers.

`evolve` follows norm and angle step by step from one of the `states`. Norms scale out: where L (SGD, SGDW) or the
number of entries (AdamW, Lion) is not given, they are in units of L^(1/4) or sqrt(d).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibria.errors import EquilibriaError, number, whole
from equilibria.theory import moments
from equilibria.theory._known_rule import known_rule
from equilibria.theory._reals import reals
from equilibria.theory.adam import adam_step
from equilibria.theory.citations import law
from equilibria.theory.lion import LionPull, MuonPull
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.states import State, memory_size, step_of

Array = NDArray[np.float64]

_BLOCK = 1 << 18  # numbers per block when a pass over a trajectory needs temporaries: they stay in the cache


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Norm and angle, step by step.

    Attributes:
        lr: learning rate of each step.
        weight_decay: weight decay of each step.
        norm_sq: ||w||^2 before each step and after the last, shape (steps + 1, layers...).
        moved_sq: ||w' - w||^2 of each step, shape (steps, layers...).
        final: the state after the last step, to go on from.
    """

    lr: Array
    weight_decay: Array
    norm_sq: Array
    moved_sq: Array
    final: State

    @property
    def norm(self) -> Array:
        """||w|| before each step and after the last."""
        return np.sqrt(self.norm_sq)

    @property
    def angle(self) -> Array:
        """Radians turned by each step."""
        result = np.empty_like(self.moved_sq)
        rows = max(1, _BLOCK // max(1, self.moved_sq[:1].size))
        for at in range(0, len(result), rows):
            before, after = self.norm_sq[at : at + rows + 1][:-1], self.norm_sq[at + 1 : at + rows + 1]
            chord_sq = moments.chord_sq(before, after, self.moved_sq[at : at + rows])
            result[at : at + rows] = moments.angle_from_chord_sq(chord_sq)
        return result

    @property
    def relative_update(self) -> Array:
        """||w' - w|| / ||w|| of each step."""
        return np.sqrt(self.moved_sq / self.norm_sq[:-1])


@law(
    "smd",
    "Thm 1, Thm 2",
    corrected="moment recursion valid for any lr, wd and momentum schedule; exact up to Var(P)/P^2",
)
def evolve(
    rule: Rule,
    steps: int,
    *,
    start: State,
    unit_grad_sq: ArrayLike = 1.0,
    dim: ArrayLike = 1.0,
    lr: ScheduleLike | None = None,
    weight_decay: ScheduleLike | None = None,
    momentum: ScheduleLike | None = None,
    correlation: float = 0.0,
    first_step: int = 0,
) -> Trajectory:
    """Follow norm and angle through a schedule by the rule's moment recursion.

    Args:
        rule: the optimizer; its settings hold wherever no schedule is given.
        steps: how many optimizer steps.
        start: where to begin: `cold_start`, `settled`, `rescaled`, or the ``final`` of an earlier trajectory.
        unit_grad_sq: L, a number, one per layer, or an array (steps, layers) for an L that changes.
        dim: entries per layer (AdamW, Adam with L2, Lion); for Muon the mean square of the adjusted update.
        lr: learning-rate schedule.
        weight_decay: weight-decay schedule.
        momentum: momentum schedule (SGD and SGDW); a step at momentum 0 clears the buffer, where torch would keep a
            stale one for later.
        correlation: E<v, g> / E||g||^2, which changes the angle under Nesterov only.
        first_step: where in the schedules to begin.

    Returns:
        The trajectory.

    Example:
        Dropping the learning rate by 10 in equilibrium divides the angle by 10 at once, although the new
        equilibrium asks for sqrt(10) only:

        >>> from equilibria.theory import SGD, settled
        >>> before, after = SGD(0.1, 5e-4, momentum=0.9), SGD(0.01, 5e-4, momentum=0.9)
        >>> angle = evolve(after, 200_000, start=settled(before)).angle / after.equilibrium().angle
        >>> round(float(angle[200]), 2), round(float(angle[-1]), 3)
        (0.32, 1.0)
    """
    known_rule(rule)
    _check_start(rule, start)
    count = whole("steps", steps)
    offset = whole("first_step", first_step)
    lrs = as_schedule(rule.lr if lr is None else lr, name="lr").values(count, start=offset)
    decays = as_schedule(rule.weight_decay if weight_decay is None else weight_decay, name="weight_decay").values(
        count, start=offset
    )
    forcing = reals("unit_grad_sq", unit_grad_sq, low=0)
    sizes = reals("dim", dim, above=0)
    if isinstance(rule, SGD | SGDW):
        moms = as_schedule(rule.momentum if momentum is None else momentum, name="momentum").values(count, start=offset)
        reals("momentum", moms, below=1)
        _check_correlation(rule, correlation, lrs * decays, moms)
        follow = partial(_evolve_buffer, rule, start, (lrs, decays, moms), forcing, correlation)
    elif momentum is not None:
        raise EquilibriaError(f"got a momentum schedule for {type(rule).__name__}; expected one only for SGD and SGDW")
    elif isinstance(rule, AdamW | AdamL2):
        follow = partial(_evolve_adam, rule, start, lrs, decays, forcing, sizes)
    else:
        follow = partial(_evolve_constant, rule, start, lrs, decays, _layers(start, forcing), sizes)
    try:
        with np.errstate(all="ignore"):  # reported below
            path = follow()
    except ArithmeticError:
        path = None
    if path is None or _left_float64(start, path.final):
        raise EquilibriaError(
            f"got lr up to {lrs.max():g}, weight_decay up to {decays.max():g}, unit_grad_sq from {forcing.min():g} to "
            f"{forcing.max():g}, norm from {math.sqrt(start.norm_sq.min()):g} to {math.sqrt(start.norm_sq.max()):g}; "
            "expected numbers under which ||w||^2 stays finite and above 0 in float64 (and a gradient, for Adam)"
        )
    return path


def _check_start(rule: Rule, start: State) -> None:
    if not isinstance(start, State):
        raise EquilibriaError(f"got start={start!r}; expected a state: cold_start(rule, norm) or settled(rule)")
    adam, begun = isinstance(rule, AdamW | AdamL2), start.steps_done > 0
    wrong = {
        f"{len(start.memory)} memory components": len(start.memory) != memory_size(rule),
        "second moments": not adam and bool(np.any(start.second > 0)),
        "no second moments": adam and begun and not np.any(start.second),
        "no first moment": isinstance(rule, Lion) and begun and not np.any(start.buffer_sq),
    }
    for what, found in wrong.items():
        if found:
            raise EquilibriaError(
                f"got a start with {what}; expected one made for {type(rule).__name__}, with {memory_size(rule)} "
                f"memory components and {'' if adam else 'no '}second moments: cold_start(rule, norm) or settled(rule)"
            )


def _check_correlation(rule: SGD | SGDW, correlation: float, eps: Array, momenta: Array) -> None:
    rho = number("correlation", correlation)
    if not isinstance(rule, SGD) or not rule.nesterov:
        return
    if not (moments.nesterov_correlation(eps, momenta, rho) > 0).all():
        raise EquilibriaError(
            f"got correlation={rho:g}; expected a larger one: L = N + 2 a^2 (1+a)/D C must be positive at every step"
        )


def _left_float64(start: State, final: State) -> bool:
    """Whether a weight that began with good numbers has none any more."""
    good = np.isfinite(start.norm_sq + start.radial + start.buffer_sq + start.second)
    return bool(np.any(good & ~(np.isfinite(final.norm_sq) & (final.norm_sq > 0))))


def _layers(start: State, forcing: Array) -> tuple[int, ...]:
    """Shape over layers; a 2-D forcing has the steps first."""
    return np.broadcast_shapes(start.norm_sq.shape, forcing.shape[1:] if forcing.ndim == 2 else forcing.shape)


def _series(values: Array, shape: tuple[int, ...], steps: int) -> Iterator[Any]:
    """One value per step, a Python float for a single layer: a 2-D array is a time series, anything else constant."""
    if values.ndim == 2:
        if len(values) != steps:
            raise EquilibriaError(f"got unit_grad_sq of shape {values.shape}; expected {steps} rows, one per step")
        rows = np.broadcast_to(values, (steps, *shape))
        return iter(rows if shape else rows.tolist())
    return repeat(np.broadcast_to(values, shape).astype(np.float64) if shape else float(values))


def _evolve_buffer(
    rule: SGD | SGDW, start: State, schedules: tuple[Array, Array, Array], forcing: Array, correlation: float
) -> Trajectory:
    shape = _layers(start, forcing)
    steps = len(schedules[0])
    step, *settings = step_of(rule, *schedules, correlation=correlation)
    settings = [np.broadcast_to(values, steps).copy() for values in settings]
    if isinstance(rule, SGD) and rule.dampening:
        held = np.append(bool(np.any(start.buffer_sq)), settings[2] > 0)[:-1]
        settings[3][~held] = 1.0  # torch's first buffer is the gradient itself, undamped
    scan = _scan_many if shape else _scan_one
    return scan(start, step, settings, _series(forcing, shape, steps))


def _scan_one(start: State, step: moments.Step, settings: list[Array], forcing: Iterator[Any]) -> Trajectory:
    """One layer: Python floats, several times faster than arrays of length one."""
    p, q, r = float(start.norm_sq), float(start.radial), float(start.buffer_sq)
    norm_sq, moved_sq = [p], []
    lrs, decays, momenta, own = (values.tolist() for values in settings)
    for big_l, lr, wd, a, c in zip(forcing, lrs, decays, momenta, own, strict=False):
        p, q, r, moved = step(p, q, r, big_l / p, lr, wd, a, c)
        norm_sq.append(p)
        moved_sq.append(moved)
    return _trajectory(
        start, settings, np.array(norm_sq), np.array(moved_sq), (np.asarray(p), np.asarray(q), np.asarray(r))
    )


def _trajectory(
    start: State, settings: list[Array], norm_sq: Array, moved_sq: Array, pqr: tuple[Array, Array, Array]
) -> Trajectory:
    p, q, r = pqr
    done = start.steps_done + len(moved_sq)
    final = dataclasses.replace(start, norm_sq=p, radial=q, buffer_sq=r, steps_done=done)
    return Trajectory(settings[0], settings[1], norm_sq, moved_sq, final)


def _scan_many(start: State, step: moments.Step, settings: list[Array], forcing: Iterator[Any]) -> Trajectory:
    """Many layers: one division and one small matrix product per step, nothing allocated inside the loop.

    The work block holds (D, P, Q, R, N) per step, so that each product reads rows 1-4 of one step and writes
    rows 0-3 of the next.
    """
    first_forcing = next(forcing, np.zeros(()))
    shape = np.broadcast_shapes(start.norm_sq.shape, first_forcing.shape)
    layers, steps = math.prod(shape), len(settings[0])
    norm_sq, moved_sq = np.empty((steps + 1, layers)), np.empty((steps, layers))
    block = np.empty((min(steps, max(1, _BLOCK // (5 * layers))) + 1, 5, layers))
    for row, values in enumerate((start.norm_sq, start.radial, start.buffer_sq), start=1):
        block[0, row] = np.broadcast_to(values, shape).ravel()
    norm_sq[0] = block[0, 1]
    views = [(block[i, 1], block[i, 4], block[i, 1:], block[i + 1, :4]) for i in range(len(block) - 1)]
    matrices = _matrices(step, settings)
    unit_grads = (values.ravel() for values in chain([first_forcing], forcing))
    for at in range(0, steps, max(1, len(views))):
        count = min(len(views), steps - at)
        for (p, n, now, after), matrix, big_l in zip(views[:count], matrices, unit_grads, strict=False):
            np.divide(big_l, p, out=n)
            np.dot(matrix, now, out=after)
        norm_sq[at + 1 : at + count + 1] = block[1 : count + 1, 1]
        moved_sq[at : at + count] = block[1 : count + 1, 0]
        block[0, :4] = block[count, :4]
    p, q, r = (block[0, row].reshape(shape).copy() for row in (1, 2, 3))
    return _trajectory(start, settings, norm_sq.reshape(-1, *shape), moved_sq.reshape(-1, *shape), (p, q, r))


def _matrices(step: moments.Step, settings: list[Array]) -> Iterator[Array]:
    """The map of every step with its rows in the order D, P, Q, R; runs of equal settings share one matrix."""
    changed = np.zeros(len(settings[0]), dtype=bool)
    changed[:1] = True
    for values in settings:
        changed[1:] |= values[1:] != values[:-1]
    first = np.flatnonzero(changed)
    maps = np.roll(moments.step_map(step, *(values[first] for values in settings)), 1, axis=1)
    for matrix, length in zip(maps, np.diff(first, append=len(changed)).tolist(), strict=True):
        yield from repeat(matrix, length)


def _evolve_adam(
    rule: AdamW | AdamL2, start: State, lrs: Array, decays: Array, forcing: Array, sizes: Array
) -> Trajectory:
    shape = np.broadcast_shapes(_layers(start, forcing), sizes.shape)
    b1, b2 = rule.betas
    p, q, r, v = (
        np.broadcast_to(x, shape) if shape else float(x)
        for x in (start.norm_sq, start.radial, start.buffer_sq, start.second)
    )
    share = (1 - b2) / (sizes if shape else float(sizes))
    lost, coupled = (lrs * decays, 0 * decays) if isinstance(rule, AdamW) else (0 * decays, decays)
    count = start.steps_done + np.arange(1, len(lrs) + 1)
    step_sizes = lrs * np.sqrt(1 - b2**count) / (1 - b1**count)
    columns = (values.tolist() for values in (step_sizes, lost, coupled))
    norm_sq, moved_sq = [p], []
    for big_l, step_size, lose, wd in zip(_series(forcing, shape, len(lrs)), *columns, strict=False):
        p, q, r, v, moved = adam_step(p, q, r, v, big_l, share, step_size, lose, wd, b1, b2)
        norm_sq.append(p)
        moved_sq.append(moved)
    p, q, r, v = (np.asarray(x, dtype=np.float64) for x in (p, q, r, v))
    final = State(p, q, r, v, start.memory, start.steps_done + len(lrs))
    return Trajectory(lrs, decays, np.array(norm_sq), np.array(moved_sq).reshape(-1, *shape), final)


def _evolve_constant(
    rule: Lion | Muon, start: State, lrs: Array, decays: Array, layers: tuple[int, ...], sizes: Array
) -> Trajectory:
    shape = np.broadcast_shapes(sizes.shape, start.norm_sq.shape, layers)
    p, size = (np.broadcast_to(x, shape) if shape else float(x) for x in (start.norm_sq, sizes))
    pull = _pull(rule, start, shape)
    norm_sq, moved_sq = [p], []
    for eta, wd in zip(lrs.tolist(), decays.tolist(), strict=True):
        lost = eta * wd
        kept = 1.0 - lost
        z = pull(p, eta, kept) if shape else float(pull(p, eta, kept))
        moved_sq.append(lost * lost * p + (eta - 2 * lost * z) * eta * size)
        p = kept * kept * p + (eta + 2 * kept * z) * eta * size
        norm_sq.append(p)
    buffer_sq = np.asarray(pull.buffer_sq) if isinstance(pull, LionPull) else start.buffer_sq
    final = dataclasses.replace(
        start,
        norm_sq=np.asarray(p),
        buffer_sq=buffer_sq,
        memory=np.array(pull.traces),
        steps_done=start.steps_done + len(lrs),
    )
    return Trajectory(lrs, decays, np.array(norm_sq), np.array(moved_sq).reshape(-1, *shape), final)


def _pull(rule: Lion | Muon, start: State, shape: tuple[int, ...]) -> LionPull | MuonPull:
    if isinstance(rule, Muon):
        return MuonPull(rule.memory, [float(value) if np.ndim(value) == 0 else value for value in start.memory])
    missing = 1 + len(shape) - start.memory.ndim
    traces = start.memory.reshape(*start.memory.shape, *(1,) * missing)
    buffer_sq = np.broadcast_to(start.buffer_sq, shape) if shape else float(start.buffer_sq)
    return LionPull(rule.betas, buffer_sq, np.broadcast_to(traces, (len(traces), *shape)))
