"""The demo's trainings: what each arm changes at the drop, and the physics it shows, measured independently."""

from __future__ import annotations

import copy
import math
from itertools import islice

import numpy as np
import pytest
import torch
from tests.helpers.slow_monitor import SlowMonitor
from torch.nn import functional

from equilibria.lab.demo.training import ARMS, LESS_DECAY, PLAIN, RESCALED, DemoSettings, arm_recipe, convolution_names
from equilibria.lab.training import Training, recomputed_statistics, train
from equilibria.theory.states import rescale_factors

SETTINGS = DemoSettings()
SHORT = {"steps_before": 30, "steps_after": 5, "steady_window": 5, "drop_window": 5}


def advance(training: Training, steps: int) -> SlowMonitor:
    """Do some steps; every angle measured from copies of the weights."""
    with SlowMonitor(training.model, training.optimizer) as monitor:
        for batch in islice(training.batches(), steps):
            training.advance(batch)
    return monitor


def branch(settings: DemoSettings, arm: str, state) -> Training:
    """A training of an arm that continues from a state."""
    training = Training(arm_recipe(settings, arm))
    training.load_state_dict(copy.deepcopy(state), branch=True)
    return training


def at_the_drop(arm: str, **settings) -> Training:
    """A short training of an arm right before its drop."""
    short = DemoSettings(**{**SHORT, **settings})
    training = Training(arm_recipe(short, arm))
    advance(training, short.steps_before)
    return training


@pytest.fixture(scope="module")
def settled():
    """The state right before the drop, and the angles of every layer until there."""
    training = Training(arm_recipe(SETTINGS, PLAIN))
    monitor = advance(training, SETTINGS.steps_before)
    training.measure()
    return training.state_dict(), monitor, training.curves()["test_accuracy"][-1]


def equilibrium_angle(arm: str | None = None) -> float:
    rule = SETTINGS.rule_before if arm is None else SETTINGS.rule_after(arm)
    return math.sqrt(2 * rule.lr * rule.weight_decay / (1 + rule.momentum))


@pytest.mark.slow
def test_the_layers_turn_as_the_theory_says_before_the_drop(settled):
    """Within 5 % of sqrt(2 lr wd / (1 + momentum)), the demo's promise."""
    _, monitor, accuracy = settled
    end = SETTINGS.steps_before
    measured = monitor.rms_angles(end - SETTINGS.steady_window, end)
    assert measured / equilibrium_angle() == pytest.approx(np.ones(6), abs=0.05)
    assert accuracy > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_the_layers_turn_as_the_theory_says_right_after_the_drop(settled, arm):
    """A layer of d entries scatters by 1/sqrt(2 d) per sample: 8 % for the smallest, d = 72.

    Momentum leaves about one independent sample in ten steps and the gradients of a real network scatter more: seeds 0
    to 4 gave 0.30 to 0.38 and 0.86 to 1.06. 20 % around 1/sqrt(10) to its value 100 steps later, 0.35, and around 1.
    """
    training = branch(SETTINGS, arm, settled[0])
    after = advance(training, 100).rms_angles(0, 100) / equilibrium_angle(arm)
    low, high = (0.8 * 0.316, 1.2 * 0.35) if arm == PLAIN else (0.8, 1.2)
    assert (after > low).all() and (after < high).all()
    training.measure()
    assert training.curves()["test_accuracy"][-1] > 0.9


@pytest.mark.slow
def test_the_drop_divides_the_update_by_ten_and_the_rescaled_angle_by_its_root(settled):
    """The same batch from the same state: without a drop, and with the drop of every arm.

    Exact but for BatchNorm's eps, which is 1e-5 beside variances above 0.01, and float32.
    """
    angles = {arm: advance(branch(SETTINGS, arm, settled[0]), 1).rms_angles(0, 1) for arm in ARMS}
    later = DemoSettings(steps_before=SETTINGS.steps_before + 400)
    without = advance(branch(later, PLAIN, settled[0]), 1).rms_angles(0, 1)
    assert angles[PLAIN] / without == pytest.approx(np.full(6, 0.1), rel=2e-3)
    assert angles[LESS_DECAY] / without == pytest.approx(np.full(6, 0.1), rel=2e-3)
    assert angles[RESCALED] / without == pytest.approx(np.full(6, math.sqrt(0.1)), rel=2e-3)


def test_rescaling_leaves_what_the_network_computes_in_training_and_in_evaluation():
    training = at_the_drop(RESCALED)
    model, images = training.model, next(iter(training.recipe.data))[0]
    in_training = model.train()(images)  # first: it moves the running statistics
    in_evaluation = model.eval()(images)
    training.scheduler.step()
    assert torch.allclose(model(images), in_evaluation, atol=1e-3)
    assert torch.allclose(model.train()(images), in_training, atol=1e-3)


def test_without_the_running_statistics_the_evaluation_would_change():
    training = at_the_drop(RESCALED)
    model, images = training.model.eval(), next(iter(training.recipe.data))[0]
    before, statistics = model(images), {name: value.clone() for name, value in model.named_buffers()}
    training.scheduler.step()
    assert torch.allclose(model(images), before, atol=1e-3)
    for name, value in model.named_buffers():
        value.copy_(statistics[name])
    assert (model(images) - before).abs().max() > 0.1


def test_rescaling_multiplies_weights_and_momentum_of_the_convolutions_alone():
    training = at_the_drop(RESCALED)
    weights = {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    buffers = {
        name: training.optimizer.state[weight]["momentum_buffer"].clone()
        for name, weight in training.model.named_parameters()
    }
    training.scheduler.step()
    settings = DemoSettings(**SHORT)
    factors = rescale_factors(settings.rule_before, settings.rule_after(RESCALED))
    for name, weight in training.model.named_parameters():
        r = factors.weight if name.endswith("conv.weight") else 1.0
        assert torch.allclose(weight, weights[name] * r)
        assert torch.allclose(training.optimizer.state[weight]["momentum_buffer"], buffers[name] / r)
    assert factors.weight == pytest.approx(10**-0.25, rel=1e-3)


@pytest.mark.parametrize(("arm", "weight_decay"), [(PLAIN, 5e-3), (RESCALED, 5e-3), (LESS_DECAY, 5e-4)])
def test_the_drop_changes_the_learning_rate_of_every_group_and_weight_decay_in_one_arm(arm, weight_decay):
    training = at_the_drop(arm)
    assert [group["lr"] for group in training.optimizer.param_groups] == [0.1, 0.1]
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [5e-3, 0.0]
    training.scheduler.step()
    assert [group["lr"] for group in training.optimizer.param_groups] == pytest.approx([0.01, 0.01])
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == pytest.approx([weight_decay, 0.0])


def test_less_decay_keeps_the_equilibrium_norm_and_divides_the_angle():
    before, after = (
        rule.equilibrium(unit_grad_sq=1.0) for rule in (SETTINGS.rule_before, SETTINGS.rule_after(LESS_DECAY))
    )
    assert after.norm == pytest.approx(before.norm, rel=1e-3)
    assert after.angle == pytest.approx(before.angle / 10, rel=1e-3)


def test_every_parameter_is_trained_and_only_convolutions_decay():
    training = Training(arm_recipe(SETTINGS, PLAIN))
    groups = [{id(p) for p in group["params"]} for group in training.optimizer.param_groups]
    assert groups[0] == {id(p) for p in training.model.parameters() if p.ndim == 4}
    assert groups[0] | groups[1] == {id(p) for p in training.model.parameters()}
    assert convolution_names(training.model) == [f"{name}.conv.weight" for name, _ in training.model.normalised()]


def test_all_arms_are_the_same_until_the_drop_and_differ_after_it():
    monitors = {arm: advance(Training(arm_recipe(DemoSettings(**SHORT), arm)), 35) for arm in ARMS}
    plain = monitors[PLAIN]
    for arm in (RESCALED, LESS_DECAY):
        for name in plain.angles:
            assert plain.angles[name][:30] == monitors[arm].angles[name][:30]
            assert plain.angles[name][30:] != monitors[arm].angles[name][30:]


def test_a_training_depends_on_its_seed_alone():
    short = {"steps_before": 10, "steps_after": 3, "steady_window": 3, "drop_window": 3}
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = train(arm_recipe(DemoSettings(**short), RESCALED)).model
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    second = train(arm_recipe(DemoSettings(**short), RESCALED)).model
    other = train(arm_recipe(DemoSettings(seed=1, **short), RESCALED)).model
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.stem.conv.weight, other.stem.conv.weight)


def test_the_accuracy_is_that_of_the_test_images_and_leaves_the_model_as_it_was():
    from equilibria.lab.data import load_digits

    training = at_the_drop(PLAIN, steps_before=100)
    statistics = copy.deepcopy(training.model.state_dict())
    training.measure()
    accuracy = training.curves()["test_accuracy"][-1]
    assert training.model.training
    assert all(torch.equal(value, statistics[name]) for name, value in training.model.state_dict().items())
    digits = load_digits()
    with recomputed_statistics(training.model, [digits.train_images[:256], digits.train_images[256:512]]):
        guesses = [training.model(image[None]).argmax().item() for image in digits.test_images]
        loss = functional.cross_entropy(training.model(digits.test_images), digits.test_labels)
    right = sum(guess == label for guess, label in zip(guesses, digits.test_labels.tolist(), strict=True))
    assert accuracy == pytest.approx(right / 360)
    assert loss < 2.3
