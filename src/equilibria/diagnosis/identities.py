"""Checks of the measurement by identities that hold for any gradients.

A residual means that an assumption of the measurement is broken. Both identities need a scale-invariant weight and
consecutive samples; neither needs equilibrium. Angles and norms balance under plain SGD; squared steps and norms
balance under SGD with momentum while its settings are constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from equilibria.diagnosis.metadata import rules_from_metadata
from equilibria.diagnosis.run import SampledRun, sampled_run
from equilibria.diagnosis.series import SETTINGS, Array, Series, setting_changes
from equilibria.records.tables import CHANGED_OUTSIDE, NOTES, RESCALED
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
    return check_run(sampled_run(samples, metadata=metadata))


def check_run(run: SampledRun) -> tuple[IdentityCheck, ...]:
    """`check_identities` for samples that are sorted already."""
    broken = _not_consecutive(run.taken)
    checks = [*_checks(_LOG_COS, run, broken), *_checks(_WINDOW, run, broken | setting_changes(run.taken))]
    order = {name: position for position, name in enumerate(run.taken.names)}
    return tuple(sorted(checks, key=lambda check: order[check.param]))


def _not_consecutive(series: Series) -> Array:
    """Flag the rows that do not continue the row before: another parameter, a gap, or weights changed in between."""
    broken = np.isin(series.columns["note"], (NOTES.index(CHANGED_OUTSIDE), NOTES.index(RESCALED)))
    broken[1:] |= np.diff(series.columns["step"]) != 1
    broken[series.first[:-1][series.counts > 0]] = True
    return np.asarray(broken)


_COLUMNS = ("step", "angle", "norm", "update_norm", "cosine", "grad_norm", *SETTINGS)
_Stretches: TypeAlias = dict[str, Array]  # columns with one line per stretch; all have one rule and one length


def _checks(identity: _Identity, run: SampledRun, breaks: Array) -> list[IdentityCheck]:
    """Check an identity over all stretches between breaks, in their order.

    Those with the same rule and length are checked together: of most runs these are the stretches of all layers.
    """
    begins = np.flatnonzero(breaks)
    lengths = np.diff(begins, append=len(breaks))
    is_long = lengths - 1 >= _LEAST_STEPS  # the last row only gives the norm after the step before
    begins, lengths = begins[is_long], lengths[is_long]
    owners = (np.searchsorted(run.taken.first, begins, side="right") - 1).tolist()
    settings = zip(*(run.taken.columns[name][begins].tolist() for name in SETTINGS), strict=True)
    rules = rules_from_metadata([run.entries[owner] for owner in owners], settings)
    alike: dict[tuple[SGD | SGDW, int], list[int]] = {}
    for place, (rule, length) in enumerate(zip(rules, lengths.tolist(), strict=True)):
        if isinstance(rule, SGD | SGDW):
            alike.setdefault((rule, length), []).append(place)
    checks: dict[int, IdentityCheck] = {}
    for (rule, length), members in alike.items():
        rows = begins[members][:, None] + np.arange(length)
        stretches = {name: run.taken.columns[name][rows] for name in _COLUMNS}
        entries = [run.entries[owners[place]] for place in members]
        invariant = [bool(run.invariant[owners[place]]) for place in members]
        kept = np.flatnonzero(np.array(invariant) & identity.applies(rule, stretches))
        if not len(kept):
            continue
        stretches = {name: values[kept] for name, values in stretches.items()}
        left, right = identity.sides(rule, stretches)
        larger = np.maximum(np.abs(left), np.abs(right))
        error = np.divide(np.abs(left - right), larger, out=np.zeros(len(kept)), where=larger > 0)
        tolerance = _tolerance([str(entries[index].get("dtype")) for index in kept], stretches)
        steps = np.full(len(kept), length - 1)
        numbers = (left, right, error, tolerance, steps, stretches["step"][:, 0])
        for index, *values in zip(kept.tolist(), *(column.tolist() for column in numbers), strict=True):
            place = members[index]
            checks[place] = IdentityCheck(run.taken.names[owners[place]], identity.law, *values)
    return [checks[place] for place in sorted(checks)]


def _tolerance(dtypes: Sequence[str], stretches: _Stretches) -> Array:
    """What rounding (at the two ends and at every step) and <w, g> may add to the squared angle of a stretch."""
    turned = {name: values[:, :-1] for name, values in stretches.items()}
    turned_sq = np.sum((turned["update_norm"] / turned["norm"]) ** 2, axis=1)
    radial = 2 * np.abs(np.sum(turned["lr"] * turned["cosine"] * turned["grad_norm"] / turned["norm"], axis=1))
    every_step = np.array([(2 * ROUNDED_AWAY.get(dtype, 0.0)) ** 2 for dtype in dtypes])
    explained = turned["norm"].shape[1] * every_step + _NORM_ROUNDING + radial
    with np.errstate(divide="ignore"):
        return np.asarray(_SLACK + explained / turned_sq)


@dataclass(frozen=True, slots=True)
class _Identity:
    """An identity over stretches of one rule and length.

    Attributes:
        law: its name in `equilibria.theory`.
        applies: for each stretch, whether its settings and samples are what the identity needs.
        sides: the left and right side for each stretch.
    """

    law: str
    applies: Callable[[SGD | SGDW, _Stretches], Array | bool]
    sides: Callable[[SGD | SGDW, _Stretches], tuple[Array, Array]]


def _log_cos_applies(_rule: SGD | SGDW, stretches: _Stretches) -> Array:
    """Plain SGD with coupled or decoupled decay, any schedule."""
    angles, lr, decay = (stretches[name][:, :-1] for name in ("angle", "lr", "weight_decay"))
    is_plain = ~np.any(stretches["momentum"] > 0, axis=1)
    return np.asarray(is_plain & np.all(lr * decay < 1, axis=1) & ~np.any(angles >= math.pi / 2, axis=1))


def _log_cos(_rule: SGD | SGDW, stretches: _Stretches) -> tuple[Array, Array]:
    """The balance of angles and norms."""
    angles, lr, decay = (stretches[name][:, :-1].T for name in ("angle", "lr", "weight_decay"))
    ends_sq = stretches["norm"][:, [0, -1]].T ** 2
    balance = log_cos_balance(angles, lr, weight_decay=decay, norm_sq=ends_sq)
    return np.asarray(balance.turned), np.asarray(balance.decayed + balance.grown)


def _window_applies(rule: SGD | SGDW, stretches: _Stretches) -> Array | bool:
    """SGD with or without momentum, and constant settings."""
    if not isinstance(rule, SGD) or rule.nesterov or rule.lr == 0:
        return False
    return np.asarray(~np.any(np.isnan(stretches["update_norm"]), axis=1))


def _window(rule: SGD | SGDW, stretches: _Stretches) -> tuple[Array, Array]:
    """The balance of squared steps and norms; dampening scales lr."""
    assert isinstance(rule, SGD)
    identity = window_identity(
        stretches["norm"].T ** 2,
        stretches["update_norm"][:, :-1].T ** 2,
        lr=rule.lr * (1 - rule.dampening),
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
    )
    return identity.step_sq, identity.implied_step_sq


_LOG_COS = _Identity("angles.log_cos_balance", _log_cos_applies, _log_cos)
_WINDOW = _Identity("norms.window_identity", _window_applies, _window)
