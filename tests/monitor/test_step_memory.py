"""What connects a step with earlier ones: turning over many steps, the pull of a gradient on the last move, kappa."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.watched_worlds import backward, batches, column, make_net, train

import equilibria as eq
from equilibria.monitor.monitor import Monitor
from equilibria.monitor.sampler import Sampler
from equilibria.monitor.step_memory import LONGEST, Comparison, DiffusionLog
from equilibria.tensors.device_queue import Sent
from equilibria.tensors.subsample import Subsample

DISTANCES = [2**power for power in range(11)]
# Without samples in between. A pair of n steps begins n steps after another one as well, and short ones thrice.
BURSTS = {(begin + after, n) for begin in (0, 256, 512) for n in (2, 4, 8, 16) for after in (0, n)}
BURSTS |= {(begin, 32) for begin in (0, 256, 512)} | {(32, 32), (0, 1), (1, 1)}
PAIRS = BURSTS | {(begin, n) for n in DISTANCES[6:10] for begin in (0, n)} | {(0, 1024)}
PAIRS |= {(LONGEST + begin, n) for begin, n in PAIRS if begin + n <= 64}


def sgd(net, **settings):
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "weight_decay": 5e-3, **settings})


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)


def history_of(net, optimizer, steps, *, seed=1):
    """Train, and return the weights before every step and after the last, in float64."""
    kept = []

    def keep(_):
        kept.append({name: param.detach().double().clone() for name, param in net.named_parameters()})

    train(net, optimizer, steps, seed=seed, before_step=keep)
    keep(None)
    return kept


def turned(a, b):
    return -math.log(float((a * b).sum() / (a.norm() * b.norm())))


@pytest.mark.parametrize(("make", "granularity"), [(sgd, "row"), (adamw, "tensor")])
def test_turning_is_that_of_the_weights(make, granularity):
    """Tensors of fewer than 1,024 entries are read whole, and rows of at most 64."""
    net = make_net()
    optimizer = make(net)
    with Monitor(net, optimizer, every=500, granularity=granularity) as monitor:
        kept = history_of(net, optimizer, LONGEST + 70)
        rows = monitor.diffusion().to_pylist()
    units = 3 if granularity == "tensor" else 8 + 8 + 3
    assert len(rows) == len(PAIRS) * units
    assert {(row["step"], row["distance"]) for row in rows} == PAIRS
    for row in rows:
        name, _, index = row["param"].removesuffix("]").partition("[")
        a, b = (kept[step][name] for step in (row["step"], row["step"] + row["distance"]))
        a, b = (a[int(index)], b[int(index)]) if index else (a, b)
        assert row["turned"] == pytest.approx(turned(a, b), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_samples_every_four_steps_make_a_pair_of_up_to_32_steps_every_32_steps(momentum):
    net = make_net()
    optimizer = sgd(net, momentum=momentum)
    with Monitor(net, optimizer, every=4) as monitor:
        train(net, optimizer, LONGEST)
        rows = [row for row in monitor.diffusion().to_pylist() if row["param"] == "0.weight"]
    pairs = {n: [row["step"] for row in rows if row["distance"] == n] for n in (2, 4, 8, 16, 32)}
    assert {n: len(steps) for n, steps in pairs.items()} == {2: 6, 4: 32, 8: 32, 16: 32, 32: 31}  # one to come
    assert all(np.min(np.diff(steps)) >= n for n, steps in pairs.items()), "pairs of one distance do not overlap"


def test_the_coordinates_are_read_at_two_per_cent_of_the_steps(monkeypatch):
    net = make_net()
    optimizer = sgd(net, momentum=0.9)
    reads = []
    monkeypatch.setattr(
        Subsample, "weights", lambda self, out, read=Subsample.weights: reads.append(1) or read(self, out)
    )
    with Monitor(net, optimizer, every=10**6):
        train(net, optimizer, 2 * LONGEST)
    assert len(reads) == 2 * 21


def test_a_large_tensor_is_represented_by_a_thousand_coordinates():
    torch.manual_seed(0)
    net = torch.nn.Linear(200, 200, bias=False)
    optimizer = sgd(net)
    start = net.weight.detach().double().clone()
    with Monitor(net, optimizer, every=100) as monitor:
        for _ in range(65):
            net.weight.grad = torch.randn(200, 200)
            before = net.weight.detach().double().clone()
            optimizer.step()
        row = monitor.diffusion().to_pylist()[-1]
    assert row["distance"] == 64
    # Gaussian moves and weights at 1,024 coordinates: sqrt(2/k) of each, 6 % together; four standard errors
    assert row["turned"] == pytest.approx(turned(start, before), rel=0.25)


@given(scale=st.floats(1e-3, 1e3), angle=st.floats(1e-6, 1.5), length=st.floats(1e-2, 1e2))
def test_turning_depends_on_the_angle_alone(scale, angle, length):
    a, b = np.array([length, 0.0]), scale * length * np.array([math.cos(angle), math.sin(angle)])
    move = b - a
    products = Sent(np.array([[a @ a, a @ move, move @ move]]))
    measured = Comparison(0, 1, np.array([0]), products).turned()
    assert measured[0] == pytest.approx(-math.log(math.cos(angle)), rel=1e-6, abs=1e-15 * max(scale, 1 / scale) ** 2)


@pytest.mark.parametrize("large", [0.0, 2.0])
def test_a_few_large_entries_of_a_large_tensor_count_whether_they_are_read_or_not(large):
    torch.manual_seed(0)
    net = torch.nn.Linear(200, 200, bias=False)
    with torch.no_grad():
        net.weight[0, :40] = large  # most of the norm; 1,024 coordinates hold one of them on average
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002)
    kept = []
    with Monitor(net, optimizer, every=2) as monitor:
        for _ in range(97):
            net.weight.grad = torch.randn(200, 200)
            kept.append(net.weight.detach().double().clone())
            optimizer.step()
        rows = [row for row in monitor.diffusion().to_pylist() if row["distance"] == 16]
    measured = np.mean([row["turned"] for row in rows])
    expected = np.mean([turned(kept[row["step"]], kept[row["step"] + 16]) for row in rows])
    # Gaussian moves at 1,024 coordinates: sqrt(2/1024) = 4.4 % for a pair, 2.2 % for four; four standard errors
    assert len(rows) == 4 and measured == pytest.approx(expected, rel=0.09)


def test_from_a_right_angle_on_there_is_no_number():
    products = Sent(np.array([[1.0, 1.0, np.nan], [-1.0, -1.5, 0.0], [2.0, 4.0, 1.0]]).T)
    log = DiffusionLog()
    log.add(Comparison(5, 2, np.array([0, 1, 2]), products), ["a", "b", "c"])
    assert log.table().to_pylist() == [{"step": 5, "param": name, "distance": 2, "turned": None} for name in ("a", "b")]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("stop", [3, 8, 9])
def test_a_resumed_run_compares_with_the_reference_from_before(stop, tmp_path):
    def run(log_dir, *stops):
        net = make_net()
        optimizer, saved, start = adamw(net), None, 0
        for end in (*stops, 40):
            if saved is not None:
                net, optimizer = make_net(seed=9), None
                optimizer = adamw(net)
            monitor = eq.watch(net, optimizer, every=2, log_dir=log_dir)
            if saved is not None:
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                monitor.load_state_dict(saved[2])
            for step in range(start, end):
                train(net, optimizer, 1, seed=100 + step)
            saved, start = through_a_file([copy.deepcopy(x.state_dict()) for x in (net, optimizer, monitor)]), end
            seen = monitor.diffusion().to_pylist()
            monitor.close()
        return seen, eq.read_run(log_dir).diffusion().to_pylist()

    expected, recorded = run(tmp_path / "whole")
    assert recorded == expected
    assert {row["distance"] for row in expected} == {1, 2, 4, 8, 16, 32}
    seen, recorded = run(tmp_path / "parts", stop)
    assert seen == recorded == expected


def test_rolling_back_supersedes_later_comparisons(tmp_path):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        train(net, optimizer, 5)
        saved = copy.deepcopy([part.state_dict() for part in (net, optimizer, monitor)])
        train(net, optimizer, 20, seed=2)
        for part, state in zip((net, optimizer, monitor), saved, strict=True):
            part.load_state_dict(state)
        train(net, optimizer, 6, seed=3)
        monitor.flush()
        in_memory = monitor.diffusion()
    distances = [row["distance"] for row in in_memory.to_pylist() if row["param"] == "0.weight"]
    assert distances == [1, 1, 2, 2, 4, 4, 8]
    assert eq.read_run(tmp_path / "run").diffusion().to_pylist() == in_memory.to_pylist()


def test_a_weight_changed_from_outside_is_left_out_until_the_next_reference():
    net = make_net()
    optimizer = sgd(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 5)
        with torch.no_grad():
            net[0].weight.add_(1.0)
        train(net, optimizer, 15, seed=2)
        rows, pulls = monitor.diffusion().to_pylist(), column(monitor, "pull", "0.weight")
    distances = {name: [row["distance"] for row in rows if row["param"] == name] for name in ("0.weight", "4.weight")}
    assert distances == {"0.weight": [1, 1, 2, 2, 4, 8], "4.weight": [1, 1, 2, 2, 4, 4, 8, 8, 16]}
    assert [step for step, pull in enumerate(pulls) if pull is not None] == [1, 3, 7, 9, 11, 13, 15, 17, 19]


# ---- the pull on the last move


@pytest.mark.parametrize(("every", "read"), [(1, {1, 3, 5, 7, 9, 11}), (3, {3, 6, 9, 12})])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
def test_the_pull_is_that_of_the_gradient_on_the_last_move(make, granularity, every, read):
    """Two steps apart at least."""
    net = make_net()
    optimizer = make(net)
    expected, scaled, before = {}, {}, {}
    with Monitor(net, optimizer, every=every, granularity=granularity) as monitor:
        for step, batch in enumerate(batches(13)):
            optimizer.zero_grad()
            backward(net, batch)
            for name, param in net.named_parameters():
                gradient, weight = param.grad.double(), param.detach().double().clone()
                if name in before:
                    expected[step, name] = gradient * (weight - before[name])
                if "exp_avg_sq" in optimizer.state[param]:
                    root = optimizer.state[param]["exp_avg_sq"].double().sqrt()
                    scaled[step, name] = torch.where(root > 0, gradient**2 / root, 0.0)
                before[name] = weight
            optimizer.step()
        rows = monitor.samples().to_pylist()
    assert {row["step"] for row in rows} == set(range(0, 13, every))
    for row in rows:
        name, _, index = row["param"].removesuffix("]").partition("[")
        for column_name, slow in (("pull", expected), ("scaled_grad_sq", scaled)):
            parts = slow.get((row["step"], name)) if row["step"] in read else None
            if parts is None:
                assert row[column_name] is None
            else:
                whole = parts[int(index)].sum() if index else parts.sum()
                assert row[column_name] == pytest.approx(float(whole), rel=1e-5, abs=1e-9)


def test_heavy_ball_momentum_needs_no_pull_and_nesterov_does():
    for nesterov in (False, True):
        net = make_net()
        optimizer = sgd(net, momentum=0.9, nesterov=nesterov)
        with Monitor(net, optimizer, every=1) as monitor:
            train(net, optimizer, 6)
            pulls = column(monitor, "pull", "0.weight")
        assert [pull is not None for pull in pulls] == [False, nesterov, False, nesterov, False, nesterov]


def test_there_is_no_pull_where_the_gradient_is_not_known_before_the_step():
    net = make_net()
    optimizer = adamw(net)
    batch = next(batches(1))

    def closure():
        optimizer.zero_grad()
        return backward(net, batch)

    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(4):
            optimizer.step(closure)
        assert set(column(monitor, "pull")) == {None}


def test_the_step_before_an_automatic_sample_is_known():
    sampler = Sampler("auto")
    assert sampler.is_due(0, count=10, step=10, jumps=False)
    sampler.wish(0, 10)
    sampler.plan_next(0, 10, 5.0)
    assert [step for step in range(10, 15) if sampler.expects(0, count=step, step=step)] == [14]
    fixed = Sampler(3)
    assert [step for step in range(7) if fixed.expects(0, count=step, step=step)] == [2, 5]


# ---- kappa


def test_update_gain_is_kappa_of_adamw():
    net = make_net()
    optimizer = adamw(net)
    beta1, beta2 = 0.9, 0.999
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 20)
        measured = column(monitor, "update_gain", "4.weight")[-1]
    state = optimizer.state[net[4].weight]
    first, second = state["exp_avg"] / (1 - beta1**20), state["exp_avg_sq"] / (1 - beta2**20)
    kappa = (1 + beta1) / (1 - beta1) * float((first / (second.sqrt() + 1e-8)).square().mean())
    assert measured == pytest.approx(kappa, rel=1e-3)  # float32 rounds the new weight


@pytest.mark.parametrize("make", [sgd, lambda net: torch.optim.Adam(net.parameters(), weight_decay=0.01)])
def test_other_rules_have_no_update_gain(make):
    net = make_net()
    optimizer = make(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        assert set(column(monitor, "update_gain")) == {None}
