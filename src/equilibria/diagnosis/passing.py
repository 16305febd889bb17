"""Whether a norm rests at its equilibrium or only passes it on the way.

A norm may cross its equilibrium, because the equilibrium itself moves with lr, with the gradients or with the gain. A
weight that relaxes approaches it ever more slowly: with d = ln(norm / equilibrium), d falls by a factor of e in a time
constant, 1/(2 p eps) with eps the decay in force and p = 2 for SGD. Even right after it has come within 5 %, a straight
line through its last time constant falls by less than 0.09; one that passes crosses all of the tolerance in that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equilibria.diagnosis.run import decays
from equilibria.diagnosis.series import Array, Series
from equilibria.theory.requested import norm_power
from equilibria.theory.rules import Rule

WIDTH = 0.1  # of the tolerance: d from 5 % below equilibrium to 5 % above
_LEAST_ROWS = 3  # with a slope of their own


def passing_steps(history: Series, *, entries: Sequence[Mapping[str, Any]], rules: Sequence[Rule | None]) -> Array:
    """Steps in which every norm crosses the tolerance at the pace of its last time constant, negative where it falls.

    The slope of a straight line through the samples since the settings last jumped, with the weight of the steps that
    they stand for.

    Args:
        history: samples of steps that were taken.
        entries: of the metadata.
        rules: of each layer.

    Returns:
        NaN where that takes a time constant or more, and for layers without an equilibrium norm or with fewer than
        three samples.
    """
    decay = decays(history, entries)
    power = np.array([1 if rule is None else norm_power(rule) for rule in rules])
    columns = {"rate": decay * np.repeat(2 * power, history.counts), "step": history.columns["step"].astype(np.float64)}
    with np.errstate(invalid="ignore", divide="ignore"):
        columns["apart"] = np.log(history.columns["norm"] / history.columns["norm_equilibrium"])
        rows = history.only(**columns)
        constant = 1 / rows.last("rate")
        since = np.repeat(rows.last("step") - constant, history.counts)
        known = np.isfinite(columns["apart"]) & (columns["step"] >= since)
        known &= np.arange(history.first[-1]) >= np.repeat(history.last_jump, history.counts)
        near = rows.where(known)
        weights = near.weights
        step, apart = near.columns["step"], near.columns["apart"]
        centred = step - np.repeat(near.mean(step, weights), near.counts)
        slope = near.mean(centred * apart, weights) / near.mean(centred**2, weights)
        passes = (near.counts >= _LEAST_ROWS) & (np.abs(slope) * constant > WIDTH)
        return np.asarray(np.where(passes, WIDTH / slope, np.nan))
