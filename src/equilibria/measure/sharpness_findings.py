"""What the queries of a sharpness tracker mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.findings import Finding, counted
from equilibria.measure.sharpness_table import APPROACHING, DIVERGING, EDGE, PAST, SHARPNESS_FIELDS
from equilibria.theory.eos_series import ratio_crossings

Floats = NDArray[np.float64]

_HELD = 0.1  # deviation of R from 1 up to which it counts as held there
_PER_PERIOD = 5  # queries: with fewer a period cannot be counted
_LOOSE = 0.05  # bound of the error beyond which a value is not worth much
_SWINGS = 0.5  # share of steps that turn back
_LOST = 0.2  # by which a search from scratch may exceed the one before it without a word: at the edge values vary


def sharpness_findings(samples: pa.Table) -> tuple[Finding, ...]:
    """What there is to say about a run, warnings first.

    Args:
        samples: the table of a tracker, or of a recorded run.

    Example:
        >>> sharpness_findings(SHARPNESS_FIELDS.empty_table())
        ()
    """
    if samples.num_rows == 0:
        return ()
    states = samples["state"].to_pylist()
    columns = {
        name: np.asarray(samples[name].to_numpy(zero_copy_only=False), dtype=np.float64)
        for name in SHARPNESS_FIELDS.names
        if name != "state"
    }
    laws = {EDGE: _at_the_edge, APPROACHING: _approaching, PAST: _past, DIVERGING: _diverging}
    now = laws.get(states[-1], _stable)
    return (*_loose(columns), *_lost(columns), now(columns, states))


def since(steps: Floats, states: Sequence[str | None]) -> int:
    """The step of the first query of the last stretch of one state."""
    first = len(states) - 1
    while first > 0 and states[first - 1] == states[-1]:
        first -= 1
    return int(steps[first])


def _stable(columns: dict[str, Floats], _states: Sequence[str | None]) -> Finding:
    return Finding(
        "note",
        f"stable: sharpness {columns['sharpness'][-1]:.3g} is below the threshold {columns['threshold'][-1]:.3g}",
        f"R = {columns['ratio'][-1]:.3g} at step {columns['step'][-1]:,.0f}; 1 is the edge of stability",
        "nothing: a larger lr would bring it nearer to the edge",
        "thresholds.momentum_threshold",
    )


def _approaching(columns: dict[str, Floats], _states: Sequence[str | None]) -> Finding:
    step, left, until = (columns[name][-1] for name in ("step", "steps_to_crossing", "steps_to_oscillation"))
    burst = f"; the loss jumps at about step {step + until:,.0f}" if np.isfinite(until) else ""
    return Finding(
        "note",
        f"the edge of stability comes at step {step + left:,.0f}, {left:,.0f} steps from the last query",
        f"R = {columns['ratio'][-1]:.3g} at step {step:,.0f}, and grows as weight decay alone makes it grow{burst}",
        "nothing, if training is to go on there: it finds flatter minima at the edge; less weight decay comes later",
        "stability.crossing_time",
    )


def _past(columns: dict[str, Floats], states: Sequence[str | None]) -> Finding:
    step, until = columns["step"][-1], columns["steps_to_oscillation"][-1]
    burst = f"; the loss jumps at about step {step + until:,.0f}" if np.isfinite(until) else ""
    swings = columns["turned_back"][-1] > _SWINGS
    seen = "the oscillation still grows" if swings else "no oscillation is seen yet"
    return Finding(
        "note",
        f"R is above 1 since step {since(columns['step'], states):,}, but {seen}",
        f"R = {columns['ratio'][-1]:.3g} at step {step:,.0f}; the oscillation has to grow out of rounding{burst}",
        "with mini-batches this may last: the sharpness is that of the tracker's batch, not of the others",
        "stability.eos_delay",
    )


def _diverging(columns: dict[str, Floats], states: Sequence[str | None]) -> Finding:
    began = since(columns["step"], states)
    return Finding(
        "warning",
        f"diverging since step {began:,}: sharpness {columns['sharpness'][-1]:.3g} is above the threshold "
        f"{columns['threshold'][-1]:.3g}",
        f"R = {columns['ratio'][-1]:.3g} at step {columns['step'][-1]:,.0f}, and the loss has grown from "
        f"{columns['loss'][0]:.3g} to {columns['loss'][-1]:.3g}",
        f"lower lr, to less than {columns['lr'][-1] / columns['ratio'][-1]:.2g}: nothing holds this oscillation",
        "thresholds.momentum_threshold",
    )


def _at_the_edge(columns: dict[str, Floats], states: Sequence[str | None]) -> Finding:
    began = since(columns["step"], states)
    late = columns["step"] >= max(began, (began + columns["step"][-1]) / 2)  # the first bursts are the largest
    spherical = np.isfinite(columns["effective_lr"][-1])
    limit = "2/lr_eff" if spherical else "the threshold"
    ratio, loss, level = (float(np.mean(columns[name][late])) for name in ("ratio", "loss", "loss_predicted"))
    parts = [f"R = {ratio:.3g} on average over {counted(int(late.sum()), 'query').replace('querys', 'queries')}"]
    if np.isfinite(level):
        parts.append(f"loss predicted at most {level:.3g} above its minimum, measured {loss:.3g} in all")
        parts.append(_periods(columns, columns["step"] >= began))
    return Finding(
        "note",
        f"edge of stability since step {began:,}: sharpness {columns['sharpness'][-1]:.3g} is held "
        f"{'at' if abs(ratio - 1) < _HELD else 'near'} {limit} = "
        f"{columns['threshold'][-1]:.3g}",
        "; ".join(filter(None, parts)),
        "nothing: this is no divergence. With weight decay training drifts to flatter minima; the loss level falls "
        "with lr x wd",
        "stability.edge_of_stability" if np.isfinite(level) else "thresholds.momentum_threshold",
    )


def _periods(columns: dict[str, Floats], there: NDArray[np.bool_]) -> str:
    expected, steps = columns["period"][-1], columns["step"][there]
    told = f"period of the slow oscillation predicted {expected:,.0f} steps once it is small"
    measured = slow_period(steps, columns["ratio"][there], shortest=expected)
    return told if measured is None else f"{told}, last measured {measured:,.0f}"


def slow_period(steps: Floats, ratio: Floats, *, shortest: float) -> float | None:
    """The last time from one downward crossing of R = 1 to the next; None where queries are too rare to tell."""
    if len(steps) < 2 or np.max(np.diff(steps)) * _PER_PERIOD > shortest:
        return None
    at = ratio_crossings(ratio).downward
    return float(np.diff(steps[at])[-1]) if len(at) > 1 else None


def _loose(columns: dict[str, Floats]) -> list[Finding]:
    wide = columns["bound"] > _LOOSE
    if not wide.any():
        return []
    return [
        Finding(
            "warning",
            f"{wide.sum():,} of {len(wide):,} values may be wrong by more than {_LOOSE:.0%}",
            f"the largest bound is {columns['bound'].max():.0%}, at step {columns['step'][wide][-1]:,.0f} the last one",
            "query more often (every=), so that each begins near its eigenvector",
            "",
        )
    ]


def _lost(columns: dict[str, Floats]) -> list[Finding]:
    """A search from scratch that finds far more than the warm one before it did: that one had lost the top."""
    steps, found, certified = (columns[name] for name in ("step", "sharpness", "certified"))
    lost = []
    for at in np.flatnonzero(certified):
        before = np.flatnonzero((steps[:at] - steps[at]) % 2 == 0)  # at the edge others are across the valley
        if len(before) and not certified[before[-1]] and found[at] > (1 + _LOST) * found[before[-1]]:
            lost.append((at, before[-1]))
    if not lost:
        return []
    at, earlier = lost[-1]
    return [
        Finding(
            "warning",
            f"the top eigenvector may have been lost before step {steps[at]:,.0f}",
            f"a search from scratch found {found[at]:.3g}, the warm query before it {found[earlier]:.3g}",
            "search from scratch more often: recheck=",
            "",
        )
    ]
