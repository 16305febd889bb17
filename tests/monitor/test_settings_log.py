"""The log of settings against a list that holds every step."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equilibria.monitor.settings_log import Settings, SettingsLog, read_settings


def group(lr=0.1, **others):
    return {"lr": lr, "weight_decay": 0.01, "momentum": 0.9, **others}


@given(
    lrs=st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=30),
    cut=st.integers(0, 40),
    ends=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_every_step_has_the_settings_it_was_taken_with(lrs, cut, ends):
    log = SettingsLog()
    for step, lr in enumerate(lrs):
        log.note(step, group(lr), sampled=False)
    first, after = sorted(min(end, len(lrs)) for end in ends)
    assert [log.at(step).lr for step in range(len(lrs))] == lrs
    assert [settings.lr for settings in log.between(first, after)] == lrs[first:after]
    log.hand_over(cut)
    kept = range(min(cut, len(lrs) - 1), len(lrs))
    assert [log.at(step).lr for step in kept] == [lrs[step] for step in kept]
    assert [settings.lr for settings in log.between(kept[0], len(lrs))] == lrs[kept[0] :]


def test_only_changes_are_kept_and_old_ones_dropped():
    log = SettingsLog()
    for step in range(1000):
        log.note(step, group(0.1 if step < 500 else 0.2), sampled=False)
    assert len(log.state_dict()) == 2
    log.hand_over(-1)
    assert len(log.state_dict()) == 2
    log.hand_over(600)
    assert len(log.state_dict()) == 1
    assert log.at(600).lr == 0.2


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
def test_a_change_of_any_setting_is_seen(name):
    log, held = SettingsLog(), group()
    log.note(0, held, sampled=False)
    held[name] = 0.5
    log.note(1, held, sampled=False)
    assert getattr(log.at(1), name) == 0.5
    assert getattr(log.at(0), name) != 0.5


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum"])
def test_a_tensor_that_is_changed_in_place_is_seen(name):
    log, held = SettingsLog(), group()
    held[name] = torch.tensor(0.25)
    for step, value in enumerate([0.25, 0.5, 0.5, 0.25]):
        held[name].fill_(value)
        log.note(step, held, sampled=False)
    assert [getattr(log.at(step), name) for step in range(4)] == [0.25, 0.5, 0.5, 0.25]
    assert len(log.state_dict()) == 3


@pytest.mark.parametrize("betas", [(torch.tensor(0.5), torch.tensor(0.75)), [0.5, 0.75]], ids=["tensors", "list"])
def test_betas_that_are_changed_in_place_are_seen(betas):
    log, held = SettingsLog(), {"lr": 0.1, "betas": betas}
    log.note(0, held, sampled=False)
    if isinstance(betas, list):
        betas[0] = 0.25
    else:
        betas[0].fill_(0.25)
    log.note(1, held, sampled=False)
    assert [log.at(step).betas for step in (0, 1)] == [(0.5, 0.75), (0.25, 0.75)]
    assert log.at(1).momentum == 0.25


class OnDevice(torch.Tensor):
    """Says that it is on a device, and counts how often it is read."""

    reads = 0

    @property
    def device(self):
        return torch.device("meta")

    def __float__(self):
        OnDevice.reads += 1
        return super().__float__()


def test_settings_on_a_device_are_read_at_sampled_steps_only():
    held, log = {"lr": torch.tensor(0.25).as_subclass(OnDevice)}, SettingsLog()
    log.note(0, held, sampled=True)
    once = OnDevice.reads
    for step in range(1, 10):
        log.note(step, held, sampled=False)
    assert OnDevice.reads == once
    log.note(10, held, sampled=True)
    assert OnDevice.reads > once


def test_optimizers_with_unusual_groups_are_read_without_an_error():
    assert math.isnan(read_settings({"lr": None}).lr)  # chooses its own
    assert math.isnan(read_settings({}).lr)
    assert read_settings({"lr": 0.1, "betas": (0.9, 0.99, 0.999)}).betas == (0.9, 0.99)
    assert read_settings({"lr": 0.1, "betas": 0.9}).betas is None
    assert math.isnan(read_settings({"lr": 0.1, "momentum": None}).momentum)
    log = SettingsLog()
    for step in range(100):
        log.note(step, {"lr": None, "betas": (None, 0.999)}, sampled=True)
    assert len(log.state_dict()) == 1


def test_state_goes_through_a_safe_checkpoint():
    log, file = SettingsLog(), io.BytesIO()
    for step, lr in enumerate([0.1, 0.1, 0.2]):
        log.note(step, {"lr": lr, "betas": (0.9, 0.99)}, sampled=True)
    torch.save(log.state_dict(), file)
    file.seek(0)
    other = SettingsLog()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict() == log.state_dict()
    assert other.at(1) == Settings(0.1, 0.0, 0.9, (0.9, 0.99))
    for each in (log, other):
        each.note(3, {"lr": 0.2, "betas": (0.9, 0.99)}, sampled=True)
        each.note(4, {"lr": 0.3, "betas": (0.9, 0.99)}, sampled=True)
    assert other.state_dict() == log.state_dict()


def jumps(lrs):
    log = SettingsLog()
    for step, lr in enumerate(lrs):
        log.note(step, group(lr), sampled=False)
    return [step for step in range(len(lrs)) if log.jumped(step, step + 1)]


def test_a_drop_is_a_jump_and_so_is_the_next():
    assert jumps([0.1] * 5 + [0.01] * 5 + [0.001] * 5) == [5, 10]


@pytest.mark.parametrize(("steeper", "is_jump"), [(2.5, False), (3.5, True)])
def test_a_change_is_a_jump_beside_a_ramp_if_it_is_more_than_three_times_as_steep(steeper, is_jump):
    ramp = [0.1 * 0.95**step for step in range(6)]
    after = ramp[-1] * (1 - steeper * 0.05)
    assert jumps([*ramp, after, after]) == ([6] if is_jump else [])


@pytest.mark.parametrize(
    "lr",
    [
        lambda step: 0.05 * (1 + math.cos(math.pi * step / 100)),  # steep at its end
        lambda step: 0.1 * 0.93**step,
        lambda step: 0.1 if step < 50 else 0.095,
    ],
    ids=["cosine", "exponential", "by less than a tenth"],
)
def test_a_smooth_schedule_has_no_jumps(lr):
    assert jumps([lr(step) for step in range(100)]) == []


def test_a_restart_is_a_jump_and_a_checkpoint_keeps_it():
    lrs = [0.05 * (1 + math.cos(math.pi * (step % 50) / 50)) for step in range(100)]
    assert jumps(lrs) == [50]
    log, other = SettingsLog(), SettingsLog()
    for step, lr in enumerate(lrs):
        log.note(step, group(lr), sampled=False)
    buffer = io.BytesIO()
    torch.save(log.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.jumped(50, 51) and not other.jumped(51, 100) and not other.jumped(0, 50)


def foreseen(lrs):
    """The steps at which a sample would be taken for a jump, asked before each step as the hooks do."""
    log, steps = SettingsLog(), []
    for step, lr in enumerate(lrs):
        if log.jumps(step, group(lr)):
            steps.append(step)
        log.note(step, group(lr), sampled=False)
    return steps


@pytest.mark.parametrize(
    "lr",
    [
        lambda step: 0.05 * (1 + math.cos(math.pi * step / 200)),
        lambda step: 0.1 * (1 - step / 200),
        lambda step: 0.1 * 0.85**step,
    ],
    ids=["cosine", "linear to zero", "exponential"],
)
def test_the_steep_tail_of_a_smooth_schedule_takes_no_samples(lr):
    """Of the exponential, whose every step changes lr by more than a tenth, the first is a jump."""
    assert len(foreseen([lr(step) for step in range(201)])) <= 1


def test_real_jumps_are_foreseen_also_within_a_ramp():
    assert foreseen([0.1] * 5 + [0.01] * 5 + [0.001] * 5) == [5, 10]
    cosine = [0.05 * (1 + math.cos(math.pi * step / 200)) for step in range(100)]
    assert foreseen([*cosine, *(lr / 10 for lr in cosine)]) == [100]
