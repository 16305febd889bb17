"""Settled is not said of a norm that crosses its equilibrium: a planted crossing, and a slow computation."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from tests.helpers.sample_worlds import edited, world

import equilibria as eq
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.passing import passing_steps
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.summary import summarise
from equilibria.records.tables import SETTLED
from equilibria.theory import SGD, AdamW
from equilibria.theory.states import settled

LR, WD, ENTRIES = 0.02, 0.1, 400  # a time constant of 1/(2 lr wd) = 250 steps at the highest lr


@cache
def trained(start: float, falls: bool) -> tuple[pa.Table, dict]:
    """A scale-invariant weight under AdamW, at first at `start` times its equilibrium norm; lr may fall to a third."""
    torch.manual_seed(0)
    rest = math.sqrt(settled(AdamW(LR, WD, betas=(0.0, 0.99)), unit_grad_sq=1.0, dim=ENTRIES).norm_sq)
    model = torch.nn.Linear(20, 20, bias=False)
    with torch.no_grad():
        model.weight *= start * rest / model.weight.norm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WD, betas=(0.0, 0.99))
    steps = 500 if falls else 800
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 2 / 3 * step / steps if falls else 1.0)
    with eq.watch(model, optimizer, every=5) as monitor:
        for _ in range(steps):
            ((torch.randn(20, 20) * model.weight).sum() / model.weight.norm()).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return monitor.samples(), monitor.metadata


def summary(table: pa.Table, metadata: dict, *, until: int) -> LayerSummary:
    return summarise(table.filter(pc.field("step") <= until), metadata=metadata)[0]


def test_a_norm_that_crosses_its_falling_equilibrium_is_not_settled():
    table, metadata = trained(0.6, falls=True)
    step, norm, rest = (table[name].to_numpy() for name in ("step", "norm", "norm_equilibrium"))
    crossing = int(step[np.argmax(norm > rest)])
    assert 100 < crossing < 400, "the run is long enough before and after"
    assert table.filter(pc.field("step") == crossing)["state"].to_pylist() == [SETTLED], "it is near, at that sample"
    layer = summary(table, metadata, until=crossing)
    assert layer.norm_vs_equilibrium == pytest.approx(1, abs=0.05) and layer.state == "settling"
    assert "settled" not in layer.sentence
    later = summary(table, metadata, until=499)
    assert later.norm_vs_equilibrium > 1.1, "and it did not stay"


@pytest.mark.parametrize("start", [0.6, 1.0, 1.6])
def test_a_norm_that_has_come_to_rest_is_settled(start):
    layer = summary(*trained(start, falls=False), until=799)
    assert layer.state == "settled" and layer.passing is None and layer.sentence.endswith("; it is settled.")


def crossing_table(rate: float) -> tuple[pa.Table, dict]:
    """Samples near equilibrium, whose ln(norm / equilibrium) ends at 0 after it rose by `rate` per step."""
    run = world(SGD(0.1, 2e-3), 400, layers=("a", "b"), every=4)
    steps = run.samples["step"].to_numpy()
    rest = run.samples["norm_equilibrium"].to_numpy()
    apart = rate * (steps - steps.max())
    return edited(run.samples, norm=rest * np.exp(apart), state=[SETTLED] * len(steps)), run.metadata


def test_the_sentence_says_how_fast_it_moves_against_its_equilibrium():
    table, metadata = crossing_table(4 * 2e-4 * 0.2)  # 20 % per time constant 1/(4 lr wd)
    layer = summarise(table, metadata=metadata)[0]
    assert layer.passing == pytest.approx(625) and layer.state == "settling"
    assert layer.sentence.endswith(
        "right to 1 %, but not at rest: at its pace it takes 625 steps from 5 % below equilibrium to 5 % above."
    )
    slower, metadata = crossing_table(4 * 2e-4 * 0.09)
    assert summarise(slower, metadata=metadata)[0].state == SETTLED, "as slow as a norm may relax"


def test_the_drift_is_that_of_a_straight_line_through_the_last_time_constant():
    run = world(SGD(0.1, 2e-2), 600, layers=("a", "b", "c", "d"), every=3)
    paces = {"a": 0.0, "b": 2e-3, "c": -2e-3, "d": 1e-4}
    moving = [row["norm"] * math.exp(paces[row["param"]] * row["step"]) for row in run.samples.to_pylist()]
    run = dataclasses.replace(run, samples=edited(run.samples, norm=moving))
    sampled = sampled_run(run.samples, metadata=run.metadata)
    got = passing_steps(sampled.taken, entries=sampled.entries, rules=sampled.rules)
    assert np.sign(got[1:3]).tolist() == [1, -1] and np.isnan(got[[0, 3]]).all()
    for name, value in zip(sampled.taken.names, got, strict=True):
        rows = [row for row in run.samples.to_pylist() if row["param"] == name]
        constant = 1 / (4 * rows[-1]["lr"] * rows[-1]["weight_decay"])
        last = [row for row in rows if row["step"] >= rows[-1]["step"] - constant]
        slope = np.polyfit(
            [row["step"] for row in last], [math.log(row["norm"] / row["norm_equilibrium"]) for row in last], 1
        )[0]
        assert value == pytest.approx(0.1 / slope if abs(slope) * constant > 0.1 else math.nan, rel=1e-9, nan_ok=True)
