"""What is said about a tracked run: true words for runs that went wrong, and for optimizers other than plain SGD."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.curvature import adam_preconditioner
from equilibria.curvature._edge import EdgeDetector
from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.records.tables import APPROACHING_EDGE, DIVERGED, DIVERGING, EDGE, PAST, SHARPNESS_FIELDS, STABLE


def quadratic(make, *, curvature=3.0):
    weights = nn.Parameter(torch.tensor([1.0, 0.5], dtype=torch.float64))
    scale = torch.tensor([curvature, 1.0], dtype=torch.float64)
    objective = eq.Objective(lambda params, _batch: (scale * params["w"] ** 2).sum() / 2, {"w": weights})
    return objective, weights, make([weights])


def train(objective, weights, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        objective({"w": weights}, None).backward()
        optimizer.step()


def table(rows):
    """Queries with the fields that matter, the others null."""
    return pa.Table.from_pylist(rows, schema=SHARPNESS_FIELDS)


def at(step, ratio, state, **more):
    known = {"bound": 1e-3, "sharpness": ratio, "threshold": 1.0, "ratio": ratio, "lr": 2.0, "weight_decay": 0.0}
    return {**dict.fromkeys(SHARPNESS_FIELDS.names), **known, "step": step, "loss": 1.0, "state": state, **more}


# ---- no threshold, and no network left


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_where_weight_decay_alone_diverges_no_sharpness_is_stable(momentum):
    settings = {"lr": 10.0, "weight_decay": 0.5, "momentum": momentum}  # lr x wd = 5 > 2(1 + momentum)
    objective, weights, optimizer = quadratic(lambda params: torch.optim.SGD(params, **settings), curvature=0.0)
    assert eq.sharpness(objective, None).stability_ratio(10.0, weight_decay=0.5, momentum=momentum) == math.inf
    assert eq.sharpness(objective, None).stability_ratio(optimizer) == math.inf
    with SharpnessMonitor(objective, optimizer, None, every=1, spherical=False) as tracker:
        train(objective, weights, optimizer, 3)
    assert abs(float(weights[0].detach())) > 1.0  # it has no curvature, and grows
    assert tracker.samples()["ratio"].to_pylist() == [math.inf] * 3
    assert STABLE not in tracker.samples()["state"].to_pylist()
    finding = tracker.findings()[-1]
    assert finding.severity == "warning"
    assert finding.subject == "unstable at any sharpness: lr x wd = 5, so that weight decay alone diverges"


def test_a_dead_network_is_not_stable():
    detector = EdgeDetector()
    losses, ratios = [2.0, 40.0, 300.0, 250.0, 260.0], [1.5, 20.0, 0.0, 0.0, 0.0]
    states = [
        detector.take(step, ratio, turned_back=None, sharpness=1.0, decay=None, loss=loss).state
        for step, (ratio, loss) in enumerate(zip(ratios, losses, strict=True))
    ]
    assert states == [PAST, DIVERGING, DIVERGING, DIVERGED, DIVERGED]  # the third by the mean of two steps
    assert EdgeDetector().take(0, 0.5, turned_back=None, sharpness=1.0, decay=None, loss=-3.0).state == STABLE


def test_an_infinite_ratio_does_not_stop_the_detector():
    detector = EdgeDetector()
    detector.take(0, math.inf, turned_back=None, sharpness=1.0, decay=(0.1, 5e-3))
    assert detector.take(9, 0.5, turned_back=None, sharpness=1.0, decay=(0.1, 5e-3)).state == STABLE


def test_what_is_said_of_a_dead_network():
    rows = [at(0, 1.5, PAST, loss=2.0), at(20, 0.0, DIVERGED, loss=500.0, bound=math.inf)]
    loose, finding = sharpness_findings(table(rows))
    assert finding.subject == "diverged: the loss is 250 times that of the first query"
    assert "inf%" not in loose.evidence and "is infinite" in loose.evidence


# ---- the crossing


def test_a_forecast_is_told_with_its_spread_and_the_growth_it_continues():
    rows = [at(step, 0.5 * 1.02**step, APPROACHING_EDGE) for step in range(15)]
    rows[-1] |= {"steps_to_crossing": 21.0, "crossing_spread": 4.0, "steps_to_oscillation": 60.0}
    (finding,) = sharpness_findings(table(rows))
    assert finding.subject == "R reaches 1, the edge of stability, at about step 35 ± 4 if its growth goes on"
    assert finding.evidence == (
        f"R = {0.5 * 1.02**14:.3g} at step 14, 1.2 times that at step 5; the loss would jump at about step 74"
    )


def test_a_record_without_a_spread_is_told_without_one():
    (finding,) = sharpness_findings(table([at(20, 0.5, APPROACHING_EDGE, steps_to_crossing=100.0)]))
    assert finding.subject == "R reaches 1, the edge of stability, at about step 120 if its growth goes on"


@pytest.mark.parametrize("state", [PAST, EDGE])
def test_after_the_crossing_the_observed_step_is_told(state):
    rows = [at(20, 0.98, STABLE), at(40, 1.04, state, steps_to_crossing=-13.0, crossing_spread=13.0)]
    (finding,) = sharpness_findings(table(rows))
    assert finding.evidence.startswith("R crossed 1 at step 27; R = 1.04")


# ---- at the edge


def test_a_single_query_does_not_end_a_stretch_and_the_average_says_what_it_is_of():
    rows = [at(step, 1.2, EDGE) for step in range(0, 200, 20)]
    rows[4] = at(80, 0.8, STABLE)
    (finding,) = sharpness_findings(table(rows))
    assert finding.subject.startswith("edge of stability since step 0: sharpness 1.2 is held near the threshold")
    assert "R = 1.2 on average over the last 5 queries, 1.20 to 1.20" in finding.evidence
    assert "flatter" not in finding.remedy  # that is a law of scale-invariant losses
    rows[4:6] = at(80, 0.8, STABLE), at(100, 0.8, STABLE)
    assert sharpness_findings(table(rows))[0].subject.startswith("edge of stability since step 120")


def test_a_wide_swing_is_not_called_held():
    (finding,) = sharpness_findings(table([at(step, ratio, EDGE) for step, ratio in ((0, 1.0), (20, 1.0), (40, 3.0))]))
    assert "held" not in finding.subject
    assert "1.00 to 3.00" in finding.evidence


def test_the_loss_is_compared_above_the_lowest_seen():
    rows = [at(step, 1.0, EDGE, loss=loss, loss_predicted=0.5, period=70.0) for step, loss in ((0, 9.0), (20, 9.2))]
    (finding,) = sharpness_findings(table(rows))
    assert "loss 0.2 above the lowest seen, predicted at most 0.5" in finding.evidence


# ---- optimizers


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (lambda params: torch.optim.AdamW(params, lr=1e-3), "stability.adam_threshold"),
        (lambda params: torch.optim.SGD(params, lr=1e-3), "stability.raw_threshold"),
        (lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9), "stability.momentum_threshold"),
        (
            lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, nesterov=True),
            "stability.nesterov_threshold",
        ),
    ],
)
def test_the_law_is_that_of_the_optimizer_and_the_ratio_that_of_the_tracker(make, law):
    objective, weights, optimizer = quadratic(make)
    with SharpnessMonitor(objective, optimizer, None, every=3, spherical=False) as tracker:
        train(objective, weights, optimizer, 4)
        adam = law == "stability.adam_threshold"
        (finding,) = tracker.findings()
        assert finding.law == law and eq.cite(law)
        assert finding.subject.startswith("stable: preconditioned sharpness" if adam else "stable: sharpness")
        scale = adam_preconditioner(objective, optimizer) if adam else None
        found = eq.sharpness(objective, None, preconditioner=scale)
    row = tracker.samples().to_pylist()[-1]
    assert found.stability_ratio(optimizer) == pytest.approx(found.value / row["threshold"], rel=1e-12)
    assert tracker.metadata["sharpness"]["preconditioned"] == adam


def test_the_ratio_is_refused_for_what_was_measured_otherwise():
    objective, _, adam = quadratic(lambda params: torch.optim.AdamW(params, lr=1e-3))
    found = eq.sharpness(objective, None)
    with pytest.raises(EquilibriaError, match="got AdamW for a result without its preconditioner"):
        found.stability_ratio(adam)
    with pytest.raises(EquilibriaError, match=r"expected stability_ratio\(optimizer\) alone"):
        found.stability_ratio(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), momentum=0.9)
    assert "tensor" not in repr(found)


# ---- what the tracker knows beside its rows


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return net, (torch.randn(32, 6), torch.arange(32) % 3)


@pytest.mark.parametrize("wrong", ["batch", "mode", None])
def test_another_batch_or_mode_than_that_of_training_is_noticed(wrong):
    net, batch = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    given = (torch.randn(32, 6), batch[1]) if wrong == "batch" else batch
    with SharpnessMonitor(eq.objective(net, functional.cross_entropy), optimizer, given, every=2) as tracker:
        net.train(wrong != "mode")
        for _ in range(2):
            optimizer.zero_grad()
            functional.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()
    subjects = [finding.subject for finding in tracker.findings()]
    assert ("the tracker measures another batch or mode than that of training" in subjects) == (wrong is not None)


def test_the_end_of_the_tracking_is_the_first_thing_said():
    objective, weights, optimizer = quadratic(lambda params: torch.optim.SGD(params, lr=0.1))
    tracker = SharpnessMonitor(objective, optimizer, None, every=5)
    train(objective, weights, optimizer, 7)
    objective._fn = lambda params, batch: params["w"].sum() * math.nan
    with pytest.warns(WatchWarning, match="sharpness tracking has stopped"):
        for _ in range(10):
            weights.grad = torch.ones(2, dtype=torch.float64)
            optimizer.step()
    assert tracker.findings()[0].subject.startswith("tracking stopped at step 10: EquilibriaError: got a loss of nan")
    assert sharpness_findings(SHARPNESS_FIELDS.empty_table(), metadata=tracker.metadata)[0] == tracker.findings()[0]


def test_a_lost_eigenvector_is_told_and_a_growing_one_is_not():
    """One direction rises from nowhere through the top; in the other run all curvature grows by a third per query."""
    for lost in (True, False):
        made = torch.Generator().manual_seed(3)
        basis, _ = torch.linalg.qr(torch.randn(200, 200, generator=made, dtype=torch.float64))
        values = torch.linspace(0.0, 1.0, 200, dtype=torch.float64)
        values[-1] = 2.0
        weights = nn.Parameter(basis[-1].clone())
        objective = eq.Objective(lambda p, _b, v=values, b=basis: (v * (b @ p["w"]) ** 2).sum() / 2, {"w": weights})
        optimizer = torch.optim.SGD([weights], lr=1e-9)
        with SharpnessMonitor(objective, optimizer, None, every=1, recheck=8) as tracker:
            for step in range(20):
                if lost and step == 18:  # where the even steps begin at random again
                    values[0] = 4.0
                elif not lost:
                    values *= 1.33
                train(objective, weights, optimizer, 1)
        told = [finding for finding in tracker.findings() if "had been lost" in finding.subject]
        assert len(told) == lost
        if lost:
            assert "from scratch found 4, the warm start 2" in told[0].evidence


def test_few_queries_by_auto_are_told():
    about = {"sharpness": {"every": "auto"}, "steps": 300}
    assert "last query at step 0 of 300; give every=20" in [
        finding.subject for finding in sharpness_findings(table([at(0, 0.5, STABLE)]), metadata=about)
    ]
    about["sharpness"]["every"] = 20
    assert len(sharpness_findings(table([at(0, 0.5, STABLE)]), metadata=about)) == 1


def test_batches_that_are_normalised_each_by_itself_are_named():
    net, (inputs, labels) = network()
    halves = [(inputs[:16], labels[:16]), (inputs[16:], labels[16:])]
    found = eq.sharpness(eq.objective(net, functional.cross_entropy), halves)
    assert "of the mean of 2 batches, each normalised by itself" in str(found)
