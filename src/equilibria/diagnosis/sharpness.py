"""Findings about the queries of a sharpness tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equilibria.findings import Finding, Findings
from equilibria.records.tables import (
    APPROACHING_EDGE,
    DIVERGED,
    DIVERGING,
    EDGE,
    PAST,
    SHARPNESS_FIELDS,
)
from equilibria.theory.eos_series import ratio_crossings

Floats = NDArray[np.float64]
About = Mapping[str, Any]

_HELD, _NEAR = 0.1, 0.3  # mean deviation of R from 1 up to which it is held there, or near it
_PER_PERIOD = 5  # queries: with fewer a period cannot be measured
_LOOSE = 0.05  # error bound beyond which a value is unreliable
_GROWN_OVER = 10  # queries
_SWINGS = 0.5  # share of steps that turn back
_OTHER_GRADIENT = 0.1  # relative difference beyond which training and tracker have different losses
_MOMENTUM = "stability.momentum_threshold"


def sharpness_findings(samples: pa.Table, *, metadata: Mapping[str, Any] | None = None) -> Findings:
    """Findings about a tracked run; the last one says where it stands.

    Args:
        samples: the sharpness table of a tracker or of a recorded run.
        metadata: of the tracker or the run; "steps" is the length of the run.

    Example:
        >>> sharpness_findings(SHARPNESS_FIELDS.empty_table())
        no findings
    """
    about = (metadata or {}).get("sharpness") or {}
    stopped = _stopped(about)
    if samples.num_rows == 0:
        return Findings(stopped)
    states = samples["state"].to_pylist()
    columns = {
        name: np.asarray(samples[name].to_numpy(zero_copy_only=False), dtype=np.float64)
        for name in SHARPNESS_FIELDS.names
        if name != "state"
    }
    laws = {EDGE: _at_the_edge, APPROACHING_EDGE: _approaching, PAST: _past, DIVERGING: _diverging, DIVERGED: _diverged}
    now = laws.get(states[-1], _stable) if columns["threshold"][-1] > 0 else _decay_alone
    late = [] if stopped else _late(columns, about, (metadata or {}).get("steps", 0))
    findings = {
        "stopped": stopped,
        "elsewhere": _elsewhere(about),
        "loose": _loose(columns),
        "lost": _lost(about),
        "late": late,
        now.__name__.strip("_"): [now(columns, states, about)],
    }
    return Findings(replace(finding, kind=f"sharpness {kind}") for kind in findings for finding in findings[kind])


def sharpness_name(about: About) -> str:
    """The name of the measured quantity.

    Args:
        about: the entry "sharpness" of the metadata.

    Example:
        >>> sharpness_name({}), sharpness_name({"preconditioned": True})
        ('sharpness', 'preconditioned sharpness')
    """
    return "preconditioned sharpness" if about.get("preconditioned") else "sharpness"


def figure(value: float) -> str:
    """A number with three digits, without a power of ten up to a million.

    Example:
        >>> figure(0.01234), figure(3812.3), figure(2e7)
        ('0.0123', '3,810', '2e+07')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e6 else f"{value:.3g}"


def state_since(steps: Floats, states: Sequence[str | None]) -> int:
    """First step of the last stretch of queries in one state; a single query in another state does not end it.

    Example:
        >>> state_since(np.array([0.0, 20, 40, 60, 80]), ["stable", "diverging", "stable", "diverging", "diverging"])
        20
    """
    first = len(states) - 1
    for row in range(len(states) - 2, -1, -1):
        if states[row] == states[-1]:
            first = row
        elif first - row > 1:
            break
    return int(steps[first])


def _stable(columns: dict[str, Floats], _states: Sequence[str | None], about: About) -> Finding:
    return Finding(
        "note",
        f"stable: {sharpness_name(about)} {figure(columns['sharpness'][-1])} is below the threshold "
        f"{figure(columns['threshold'][-1])}",
        f"R = {columns['ratio'][-1]:.3g} at step {columns['step'][-1]:,.0f}; 1 is the edge of stability",
        "nothing to do; a larger lr would bring it nearer to the edge",
        about.get("law", _MOMENTUM),
    )


def _decay_alone(columns: dict[str, Floats], _states: Sequence[str | None], about: About) -> Finding:
    lr, decay = columns["lr"][-1], columns["weight_decay"][-1]
    spherical = not np.isnan(columns["effective_lr"][-1])
    does = "turns the weights around at every step" if spherical else "diverges"
    return Finding(
        "warning",
        f"unstable at any sharpness: lr x wd = {figure(lr * decay)}, so that weight decay alone {does}",
        f"the threshold is {figure(columns['threshold'][-1])} at step {columns['step'][-1]:,.0f}; it must be positive",
        f"lower lr or weight decay until lr x wd is far below {1 if spherical else 2}",
        about.get("law", _MOMENTUM),
    )


def _diverged(columns: dict[str, Floats], states: Sequence[str | None], _about: About) -> Finding:
    first, last = columns["loss"][0], columns["loss"][-1]
    return Finding(
        "warning",
        f"diverged: the loss is {figure(last / first)} times that of the first query",
        f"it has grown from {figure(first)} to {figure(last)}, more than tenfold since step "
        f"{state_since(columns['step'], states):,}; R = {columns['ratio'][-1]:.3g} there says nothing about training",
        "start again with a smaller lr",
        "",
    )


def _approaching(columns: dict[str, Floats], _states: Sequence[str | None], _about: About) -> Finding:
    step, left, until = (columns[name][-1] for name in ("step", "steps_to_crossing", "steps_to_oscillation"))
    spread = columns["crossing_spread"][-1]
    around = f" ± {spread:,.0f}" if np.isfinite(spread) else ""  # earlier versions recorded none
    burst = f"; the loss would jump at about step {step + until:,.0f}" if np.isfinite(until) and left > 0 else ""
    growth = _growth(columns["step"], columns["ratio"])
    return Finding(
        "note",
        f"R reaches 1, the edge of stability, at about step {step + left:,.0f}{around} if its growth goes on"
        if left > 0
        else f"R crossed 1, the edge of stability, at about step {step + left:,.0f}{around}",
        f"R = {columns['ratio'][-1]:.3g} at step {step:,.0f}{growth}{burst}",
        "nothing to do if training may go on there: it finds flatter minima at the edge; with less weight decay the "
        "edge comes later",
        "stability.crossing_time",
    )


def _growth(steps: Floats, ratio: Floats) -> str:
    """How much R has grown over the last queries."""
    first = max(0, len(steps) - _GROWN_OVER)
    if first == len(steps) - 1 or not ratio[first] > 0:
        return ""
    return f", {ratio[-1] / ratio[first]:.3g} times that at step {steps[first]:,.0f}"


def _crossed(columns: dict[str, Floats]) -> str:
    """The observed step at which R crossed 1; empty if no query was made before it."""
    left, spread, step = (columns[name][-1] for name in ("steps_to_crossing", "crossing_spread", "step"))
    return f"R crossed 1 at step {step + left:,.0f}" if left < 0 and np.isfinite(spread) else ""


def _past(columns: dict[str, Floats], states: Sequence[str | None], _about: About) -> Finding:
    step, until = columns["step"][-1], columns["steps_to_oscillation"][-1]
    burst = f"; the loss jumps at about step {step + until:,.0f}" if np.isfinite(until) else ""
    swings = columns["turned_back"][-1] > _SWINGS
    oscillation = "the oscillation still grows" if swings else "there is no oscillation yet"
    return Finding(
        "note",
        f"R has been above 1 since step {state_since(columns['step'], states):,}, but {oscillation}",
        "; ".join(
            filter(
                None,
                (
                    _crossed(columns),
                    f"R = {columns['ratio'][-1]:.3g} at step {step:,.0f}",
                    f"the oscillation first has to grow out of rounding{burst}",
                ),
            )
        ),
        "nothing to do; with mini-batches this may last: the sharpness is that of the tracker's batch alone",
        "stability.eos_delay",
    )


def _diverging(columns: dict[str, Floats], states: Sequence[str | None], about: About) -> Finding:
    began = state_since(columns["step"], states)
    return Finding(
        "warning",
        f"diverging since step {began:,}: {sharpness_name(about)} {figure(columns['sharpness'][-1])} is above the "
        f"threshold {figure(columns['threshold'][-1])}",
        f"R = {columns['ratio'][-1]:.3g} at step {columns['step'][-1]:,.0f}, and the loss has grown from "
        f"{figure(columns['loss'][0])} to {figure(columns['loss'][-1])}",
        f"lower lr to less than {columns['lr'][-1] / columns['ratio'][-1]:.2g}: nothing limits this oscillation",
        about.get("law", _MOMENTUM),
    )


def _at_the_edge(columns: dict[str, Floats], states: Sequence[str | None], about: About) -> Finding:
    began = state_since(columns["step"], states)
    late = columns["step"] >= max(began, (began + columns["step"][-1]) / 2)  # the first bursts are the largest
    ratios, spherical = columns["ratio"][late], np.isfinite(columns["effective_lr"][-1])
    loss, level = (float(np.mean(columns[name][late])) for name in ("loss", "loss_predicted"))
    over = f"the last {len(ratios):,} queries" if len(ratios) > 1 else "the last query"
    parts = [_crossed(columns)]
    parts += [f"R = {np.mean(ratios):.3g} on average over {over}, {np.min(ratios):.2f} to {np.max(ratios):.2f}"]
    if np.isfinite(level):
        parts.append(
            f"loss {figure(loss - np.nanmin(columns['loss']))} above the lowest seen, predicted at most {level:.3g}"
        )
        parts.append(_periods(columns, columns["step"] >= began))
    flatter = ". With weight decay training drifts to flatter minima; the loss level falls with lr x wd"
    return Finding(
        "note",
        f"edge of stability since step {began:,}: {sharpness_name(about)} {figure(columns['sharpness'][-1])} "
        f"{_held(ratios)} {'2/lr_eff' if spherical else 'the threshold'} = {figure(columns['threshold'][-1])}",
        "; ".join(filter(None, parts)),
        f"nothing to do: this is no divergence{flatter if np.isfinite(level) else ''}",
        "stability.edge_of_stability" if np.isfinite(level) else about.get("law", _MOMENTUM),
    )


def _held(ratios: Floats) -> str:
    off = abs(float(np.mean(ratios)) - 1)
    if off > _NEAR:
        return "swings about"
    return "is held at" if off < _HELD else "is held near"


def _periods(columns: dict[str, Floats], there: NDArray[np.bool_]) -> str:
    expected, steps = columns["period"][-1], columns["step"][there]
    predicted = f"period of the slow oscillation predicted {expected:,.0f} steps once it is small"
    measured = slow_period(steps, columns["ratio"][there], shortest=expected)
    return predicted if measured is None else f"{predicted}, last measured {measured:,.0f}"


def slow_period(steps: Floats, ratio: Floats, *, shortest: float) -> float | None:
    """Steps between the last two downward crossings of R = 1; None where queries are too rare to measure it."""
    if len(steps) < 2 or np.max(np.diff(steps)) * _PER_PERIOD > shortest:
        return None
    crossings = ratio_crossings(ratio).downward
    return float(np.diff(steps[crossings])[-1]) if len(crossings) > 1 else None


def _loose(columns: dict[str, Floats]) -> list[Finding]:
    bounds = columns["bound"]
    wide = bounds > _LOOSE
    if not wide.any():
        return []
    largest = (
        f"is {bounds.max():.0%}" if np.isfinite(bounds.max()) else "is infinite, since there is hardly any curvature"
    )
    return [
        Finding(
            "warning",
            f"{wide.sum():,} of {len(wide):,} values may be wrong by more than {_LOOSE:.0%}",
            f"the largest bound on the error {largest}; the last such step is {columns['step'][wide][-1]:,.0f}",
            "query more often (every=), so that each query starts near its eigenvector",
            "",
        )
    ]


def _stopped(about: About) -> list[Finding]:
    end = about.get("stopped")
    if not end:
        return []
    return [
        Finding(
            "warning",
            f"tracking stopped at step {end['step']:,}: {end['reason']}",
            "everything below is about the steps before",
            "fix the cause and start again; training itself went on",
            "",
        )
    ]


def _elsewhere(about: About) -> list[Finding]:
    apart = about.get("gradient_difference")
    if apart is None or apart <= _OTHER_GRADIENT:
        return []
    return [
        Finding(
            "warning",
            "the tracker measures another batch or mode than that of training",
            f"at the first query the gradients differ by {apart:.0%}; expected with mini-batches, dropout or clipping",
            "otherwise give the tracker the training batch, and call model.train() while training",
            "",
        )
    ]


def _lost(about: About) -> list[Finding]:
    """A search from scratch that found far more than the warm start at the same weights, which had lost the top."""
    lost = about.get("lost")
    if not lost:
        return []
    return [
        Finding(
            "warning",
            f"the top eigenvector had been lost before step {lost['step']:,}",
            f"there a search from scratch found {figure(lost['found'])}, the warm start {figure(lost['followed'])}",
            "search from scratch more often: recheck=",
            "",
        )
    ]


def _late(columns: dict[str, Floats], about: About, steps: int) -> list[Finding]:
    """A short run of which every="auto" left most without a query."""
    last = columns["step"][-1]
    if about.get("every") != "auto" or last >= steps / 2 or steps < 2:
        return []
    return [
        Finding(
            "warning",
            f"last query at step {last:,.0f} of {steps:,}; give every=20",
            'every="auto" uses a tenth of the training time, which is little in a short run',
            "give every=20: the first search costs as much as fifty steps or more",
            "",
        )
    ]
