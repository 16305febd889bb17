"""The tracked sharpness of runs at the edge of stability against eigsh and the theory; training does not change."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from tests.helpers.tracked_worlds import completion, sphere
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.diagnosis.sharpness import slow_period
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.lab.data.image_set import load_digits
from equilibria.records.tables import APPROACHING_EDGE, DIVERGING, EDGE, PAST, SHARPNESS_FIELDS, STABLE


class Weights:
    """A sink that keeps the weights at every query."""

    def __init__(self, world):
        self.world, self.seen = world, []

    def append(self, _columns):
        self.seen.append(self.world.flat())

    def close(self):
        pass


def column(table, name):
    return np.array(table[name].to_pylist(), dtype=float)


def run(world, steps, **settings):
    """The table of a tracked run, the weights at its queries, and the loss at every step."""
    weights, losses = Weights(world), []
    with SharpnessMonitor(world.objective, world.optimizer, None, sinks=[weights], **settings) as tracker:
        for _ in world.train(steps):
            losses.append(float(world.loss(world.params).detach()))
    assert tracker.failure is None
    return tracker, np.array(weights.seen), np.array(losses)


# ---- matrix completion, against eigsh


@pytest.fixture(scope="module")
def completion_run():
    world, problem = completion()
    tracker, weights, losses = run(world, 2600, every=20)
    return tracker, problem, weights, losses


@pytest.fixture(scope="module")
def completion_truth(completion_run):
    """By eigsh on the problem's own analytic products."""
    _, problem, weights, _ = completion_run
    return np.array([problem.sharpness(row[None])[0] for row in weights])


@pytest.mark.slow
def test_every_value_is_within_the_tolerance_of_eigsh(completion_run, completion_truth):
    table = completion_run[0].samples()
    wrong = np.abs(column(table, "sharpness") / completion_truth - 1)
    assert wrong.max() < 1e-2
    assert table.schema.equals(SHARPNESS_FIELDS)


def test_a_query_takes_about_two_products(completion_run):
    """More for a while after the oscillation sets in, when the eigenvectors turn: eigsh takes 20 and more each time."""
    table = completion_run[0].samples()
    before_the_edge = column(table, "step") < 1700
    assert column(table, "hvps")[before_the_edge].mean() <= 2.5
    assert column(table, "hvps").mean() <= 4.5


def test_the_crossing_is_forecast_long_before(completion_run):
    """The sheet has 1770 by formula and 1772 simulated; the jump of the loss at 1904."""
    table, losses = completion_run[0].samples(), completion_run[-1]
    step, ratio, ahead = (column(table, name) for name in ("step", "ratio", "steps_to_crossing"))
    late = (step > 1771 / 2) & (step < 1771)
    forecast = (step + ahead)[late]
    crossed = np.interp(0.0, np.log(ratio[step < 1850]), step[step < 1850])
    assert forecast == pytest.approx(1771, abs=1.5)
    assert crossed == pytest.approx(1771, abs=1.5)
    after = step > 1800
    assert (step + ahead)[after] == pytest.approx(crossed, abs=0.01)  # the observed one, to the end of the run
    assert np.all(column(table, "crossing_spread")[after] <= 20)  # it lies between two queries
    jump = 1800 + int(np.argmax(losses[1800:] > 1e-6))
    expected = (step + column(table, "steps_to_oscillation"))[late]
    assert jump == pytest.approx(1904, abs=10)  # it grows out of rounding, which differs between machines
    assert expected == pytest.approx(jump, abs=0.08 * (jump - crossed))  # the law is 6 % short at lr x wd = 1e-3


def test_the_states_come_in_order_and_the_edge_with_the_oscillation(completion_run):
    table = completion_run[0].samples()
    states = table["state"].to_pylist()
    order = list(dict.fromkeys(states))
    assert order == ["stable", APPROACHING_EDGE, PAST, EDGE]
    first = {state: table["step"][states.index(state)].as_py() for state in order}
    assert 1771 < first[PAST] <= 1771 + 20
    assert 1870 <= first[EDGE] <= 1910  # the steps swing before the loss shows it
    assert states[states.index(EDGE) :] == [EDGE] * states.count(EDGE)


def test_at_the_edge_the_ratio_is_one_and_the_secant_near(completion_run):
    table = completion_run[0].samples()
    late = column(table, "step") > 2200
    second = late & np.append(False, np.diff(column(table, "step")) == 1)  # of two consecutive steps
    assert second.sum() == pytest.approx(late.sum() / 2, abs=1)
    assert column(table, "ratio_mean")[second] == pytest.approx(1.0, abs=0.06)
    assert np.median(np.abs(column(table, "secant") / column(table, "sharpness") - 1)[late]) < 0.05
    before = (column(table, "step") > 300) & (column(table, "step") < 1700)
    assert np.median(np.abs(column(table, "secant") / column(table, "sharpness") - 1)[before]) > 0.5


def test_the_finding_at_the_edge(completion_run):
    (finding,) = completion_run[0].findings()
    assert finding.subject.startswith("edge of stability since step 1,")
    assert "is held at 2/lr_eff = " in finding.subject
    assert "above the lowest seen, predicted at most" in finding.evidence
    assert eq.cite(finding.law)


# ---- the 3-D loss: section 3 of the sheet


@pytest.fixture(scope="module")
def sphere_run():
    world, problem = sphere()
    return (*run(world, 3500, every=10), problem)


def test_the_three_dimensional_crossing(sphere_run):
    """t_cross 347 simulated, 346.4 by formula; delay 136 simulated, 128.5 by formula."""
    tracker, weights, losses, problem = sphere_run
    table = tracker.samples()
    step, ratio = column(table, "step"), column(table, "ratio")
    assert column(table, "sharpness") == pytest.approx(problem.sharpness(weights), rel=1e-9)
    assert ratio[0] == pytest.approx(0.5, rel=1e-9)
    forecast = (step + column(table, "steps_to_crossing"))[(step >= 50) & (step < 340)]
    assert forecast == pytest.approx(346.4, abs=0.1)
    assert np.interp(1.0, ratio[step < 400], step[step < 400]) == pytest.approx(346.4, abs=0.2)
    seen = int(np.argmax(losses > 9.375 * 1e-3 / 4))  # h^2 = lr wd/2
    assert seen - 346.4 == pytest.approx(136, abs=6)
    assert (step + column(table, "steps_to_oscillation"))[5] == pytest.approx(346.4 + 128.5, abs=0.2)


def test_the_loss_at_the_edge(sphere_run):
    """lr wd lambda1/(4 + g^2): with z nearly 0 at the end g = 2 z/sqrt(1 - z^2) hardly counts. Leading order in lr wd:
    at lr wd = 1e-3 the terms left out are of a per cent."""
    tracker, weights, losses, problem = sphere_run
    table = tracker.samples()
    late = column(table, "step") > 3000
    assert column(table, "loss_predicted")[late].mean() == pytest.approx(losses[3000:].mean(), rel=0.02)
    slope = 2 * np.tan(np.arcsin(problem.coordinates(weights)[:, 2] / np.linalg.norm(weights, axis=1)))
    assert np.abs(slope[late]).max() < 0.2


def test_the_period_at_the_edge():
    """From a small swing on, so that the period is that of small amplitudes: pi/sqrt(2 lr wd) = 70.2."""
    world, problem = sphere(ratio=1.0)
    with torch.no_grad():
        lifted = problem.at(np.array([[0.02, -0.02, 0.0]]))[0]
        world.params["w"].add_(torch.tensor(lifted) * world.params["w"].norm())
    tracker, _, _ = run(world, 600, every=3)
    table = tracker.samples()
    period = slow_period(column(table, "step"), column(table, "ratio"), shortest=70.2)
    assert column(table, "period") == pytest.approx(math.pi / math.sqrt(2e-3), rel=1e-12)
    assert period == pytest.approx(70.2, abs=6)  # two crossings, each known to a query (three steps)
    assert f"last measured {period:,.0f}" in tracker.findings()[-1].evidence


# ---- thresholds by optimizer


def quadratic_world(values, optimizer):
    weights = nn.Parameter(torch.linspace(0.5, 1.0, len(values), dtype=torch.float64))
    curvature = torch.tensor(values, dtype=torch.float64)
    objective = eq.Objective(lambda params, _batch: (curvature * params["w"] ** 2).sum() / 2, {"w": weights})
    made = optimizer([weights])
    return objective, weights, made


def steps(objective, weights, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        objective({"w": weights}, None).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "threshold"),
    [
        ({"lr": 0.1}, 20.0),
        ({"lr": 0.1, "weight_decay": 0.3}, 19.7),
        ({"lr": 0.1, "momentum": 0.9}, 38.0),
        ({"lr": 0.1, "momentum": 0.5, "nesterov": True}, 15.0),
    ],
)
def test_the_threshold_is_where_sgd_diverges(settings, threshold):
    """2 % below it the run shrinks, 2 % above it grows; R says which."""
    for factor, grows in ((0.98, False), (1.02, True)):
        values = [factor * threshold, 1.0]
        objective, weights, optimizer = quadratic_world(values, lambda params: torch.optim.SGD(params, **settings))
        with SharpnessMonitor(objective, optimizer, None, every=100, spherical=False) as tracker:
            steps(objective, weights, optimizer, 400)
        assert tracker.samples()["ratio"][0].as_py() == pytest.approx(factor, rel=1e-9)
        assert (abs(float(weights[0].detach())) > 0.5) == grows


def test_a_raw_run_past_its_threshold_is_at_the_edge_when_it_oscillates():
    """A quartic term holds the swing: the loss of one coordinate is a w^2/2 + w^4/4 with a beyond 2/lr."""
    weights = nn.Parameter(torch.tensor([0.01, 0.3], dtype=torch.float64))
    objective = eq.Objective(
        lambda params, _batch: 10.2 * params["w"][0] ** 2 - params["w"][0] ** 4 + params["w"][1] ** 2, {"w": weights}
    )
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with SharpnessMonitor(objective, optimizer, None, every=10) as tracker:
        steps(objective, weights, optimizer, 200)
    assert not tracker.spherical
    assert tracker.state == EDGE
    assert tracker.samples()["effective_lr"].null_count == tracker.samples().num_rows


def test_adam_is_measured_with_its_preconditioner():
    """The query of a step sees the second moments of the step before it."""
    values, expected = [3.0, 1.0, 0.2], []
    objective, weights, optimizer = quadratic_world(values, lambda params: torch.optim.AdamW(params, lr=1e-2))
    with SharpnessMonitor(objective, optimizer, None, every=4) as tracker:
        for _ in range(10):
            steps(objective, weights, optimizer, 1)
            state = optimizer.state[weights]
            denominator = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
            expected.append(float((torch.tensor(values, dtype=torch.float64) / denominator).max()))
    table = tracker.samples()
    assert table["step"].to_pylist() == [1, 4, 8]  # at step 0 there are none yet
    assert column(table, "sharpness") == pytest.approx([expected[0], expected[3], expected[7]], rel=1e-9)
    assert column(table, "threshold") == pytest.approx((2 - 1e-2 * 1e-2) * 19 / 1e-2, rel=1e-9)


# ---- what may go wrong


def test_an_eigenvalue_that_overtakes_unseen_is_found_by_the_cold_check():
    """The Hessian is exactly diagonal in a random basis; one direction rises through the top from nowhere."""
    made = torch.Generator().manual_seed(3)
    basis, _ = torch.linalg.qr(torch.randn(200, 200, generator=made, dtype=torch.float64))
    values = torch.linspace(0.0, 1.0, 200, dtype=torch.float64)
    values[-1] = 2.0
    weights = nn.Parameter(basis[-1].clone())

    def loss(params, _batch):
        inside = basis @ params["w"]
        return (values * inside**2).sum() / 2

    optimizer = torch.optim.SGD([weights], lr=1e-6)
    objective, recheck = eq.Objective(loss, {"w": weights}), 8
    with SharpnessMonitor(objective, optimizer, None, every=1, recheck=recheck) as tracker:
        for step in range(60):
            if step == 20:
                values[0] = 3.0
            steps(objective, weights, optimizer, 1)
    table = tracker.samples()
    found, certified = column(table, "sharpness"), column(table, "certified")
    assert found[:20] == pytest.approx(2.0, rel=1e-2)
    late = 20 + 2 * (recheck + 1)  # even and odd steps have a period of their own
    assert found[late:] == pytest.approx(3.0, rel=1e-2)
    assert max(np.diff(np.flatnonzero(certified))) <= 2 * (recheck + 1)


def batch_normalised(dropout=0.2):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))
    batch = torch.randn(32, 6), torch.randint(3, (32,))
    return net, batch


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_not_changed_by_a_single_bit(kind):
    ends = []
    for tracked in (False, True):
        net, batch = batch_normalised()
        optimizer = kind(net.parameters(), lr=0.05, weight_decay=0.01)
        tracker = None
        if tracked:
            tracker = SharpnessMonitor(eq.objective(net, functional.cross_entropy), optimizer, batch, every=3)
        torch.manual_seed(5)
        for step in range(25):
            if step == 12:
                net.eval()  # a mode that is the trainer's own business
            optimizer.zero_grad()
            functional.cross_entropy(net(batch[0]), batch[1]).backward()
            optimizer.step()
        grads = [param.grad for param in net.parameters()]
        ends.append([*net.state_dict().values(), *grads, torch.get_rng_state(), torch.tensor(net.training)])
        assert tracker is None or (tracker.failure is None and tracker.samples().num_rows >= 9)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_an_error_stops_the_tracking_with_one_warning_and_training_goes_on():
    objective, weights, optimizer = quadratic_world([2.0, 1.0], lambda params: torch.optim.SGD(params, lr=0.1))
    tracker = SharpnessMonitor(objective, optimizer, None, every=5)
    steps(objective, weights, optimizer, 7)
    objective._fn, whole = (lambda params, batch: params["w"].sum() * math.nan), objective._fn
    with pytest.warns(WatchWarning, match="sharpness tracking has stopped: EquilibriaError: got a loss of nan") as seen:
        for _ in range(10):
            weights.grad = torch.ones(2, dtype=torch.float64)
            optimizer.step()
    objective._fn = whole
    assert len(seen) == 1
    assert tracker.failure is not None
    assert tracker.samples().num_rows == 2
    before = weights.detach().clone()
    steps(objective, weights, optimizer, 1)
    assert not torch.equal(before, weights)


def test_a_network_on_other_batches_has_no_secant():
    net, batch = batch_normalised(dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with SharpnessMonitor(eq.objective(net, functional.cross_entropy), optimizer, batch, every=2) as tracker:
        for seed in range(6):
            made = torch.Generator().manual_seed(seed)
            inputs = torch.randn(16, 6, generator=made), torch.randint(3, (16,), generator=made)
            optimizer.zero_grad()
            functional.cross_entropy(net(inputs[0]), inputs[1]).backward()
            optimizer.step()
    assert tracker.samples()["secant"].null_count == tracker.samples().num_rows > 2


def test_scale_invariance_is_detected_and_a_false_claim_raises():
    net, batch = batch_normalised(dropout=0.0)
    optimizer, objective = torch.optim.SGD(net.parameters(), lr=0.1), eq.objective(net, functional.cross_entropy)
    with SharpnessMonitor(objective, optimizer, batch, select=["0.weight"]) as tracker:
        assert tracker.spherical
    with SharpnessMonitor(objective, optimizer, batch) as tracker:
        assert not tracker.spherical
    with pytest.raises(EquilibriaError, match="got spherical=True for 5 parameters in which the loss is not"):
        SharpnessMonitor(objective, optimizer, batch, spherical=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"every": 0}, "every"),
        ({"every": "often"}, "expected 'auto' or a whole number"),
        ({"tol": 0.0}, "tol"),
        ({"recheck": 0}, "recheck"),
        ({"select": ["7.weight"]}, "matches no parameter"),
        ({"batch": (torch.randn(4, 5), torch.zeros(4).long())}, "on which the loss cannot be computed"),
        (
            {"optimizer": lambda net: torch.optim.RMSprop(net.parameters())},
            "RMSprop, whose stability threshold is unknown",
        ),
        ({"optimizer": lambda net: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)}, "trains none of the 5"),
        ({"optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=1.0, maximize=True)}, "maximize=True"),
        ({"optimizer": lambda net: torch.optim.Adam(net.parameters(), weight_decay=0.1)}, "expected AdamW, or"),
        ({"optimizer": lambda net: torch.optim.AdamW(net.parameters()), "spherical": True}, "excludes the sphere"),
        (
            {
                "optimizer": lambda net: torch.optim.SGD(
                    [{"params": net[0].parameters()}, {"params": net[4].parameters(), "lr": 0.5}], lr=1.0
                )
            },
            "parameter groups with lr=0.5, 1.0",
        ),
        ({"objective": nn.Linear(2, 2)}, "got objective of type Linear"),
    ],
)
def test_bad_input_raises_before_anything_changes(change, message):
    net, batch = batch_normalised()
    optimizer = change.pop("optimizer", lambda net: torch.optim.SGD(net.parameters(), lr=0.1))(net)
    objective = change.pop("objective", eq.objective(net, functional.cross_entropy))
    held = copy.deepcopy(net.state_dict())
    with pytest.raises(EquilibriaError, match=message):
        SharpnessMonitor(objective, optimizer, change.pop("batch", batch), **change)
    assert not optimizer._optimizer_step_pre_hooks
    assert all(torch.equal(held[name], value) for name, value in net.state_dict().items())


def test_a_selected_parameter_that_is_not_trained_raises():
    net, batch = batch_normalised()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    objective = eq.objective(net, functional.cross_entropy)
    with pytest.raises(EquilibriaError, match=r"'4.weight' in select, which the optimizer does not train"):
        SharpnessMonitor(objective, optimizer, batch, select=["0.weight", "4.weight"])
    with SharpnessMonitor(objective, optimizer, batch) as tracker:
        assert tracker.metadata["sharpness"]["params"] == ["0.weight"]


def train(net, optimizer, batch, steps, *, loss=functional.cross_entropy, after=lambda: None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(batch[0]), batch[1]).backward()
        optimizer.step()
        after()


class ByEigsh:
    """A sink that finds the top eigenvalue at every query by other means: own products in float64, scipy's solver."""

    def __init__(self, net, batch):
        self.net, self.batch, self.found = net, (batch[0].double(), batch[1]), []

    def append(self, _columns):
        net = copy.deepcopy(self.net).double()
        params = list(net.parameters())
        loss = functional.cross_entropy(net(self.batch[0]), self.batch[1])
        grad = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, params, create_graph=True)])

        def product(vector):
            along = torch.autograd.grad(grad @ torch.from_numpy(vector).reshape(-1), params, retain_graph=True)
            return torch.cat([part.reshape(-1) for part in along]).numpy()

        operator = LinearOperator((len(grad),) * 2, matvec=product, dtype=float)
        norm_sq = sum(float(param.detach().square().sum()) for param in params)
        self.found.append(norm_sq * float(eigsh(operator, k=1, which="LA", tol=1e-6)[0][0]))

    def close(self):
        pass


def test_a_network_is_tracked_within_the_bound_up_to_the_edge():
    """The network of docs/sharpness.md, in whose stable phase the second eigenvalue overtakes the first."""
    digits = load_digits()
    batch = digits.train_images[:256].flatten(1), digits.train_labels[:256]
    torch.manual_seed(0)
    first, second = (nn.BatchNorm1d(width, affine=False) for width in (32, 10))
    net = nn.Sequential(nn.Linear(64, 32, bias=False), first, nn.SiLU(), nn.Linear(32, 10, bias=False), second)
    optimizer, truth = torch.optim.SGD(net.parameters(), lr=0.05, weight_decay=0.02), ByEigsh(net, batch)
    objective = eq.objective(net, functional.cross_entropy)
    with SharpnessMonitor(objective, optimizer, batch, every=20, sinks=[truth]) as tracker:
        train(net, optimizer, batch, 440)
    table = tracker.samples().to_pydict()
    wrong = np.abs(np.array(table["sharpness"]) / np.array(truth.found) - 1)
    assert len(wrong) > 25 and sum(table["certified"]) <= 3
    assert np.all(wrong <= np.array(table["bound"]))
    assert np.mean(table["hvps"][1:]) < 9


@pytest.mark.parametrize("ratio", [1.05, 1.5, 5.0])
def test_a_diverging_run_is_reported(ratio):
    weights = nn.Parameter(torch.ones(2, dtype=torch.float64))
    curvature = torch.tensor([ratio * 20.0, 1.0], dtype=torch.float64)
    objective = eq.Objective(lambda params, _: (curvature * params["w"] ** 2).sum() / 2, {"w": weights})
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with SharpnessMonitor(objective, optimizer, None, every=10) as tracker:
        for _ in range(60):
            optimizer.zero_grad()
            objective({"w": weights}, None).backward()
            optimizer.step()
    assert tracker.state == DIVERGING
    assert EDGE not in tracker.samples()["state"].to_pylist()
    finding = tracker.findings()[-1]
    assert finding.severity == "warning" and finding.subject.startswith("diverging since step")


def test_a_loader_that_training_reads_is_left_alone():
    """The generator that shuffles, and the one iterator of persistent workers, belong to training."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    ends = []
    for tracked in (False, True):
        torch.manual_seed(1)
        net, generator = nn.Linear(6, 3), torch.Generator().manual_seed(0)
        shuffled = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        objective = eq.objective(net, functional.cross_entropy)
        tracker = SharpnessMonitor(objective, optimizer, shuffled, every=2) if tracked else None
        for batch in [*shuffled, *shuffled]:
            train(net, optimizer, batch, 1)
        ends.append(net.weight.detach().clone())
        assert tracker is None or (tracker.failure is None and tracker.samples().num_rows == 4)
    assert torch.equal(*ends)
    loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    with SharpnessMonitor(objective, optimizer, loader, every=1) as tracker:
        steps = sum(1 for batch in loader if train(net, optimizer, batch, 1) is None)
    assert (steps, tracker.samples().num_rows) == (4, 4)


def test_a_schedule_that_touches_zero():
    net, batch = nn.Linear(6, 3), (torch.randn(16, 6), torch.randint(3, (16,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0, 0.0][min(step, 3)])
    with SharpnessMonitor(eq.objective(net, functional.cross_entropy), optimizer, batch, every=1) as tracker:
        train(net, optimizer, batch, 5, after=schedule.step)
    table = tracker.samples().to_pydict()
    assert tracker.failure is None and tracker.state == STABLE
    assert [ratio == 0 for ratio in table["ratio"]] == [True, False, False, True, True]
    assert table["threshold"][0] == np.inf
    assert "stable" in tracker.findings()[-1].subject


def test_which_optimizers_have_a_known_threshold():
    class Signed(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(group["lr"] * param.grad.sign())

    net, batch = nn.Linear(6, 3), (torch.randn(16, 6), torch.randint(3, (16,)))
    objective = eq.objective(net, functional.cross_entropy)
    with pytest.raises(EquilibriaError, match="type Signed, whose stability threshold"):
        SharpnessMonitor(objective, Signed(net.parameters(), lr=0.1), batch)
    for momentum, decay in ((0.99, 5e-4), (0.9, 0.05)):
        settings = {"lr": 0.1, "momentum": momentum, "nesterov": True, "weight_decay": decay}
        SharpnessMonitor(objective, torch.optim.SGD(net.parameters(), **settings), batch).close()
