"""Copies of controllers hook themselves into the optimizer copied with them; the table tests that they go on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.helpers.bn_worlds import bn_net, deviation, eval_logits, invariant_of, sgd, take_step
from torch.optim.lr_scheduler import StepLR

from equilibria.control import AngularSchedule, FoldedWeightDecay, RescaleOnDecay
from equilibria.errors import EquilibriaError


def pickled(tree):
    return pickle.loads(pickle.dumps(tree))


def folded_run():
    net = bn_net()
    optimizer = sgd(net)
    return net, optimizer, FoldedWeightDecay(StepLR(optimizer, 10, gamma=0.5), model=net, invariant=invariant_of(net))


def go_on(run, steps):
    net, optimizer, scheduler = run
    for step in steps:
        take_step(net, optimizer, step)
        scheduler.step()
    return run


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step.*overridden:UserWarning")  # torch: of any copy
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("step", [0, 15])
def test_a_copy_of_a_folded_run_is_the_run_with_weight_decay(copied, step):
    net = bn_net()
    plain = net, sgd(net)
    go_on((*plain, StepLR(plain[1], 10, gamma=0.5)), range(40))
    original = go_on(folded_run(), range(step))
    copies = go_on(copied(original), range(step, 40))
    assert deviation(eval_logits(copies[0]), eval_logits(net)) < 1e-11
    assert original[2].last_epoch == step
    assert deviation(eval_logits(go_on(original, range(step, 40))[0]), eval_logits(net)) < 1e-11


def test_a_copy_of_an_unfolded_run_stays_unfolded():
    run = go_on(folded_run(), range(5))
    run[2].unfold()
    _, optimizer, _ = copies = copy.deepcopy(run)
    assert not optimizer._optimizer_step_pre_hooks
    assert torch.equal(eval_logits(go_on(copies, range(5, 15))[0]), eval_logits(go_on(run, range(5, 15))[0]))


@pytest.mark.parametrize("kind", [AngularSchedule, FoldedWeightDecay, RescaleOnDecay])
def test_a_shallow_copy_would_act_on_the_same_optimizer(kind):
    net = bn_net()
    optimizer, invariant = sgd(net), invariant_of(net)
    scheduler = (
        AngularSchedule(optimizer, 0.01, invariant=invariant)
        if kind is AngularSchedule
        else kind(StepLR(optimizer, 5), model=net, invariant=invariant)
    )
    with pytest.raises(EquilibriaError, match=f"copy.copy of {kind.__name__}; expected copy.deepcopy"):
        copy.copy(scheduler)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_copied_angular_schedule_sees_weights_that_are_changed_from_outside():
    """Torch counts the changes of the copied tensor from 0: it must not be taken for one that was seen already."""
    net = bn_net()
    optimizer = sgd(net)
    weight = invariant_of(net)[0]
    with pytest.warns(UserWarning, match="other parameters in the same group"):
        scheduler = AngularSchedule(optimizer, 0.01, invariant=[weight])
    net, optimizer, scheduler = copy.deepcopy(go_on((net, optimizer, scheduler), range(20)))
    seen, moved = weight._version, invariant_of(net)[0].detach()
    with torch.no_grad():
        while moved._version < seen:
            moved.copy_(torch.randn_like(moved))
    assert moved._version == seen
    go_on((net, optimizer, scheduler), [20])
    assert scheduler.report(1)[0].delivered < 0.3  # a random direction is 1.5 away
