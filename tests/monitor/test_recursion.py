"""The recursion over a few steps says what `evolve` says, which is tested against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from equilibria.monitor.recursion import run_recursion
from equilibria.theory import AdamL2, AdamW
from equilibria.theory.states import cold_start
from equilibria.theory.transient import evolve


@pytest.mark.parametrize("kind", [AdamW, AdamL2])
def test_adam_as_evolve_follows_it(kind):
    rules = [kind(1e-3 * (1 + 0.1 * step), 0.1 + 0.01 * step) for step in range(7)]
    start, sizes = cold_start(rules[0], np.array([1.0, 2.0, 5.0])), np.array([10.0, 100.0, 1000.0])
    drives = np.random.default_rng(0).uniform(0.5, 2.0, (7, 3))
    state, (before, after), moved = run_recursion(
        rules, start, drives, sizes=sizes, entries=sizes, correlation=np.zeros(3), recall=np.full(3, np.nan)
    )
    path = evolve(
        rules[0],
        7,
        start=start,
        unit_grad_sq=drives,
        dim=sizes,
        lr=[rule.lr for rule in rules],
        weight_decay=[rule.weight_decay for rule in rules],
    )
    for found, expected in (
        (before, path.norm_sq[-2]),
        (after, path.norm_sq[-1]),
        (moved, path.moved_sq[-1]),
        (state.second, path.final.second),
        (state.radial, path.final.radial),
        (state.buffer_sq, path.final.buffer_sq),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-13)
    assert state.steps_done == path.final.steps_done == 7
