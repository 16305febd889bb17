"""Every measured column against copies of the weights around the step, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers.odd_tensors import tangent
from tests.helpers.watched_worlds import Account, assert_account, backward, batches, column, make_net, measure, train
from torch import nn

from equilibria.control._lion import Lion
from equilibria.monitor.monitor import Monitor
from equilibria.records.tables import DISTURBED, SETTLED, SETTLING
from equilibria.theory.rules import Muon

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=5e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-3),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-3, dampening=0.4),
    "dampening without momentum": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=5e-3, dampening=0.4),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-3, nesterov=True),
    "Nesterov without decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=5e-3, maximize=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-3, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.01),
    "Adam, decoupled": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([w for w in p if w.ndim == 2], lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_measured_columns(make, every):
    net = make_net()
    optimizer = make(net.parameters())
    account = Account(net)
    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 9, before_step=account.before, after_step=account.after)
        assert sorted(set(column(monitor, "step"))) == list(range(0, 9, every))
        assert set(column(monitor, "param")) == {"0.weight", "4.weight", "7.weight"}
        assert set(column(monitor, "note")) == {None}
        # float32 weights are rounded by 6e-8 of themselves, against moves of 1e-3 of them
        assert_account(monitor, account, rtol=1e-4)


@pytest.mark.parametrize("name", ["momentum", "AdamW", "RMSprop"])
def test_measured_columns_in_float64(name):
    net = make_net().double()
    optimizer = OPTIMIZERS[name](net.parameters())
    account = Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 9, before_step=account.before, after_step=account.after)
        assert_account(monitor, account, rtol=1e-9, cosine_atol=1e-12)


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_measured_columns_in_bfloat16(name):
    net = make_net().bfloat16()
    optimizer = OPTIMIZERS[name](net.parameters())
    account = Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 9, before_step=account.before, after_step=account.after)
        assert_account(monitor, account)  # of the weights as they are, rounded to bfloat16
        assert {entry["dtype"] for entry in monitor.metadata["params"]} == {"bfloat16"}


@pytest.mark.parametrize("name", ["SGD with decay", "momentum", "Nesterov without decay", "AdamW", "RMSprop"])
@pytest.mark.parametrize("angle", [1e-3, 1e-5])
def test_small_angles(name, angle):
    """Right to 1e-4 down to 1e-5 rad in float32, where arccos of a cosine has no digit left."""
    torch.manual_seed(0)
    net = nn.Linear(200, 100, bias=False)
    optimizer = OPTIMIZERS[name](net.parameters())
    for group in optimizer.param_groups:
        group["lr"] = angle * {"AdamW": 0.06, "RMSprop": 0.006}.get(name, 1.0)
        group["weight_decay"] = 0.0 if name == "Nesterov without decay" else 0.01
    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(3):
            net.weight.grad = torch.randn(100, 200) / 140 * float(net.weight.detach().norm())
            before, gradient = net.weight.detach().clone(), net.weight.grad.clone()
            optimizer.step()
            truth = measure(before.double(), gradient, net.weight.detach().double())
            assert 0.1 * angle < truth["angle"] < 30 * angle
            np.testing.assert_allclose(column(monitor, "angle")[-1], truth["angle"], rtol=1e-4)


@pytest.mark.parametrize("name", ["momentum", "Nesterov without decay", "AdamW", "RMSprop", "Lion"])
def test_rows(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3))
    optimizer = OPTIMIZERS[name](net.parameters())
    with Monitor(net, optimizer, every=1, granularity="row") as monitor:
        for step in range(4):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 1, 6, 6)).square().mean()
            loss.backward()
            before = {key: weight.detach().double().clone() for key, weight in net.named_parameters()}
            gradients = {key: weight.grad.double().clone() for key, weight in net.named_parameters()}
            optimizer.step()
            table = [row for row in monitor.samples().to_pylist() if row["step"] == step]
            axes = {"0.weight": 0, "1.weight": 1, "3.weight": 0}
            assert [row["param"] for row in table] == [
                f"{key}[{index}]" for key, axis in axes.items() for index in range(before[key].shape[axis])
            ]
            for row in table:
                key, index = row["param"].rstrip("]").split("[")
                weight = dict(net.named_parameters())[key].detach().double()
                parts = [tensor.select(axes[key], int(index)) for tensor in (before[key], gradients[key], weight)]
                truth = measure(*parts)
                for field in ("norm", "grad_norm", "update_norm", "angle", "unit_grad_sq"):
                    np.testing.assert_allclose(row[field], truth[field], rtol=1e-4, err_msg=f"{field} {row}")


@pytest.mark.parametrize("dampening", [0.0, 0.4])
def test_the_unit_gradient_with_momentum(dampening):
    """(||g||^2 + 2 a <v, g> / (1 - dampening)) ||w||^2, v the buffer before the step."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, weight_decay=5e-3, dampening=dampening)
    expected = []

    def before(_):
        w, g = net[4].weight.detach().double(), net[4].weight.grad.double()
        v = optimizer.state.get(net[4].weight, {}).get("momentum_buffer")
        vg = 0.0 if v is None else float((v.double() * g).sum())
        expected.append(float((g.square().sum() + 2 * 0.8 * vg / (1 - dampening)) * w.square().sum()))

    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 6, before_step=before)
        np.testing.assert_allclose(column(monitor, "momentum_unit_grad_sq", "4.weight"), expected, rtol=1e-4)


def test_settings_are_those_of_the_step():
    net = make_net()
    groups = [{"params": net[0].parameters(), "weight_decay": 0.5}, {"params": net[4].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.99))

    def change(number):
        optimizer.param_groups[0]["lr"] = 1e-3 / (number + 2)
        optimizer.param_groups[1]["weight_decay"] = 0.1 * number
        optimizer.param_groups[1]["betas"] = (0.8 - 0.1 * number, 0.99)

    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 4, after_step=change)
        np.testing.assert_allclose(column(monitor, "lr", "0.weight"), [1e-3 / k for k in (1, 2, 3, 4)])
        assert column(monitor, "lr", "4.weight") == [1e-3] * 4
        assert column(monitor, "weight_decay", "0.weight") == [0.5] * 4
        np.testing.assert_allclose(column(monitor, "weight_decay", "4.weight"), [0.1, 0.0, 0.1, 0.2])
        np.testing.assert_allclose(column(monitor, "momentum", "4.weight"), [0.8, 0.8, 0.7, 0.6])
        assert monitor.failure is None


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_a_learning_rate_in_a_tensor(name):
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    optimizer.param_groups[0]["foreach"] = False
    account = Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        for number, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            backward(net, batch)
            account.before(number)
            optimizer.step()
            account.after(number)
            optimizer.param_groups[0]["lr"].mul_(0.5)  # as a scheduler does, in place
        np.testing.assert_allclose(column(monitor, "lr", "0.weight"), [0.01, 0.005, 0.0025, 0.00125], rtol=1e-6)
        assert_account(monitor, account, rtol=1e-3)


def test_unknown_optimizers_are_measured_and_have_no_law():
    net = make_net()
    optimizer = torch.optim.RMSprop(net.parameters())
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        for name in ("angle_predicted", "norm_predicted", "angle_equilibrium", "norm_equilibrium", "steps_to_settle"):
            assert column(monitor, name) == [None] * 9
        expected = "no law for RMSprop (no decay): without weight decay there is no equilibrium"
        assert {entry["no_law"] for entry in monitor.metadata["params"]} == {expected}
        assert set(column(monitor, "state")) == {"none"}


def test_channels_last():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    for name in ("momentum", "AdamW"):
        optimizer = OPTIMIZERS[name](net.parameters())
        account = Account(net)
        with Monitor(net, optimizer, every=1) as monitor:
            for number in range(4):
                optimizer.zero_grad()
                net(torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean().backward()
                account.before(number)
                optimizer.step()
                account.after(number)
            assert_account(monitor, account, rtol=1e-4)


def test_a_drop_of_the_learning_rate_is_sampled_where_it_happens():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    monitor = Monitor(net, optimizer, every="auto")
    monitor._sampler._budget.interval = lambda: 50.0
    monitor._sampler._start_left = 0.0  # the start of a run is sampled more densely
    for count, lr in ((70, 0.1), (70, 0.01)):
        optimizer.param_groups[0]["lr"] = lr
        train(net, optimizer, count)
    monitor.close()
    steps = sorted(set(monitor.samples()["step"].to_pylist()))
    assert 70 in steps
    assert len(steps) < 12  # the interval doubles at most: 1, 2, 4, ..., 64, then 50


@pytest.mark.parametrize("kind", ["AdamW", "SGD with a closure"])
def test_rows_of_float64_weights(kind):
    """Where the copy of the weight needs no conversion, it must not be refreshed before it was compared."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4)).double()
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    monitor = Monitor(net, optimizer, every=1, granularity="row")
    norms = []
    for _ in range(10):

        def closure():
            optimizer.zero_grad()
            loss = net(torch.randn(32, 8, dtype=torch.float64)).pow(3).mean()
            loss.backward()
            return loss

        norms += net[0].weight.detach().norm(dim=1).tolist()
        if kind == "AdamW":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
    monitor.close()
    rows = [row for row in monitor.samples().to_pylist() if row["param"].startswith("0.weight")]
    np.testing.assert_allclose([row["norm"] for row in rows], norms, rtol=1e-12)
    assert max(abs(row["cosine"]) for row in rows) < 1e-3
    assert {row["note"] for row in rows} == {None}


def test_going_uphill_on_the_negative_is_going_downhill():
    theory = ("norm_predicted", "angle_predicted", "momentum_unit_grad_sq", "norm_equilibrium", "steps_to_settle")
    found = []
    for maximize in (False, True):
        torch.manual_seed(0)
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3, maximize=maximize)
        monitor = Monitor(net, optimizer, every=1)
        for inputs, targets in batches(25):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            (-loss if maximize else loss).backward()
            optimizer.step()
        monitor.close()
        found.append(monitor.samples())
    for name in theory:
        plain, uphill = (np.array(table[name].to_pylist(), dtype=float) for table in found)
        np.testing.assert_allclose(uphill, plain, rtol=1e-5, err_msg=name)


def test_a_sample_is_handed_on_at_once():
    """Training may pause for an evaluation, or for ever: nothing waits for the next step."""
    received = []

    class Sink:
        def append(self, columns):
            received.append(columns["step"][0])

        def close(self):
            pass

    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    monitor = Monitor(net, optimizer, every=1, sinks=[Sink()])
    train(net, optimizer, 3)
    assert received == [0, 1, 2]
    monitor.close()


def test_a_vanished_gradient_is_not_settled():
    """The norm may pass its running target; the angle is far below equilibrium then."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-4)
    inputs, targets = torch.randn(32, 8), torch.randint(0, 4, (32,))
    monitor = Monitor(net, optimizer, every=1, select=["0.weight"])
    for _ in range(600):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    monitor.close()
    table = monitor.samples().to_pydict()
    late = range(300, 600)
    ratio = [table["angle"][step] / table["angle_equilibrium"][step] for step in late]
    assert max(ratio) < 0.3
    assert {table["state"][step] for step in late} == {"settling"}


@pytest.mark.parametrize("every", [3, 20])
def test_a_smooth_schedule_disturbs_nothing_and_a_drop_does(every):
    """What falls behind a cosine is approaching its moving target, however it is sampled."""

    def states(factor):
        draw, net = torch.Generator().manual_seed(0), nn.Linear(30, 30, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        with Monitor(net, optimizer, every=every) as monitor:
            for _ in range(1000):
                weight = net.weight.detach().double()
                net.weight.grad = (tangent(weight, draw) / weight.norm() ** 2).float()
                optimizer.step()
                scheduler.step()
            return set(column(monitor, "state"))

    assert states(lambda step: 0.505 + 0.495 * math.cos(math.pi * step / 1000)) == {SETTLING, SETTLED}
    assert states(lambda step: 1.0 if step < 600 else 0.1) == {SETTLING, SETTLED, DISTURBED}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
@pytest.mark.parametrize(("shape", "shortened"), [((24, 24), 0.14), ((12, 48), 0.02)])
def test_what_orthogonalisation_leaves_of_muons_memory_is_measured(shape, shortened):
    """The momentum's own memory would be off by 18 % for square matrices; 1,000 angles are good to 1 %."""
    draw, net = torch.Generator().manual_seed(0), nn.Linear(shape[1], shape[0], bias=False)
    rule = Muon(0.02, 0.2, momentum=0.9)
    optimizer = torch.optim.Muon(net.parameters(), lr=rule.lr, weight_decay=rule.weight_decay, momentum=rule.momentum)
    with Monitor(net, optimizer, every=2) as monitor:
        for _ in range(1600):
            weight = net.weight.detach().double()
            net.weight.grad = (tangent(weight, draw) / weight.norm() ** 2).float()
            optimizer.step()
        late = {
            name: np.array(column(monitor, name), dtype=float)[-400:]
            for name in ("angle", "angle_predicted", "angle_equilibrium", "norm", "norm_predicted", "norm_equilibrium")
        }
        assert monitor.findings() == ()
    rms = {name: math.sqrt(np.mean(values**2)) for name, values in late.items()}
    for kind in ("predicted", "equilibrium"):
        assert rms["angle"] == pytest.approx(rms[f"angle_{kind}"], rel=0.02)
        assert rms["norm"] == pytest.approx(rms[f"norm_{kind}"], rel=0.02)
    assert rms["angle"] > (1 + shortened) * rule.equilibrium().angle


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
@pytest.mark.parametrize("shape", [(24, 24), (12, 48)])
def test_muons_memory_is_that_of_its_shape_until_it_is_measured(shape):
    """The momentum's own memory would make the angle of a square matrix 17 % too small."""
    draw, net = torch.Generator().manual_seed(0), nn.Linear(shape[1], shape[0], bias=False)
    optimizer = torch.optim.Muon(net.parameters(), lr=0.02, weight_decay=0.2, momentum=0.9)
    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(3):
            net.weight.grad = tangent(net.weight.detach().double(), draw).float()
            optimizer.step()
        stated = column(monitor, "angle_equilibrium")
    assert stated[-1] == pytest.approx(Muon(0.02, 0.2, momentum=0.9, shape=shape).equilibrium().angle, rel=1e-3)
