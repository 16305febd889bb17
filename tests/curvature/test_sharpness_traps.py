"""What the tracker and the sharpness once said that was not so."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from tests.helpers.curved_worlds import images, net_objective, quadratic
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import equilibria as eq
from equilibria.curvature._tracker import SharpnessMonitor
from equilibria.errors import EquilibriaError
from equilibria.lab.data.digits import load_digits
from equilibria.records.tables import DIVERGING, EDGE, STABLE


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
        grad = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, params, create_graph=True)])

        def product(vector):
            along = torch.autograd.grad(grad @ torch.from_numpy(vector).reshape(-1), params, retain_graph=True)
            return torch.cat([each.reshape(-1) for each in along]).numpy()

        operator = LinearOperator((len(grad),) * 2, matvec=product, dtype=float)
        norm_sq = sum(float(param.detach().square().sum()) for param in params)
        self.found.append(norm_sq * float(eigsh(operator, k=1, which="LA", tol=1e-6)[0][0]))

    def close(self):
        pass


def test_a_network_is_followed_within_the_bound_up_to_the_edge():
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


def test_a_result_with_a_preconditioner_is_not_taken_for_one_without():
    objective = quadratic(torch.diag(torch.linspace(1, 300, 100, dtype=torch.float64)))
    scaled = eq.sharpness(objective, None, preconditioner={"w": torch.linspace(1, 2, 100).double() ** 2})
    assert str(scaled).startswith("preconditioned sharpness")
    with pytest.raises(EquilibriaError, match=r"with a preconditioner; expected .* without a preconditioner"):
        eq.sharpness(objective, None, warm=scaled)
    with pytest.raises(EquilibriaError, match="preconditioner, which SGD has not"):
        scaled.stability_ratio(0.1)
    warm = eq.sharpness(objective, None, warm=eq.sharpness(objective, None))
    assert "an estimate" in str(warm)


def test_flat_along_the_weights_is_not_scale_invariant():
    flat = quadratic(torch.diag(torch.tensor([1e4, 1.0]).double()), torch.tensor([0.0, 1.0]).double())
    with pytest.raises(EquilibriaError, match="doubling weights beside them"):
        eq.sharpness(flat, None, spherical=True)
    torch.manual_seed(0)
    inputs, weights = torch.randn(50, 80).double() + 30, torch.randn(80).double()
    weights -= weights.mean()
    wanted, near = inputs @ weights, nn.Parameter(weights + 1e-3 * torch.randn(80).double())
    objective = eq.Objective(lambda params, _: (inputs @ params["w"] - wanted).square().mean(), {"w": near})
    assert not SharpnessMonitor(objective, torch.optim.SGD([near], lr=1e-4), None).spherical


@pytest.mark.parametrize("ratio", [1.05, 1.5, 5.0])
def test_a_diverging_run_is_called_so(ratio):
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


def test_the_bound_of_small_networks_holds_in_single_precision():
    """On the dense path, group by group, beside float64."""
    objective, batch = net_objective(), images()
    for name in ("0.weight", "1.weight", "1.bias"):
        found = eq.sharpness(objective, batch, select=[name])
        exact = eq.sharpness(objective.double(), batch, select=[name]).value
        assert abs(found.value - exact) <= found.bound[0] * abs(found.value)
