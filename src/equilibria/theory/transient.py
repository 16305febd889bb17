"""How a weight reaches its equilibrium: the moment recursion of every rule under any schedule, vectorised over layers.

`evolve` follows norm and angle step by step from one of the `states`. Norms scale out: where L (SGD, SGDW) or the
number of entries (AdamW, Lion) is not given, they are in units of L^(1/4) or sqrt(d).

Each kind of rule has a generator that yields its moments after every step, P = ||w||^2 and D = ||w' - w||^2 first
(`_buffer_steps`, `_adam_steps`, `_constant_steps`), and one loop, `_follow`, collects them. Many layers under SGD or
SGDW take `_follow_many` instead, which does the same with matrix products in place; many layers under Adam or Lion take
the loops of `_recursion_loops` where numba is installed and the path is long enough to pay for its import.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, number, whole
from equilibria.theory import moments
from equilibria.theory._reals import Array, reals
from equilibria.theory.citations import law
from equilibria.theory.identified import Identified, identified_step
from equilibria.theory.memory import LionPull, MuonPull
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule, check_rule
from equilibria.theory.schedules import ScheduleLike, as_schedule
from equilibria.theory.states import State, adam_settings, memory_size, step_of

_BLOCK = 1 << 18  # numbers per block of temporaries: they stay in the cache
_WORTH_COMPILING = 100_000  # steps times layers from which on a compiled loop pays for the import of numba


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Norm and angle, step by step.

    Attributes:
        lr: learning rate of each step.
        weight_decay: weight decay of each step.
        norm_sq: ||w||^2 before each step and after the last, shape (steps + 1, layers...).
        moved_sq: ||w' - w||^2 of each step, shape (steps, layers...).
        final: the state after the last step, to continue from.
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
        for first in range(0, len(result), rows):
            end = first + rows
            before, after = self.norm_sq[first : end + 1][:-1], self.norm_sq[first + 1 : end + 1]
            chord_sq = moments.chord_sq(before, after, self.moved_sq[first:end])
            result[first:end] = moments.angle_from_chord_sq(chord_sq)
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
    update_gain: ArrayLike = 1.0,
    first_step: int = 0,
) -> Trajectory:
    """Follow norm and angle through a schedule, step by step, by the rule's moment recursion.

    The recursion maps P = ||w||^2, Q = <w, buffer>, R = ||buffer||^2 and N = L / P of one step to those of the next;
    see `moments` for its formulas, and `memory` for updates of constant size.

    Args:
        rule: the optimizer; its settings apply wherever no schedule is given.
        steps: number of optimizer steps.
        start: the state to begin with: `cold_start`, `settled`, `rescaled`, or the ``final`` of an earlier trajectory.
        unit_grad_sq: L, a number, one per layer, or an array (steps, layers) for an L that changes.
        dim: entries per layer (AdamW, Adam with L2, Lion); for Muon the mean square of the adjusted update.
        lr: learning-rate schedule.
        weight_decay: weight-decay schedule.
        momentum: momentum schedule (SGD and SGDW); a step at momentum 0 clears the buffer, where torch would keep a
            stale one for later.
        correlation: E<v, g> / E||g||^2, which changes the angle under Nesterov only.
        update_gain: kappa of AdamW and Adam with L2, measured (see `equilibrium.adamw`): a number, one per layer, or
            an array (steps, layers).
        first_step: step of the schedules to begin with.

    Returns:
        The trajectory.

    Example:
        Dividing the learning rate by 10 in equilibrium divides the angle by 10 at once, although the new equilibrium
        angle is smaller by sqrt(10) only:

        >>> from equilibria.theory import SGD, settled
        >>> before, after = SGD(0.1, 5e-4, momentum=0.9), SGD(0.01, 5e-4, momentum=0.9)
        >>> angle = evolve(after, 200_000, start=settled(before)).angle / after.equilibrium().angle
        >>> round(float(angle[200]), 2), round(float(angle[-1]), 3)
        (0.32, 1.0)
    """
    check_rule(rule)
    _check_start(rule, start)
    count = whole("steps", steps)
    offset = whole("first_step", first_step)
    lrs = as_schedule(rule.lr if lr is None else lr, name="lr").values(count, start=offset)
    decays = as_schedule(rule.weight_decay if weight_decay is None else weight_decay, name="weight_decay").values(
        count, start=offset
    )
    unit_grads = reals("unit_grad_sq", unit_grad_sq, low=0)
    sizes = reals("dim", dim, above=0)
    gains = reals("update_gain", update_gain, above=0)
    if not isinstance(rule, AdamW | AdamL2) and np.any(gains != 1):
        raise EquilibriaError(
            f"got update_gain={update_gain!r} for {type(rule).__name__}; expected one only for AdamW and Adam with L2",
            argument="update_gain",
        )
    if isinstance(rule, SGD | SGDW):
        moms = as_schedule(rule.momentum if momentum is None else momentum, name="momentum").values(count, start=offset)
        reals("momentum", moms, below=1)
        _check_correlation(rule, correlation, lrs * decays, moms)
        follow = partial(_evolve_buffer, rule, start, (lrs, decays, moms), unit_grads, correlation)
    elif momentum is not None:
        raise EquilibriaError(
            f"got a momentum schedule for {type(rule).__name__}; expected one only for SGD and SGDW",
            argument="momentum",
        )
    elif isinstance(rule, Identified):
        follow = partial(_evolve_identified, rule, start, lrs, decays, unit_grads, sizes)
    elif isinstance(rule, AdamW | AdamL2):
        follow = partial(_evolve_adam, rule, start, lrs, decays, unit_grads, sizes, gains)
    else:
        follow = partial(_evolve_constant, rule, start, lrs, decays, _layers(start, unit_grads), sizes)
    try:
        with np.errstate(all="ignore"):  # results outside float64 raise below
            path = follow()
    except ArithmeticError:
        path = None
    if path is None or _left_range(start, path.final):
        raise EquilibriaError(
            f"got lr up to {lrs.max():g}, weight_decay up to {decays.max():g}, unit_grad_sq from {unit_grads.min():g} "
            f"to {unit_grads.max():g}, norm from {math.sqrt(start.norm_sq.min()):g} "
            f"to {math.sqrt(start.norm_sq.max()):g}; "
            "expected numbers under which ||w||^2 stays finite and above 0 in float64 (and a gradient, for Adam)"
        )
    return path


def _check_start(rule: Rule, start: State) -> None:
    if not isinstance(start, State):
        raise EquilibriaError(
            f"got start={start!r}; expected a state: cold_start(rule, norm) or settled(rule)", argument="start"
        )
    adam, begun = isinstance(rule, AdamW | AdamL2), start.steps_done > 0
    wrong = {
        f"{len(start.memory)} memory components": len(start.memory) != memory_size(rule),
        "second moments": not adam and bool(np.any(start.second > 0)),
        "no second moments": adam and begun and not np.any(start.second),
        "no first moment": isinstance(rule, Lion) and begun and not np.any(start.buffer_sq),
    }
    for content, mismatch in wrong.items():
        if mismatch:
            raise EquilibriaError(
                f"got a start with {content}; expected one made for {type(rule).__name__}, with {memory_size(rule)} "
                f"memory components and {'' if adam else 'no '}second moments: cold_start(rule, norm) or settled(rule)",
                argument="start",
            )


def _check_correlation(rule: SGD | SGDW, correlation: float, eps: Array, momenta: Array) -> None:
    rho = number("correlation", correlation)
    if not isinstance(rule, SGD) or not rule.nesterov:
        return
    if not (moments.nesterov_correlation(eps, momenta, rho) > 0).all():
        raise EquilibriaError(
            f"got correlation={rho:g}; expected a larger one: L = N + 2 a^2 (1+a)/D C must be positive at every step",
            argument="correlation",
        )


def _left_range(start: State, final: State) -> bool:
    """Whether a weight that started with finite moments has lost them."""
    good = np.isfinite(start.norm_sq + start.radial + start.buffer_sq + start.second)
    return bool(np.any(good & ~(np.isfinite(final.norm_sq) & (final.norm_sq > 0))))


def _layers(start: State, unit_grads: Array) -> tuple[int, ...]:
    """Shape over layers; a 2-D L has the steps first."""
    return np.broadcast_shapes(start.norm_sq.shape, unit_grads.shape[1:] if unit_grads.ndim == 2 else unit_grads.shape)


def _series(values: Array, shape: tuple[int, ...], steps: int, *, name: str = "unit_grad_sq") -> Iterator[Any]:
    """L of every step, a Python float for a single layer: a 2-D array is a time series, anything else constant."""
    if values.ndim == 2:
        if len(values) != steps:
            raise EquilibriaError(
                f"got {name} of shape {values.shape}; expected {steps} rows, one per step", argument=name
            )
        rows = np.broadcast_to(values, (steps, *shape))
        return iter(rows if shape else rows.tolist())
    return repeat(np.broadcast_to(values, shape).astype(np.float64) if shape else float(values))


def _per_layer(values: Array, shape: tuple[int, ...]) -> Any:
    """One value per layer, or a Python float for a single layer: several times faster than an array of length one."""
    return np.broadcast_to(values, shape) if shape else float(values)


def _follow(path: Iterator[tuple[Any, ...]]) -> tuple[Array, Array, tuple[Any, ...]]:
    """P before each step and after the last, D of each step, and all moments after the last step.

    Args:
        path: (P, D, further moments) before the first step, where D is ignored, and after each step.
    """
    last = next(path)
    shape, norm_sq, moved_sq = np.shape(last[0]), [last[0]], []
    for last in path:
        norm_sq.append(last[0])
        moved_sq.append(last[1])
    return np.array(norm_sq), np.array(moved_sq).reshape(-1, *shape), last


def _trajectory(
    start: State, settings: Sequence[Array], norm_sq: Array, moved_sq: Array, *, moments_after: dict[str, Any]
) -> Trajectory:
    """The trajectory under settings lr and weight decay, its final state with the moments after the last step."""
    fields = {name: np.asarray(value, dtype=np.float64) for name, value in moments_after.items()}
    final = dataclasses.replace(start, steps_done=start.steps_done + len(moved_sq), **fields)
    return Trajectory(settings[0], settings[1], norm_sq, moved_sq, final)


def _evolve_buffer(
    rule: SGD | SGDW, start: State, schedules: tuple[Array, Array, Array], unit_grads: Array, correlation: float
) -> Trajectory:
    shape = _layers(start, unit_grads)
    steps = len(schedules[0])
    step, *settings = step_of(rule, *schedules, correlation=correlation)
    settings = [np.broadcast_to(values, steps).copy() for values in settings]
    if isinstance(rule, SGD) and rule.dampening:
        has_buffer = np.append(bool(np.any(start.buffer_sq)), settings[2] > 0)[:-1]
        settings[3][~has_buffer] = 1.0  # torch's first buffer is the gradient itself, undamped
    series = _series(unit_grads, shape, steps)
    if shape:
        norm_sq, moved_sq, (p, q, r) = _follow_many(start, step, settings, series, shape=shape)
    else:
        p, q, r = (_per_layer(values, shape) for values in (start.norm_sq, start.radial, start.buffer_sq))
        rows = zip(series, *(values.tolist() for values in settings), strict=False)
        norm_sq, moved_sq, (p, _, q, r) = _follow(_buffer_steps(step, p, q, r, rows))
    after = {"norm_sq": p, "radial": q, "buffer_sq": r}
    return _trajectory(start, settings, norm_sq, moved_sq, moments_after=after)


def _buffer_steps(
    step: moments.MomentStep, p: Any, q: Any, r: Any, rows: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """(P, D, Q, R) before and after each step of SGD or SGDW; a row holds L and the four settings of the step."""
    yield p, 0.0, q, r
    for unit_grad_sq, lr, wd, a, own in rows:
        p, q, r, moved = step(p, q, r, unit_grad_sq / p, lr, wd, a, own)
        yield p, moved, q, r


def _follow_many(
    start: State, step: moments.MomentStep, settings: list[Array], series: Iterator[Array], *, shape: tuple[int, ...]
) -> tuple[Array, Array, tuple[Array, Array, Array]]:
    """`_follow` for many layers: one division and one small matrix product per step, nothing allocated in the loop.

    The work block holds (D, P, Q, R, N) per step, so that each product reads rows 1-4 of one step and writes
    rows 0-3 of the next.
    """
    layers, steps = math.prod(shape), len(settings[0])
    norm_sq, moved_sq = np.empty((steps + 1, layers)), np.empty((steps, layers))
    block = np.empty((min(steps, max(1, _BLOCK // (5 * layers))) + 1, 5, layers))
    for row, values in enumerate((start.norm_sq, start.radial, start.buffer_sq), start=1):
        block[0, row] = np.broadcast_to(values, shape).ravel()
    norm_sq[0] = block[0, 1]
    views = [(block[i, 1], block[i, 4], block[i, 1:], block[i + 1, :4]) for i in range(len(block) - 1)]
    matrices = _matrices(step, settings)
    unit_grads = (values.ravel() for values in series)
    for first in range(0, steps, max(1, len(views))):
        count = min(len(views), steps - first)
        for (p, n, now, after), matrix, unit_grad_sq in zip(views[:count], matrices, unit_grads, strict=False):
            np.divide(unit_grad_sq, p, out=n)
            np.dot(matrix, now, out=after)
        norm_sq[first + 1 : first + count + 1] = block[1 : count + 1, 1]
        moved_sq[first : first + count] = block[1 : count + 1, 0]
        block[0, :4] = block[count, :4]
    p, q, r = (block[0, row].reshape(shape).copy() for row in (1, 2, 3))
    return norm_sq.reshape(-1, *shape), moved_sq.reshape(-1, *shape), (p, q, r)


def _matrices(step: moments.MomentStep, settings: list[Array]) -> Iterator[Array]:
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
    rule: AdamW | AdamL2, start: State, lrs: Array, decays: Array, unit_grads: Array, sizes: Array, gains: Array
) -> Trajectory:
    shape = np.broadcast_shapes(_layers(start, unit_grads), _layers(start, gains), sizes.shape)
    p, q, r, v = (_per_layer(x, shape) for x in (start.norm_sq, start.radial, start.buffer_sq, start.second))
    share = (1 - rule.betas[1]) / (sizes if shape else float(sizes))
    settings = adam_settings(rule, lrs, decays, start.steps_done + np.arange(1, len(lrs) + 1))
    if _pays_to_compile(shape, len(lrs)):
        norm_sq, moved_sq, (p, q, r, v) = _follow_adam(rule, settings, unit_grads, gains, share, (p, q, r, v), shape)
        after = {"norm_sq": p, "radial": q, "buffer_sq": r, "second": v}
        return _trajectory(start, (lrs, decays), norm_sq, moved_sq, moments_after=after)
    columns = (values.tolist() for values in settings)
    units, kappas = _series(unit_grads, shape, len(lrs)), _series(gains, shape, len(lrs), name="update_gain")
    rows = zip(units, kappas, *columns, strict=False)
    norm_sq, moved_sq, (p, _, q, r, v) = _follow(_adam_steps(p, q, r, v, share, rule.betas, rows))
    after = {"norm_sq": p, "radial": q, "buffer_sq": r, "second": v}
    return _trajectory(start, (lrs, decays), norm_sq, moved_sq, moments_after=after)


def _pays_to_compile(shape: tuple[int, ...], steps: int) -> bool:
    long_enough = bool(shape) and steps * math.prod(shape) >= _WORTH_COMPILING
    return long_enough and importlib.util.find_spec("numba") is not None


def _plain(values: Array) -> Array:
    """The array as the compiled loops take it, contiguous and writable; copied only if it is not."""
    return np.require(values, requirements=["C", "W"])


def _follow_adam(
    rule: AdamW | AdamL2,
    settings: tuple[Array, Array, Array],
    unit_grads: Array,
    gains: Array,
    share: Array | float,
    state: tuple[Array, ...],
    shape: tuple[int, ...],
) -> tuple[Array, Array, tuple[Array, ...]]:
    """`_follow` along `_adam_steps` for many layers, compiled."""
    from equilibria.theory._recursion_loops import adam_loop

    steps, layers = len(settings[0]), math.prod(shape)
    norm_sq, moved_sq = np.empty((steps + 1, layers)), np.empty((steps, layers))
    rows = np.array([np.broadcast_to(values, shape).ravel() for values in state])
    norm_sq[0] = rows[0]
    adam_loop(
        _plain(np.stack(np.broadcast_arrays(*settings), axis=1)),
        _table(unit_grads, shape, steps),
        _table(gains, shape, steps, name="update_gain"),
        np.broadcast_to(share, shape).flatten(),
        *map(float, rule.betas),
        rows,
        norm_sq[1:],
        moved_sq,
    )
    final = tuple(row.reshape(shape) for row in rows)
    return norm_sq.reshape(-1, *shape), moved_sq.reshape(-1, *shape), final


def _table(values: Array, shape: tuple[int, ...], steps: int, *, name: str = "unit_grad_sq") -> Array:
    """The values of `_series` as the compiled loops take them: a row per step, or one row for all."""
    if values.ndim < 2:
        return _plain(np.broadcast_to(values, shape).reshape(1, -1))
    next(_series(values, shape, steps, name=name), None)  # checks the number of rows
    return _plain(np.broadcast_to(values, (steps, *shape)).reshape(steps, -1))


def _adam_steps(
    p: Any, q: Any, r: Any, v: Any, share: Any, betas: tuple[float, float], rows: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """(P, D, Q, R, v) before and after each step of Adam; a row holds L, kappa and three settings."""
    b1, b2 = betas
    yield p, 0.0, q, r, v
    for unit_grad_sq, gain, step_size, lost, coupled in rows:
        p, q, r, v, moved = moments.adam_step(p, q, r, v, unit_grad_sq, share, step_size, lost, coupled, b1, b2, gain)
        yield p, moved, q, r, v


def _evolve_identified(
    rule: Identified, start: State, lrs: Array, decays: Array, unit_grads: Array, sizes: Array
) -> Trajectory:
    shape = np.broadcast_shapes(_layers(start, unit_grads), sizes.shape)
    p, size = _per_layer(start.norm_sq, shape), _per_layer(sizes, shape)
    traces = [float(value) if np.ndim(value) == 0 else value for value in start.memory]
    rows = zip(_series(unit_grads, shape, len(lrs)), lrs.tolist(), decays.tolist(), strict=False)
    norm_sq, moved_sq, (p, _, *traces) = _follow(_identified_steps(rule, p, traces, size, rows))
    after = {"norm_sq": p, "memory": np.array(traces).reshape(len(traces), *np.shape(traces[0]) if traces else ())}
    return _trajectory(start, (lrs, decays), norm_sq, moved_sq, moments_after=after)


def _identified_steps(
    rule: Identified, p: Any, traces: list[Any], size: Any, rows: Iterable[tuple[Any, float, float]]
) -> Iterator[tuple[Any, ...]]:
    """(P, D, traces) before and after each step of a measured law; a row holds L, lr and weight decay."""
    yield p, 0.0, *traces
    for unit_grad_sq, lr, wd in rows:
        p, moved, traces = identified_step(rule, p, traces, unit_grad_sq, size, lr, wd)
        yield p, moved, *traces


def _evolve_constant(
    rule: Lion | Muon, start: State, lrs: Array, decays: Array, layers: tuple[int, ...], sizes: Array
) -> Trajectory:
    shape = np.broadcast_shapes(sizes.shape, start.norm_sq.shape, layers)
    p, size = _per_layer(start.norm_sq, shape), _per_layer(sizes, shape)
    pull = _pull(rule, start, shape)
    if isinstance(pull, LionPull) and _pays_to_compile(shape, len(lrs)):
        norm_sq, moved_sq, p = _follow_lion(pull, p, size, lrs, decays)
        after = {"norm_sq": p, "buffer_sq": pull.buffer_sq, "memory": pull.traces}
        return _trajectory(start, (lrs, decays), norm_sq, moved_sq, moments_after=after)
    rows = zip(lrs.tolist(), decays.tolist(), strict=True)
    norm_sq, moved_sq, (p, _) = _follow(_constant_steps(pull, p, size, rows, single=not shape))
    buffer_sq = pull.buffer_sq if isinstance(pull, LionPull) else start.buffer_sq
    after = {"norm_sq": p, "buffer_sq": buffer_sq, "memory": np.array(pull.traces)}
    return _trajectory(start, (lrs, decays), norm_sq, moved_sq, moments_after=after)


def _follow_lion(pull: LionPull, p: Array, size: Array, lrs: Array, decays: Array) -> tuple[Array, Array, Array]:
    """`_follow` along `_constant_steps` for many layers under Lion, compiled; the pull ends as after the last step."""
    from equilibria.theory._recursion_loops import lion_loop

    shape, steps = p.shape, len(lrs)
    norm_sq, moved_sq = np.empty((steps + 1, p.size)), np.empty((steps, p.size))
    norm_sq[0] = p.ravel()
    weights, buffers = p.flatten(), np.broadcast_to(pull.buffer_sq, shape).flatten()
    traces = np.array(pull.traces, dtype=np.float64).reshape(len(pull.traces), p.size)
    lion_loop(
        _plain(lrs),
        _plain(decays),
        np.broadcast_to(size, shape).flatten(),
        float(pull.b1),
        float(pull.b2),
        _plain(pull.powers.ravel()),
        _plain(pull.coefficients),
        weights,
        buffers,
        traces,
        norm_sq[1:],
        moved_sq,
    )
    pull.buffer_sq, pull.traces = buffers.reshape(shape), traces.reshape(-1, *shape)
    return norm_sq.reshape(-1, *shape), moved_sq.reshape(-1, *shape), weights.reshape(shape)


def _constant_steps(
    pull: LionPull | MuonPull, p: Any, size: Any, rows: Iterable[tuple[float, float]], *, single: bool
) -> Iterator[tuple[Any, Any]]:
    """(P, D) before and after each step of an update of constant size; a row holds lr and weight decay."""
    yield p, 0.0
    for lr, wd in rows:
        lost = lr * wd
        kept = 1.0 - lost
        z = float(pull(p, lr, kept)) if single else pull(p, lr, kept)
        moved = lost * lost * p + (lr - 2 * lost * z) * lr * size
        p = kept * kept * p + (lr + 2 * kept * z) * lr * size
        yield p, moved


def _pull(rule: Lion | Muon, start: State, shape: tuple[int, ...]) -> LionPull | MuonPull:
    if isinstance(rule, Muon):
        return MuonPull(rule.memory, [float(value) if np.ndim(value) == 0 else value for value in start.memory])
    missing = 1 + len(shape) - start.memory.ndim
    traces = start.memory.reshape(*start.memory.shape, *(1,) * missing)
    return LionPull(rule.betas, _per_layer(start.buffer_sq, shape), np.broadcast_to(traces, (len(traces), *shape)))
