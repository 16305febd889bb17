"""The log in which controllers announce themselves, and the order of hooks that follows from it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from equilibria.optimizers.controllers import Rescaled, announce, control_log, order_hooks, withdraw


class Acting:
    """A controller with a hook on either side of a step."""

    promise = "does nothing"

    def __init__(self, optimizer, seen):
        self._seen = seen
        optimizer.register_step_pre_hook(self.act)
        optimizer.register_step_post_hook(self.act)
        announce(optimizer, self)

    def act(self, *_):
        self._seen.append(self)


def stepping():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1), weight


def test_rescalings_add_up_by_weight():
    optimizer, weight = stepping()
    log = control_log(optimizer)
    assert log.of(weight) == Rescaled()
    log.note_rescaling(weight, 0.5)
    log.note_rescaling(weight, 3.0, changes=2)
    log.note_rescaling(torch.ones(1), 7.0)
    log.note_rescaling(weight, 0.25, stands_for_same=True)
    scales = {"log_scale": pytest.approx(math.log(1.5 / 4)), "log_change": pytest.approx(math.log(1.5))}
    assert log.of(weight) == Rescaled(**scales, changes=4)
    assert log.count == 4
    assert control_log(optimizer) is log


def test_controllers_act_first_before_a_step_and_last_after_it_in_their_own_order():
    optimizer, _ = stepping()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    first, second = Acting(optimizer, seen), Acting(optimizer, seen)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    order_hooks(optimizer)
    optimizer.step()
    assert seen == [first, second, "before", "after", first, second]


def test_one_that_withdraws_is_forgotten_and_one_that_announces_itself_twice_is_there_once():
    optimizer, _ = stepping()
    controller = Acting(optimizer, [])
    announce(optimizer, controller)
    assert control_log(optimizer).controllers == [controller]
    withdraw(optimizer, controller)
    assert control_log(optimizer).controllers == []


def test_a_copied_optimizer_has_no_controllers():
    optimizer, _ = stepping()
    Acting(optimizer, [])
    assert control_log(copy.deepcopy(optimizer)).controllers == []
