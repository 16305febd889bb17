"""Cut a schedule into phases as people see them: flat stretches and pieces of ramps; and thin series of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from equilibria.theory._reals import Array

Steps = NDArray[np.int64]

_FLAT_SHARE = 0.02  # a constant stretch of at least this share of the run is a phase by itself
_MOST_FLAT = 12  # more constant stretches than this are the stairs of a ramp (one scheduler step per epoch) ...
_LONG_SHARE = 0.1  # ... except stretches of at least this share of the run
_MOST_TURNS = 20  # more turns than this are noise
_RAMP_PIECES = 8  # a ramp over the whole run is cut into this many pieces
_JUMP = 0.2  # within a ramp, a change of this share of the largest lr begins a new phase (warm restarts)


@dataclass(frozen=True, slots=True)
class Span:
    """Steps ``first`` to ``first + steps - 1``; ``jump`` is True if it begins with a jump of lr or weight decay."""

    first: int
    steps: int
    flat: bool
    jump: bool


def cut(lr: Array, weight_decay: Array) -> tuple[Span, ...]:
    """The phases of a schedule.

    Args:
        lr: learning rate per step.
        weight_decay: weight decay per step.

    Returns:
        Spans that cover every step once.

    Example:
        >>> [(span.first, span.steps) for span in cut(np.array([0.1] * 60 + [0.01] * 40), np.full(100, 5e-4))]
        [(0, 60), (60, 40)]
    """
    total = len(lr)
    changed = np.flatnonzero((lr[1:] != lr[:-1]) | (weight_decay[1:] != weight_decay[:-1])) + 1
    edges = np.concatenate([[0], changed, [total]])
    lengths = np.diff(edges)
    flat_length = max(2, int(_FLAT_SHARE * total))
    if np.count_nonzero(lengths >= flat_length) > _MOST_FLAT:
        flat_length = max(2, int(_LONG_SHARE * total))
    spans: list[Span] = []
    done = 0
    for first, steps in zip(edges[:-1][lengths >= flat_length], lengths[lengths >= flat_length], strict=True):
        spans += _ramp(lr, weight_decay, done, int(first), total)
        spans.append(Span(int(first), int(steps), flat=True, jump=_is_jump(lr, weight_decay, int(first))))
        done = int(first + steps)
    return (*spans, *_ramp(lr, weight_decay, done, total, total))


def _is_jump(lr: Array, weight_decay: Array, step: int) -> bool:
    if step == 0:
        return False
    lr_step = abs(float(lr[step] - lr[step - 1])) / max(float(lr[step]), float(lr[step - 1]), 1e-300)
    wd_step = abs(float(weight_decay[step] - weight_decay[step - 1])) / max(float(weight_decay[step - 1]), 1e-300)
    return lr_step > _JUMP or wd_step > _JUMP


def _ramp(lr: Array, weight_decay: Array, first: int, after: int, total: int) -> list[Span]:
    if first == after:
        return []
    change, decay_change = np.diff(lr[first:after]), np.diff(weight_decay[first:after])
    large = np.abs(change) > _JUMP * float(lr.max())
    large |= np.abs(decay_change) > _JUMP * max(float(weight_decay.max()), 1e-300)
    jumps = (np.flatnonzero(large) + first + 1).tolist()
    # A phase ends where the lr turns round: at the end of a warm-up, at the top of a cycle.
    moves = np.flatnonzero(change)
    turned = np.flatnonzero(np.sign(change[moves[1:]]) != np.sign(change[moves[:-1]]))
    turns = {int(step) for step in moves[turned + 1] + first} - {step - 1 for step in jumps}  # a jump is its own turn
    if len(turns) > _MOST_TURNS:
        turns = set()
    spans: list[Span] = []
    for begin, end in pairwise(sorted({first, *jumps, *turns, after})):
        # A short ramp that falls below a tenth is still cut in three: its end has little in common with its start.
        least = 3 if lr[end - 1] < 0.1 * lr[begin] else 1
        pieces = min(end - begin, max(least, round(_RAMP_PIECES * (end - begin) / total)))
        marks = np.linspace(begin, end, pieces + 1).round().astype(int).tolist()
        starts = [*jumps, first] if _is_jump(lr, weight_decay, first) else jumps
        spans += [Span(a, b - a, flat=False, jump=a in starts) for a, b in pairwise(marks)]
    return spans


def first_equilibrium_step(pull: Array, spans: tuple[Span, ...]) -> int:
    """The step whose equilibrium training first moves to: the end of a warm-up, else the first lr x wd above 0.

    Args:
        pull: lr x wd per step, above 0 somewhere.
        spans: the phases of the schedule.

    Returns:
        The step.

    Example:
        >>> lr, wd = np.array([0.0] * 10 + [0.02] * 90 + [0.1] * 100), np.full(200, 5e-4)
        >>> first_equilibrium_step(lr * wd, cut(lr, wd))
        10
    """
    before_each = (None, *spans)
    span = next(span for before, span in zip(before_each, spans, strict=False) if not _leads_on(pull, span, before))
    last = span.first + span.steps - 1
    return last if pull[last] > pull[span.first] else span.first


def _leads_on(pull: Array, span: Span, before: Span | None) -> bool:
    """Whether lr x wd is still 0, or the span belongs to a warm-up that continues after it.

    A warm-up from 0 may come in stairs (one scheduler step per epoch): a stair is no longer than the stretch before it.
    In a longer stretch training stays.
    """
    after = span.first + span.steps
    if not pull[span.first : after].any():
        return True
    climbs = pull[after - 1] > pull[span.first]
    stair = span.flat and before is not None and before.flat and span.steps <= before.steps
    return bool((climbs or stair) and after < len(pull) and pull[after] >= pull[after - 1])


def thinned(count: int, *, most: int, boundaries: Iterable[int] = ()) -> Steps:
    """Positions of a series of ``count`` to show: ``most`` evenly spread ones, and both sides of every boundary.

    Args:
        count: length of the series.
        most: how many evenly spread positions.
        boundaries: positions at which something changes; each is kept, and the position before it.

    Example:
        >>> thinned(1000, most=3, boundaries=[0, 60]).tolist()
        [0, 59, 60, 500, 999]
    """
    even = np.linspace(0, count - 1, min(count, most)).round().astype(np.int64).tolist()
    sides = [side for boundary in boundaries for side in (boundary - 1, boundary) if side >= 0]
    return np.array(sorted({*even, *sides}), dtype=np.int64)  # np.unique would import numpy.ma, a tenth of the run time
