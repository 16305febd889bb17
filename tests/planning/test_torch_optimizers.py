"""A plan takes a torch optimizer as well as a rule of the theory."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from equilibria.control import Lion as TorchLion
from equilibria.errors import EquilibriaError
from equilibria.planning import alternatives, plan
from equilibria.theory import SGD, AdamW, Lion, Muon
from equilibria.theory.schedules import Cosine, FromValues, MultiStep, as_schedule

DROP = MultiStep(0.1, milestones=[500], factor=0.1)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


def test_an_optimizer_gives_the_plan_of_its_rule():
    cases = [
        (torch.optim.SGD(weights(), lr=0.1, momentum=0.9, weight_decay=5e-4), SGD(0.1, 5e-4, momentum=0.9)),
        (torch.optim.AdamW(weights(), lr=1e-3, weight_decay=0.1), AdamW(1e-3, 0.1)),
        (torch.optim.Muon(weights(), lr=0.02, weight_decay=0.1), Muon(0.02, 0.1)),
        (TorchLion(weights(), lr=1e-4, weight_decay=1.0), Lion(1e-4, 1.0)),
    ]
    for optimizer, rule in cases:
        schedule = Cosine(rule.lr, steps=900, end=rule.lr / 10)
        result, expected = (plan(first, schedule, steps=900) for first in (optimizer, rule))
        assert result.situation == expected.situation
        for field in dataclasses.fields(expected.curve):
            np.testing.assert_array_equal(getattr(result.curve, field.name), getattr(expected.curve, field.name))


def test_the_group_that_decays_is_planned():
    groups = [{"params": weights(), "weight_decay": 0.0}, {"params": weights(), "weight_decay": 5e-4, "lr": 0.01}]
    result = plan(torch.optim.SGD(groups, lr=0.1), DROP, steps=1000)
    assert result.situation.rule == SGD(0.1, 5e-4)  # the schedule replaces the group's lr


def test_groups_with_different_rules_are_an_error_with_a_remedy():
    groups = [{"params": weights(), "weight_decay": 5e-4}, {"params": weights(), "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(EquilibriaError, match=r"follow different rules .* pass that of one group, such as SGD\(lr=0.1"):
        plan(optimizer, DROP, steps=1000)
    decay = FromValues([5e-4] * 1000)  # replaces the only setting in which they differ
    assert plan(optimizer, DROP, weight_decay=decay, steps=1000).situation.rule == SGD(0.1, 5e-4)


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop(weights(), lr=0.1), torch.optim.SGD, "sgd", 0.1, None])
def test_anything_else_is_an_error(optimizer):
    with pytest.raises(EquilibriaError, match=r"got optimizer=.*expected"):
        plan(optimizer, DROP, steps=1000)


def test_alternatives_take_an_optimizer_too():
    optimizer, rule = torch.optim.SGD(weights(), lr=0.1, weight_decay=5e-4), SGD(0.1, 5e-4)
    plans, expected = (alternatives(first, DROP, steps=1000) for first in (optimizer, rule))
    assert list(plans) == list(expected) == ["rescale", "hold lr × wd", "rescale and hold"]
    assert [other.travelled for other in plans.values()] == [other.travelled for other in expected.values()]


def test_a_plan_prints_its_table_and_findings():
    made = plan(SGD(0.1, 5e-4), DROP, steps=1000)
    assert str(made).startswith(str(made.table())) and made.findings[0].subject in str(made)
    assert repr(made).startswith("<Plan of SGD over 1,000 steps")


def test_the_table_prints_itself():
    table = plan(SGD(0.1, 5e-4), DROP, steps=1000).table()
    assert str(table) == repr(table) and "0-500" in str(table) and "angle*" in str(table)
    assert table._repr_html_().count("<tr>") == 3


def test_a_plan_of_a_rule_does_not_import_torch():
    code = (
        "import sys, equilibria as eq\nfrom equilibria.theory import SGD\n"
        "eq.plan(SGD(0.1, 5e-4), 0.1, steps=10)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def torch_schedulers(optimizer):
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=5)
    return {
        "step": schedulers.MultiStepLR(optimizer, [10, 20]),
        "cosine": schedulers.CosineAnnealingLR(optimizer, 40),
        "lambda": schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "one cycle": schedulers.OneCycleLR(optimizer, 0.3, total_steps=60),
        "sequence": schedulers.SequentialLR(optimizer, [warm, schedulers.ExponentialLR(optimizer, 0.9)], [5]),
    }


@pytest.mark.parametrize("kind", ["step", "cosine", "lambda", "one cycle", "sequence"])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_torch_scheduler_tells_its_later_values_and_stays_where_it_is(kind):
    """Compared with the scheduler itself, stepped afterwards; begun in the middle of its course."""
    params = weights()
    optimizer = torch.optim.SGD([{"params": params, "weight_decay": 5e-4}, {"params": [], "lr": 1.0}], lr=0.1)
    scheduler = torch_schedulers(optimizer)[kind]
    for _ in range(3):
        scheduler.step()
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()["last_epoch"]))
    planned = as_schedule(scheduler).values(50)
    assert (optimizer.state_dict(), scheduler.state_dict()["last_epoch"]) == before
    truth = []
    for _ in range(50):
        truth.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    np.testing.assert_array_equal(planned, truth)
    fresh = torch.optim.SGD(weights(), lr=0.1, weight_decay=5e-4)
    assert plan(fresh, torch_schedulers(fresh)["step"], steps=30).phases


def test_a_torch_scheduler_that_needs_more_is_refused_with_a_way_out():
    optimizer = torch.optim.SGD(weights(), lr=0.1, weight_decay=5e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(EquilibriaError, match=r"ReduceLROnPlateau.: later values depend.*equilibria.theory") as caught:
        plan(optimizer, plateau, steps=100)
    assert caught.value.argument == "schedule"
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=60)
    with pytest.raises(EquilibriaError, match=r"OneCycleLR.: after 60 further steps it raises ValueError"):
        plan(optimizer, cycle, steps=100)
