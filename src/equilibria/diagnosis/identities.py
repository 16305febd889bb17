"""Checks of the measurement by identities that hold for any gradients.

A residual means that an assumption of the measurement is broken. Both identities need a scale-invariant weight and
consecutive samples; neither needs equilibrium. Angles and norms balance under plain SGD; squared steps and norms
balance under SGD with momentum while its settings are constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.metadata import entries_by_name, invariance_from_metadata, rule_from_metadata
from equilibria.diagnosis.series import SETTINGS, Array, Series, by_parameter, setting_changes, steps_taken
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES
from equilibria.theory.angles import log_cos_balance
from equilibria.theory.equilibrium import ROUNDED_AWAY
from equilibria.theory.norms import window_identity
from equilibria.theory.rules import SGD, SGDW

_LEAST_STEPS = 10  # over fewer steps the rounding of the two norms at the ends hides everything else
_NORM_ROUNDING = 1e-6  # relative error of ||w||^2 at the two ends together, if summed in float32
_SLACK = 0.01  # an identity is exact, and angles and steps are measured to 1e-4


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """One identity over one stretch of consecutive samples of one parameter.

    Attributes:
        param: the parameter.
        law: the identity's name in `equilibria.theory`.
        left: as measured: the sum of -ln cos(angle), or the mean squared step.
        right: the same from norms, lr and weight decay.
        relative_error: |left - right| / the larger of the two.
        tolerance: the largest relative error that measuring, rounding and the measured part of the gradient along the
            weight explain.
        steps: steps in the stretch.
        first_step: the first of them.
    """

    param: str
    law: str
    left: float
    right: float
    relative_error: float
    tolerance: float
    steps: int
    first_step: int

    @property
    def holds(self) -> bool:
        """Whether the two sides agree within the tolerance."""
        return self.relative_error <= self.tolerance


def check_identities(samples: pa.Table, *, metadata: Mapping[str, Any]) -> tuple[IdentityCheck, ...]:
    """Check every identity over every stretch of at least 10 consecutive steps with the settings it needs.

    Args:
        samples: the sample table of a monitor or of a recorded run.
        metadata: the metadata of the run.

    Returns:
        The checks, in the order of the parameters and of time.
    """
    series = steps_taken(by_parameter(samples, metadata=metadata))
    entries = entries_by_name(metadata)
    broken = _not_consecutive(series)
    changed = broken | setting_changes(series)
    checks: list[IdentityCheck] = []
    for position, name in enumerate(series.names):
        entry, rows = entries.get(name, {}), series.of(position)
        own = slice(series.first[position], series.first[position + 1])
        checks += _checks(_log_cos, name, entry, rows, broken[own])
        checks += _checks(_window, name, entry, rows, changed[own])
    return tuple(checks)


def _not_consecutive(series: Series) -> Array:
    """Flag the rows that do not continue the row before: another parameter, a gap, or weights changed in between."""
    broken = series.columns["note"] == NOTES.index(CHANGED_OUTSIDE)
    broken[1:] |= np.diff(series.columns["step"]) != 1
    broken[series.first[:-1][series.counts > 0]] = True
    return np.asarray(broken)


_COLUMNS = ("step", "angle", "norm", "update_norm", "cosine", "grad_norm", *SETTINGS)
Identity = Callable[[SGD | SGDW, Mapping[str, Array]], tuple[str, float, float] | None]


def _checks(
    identity: Identity, param: str, entry: Mapping[str, Any], rows: Mapping[str, Array], breaks: Array
) -> Iterator[IdentityCheck]:
    for begin, end in pairwise([*np.flatnonzero(breaks).tolist(), len(breaks)]):
        steps = end - begin - 1  # the last row only gives the norm after the step before
        if steps < _LEAST_STEPS:
            continue
        rule = rule_from_metadata(entry, {name: float(rows[name][begin]) for name in SETTINGS})
        if not isinstance(rule, SGD | SGDW):
            continue
        stretch = {column: rows[column][begin:end] for column in _COLUMNS}
        cosine = math.sqrt(float(stretch["cosine"] @ stretch["cosine"]) / (end - begin))
        sides = identity(rule, stretch) if invariance_from_metadata(entry, cosine) else None
        if sides is not None:
            law, left, right = sides
            larger = max(abs(left), abs(right))
            yield IdentityCheck(
                param,
                law,
                left,
                right,
                relative_error=abs(left - right) / larger if larger else 0.0,
                tolerance=_tolerance(str(entry.get("dtype")), stretch, steps),
                steps=steps,
                first_step=int(stretch["step"][0]),
            )


def _tolerance(dtype: str, stretch: Mapping[str, Array], steps: int) -> float:
    """What rounding (at the two ends and at every step) and <w, g> may add to the squared angle of a stretch."""
    turned = {name: values[:-1] for name, values in stretch.items()}
    turned_sq = float(np.sum((turned["update_norm"] / turned["norm"]) ** 2))
    radial = 2 * abs(float(np.sum(turned["lr"] * turned["cosine"] * turned["grad_norm"] / turned["norm"])))
    every_step = (2 * ROUNDED_AWAY.get(dtype, 0.0)) ** 2
    return _SLACK + (steps * every_step + _NORM_ROUNDING + radial) / turned_sq if turned_sq else math.inf


def _log_cos(_rule: SGD | SGDW, stretch: Mapping[str, Array]) -> tuple[str, float, float] | None:
    """The balance of angles and norms: plain SGD with coupled or decoupled decay, any schedule."""
    if np.any(stretch["momentum"] > 0):
        return None
    angles, lr, decay = (stretch[name][:-1] for name in ("angle", "lr", "weight_decay"))
    if not np.all(lr * decay < 1) or np.any(angles >= math.pi / 2):  # NaN is not below 1
        return None
    balance = log_cos_balance(angles, lr, weight_decay=decay, norm_sq=stretch["norm"][[0, -1]] ** 2)
    return "angles.log_cos_balance", balance.turned, balance.decayed + balance.grown


def _window(rule: SGD | SGDW, stretch: Mapping[str, Array]) -> tuple[str, float, float] | None:
    """The balance of squared steps and norms: SGD with momentum and constant settings; dampening scales lr."""
    if not isinstance(rule, SGD) or rule.nesterov or rule.lr == 0 or np.any(np.isnan(stretch["update_norm"])):
        return None
    identity = window_identity(
        stretch["norm"] ** 2,
        stretch["update_norm"][:-1] ** 2,
        lr=rule.lr * (1 - rule.dampening),
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
    )
    return "norms.window_identity", float(identity.step_sq), float(identity.implied_step_sq)
