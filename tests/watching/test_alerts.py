"""`on_finding`: each finding once, within a time budget, and never an exception in training."""

from __future__ import annotations

import dataclasses
import math
import re
import time

import numpy as np
import pytest
import torch
from tests.helpers.sample_worlds import world
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.spikes import spikes
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.findings import Finding
from equilibria.theory import SGD
from equilibria.watching import _alerts
from equilibria.watching._alerts import FindingAlerts


def finding(kind, subject, severity="note"):
    return Finding(severity, subject, "evidence", "remedy", "", kind=kind)


def sample(step):
    return {"step": [step]}


def watched(**more):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    return net, optimizer, eq.watch(net, optimizer, every=1, **more)


def test_a_gradient_that_is_not_finite_is_announced_once_while_training_runs(monkeypatch):
    monkeypatch.setattr(_alerts, "_SHARE", 1.0)  # such short steps leave no time else
    seen = []
    net, optimizer, monitor = watched(on_finding=lambda finding: seen.append((monitor.step, finding)))

    def spoil(step):
        if step >= 3:
            net[0].weight.grad.fill_(math.nan)

    train(net, optimizer, 60, before_step=spoil)
    about = [step for step, finding in seen if finding.kind in ("not_finite", "no_longer_finite")]
    assert 4 <= about[0] < 60
    monitor.close()
    kinds = [(finding.kind, finding.severity) for _, finding in seen]
    assert len(set(kinds)) == len(kinds)
    assert {finding.kind for finding in monitor.findings()} <= {kind for kind, _ in kinds}


def test_every_finding_has_a_kind_that_stays_when_its_words_change():
    net, optimizer, monitor = watched()
    train(net, optimizer, 30)
    before = monitor.findings()
    train(net, optimizer, 30)
    after = monitor.findings()
    assert before
    assert all(finding.kind for finding in (*before, *after))
    monitor.close()


def test_the_same_kind_with_other_numbers_is_not_new_and_a_worse_one_is():
    present, seen = [finding("spike", "1 layer")], []
    alerts = FindingAlerts(lambda finding: seen.append(finding.subject), lambda: present)
    alerts.look()
    present[:] = [finding("spike", "2 layers"), finding("", "another")]
    alerts.look()
    present[:] = [finding("spike", "3 layers", "warning"), finding("", "another")]
    alerts.look()
    present[:] = [finding("spike", "4 layers", "warning"), finding("spike", "a second spike", "warning")]
    alerts.look()
    alerts.look()
    assert seen == ["1 layer", "another", "3 layers", "a second spike"]


@pytest.mark.parametrize("looks", [range(40, 1000, 30), [1000]], ids=["a look after each", "one look"])
def test_every_bad_batch_is_announced_once_however_many_there_are(looks):
    planted = world(SGD(0.1, 2e-3, momentum=0.9), 100, dim=64)
    run = sampled_run(planted.samples, metadata=planted.metadata)
    bad, values = range(150, 800, 100), 1 + 0.05 * np.random.default_rng(0).standard_normal(1000)
    values[bad] += [4, 3, 5, 3, 9, 4, 3]
    seen, metrics = [], {}
    alerts = FindingAlerts(
        lambda finding: seen.append(finding.subject),
        lambda: list(spikes(dataclasses.replace(run, metrics=metrics))),
    )
    for until in looks:
        metrics["loss"] = np.arange(until), values[:until]
        alerts.look()
    steps = (re.findall(r"(?:at steps?|,) (\d50)\b", subject) for subject in seen)
    announced = [int(step) for of_one in steps for step in of_one]
    assert announced == list(bad)


def test_an_error_in_the_function_is_one_warning_and_the_next_finding_comes():
    present, seen = [finding("a", "a"), finding("b", "b")], []

    def fail(finding):
        seen.append(finding.kind)
        raise RuntimeError("no network")

    alerts = FindingAlerts(fail, lambda: present)
    with pytest.warns(WatchWarning, match="on_finding failed: RuntimeError: no network; training goes on") as warned:
        alerts.look()
        present.append(finding("c", "c"))
        alerts.look()
    assert seen == ["a", "b", "c"]
    assert len(warned) == 1


def test_looking_takes_a_small_share_of_the_training_time(monkeypatch):
    now, looks = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def find():
        looks.append(now[0])
        now[0] += 0.05
        return []

    alerts = FindingAlerts(lambda finding: None, find)
    for step in range(20_000):
        now[0] += 0.01
        alerts.append(sample(step))
    spent = 0.05 * len(looks)
    assert 2 < len(looks) < 20
    assert spent / now[0] < 1.5 * _alerts._SHARE


def test_the_function_may_close_the_run_and_log():
    def stop(finding):
        monitor.log(stopped=1)
        monitor.close()

    net, optimizer, monitor = watched(on_finding=stop)

    def spoil(step):
        if step >= 3:
            net[0].weight.grad.fill_(math.nan)

    with pytest.warns(WatchWarning, match="logged after close"):
        train(net, optimizer, 40, before_step=spoil)
        monitor.close()
        monitor.log(loss=1.0)
    assert monitor.failure is None
    assert monitor.metrics()["name"].to_pylist()[0] == "stopped"


def test_a_resumed_run_does_not_repeat_its_alerts():
    seen = []
    net, optimizer, monitor = watched(on_finding=lambda finding: seen.append(finding.kind))
    train(net, optimizer, 30)
    monitor._alerts.look()
    state, first = monitor.state_dict(), list(seen)
    monitor.close()
    assert first
    again, other, resumed = watched(on_finding=lambda finding: seen.append(finding.kind))
    again.load_state_dict(net.state_dict())
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(state)
    train(again, other, 30)
    resumed.close()
    assert len(set(seen)) == len(seen)


def test_what_cannot_be_called_is_refused_at_once():
    with pytest.raises(EquilibriaError, match="got on_finding of type str; expected a function of one finding"):
        watched(on_finding="print")
