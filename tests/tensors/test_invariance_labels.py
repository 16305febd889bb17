"""Watching with symmetries: what they found decides which weights are predicted, and is shown."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import equilibria as eq
from equilibria.diagnosis.summary import summarise
from equilibria.errors import EquilibriaError
from equilibria.symmetry import symmetries as find_symmetries
from equilibria.tensors.invariance import invariant_tensors, with_invariance
from equilibria.tensors.parameters import find_watched


class Net(nn.Module):
    """A convolution before BatchNorm, a linear layer with a bias before LayerNorm, and a head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.joint = nn.Linear(16, 12)
        self.ln = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        hidden = functional.adaptive_avg_pool2d(torch.tanh(self.bn(self.conv(x))), 2).flatten(1)
        return self.head(torch.tanh(self.ln(self.joint(hidden))))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 1, 6, 6, generator=generator), torch.randint(3, (32,), generator=generator)


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    net = Net()
    return net, find_symmetries(eq.objective(net, functional.cross_entropy), [batch()], progress=False)


def train(net, steps=30, **how):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    with eq.watch(net, optimizer, every=1, **how) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            inputs, targets = batch(step)
            functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return monitor


def test_only_what_is_invariant_alone_is_predicted_and_the_others_say_why(found):
    net, symmetries = found
    monitor = train(net, invariant=symmetries)
    layers = {layer.name: layer for layer in summarise(monitor.samples(), metadata=monitor.metadata)}
    assert layers["conv.weight"].how == "rows" and layers["conv.weight"].invariant
    assert layers["conv.weight"].angle_predicted is not None
    for name, how in (("joint.weight", "jointly with joint.bias"), ("head.weight", "no")):
        assert layers[name].how == how and layers[name].invariant is False
        assert layers[name].angle_predicted is None
    assert "not scale-invariant by itself (jointly with joint.bias)" in layers["joint.weight"].sentence
    assert not any("partly" in finding.subject for finding in monitor.findings())


def test_by_rows_only_rows_that_are_invariant_by_themselves_are_predicted(found):
    net, symmetries = found
    monitor = train(net, invariant=symmetries, granularity="row")
    layers = {layer.name: layer for layer in summarise(monitor.samples(), metadata=monitor.metadata)}
    assert all(layers[f"conv.weight[{row}]"].invariant for row in range(4))
    assert not any(layers[f"joint.weight[{row}]"].invariant for row in range(12))


def test_rows_that_stand_in_groups_are_not_predicted_one_by_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.randn(16, 4), torch.arange(16) % 3
    symmetries = find_symmetries(eq.objective(net, functional.cross_entropy), [data])
    assert symmetries.rows["0.weight"].invariant == (True, True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    row, whole = (
        with_invariance(
            find_watched(net, [optimizer], select=["0.weight"], granularity=granularity), symmetries, model=net
        )[0]
        for granularity in ("row", "tensor")
    )
    assert row.invariant == (False,) * 8
    assert whole.invariant == (True,)


def test_the_table_and_the_page_show_how(found, tmp_path):
    net, symmetries = found
    monitor = train(net, steps=8, invariant=symmetries)
    shown = str(monitor.table())
    assert "invariant" in shown and "rows" in shown and "jointly" in shown
    page = monitor.report(tmp_path / "a.html").read_text()
    assert "jointly with joint.bias" in page
    assert "jointly" not in train(net, steps=8).report(tmp_path / "b.html").read_text()


def test_symmetries_of_another_model_or_of_another_kind_are_refused(found):
    _, symmetries = found
    other = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(EquilibriaError, match=r"none of which is watched; expected those of this model.*0\.weight"):
        eq.watch(other, optimizer, invariant=symmetries)
    with pytest.raises(EquilibriaError, match=r"got invariant=int; expected a list of the scale-invariant tensors"):
        eq.watch(other, optimizer, invariant=7)


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_names_and_tensors_label_the_weights_too(as_tensors, granularity):
    torch.manual_seed(0)
    net = Net()
    listed = [net.conv.weight, net.bn.bias] if as_tensors else ["conv.weight", "bn.bias"]  # bn.bias is not watched
    monitor = train(net, steps=8, invariant=listed, granularity=granularity)
    units = monitor.metadata["params"]
    assert {unit["name"].partition("[")[0] for unit in units if unit["invariant"]} == {"conv.weight"}
    assert not any(unit["invariant"] is None for unit in units)
    last = monitor.samples().to_pylist()[-len(units) :]
    assert {row["param"].partition("[")[0] for row in last if row["angle_predicted"] is not None} == {"conv.weight"}


@pytest.mark.parametrize(
    ("invariant", "message"),
    [
        (
            ["conv.wieght"],
            r"'conv.wieght', which is none of the model's parameters; expected their names, such as co",
        ),
        ([nn.Parameter(torch.ones(2, 2))], r"shape \(2, 2\) that is none of the model's 9"),
        ([], "which names nothing here"),
        (["conv.weight", 3], "expected names, tensors or a result of symmetries"),
    ],
)
def test_names_and_tensors_of_nothing_raise(invariant, message):
    net = Net()
    with pytest.raises(EquilibriaError, match=message):
        eq.watch(net, torch.optim.SGD(net.parameters(), lr=0.1), invariant=invariant)


def test_symmetries_of_a_model_with_the_same_names_are_refused(found):
    _, symmetries = found
    other = Net()
    other.joint, other.ln, other.head = nn.Linear(16, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    message = r"got symmetries of another model: there joint\.weight has 192 numbers, here 96"
    with pytest.raises(EquilibriaError, match=message):
        eq.watch(other, optimizer, invariant=symmetries)
    with pytest.raises(EquilibriaError, match=message):
        eq.split_decay(other, weight_decay=0.1, invariant=symmetries)
    with pytest.raises(EquilibriaError, match=message):
        invariant_tensors(symmetries, optimizer=optimizer, model=other)
