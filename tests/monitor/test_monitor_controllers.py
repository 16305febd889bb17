"""Controllers announce themselves: predictions continue across a rescaling, and a promised angle is expected."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import column, make_net, train
from torch.optim.lr_scheduler import CosineAnnealingLR

from equilibria.control import FoldedWeightDecay, RescaleOnDecay, Rotational, TaperedExponential
from equilibria.diagnosis import diagnose
from equilibria.diagnosis.summary import summarise
from equilibria.monitor.monitor import Monitor
from equilibria.records.tables import CHANGED_OUTSIDE, RESCALED

INVARIANT = ["0.weight"]
pytestmark = pytest.mark.filterwarnings("ignore:the norm of:equilibria.control.RescaleWarning")  # short, unsettled runs
OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1),
}


def rescaled(net, optimizer, *, rates=50):
    schedule = CosineAnnealingLR(optimizer, 60, eta_min=optimizer.param_groups[0]["lr"] / rates)
    return RescaleOnDecay(schedule, model=net, invariant=INVARIANT)


@pytest.mark.parametrize("first", ["monitor", "controller"])
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_rescaling_by_our_own_controller_is_no_change_from_outside_and_predictions_continue(kind, every, first):
    """It was reported as changed outside before every sample, and the prediction started again at each of them."""
    net = make_net()
    optimizer = OPTIMIZERS[kind](net)
    rates = 50 if kind == "SGD" else 5  # a smaller norm would come near the eps of its BatchNorm
    scheduler = rescaled(net, optimizer, rates=rates) if first == "controller" else None
    with Monitor(net, optimizer, every=every, invariant=INVARIANT) as monitor:
        scheduler = scheduler or rescaled(net, optimizer, rates=rates)
        train(net, optimizer, 57, after_step=lambda _: scheduler.step())
        assert monitor.failure is None
        notes = column(monitor, "note", "0.weight")
        assert notes == [None] + [RESCALED] * (len(notes) - 1)
        assert set(column(monitor, "note", "4.weight")) == {None}
        norm, predicted = (np.array(column(monitor, x, "0.weight")) for x in ("norm", "norm_predicted"))
        np.testing.assert_allclose(predicted, norm, rtol=0.1)
        assert norm[0] / norm[-1] > 1.5  # the factor that a prediction without the rescalings would miss
        assert abs(predicted[-1] / norm[-1] - 1) > 1e-6  # it runs by itself: it did not start again
        assert not any("changed outside" in finding.subject for finding in monitor.findings())


def test_settings_and_weights_are_read_after_the_controllers_acted():
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net)
    with Monitor(net, optimizer, every=1, invariant=INVARIANT) as monitor:
        RescaleOnDecay(optimizer, model=net, invariant=INVARIANT)
        norms = []

        def set_lr(number):
            norms.append(float(net[0].weight.detach().norm()))
            optimizer.param_groups[0]["lr"] = 0.05 / 16 ** (number >= 3)

        train(net, optimizer, 6, after_step=set_lr)
        assert column(monitor, "lr", "0.weight") == [0.05] * 4 + [0.05 / 16] * 2
        assert column(monitor, "norm", "0.weight")[4] == pytest.approx(norms[3] / 2, rel=1e-3)
        assert column(monitor, "note", "0.weight")[3:] == [None, RESCALED, None]


def test_a_checkpoint_between_a_rescaling_and_the_next_step_continues_the_prediction():
    def make():
        net = make_net()
        optimizer = OPTIMIZERS["AdamW"](net)
        monitor = Monitor(net, optimizer, every=3, invariant=INVARIANT)
        return net, optimizer, rescaled(net, optimizer), monitor

    def run(net, optimizer, scheduler, monitor, steps):
        for step in steps:
            train(net, optimizer, 1, seed=step, after_step=lambda _: scheduler.step())
        return column(monitor, "norm_predicted", "0.weight")

    whole, first, resumed = make(), make(), make()
    expected = run(*whole, range(20))
    run(*first, range(8))
    for before, after in zip(first, resumed, strict=True):
        after.load_state_dict(copy.deepcopy(before.state_dict()))
    later = run(*resumed, range(8, 20))
    assert later == pytest.approx(expected[-len(later) :], rel=1e-6)
    assert CHANGED_OUTSIDE not in column(resumed[3], "note", "0.weight")
    for *_, monitor in (whole, first, resumed):
        monitor.close()


def test_the_metadata_name_the_controllers_and_what_they_promise():
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net)
    with Monitor(net, optimizer, every=1) as monitor:
        assert monitor.metadata["controllers"] == []
        rescaled(net, optimizer)
        (entry,) = monitor.metadata["controllers"]
        assert (entry["optimizer"], entry["name"]) == (0, "RescaleOnDecay")
        assert entry["promise"] == "rescales 1 weight to the equilibrium of every lr and weight decay"


@pytest.mark.parametrize("every", [1, 4])
def test_powers_of_two_that_a_folded_run_divides_out_are_no_change_from_outside(every):
    net = make_net()
    others = [param for param in net.parameters() if param is not net[0].weight]
    optimizer = torch.optim.SGD([{"params": [net[0].weight]}, {"params": others}], lr=0.1, weight_decay=0.5)
    with Monitor(net, optimizer, every=every, invariant=INVARIANT) as monitor:
        scheduler = FoldedWeightDecay(optimizer, model=net, invariant=INVARIANT)
        train(net, optimizer, 60, after_step=lambda _: scheduler.step())
        notes = column(monitor, "note", "0.weight")
        assert set(notes) == {None}  # the weights that they stand for are not rescaled


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_rotational_weight_is_compared_with_its_promise_and_the_others_with_the_plain_law(granularity):
    """There was "no law for Rotational", for the weights that keep its promise and for those beside them."""
    net = make_net()
    plain = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3)
    optimizer = Rotational(plain, model=net, invariant=INVARIANT, granularity=granularity)
    with Monitor(net, optimizer, every=1) as monitor:
        train(net, optimizer, 40)
        samples, metadata = monitor.samples(), monitor.metadata
        angle = optimizer.angle_of(optimizer.param_groups[0])
        assert column(monitor, "angle_predicted", "0.weight") == [angle] * 40
        assert set(column(monitor, "state", "0.weight")) == {"settled"}
    layers = {layer.name: layer for layer in summarise(samples, metadata=metadata)}
    assert layers["0.weight"].angle_vs_predicted == pytest.approx(1.0, abs=1e-6)
    assert layers["0.weight"].no_law is None and layers["4.weight"].no_law is None
    assert {entry["name"]: entry["promised_by"] for entry in metadata["params"]}["0.weight"] == "Rotational"
    assert not any("no law" in finding.subject for finding in diagnose(samples, metadata=metadata))


def test_a_row_of_a_tensor_that_turns_as_a_whole_has_no_promise():
    net = make_net()
    optimizer = Rotational(OPTIMIZERS["SGD"](net), model=net, invariant=INVARIANT)
    with Monitor(net, optimizer, every=1, granularity="row") as monitor:
        train(net, optimizer, 3)
        rows = [row for row in monitor.samples().to_pylist() if row["param"].startswith("0.weight")]
        assert rows and all(row["angle_predicted"] is None and row["angle_equilibrium"] is None for row in rows)


# ---- weights that are swapped for others and back


def swap_in_place(net):
    with torch.no_grad():
        kept = [param.clone() for param in net.parameters()]
        for param in net.parameters():
            param.mul_(0.5)
        for param, before in zip(net.parameters(), kept, strict=True):
            param.copy_(before)


def swap_memory(net):
    kept = [param.data.clone() for param in net.parameters()]
    for param in net.parameters():
        param.data = torch.zeros_like(param)
    for param, before in zip(net.parameters(), kept, strict=True):
        param.data = before


def interpolate_and_back(net):
    """As schedule-free optimizers do between eval() and train(): equal up to rounding."""
    with torch.no_grad():
        other = [torch.randn_like(param) for param in net.parameters()]
        for share in (1 - 1 / 0.9, 1 - 0.9):
            for param, end in zip(net.parameters(), other, strict=True):
                param.lerp_(end, share)


@pytest.mark.parametrize("every", [1, 5, "auto"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("swap", [swap_in_place, swap_memory, interpolate_and_back])
def test_weights_that_are_back_when_the_optimizer_steps_again_have_not_changed(swap, kind, every):
    net = make_net()
    optimizer = OPTIMIZERS[kind](net)
    with Monitor(net, optimizer, every=every) as monitor:
        train(net, optimizer, 20, after_step=lambda number: swap(net) if number in (3, 7, 11) else None)
        assert set(column(monitor, "note")) == {None}
        assert monitor.failure is None


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_rescaled_weight_that_something_else_changes_too_is_a_change_from_outside(kind, every):
    net = make_net()
    optimizer = OPTIMIZERS[kind](net)
    scheduler = rescaled(net, optimizer)

    def after_step(number):
        scheduler.step()
        if number == 12:
            with torch.no_grad():
                net[0].weight.copy_(net[0].weight.flip(0).clone())  # of the same norm

    with Monitor(net, optimizer, every=every, invariant=INVARIANT) as monitor:
        train(net, optimizer, 20, after_step=after_step)
        steps, notes = column(monitor, "step", "0.weight"), column(monitor, "note", "0.weight")
        assert [step for step, note in zip(steps, notes, strict=True) if note == CHANGED_OUTSIDE] == [
            min(step for step in steps if step > 12)
        ]


# ---- weights that stand for those of another run


def folded_samples(fold, *, every=1, closure=False, kind=FoldedWeightDecay, unfold_at=None):
    net = make_net().double()
    for module in net:
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eps = 1e-20  # which would tell the two networks apart
    others = [param for param in net.parameters() if param is not net[0].weight]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}
    optimizer = torch.optim.SGD([{"params": [net[0].weight]}, {"params": others}], **settings)
    scheduler = kind(optimizer, model=net, invariant=INVARIANT) if fold else None
    generator = torch.Generator().manual_seed(3)
    with Monitor(net, optimizer, every=every, invariant=INVARIANT) as monitor:
        for number in range(80):
            images = torch.randn(16, net[0].weight.shape[1], generator=generator, dtype=torch.float64)
            labels = torch.randint(net[-1].out_features, (16,), generator=generator)

            def loss(images=images, labels=labels):
                optimizer.zero_grad()
                value = torch.nn.functional.cross_entropy(net(images), labels)
                value.backward()
                return value

            for group in optimizer.param_groups:
                group["lr"] = 0.1 if number < 50 else 0.02
            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            if fold and number == unfold_at:
                scheduler.unfold()
        assert monitor.failure is None
        rows = [row for row in monitor.samples().to_pylist() if row["param"] == "0.weight"]
        return rows, [finding.subject for finding in monitor.findings()]


@pytest.mark.parametrize("options", [{}, {"every": 7}, {"closure": True}, {"unfold_at": 31}])
def test_the_samples_of_a_folded_run_are_those_of_the_run_with_weight_decay(options):
    """They had weight decay 0 and no equilibrium, and a finding said so.

    Both runs are the same network in float64; 80 steps amplify the rounding of 1e-16 by far less than 1e7.
    """
    (plain, _), (folded, subjects) = (folded_samples(fold, **options) for fold in (False, True))
    for one, other in zip(plain, folded, strict=True):
        for name, value in one.items():
            if isinstance(value, float):
                assert other[name] == pytest.approx(value, rel=1e-8, abs=1e-12), (one["step"], name)
            else:
                assert other[name] == value, (one["step"], name)
    assert plain[-1]["weight_decay"] == 0.02 and plain[-1]["angle_equilibrium"] is not None
    assert not any("no weight decay" in subject for subject in subjects)


def test_a_tapered_exponential_is_compared_with_the_run_that_its_steps_belong_to():
    """The first steps have another lr than the scheduler's, by its constant factor, and the samples say so."""
    rows, _ = folded_samples(True, kind=TaperedExponential)
    norm, predicted = (np.array([row[name] for row in rows]) for name in ("norm", "norm_predicted"))
    np.testing.assert_allclose(predicted, norm, rtol=0.1)
    assert rows[30]["lr"] == pytest.approx(0.1, rel=0.3) and rows[30]["weight_decay"] == pytest.approx(0.02, rel=1e-9)
