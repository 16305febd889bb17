"""What training scripts do that a watcher can stumble over: scaling, closures, compilers, ties, odd tensors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from tests.helpers.watched_worlds import Account, assert_account, backward, batches, column, make_net, same_bits, train
from torch import nn

from equilibria.errors import WatchWarning
from equilibria.monitor.monitor import Monitor
from equilibria.records.tables import NO_GRADIENT, NOT_FINITE, REMOVED, SKIPPED

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}


def sgd(net, **more):
    return torch.optim.SGD(net.parameters(), **{**SGD, **more})


def adamw(net, **more):
    return torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1, **more)


BOTH = pytest.mark.parametrize("make", [sgd, adamw])


# ---- automatic mixed precision


@BOTH
def test_steps_that_a_scaler_leaves_out_are_not_counted(make):
    """Without a fused optimizer, GradScaler does not call step at all."""
    net = make_net()
    optimizer, scaler, account = make(net), torch.amp.GradScaler("cpu", init_scale=1024.0), Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        taken = 0
        for number, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(batch[0]), batch[1])).backward()
            if number == 2:
                net[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            account.before(taken)
            scaler.step(optimizer)
            if number != 2:
                account.after(taken)
                taken += 1
            scaler.update()
        assert monitor.step == 5
        assert set(column(monitor, "note")) == {None}
        assert_account(monitor, account, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("every", [1, 2])
def test_fused_optimizers_under_a_scaler(make, every):
    """The gradients are still scaled when the step begins, and the optimizer leaves out a step by itself."""
    net = make_net()
    optimizer, scaler = make(net, fused=True), torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
    account = Account(net)
    with Monitor(net, optimizer, every=every) as monitor:
        for number, (inputs, targets) in enumerate(batches(8)):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(inputs), targets)).backward()
            if number == 4:
                net[0].weight.grad[0, 0] = math.inf
            account.scale = scaler.get_scale()
            account.before(number)
            scaler.step(optimizer)
            account.after(number)
            scaler.update()
        assert scaler.get_scale() != 512.0  # it changed meanwhile, more than once
        table = monitor.samples().to_pylist()
    assert monitor.failure is None
    skipped = [row for row in table if row["step"] == 4]
    assert {row["note"] for row in skipped} == {SKIPPED}
    assert {row["angle"] for row in skipped} == {row["update_norm"] for row in skipped} == {0.0}
    slow = {(row["step"], row["param"]): row for row in account.rows}
    for row in table:
        truth = slow[row["step"], row["param"]]
        np.testing.assert_allclose(row["norm"], truth["norm"], rtol=1e-6)
        if row["step"] != 4:
            for name in ("grad_norm", "update_norm", "angle", "unit_grad_sq"):
                np.testing.assert_allclose(row[name], truth[name], rtol=1e-4, err_msg=f"{name} {row}")
            np.testing.assert_allclose(row["cosine"], truth["cosine"], atol=1e-6, rtol=1e-4)


def test_the_momentum_unit_gradient_of_a_scaled_gradient():
    values = {}
    for scale in (1.0, 256.0):
        net = make_net()
        optimizer = sgd(net, fused=True)
        with Monitor(net, optimizer, every=1) as monitor:
            for batch in batches(5):
                optimizer.zero_grad()
                backward(net, batch, scale=scale)
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
                optimizer.step()
            values[scale] = monitor.samples().to_pylist()
    for plain, scaled in zip(values[1.0], values[256.0], strict=True):
        for name in ("momentum_unit_grad_sq", "unit_grad_sq", "angle", "angle_predicted"):
            if plain[name] is None:
                assert scaled[name] is None
            else:
                np.testing.assert_allclose(plain[name], scaled[name], rtol=1e-4, err_msg=name)


@BOTH
def test_a_step_inside_autocast_is_measured_in_full_precision(make):
    net = make_net()
    optimizer, account = make(net), Account(net)
    for granularity in ("tensor", "row"):
        with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
            for number, batch in enumerate(batches(3)):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    optimizer.zero_grad()
                    backward(net, batch)
                    account.before(number)
                    optimizer.step()
                account.after(number)
            if granularity == "tensor":
                assert_account(monitor, account, rtol=1e-4)
            assert monitor.failure is None


# ---- what happens to a gradient before the step


@BOTH
def test_clipped_and_accumulated_gradients(make):
    net = make_net()
    optimizer, account = make(net), Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        step = 0
        for number, batch in enumerate(batches(12)):
            backward(net, batch)
            if number % 3 == 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                account.before(step)
                optimizer.step()
                account.after(step)
                optimizer.zero_grad()
                step += 1
        assert monitor.step == 4
        assert sorted(set(column(monitor, "step"))) == [0, 1, 2, 3]
        assert max(column(monitor, "grad_norm")) <= 0.05
        assert_account(monitor, account, rtol=1e-4)


# ---- closures


@pytest.mark.parametrize("keyword", [False, True])
@BOTH
def test_a_closure(make, keyword):
    net = make_net()
    optimizer, account = make(net), Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        for number, batch in enumerate(batches(4)):

            def closure(number=number, batch=batch):
                optimizer.zero_grad()
                loss = backward(net, batch)
                account.before(number)
                return loss

            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            account.after(number)
        assert monitor.step == 4
        assert_account(monitor, account, rtol=1e-4)
        assert set(column(monitor, "note")) == {None}


def test_a_closure_that_reaches_only_some_weights():
    net = make_net()
    optimizer = sgd(net)

    def closure():
        optimizer.zero_grad()
        loss = net[7](torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(3):
            optimizer.step(closure)
        assert column(monitor, "note", "0.weight") == [NO_GRADIENT] * 3
        assert column(monitor, "note", "7.weight") == [None] * 3
        assert all(angle > 0 for angle in column(monitor, "angle", "7.weight"))


def test_lbfgs_is_measured_from_end_to_end():
    """Many evaluations move the weights in one step; the gradient of none of them stands for all."""
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)
    before, batch = net[0].weight.detach().clone().double(), next(batches(1))

    def closure():
        optimizer.zero_grad()
        return backward(net, batch)

    with Monitor(net, optimizer, every=1) as monitor:
        optimizer.step(closure)
        assert monitor.step == 1
        moved = float((net[0].weight.detach().double() - before).norm())
        np.testing.assert_allclose(column(monitor, "update_norm", "0.weight"), [moved], rtol=1e-6)
        np.testing.assert_allclose(column(monitor, "norm", "0.weight"), [float(before.norm())], rtol=1e-6)
        assert (
            column(monitor, "grad_norm") == column(monitor, "cosine") == column(monitor, "unit_grad_sq") == [None] * 3
        )
        assert set(column(monitor, "note")) == {None}
        (reason,) = {entry["no_law"] for entry in monitor.metadata["params"]}
        assert reason.startswith("no law for LBFGS (not identified): a copy of it cannot be tried")


def test_a_closure_that_raises_leaves_the_watch_in_order():
    net = make_net()
    optimizer, account = adamw(net), Account(net)
    with Monitor(net, optimizer, every=2) as monitor:
        for number, batch in enumerate(batches(6)):

            def fail():
                raise KeyError("data")

            with pytest.raises(KeyError):
                optimizer.step(fail)
            optimizer.zero_grad()
            backward(net, batch)
            account.before(number)
            optimizer.step()
            account.after(number)
        assert sorted(set(column(monitor, "step"))) == [0, 2, 4]
        assert_account(monitor, account, rtol=1e-4)


class CallsItsBase(torch.optim.SGD):
    """Torch puts hooks on the step of every class, so that they run twice here."""

    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_class_counts_once():
    net = make_net()
    optimizer = CallsItsBase(net.parameters(), **SGD)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 4)
        assert monitor.step == 4
        assert column(monitor, "step", "0.weight") == [0, 1, 2, 3]
        assert all(angle > 0 for angle in column(monitor, "angle", "0.weight"))


# ---- compilers

torch_deprecates_itself = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@torch_deprecates_itself
@BOTH
def test_a_compiled_model(make):
    net = make_net()
    compiled = torch.compile(net, backend="eager")
    optimizer, account = make(net), Account(net)
    with Monitor(compiled, optimizer, every=1) as monitor:
        train(compiled, optimizer, 3, before_step=account.before, after_step=account.after)
        assert set(column(monitor, "param")) == {"0.weight", "4.weight", "7.weight"}
        assert_account(monitor, account, rtol=1e-4)


@torch_deprecates_itself
@BOTH
def test_a_compiled_step(make):
    net, plain = make_net(), make_net()
    optimizer, other, account = make(net), make(plain), Account(net)
    step, other_step = (torch.compile(each.step, backend="eager") for each in (optimizer, other))

    with Monitor(net, optimizer, every=2) as monitor:
        for number, batch in enumerate(batches(4)):
            for model, each in ((net, optimizer), (plain, other)):
                each.zero_grad()
                backward(model, batch)
            account.before(number)
            step()
            account.after(number)
            other_step()
        assert monitor.failure is None
        assert sorted(set(column(monitor, "step"))) == [0, 2]
        assert_account(monitor, account, rtol=1e-4)
    assert same_bits(net, plain)


# ---- odd tensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(4, 4, bias=False)

    def forward(self, tokens):
        return self.out(self.frozen(self.embed(tokens)))


@BOTH
def test_tied_frozen_and_unused_weights(make):
    torch.manual_seed(0)
    net = Tied()
    optimizer = make(net)
    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.tensor([1, 2, 3])).square().sum().backward()
            optimizer.step()
        assert monitor.failure is None
        assert [(entry["name"], entry["aliases"]) for entry in monitor.metadata["params"]] == [
            ("embed.weight", ["out.weight"]),
            ("unused.weight", []),
        ]
        assert column(monitor, "note", "embed.weight") == [None] * 3
        assert column(monitor, "note", "unused.weight") == [NO_GRADIENT] * 3
        for name in ("norm", "angle", "grad_norm", "cosine", "angle_predicted", "norm_predicted"):
            assert column(monitor, name, "unused.weight") == [None] * 3


@BOTH
def test_a_weight_without_a_gradient_at_first_does_not_spoil_the_others_forecast(make):
    net = make_net()
    optimizer = make(net)

    def drop(number):
        if number < 2:
            net[4].weight.grad = None

    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 6, before_step=drop)
        assert column(monitor, "note", "4.weight") == [NO_GRADIENT] * 2 + [None] * 4
        for param, absent in (("0.weight", 0), ("4.weight", 2)):
            norms, predicted = (column(monitor, name, param) for name in ("norm", "norm_predicted"))
            assert predicted[:absent] == [None] * absent
            np.testing.assert_allclose(predicted[absent], norms[absent], rtol=1e-6)
            np.testing.assert_allclose(predicted[absent:], norms[absent:], rtol=0.05)


def test_weight_norm_and_other_parametrisations():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    torch.nn.utils.parametrizations.weight_norm(net[0])
    torch.nn.utils.parametrizations.orthogonal(net[1])
    optimizer = adamw(net)
    with Monitor(net, optimizer, every=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().sum().backward()
            optimizer.step()
        assert monitor.failure is None
        assert set(column(monitor, "param")) == {"0.weight.original0", "0.weight.original1", "1.weight"}
        assert max(map(abs, column(monitor, "cosine", "0.weight.original1"))) < 1e-5  # its direction only matters


@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net: torch.optim.SparseAdam(net.parameters(), lr=0.01),
    ],
)
def test_sparse_gradients(make, granularity):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    optimizer, account = make(net), Account(net)
    with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
        for number in range(4):
            optimizer.zero_grad()
            net(torch.tensor([1, 1, number])).square().sum().backward()
            assert net[0].weight.grad.is_sparse
            account.before(number)
            optimizer.step()
            account.after(number)
        assert monitor.failure is None
        if granularity == "tensor":
            assert_account(monitor, account, rtol=1e-4)
        else:
            assert column(monitor, "angle", "0.weight[9]")[0] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@BOTH
def test_gradients_that_are_not_numbers_are_flagged_and_never_raised(make, granularity, value):
    net, plain = make_net(), make_net()
    optimizer, other = make(net), make(plain)

    def spoil(model):
        def change(number):
            if number == 2:
                model[4].weight.grad[1, 1] = value

        return change

    with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
        train(net, optimizer, 5, before_step=spoil(net))
        train(plain, other, 5, before_step=spoil(plain))
        assert monitor.failure is None
        rows = monitor.samples().to_pylist()
    assert all(
        np.array_equal(a.detach(), b.detach(), equal_nan=True)
        for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )
    hit = "4.weight" if granularity == "tensor" else "4.weight[1]"
    (row,) = (row for row in rows if row["param"] == hit and row["step"] == 2)
    assert row["note"] == NOT_FINITE
    assert not math.isfinite(row["grad_norm"])
    assert math.isfinite(row["norm"])
    assert [row["note"] for row in rows if row["step"] < 2] == [None] * len([row for row in rows if row["step"] < 2])
    assert {row["note"] for row in rows if row["step"] > 2} == {NOT_FINITE}  # the weights themselves are lost now
    assert monitor.findings() is not None


@BOTH
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_zero_weights_and_empty_tensors(make, granularity):
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"zero": nn.Linear(3, 3, bias=False), "empty": nn.Linear(3, 3), "one": nn.Linear(1, 1, bias=False)}
    )
    net["empty"].weight = nn.Parameter(torch.zeros(3, 0))
    nn.init.zeros_(net["zero"].weight)
    optimizer = make(net)
    with Monitor(net, optimizer, every=1, granularity=granularity) as monitor:
        for _ in range(3):
            for weight in net.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        assert monitor.failure is None
        first = monitor.samples().to_pylist()[0]
        assert first["norm"] == 0
        assert first["update_norm"] > 0
        assert math.isnan(first["angle"])
        assert monitor.findings() is not None


def test_tensors_without_data_end_the_watch_and_not_the_training():
    net = nn.Linear(3, 3, device="meta")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    monitor = Monitor(net, optimizer, every=1)
    net.weight.grad, net.bias.grad = torch.empty_like(net.weight), torch.empty_like(net.bias)
    with pytest.warns(UserWarning, match="watching has stopped"):
        optimizer.step()
    assert monitor.failure is not None
    optimizer.step()


def test_parameter_groups_added_later_are_named():
    net, late = make_net(), nn.Linear(3, 3)
    optimizer = adamw(net)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        assert not any("not watched" in finding.subject for finding in monitor.findings())
        optimizer.add_param_group({"params": late.parameters(), "lr": 1e-4})
        late.weight.grad = torch.ones(3, 3)
        with pytest.warns(WatchWarning, match="optimizer0.group1.0 is trained but not watched") as caught:
            train(net, optimizer, 2)
        assert [Path(each.filename).name for each in caught] == ["watched_worlds.py"]  # once, at optimizer.step()
        assert monitor.failure is None
        assert monitor.step == 4
        assert len(monitor.metadata["params"]) == 3
        assert "optimizer0.group1.0 is trained" in monitor.findings()[0].subject
        resumed = monitor.state_dict()
        monitor.load_state_dict(resumed)


def test_what_would_not_have_been_watched_is_not_missed_later():
    net = make_net()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with Monitor(net, optimizer, every=1, select="0.*") as monitor:
        optimizer.add_param_group({"params": list(net[4].parameters()) + list(net[1].parameters())})
        train(net, optimizer, 2)
        assert not any("not watched" in finding.subject for finding in monitor.findings())


def test_tensors_that_are_unfrozen_later_are_named():
    net = make_net()
    net[4].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 2)
        net[4].requires_grad_(True)
        train(net, optimizer, 2)
        assert "4.weight is trained but not watched" in monitor.findings()[0].subject


@BOTH
@pytest.mark.parametrize("by", ["group", "tensor"])
def test_tensors_that_are_taken_out_of_the_optimizer_do_not_move(make, by):
    """SGD's products gave them the angle of a step that nobody took."""
    net = make_net()
    optimizer = make(net)
    first, *others = net.parameters()
    optimizer.param_groups[0]["params"] = others
    optimizer.add_param_group({"params": [first], "weight_decay": 0.01})
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 3)
        if by == "group":
            del optimizer.param_groups[1]
        else:
            optimizer.param_groups[1]["params"].clear()
        kept = first.detach().clone()
        train(net, optimizer, 4)
        assert torch.equal(first, kept)
        assert column(monitor, "note", "0.weight") == [None] * 3 + [REMOVED] * 4
        assert column(monitor, "angle", "0.weight")[3:] == [None] * 4
        subjects = [finding.subject for finding in monitor.findings()]
        assert "0.weight is no longer in the optimizer" in subjects
        assert not any("outside" in subject or "without a gradient" in subject for subject in subjects)
        assert monitor.failure is None and None not in column(monitor, "angle", "4.weight")


def test_parameters_that_nothing_trains_are_named():
    """Frozen ones, those of another optimizer (also one that writes to ``.data``) and the first steps are no news."""
    net = make_net()
    net[1].requires_grad_(False)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 19)
        assert not any(finding.kind == "in_no_optimizer" for finding in monitor.findings())
        train(net, optimizer, 1)
        (finding,) = (finding for finding in monitor.findings() if finding.kind == "in_no_optimizer")
        assert finding.severity == "note"
        assert finding.subject.endswith("are in no watched optimizer and have not changed in 20 steps")
        assert "1.weight" not in finding.subject + finding.remedy
        for param in net[2:].parameters():
            param.data.sub_(0.01)
        assert not any(finding.kind == "in_no_optimizer" for finding in monitor.findings())


# ---- hooks of others, and numbers at the ends of float32


@BOTH
@pytest.mark.parametrize("every", [1, 2])
def test_a_hook_that_clips_and_was_registered_later_is_seen(make, every):
    net = make_net()
    optimizer, account = make(net), Account(net)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        account.before(0)  # what the step sees

    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 4)
        optimizer.register_step_pre_hook(clip)
        train(net, optimizer, 6, after_step=lambda number: account.after(number + 4))
        table = monitor.samples().filter(pc.greater_equal(monitor.samples()["step"], 4)).to_pylist()
    slow = {(row["step"], row["param"]): row for row in account.rows}
    assert len(table) == 3 * 6 // every
    for row in table:
        for name in ("grad_norm", "angle", "update_norm"):
            assert row[name] == pytest.approx(slow[row["step"], row["param"]][name], rel=1e-4)


@pytest.mark.parametrize("size", [1e-22, 1e22])
@pytest.mark.parametrize("entries", [64, 300_000])
@pytest.mark.parametrize("momentum", [0.0, 0.9, None])
def test_norms_whose_squares_leave_float32(size, entries, momentum):
    draw = torch.Generator().manual_seed(0)
    net = nn.Linear(entries // 4, 4, bias=False)
    with torch.no_grad():
        net.weight.mul_(size)
    if momentum is None:
        optimizer = torch.optim.AdamW(net.parameters(), lr=size * 1e-3, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)
    account = Account(net)
    with Monitor(net, optimizer, every=1) as monitor:
        for number in range(4):
            scale = 0.1 if momentum is None else size * 0.1  # Adam squares it itself
            net.weight.grad = scale * torch.randn(4, entries // 4, generator=draw) / entries**0.5
            account.before(number)
            optimizer.step()
            account.after(number)
        angles = column(monitor, "angle")
    assert angles == pytest.approx([row["angle"] for row in account.rows], rel=1e-4)


def test_a_weight_that_grows_ends_the_watching_not_the_training():
    layer = nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Monitor(layer, optimizer, every=1, granularity="row"):
        layer.weight.grad = torch.randn(4, 8)
        optimizer.step()
        layer.weight.data, layer.weight.grad = torch.randn(200, 8), None
        layer.weight.grad = torch.randn(200, 8)
        with pytest.warns(UserWarning, match="got 200 rows, for 4 of which there is room"):
            optimizer.step()


def test_state_that_is_not_what_its_name_says_is_not_read():
    layer = nn.Linear(64, 300, bias=False)
    optimizer = torch.optim.RMSprop(layer.parameters())
    layer.weight.grad = torch.randn(300, 64)
    optimizer.step()
    optimizer.state[layer.weight]["exp_avg"] = torch.randn(2, 64)  # low-rank, say
    with Monitor(layer, optimizer, every=1) as monitor:
        optimizer.step()
        assert monitor.failure is None
        assert monitor.samples().num_rows == 1
