from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.helpers.bn_worlds import bn_net, deviation, eval_logits, invariant_of, sgd, take_step
from torch.optim.lr_scheduler import MultiStepLR

from equilibria.control import TaperedExponential
from equilibria.errors import EquilibriaError
from equilibria.theory.folding import unfold
from equilibria.theory.texp import texp, texp_without_drop

PHASES = [(0, 0.1), (60, 0.01), (100, 0.001)]


def tapered(net, optimizer, **options):
    scheduler = MultiStepLR(optimizer, [60, 100], gamma=0.1)
    return TaperedExponential(scheduler, model=net, invariant=invariant_of(net), **options)


@pytest.mark.parametrize(("law", "instant_drop"), [(texp, True), (texp_without_drop, False)])
def test_the_learning_rates_are_those_of_the_paper(law, instant_drop):
    net = bn_net()
    optimizer = sgd(net)
    control = tapered(net, optimizer, instant_drop=instant_drop, renormalise=False)
    used = []
    for step in range(150):
        take_step(net, optimizer, step)
        used.append(control.get_last_lr()[0])
        control.step()
    assert used == pytest.approx(law(PHASES, 5e-3, steps=150, momentum=0.9).lr.tolist(), rel=1e-12)


@pytest.mark.parametrize("instant_drop", [True, False])
def test_it_is_sgd_without_weight_decay_at_these_learning_rates(instant_drop):
    law = texp if instant_drop else texp_without_drop
    rates = law(PHASES, 2e-2, steps=150, momentum=0.9).lr
    plain, net = bn_net(), bn_net()
    reference, optimizer = sgd(plain, weight_decay=2e-2), sgd(net, weight_decay=2e-2)
    others = MultiStepLR(reference, [60, 100], gamma=0.1)
    control = tapered(net, optimizer, instant_drop=instant_drop)
    for step in range(150):
        reference.param_groups[0].update(lr=float(rates[step]), weight_decay=0.0)
        assert deviation(take_step(plain, reference, step), take_step(net, optimizer, step)) < 1e-11
        others.step()
        control.step()
    assert optimizer.param_groups[0]["fold_exponent"] > 0


@pytest.mark.parametrize("instant_drop", [True, False])
def test_eval_mode_is_that_of_the_run_with_weight_decay_that_it_equals_and_unfolding_goes_on_with_it(instant_drop):
    """TEXP v2 keeps the first learning rate and lowers weight decay in its place."""
    law = texp if instant_drop else texp_without_drop
    decays = np.repeat([5e-3, 5e-3, 5e-3] if instant_drop else [5e-3, 5e-4, 5e-5], [60, 40, 50])
    rates = law(PHASES, 5e-3, steps=150, momentum=0.9)
    with_decay = unfold(rates.log_lr, decays, momentum=0.9, log=True).lr
    plain, net = bn_net(), bn_net()
    reference, optimizer = sgd(plain), sgd(net)
    others = MultiStepLR(reference, [60, 100], gamma=0.1)
    control = tapered(net, optimizer, instant_drop=instant_drop)
    for step in range(150):
        reference.param_groups[0].update(lr=float(with_decay[step]), weight_decay=float(decays[step]))
        take_step(plain, reference, step)
        take_step(net, optimizer, step)
        assert deviation(eval_logits(plain, step), eval_logits(net, step)) < 1e-11
        others.step()
        control.step()
    control.unfold()
    assert deviation(invariant_of(plain)[0], invariant_of(net)[0]) < 1e-11
    reference.param_groups[0].update(lr=1e-3, weight_decay=5e-3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    for step in range(150, 160):  # the momentum is that run's, too
        assert deviation(take_step(plain, reference, step), take_step(net, optimizer, step)) < 1e-11
    assert deviation(eval_logits(plain), eval_logits(net)) < 1e-11


def test_a_resumed_run_continues_bit_for_bit():
    nets = [bn_net(), bn_net()]
    optimizers = [sgd(net) for net in nets]
    controls = [tapered(*pair) for pair in zip(nets, optimizers, strict=True)]
    for step in range(70):
        take_step(nets[0], optimizers[0], step)
        controls[0].step()
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    controls[1].load_state_dict(copy.deepcopy(controls[0].state_dict()))
    for step in range(70, 130):
        logits = [take_step(net, optimizer, step) for net, optimizer in zip(nets, optimizers, strict=True)]
        assert torch.equal(*logits)
        for control in controls:
            control.step()


def test_settings_without_real_roots_and_lr_0_raise_before_the_step():
    for settings, message in (({"weight_decay": 0.5}, "parameter group 0: .*lr"), ({"lr": 0.0}, "got lr=0")):
        net = bn_net()
        optimizer = sgd(net, **settings)
        tapered(net, optimizer)
        before = copy.deepcopy(net.state_dict()["0.weight"])
        with pytest.raises(EquilibriaError, match=message):
            take_step(net, optimizer, 0)
        assert torch.equal(before, net.state_dict()["0.weight"])
        assert math.isclose(optimizer.param_groups[0]["lr"], settings.get("lr", 0.1))
