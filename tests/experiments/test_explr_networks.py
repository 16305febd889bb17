"""The trainings of the experiments on networks: schedules, measures, and the papers' settings on a stand-in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equilibria.data import ImageSet, load_digits
from equilibria.experiments import find
from equilibria.experiments.claim import CONTRADICTED, SHOWN
from equilibria.experiments.curves import mean_in, rms_angle
from equilibria.experiments.explr import networks
from equilibria.experiments.explr.angle import KEEPS, LESS_DECAY
from equilibria.experiments.explr.lines import SMOKE
from equilibria.experiments.explr.networks import COSINE, DECAY, FOLDED, ROUNDED, Setting, Variant
from equilibria.experiments.explr.stepdecay import collect as collect_stepdecay
from equilibria.experiments.nrq import networks_runs
from equilibria.training import train


def small(*variants: Variant, **more) -> Setting:
    return Setting(**{**SMOKE, **more}, variants=variants)


def test_the_cosine_changes_once_per_epoch_and_steps_divide():
    setting = small(steps=100, epoch=10)
    cosine = Variant("c", schedule=COSINE)
    assert setting.factor(cosine, 0) == setting.factor(cosine, 9) == 1.0
    assert setting.factor(cosine, 50) == pytest.approx(0.5) and setting.factor(cosine, 99) > 0
    steps = Variant("s", drops_at=(3, 6), divisor=10.0)
    assert [round(setting.factor(steps, t), 12) for t in (2, 3, 6)] == [1.0, 0.1, 0.01]


@pytest.mark.parametrize("network", ["resnet", "preresnet"])
def test_every_weight_said_to_be_invariant_is(network):
    """Doubling all of them changes the outputs by what eps does."""
    images, setting = load_digits(), small(network=network)
    torch.manual_seed(0)
    model, batch = networks.network(setting, images), images.train_images[:32]
    before = model(batch)
    with torch.no_grad():
        for name in networks.invariant_names(setting, model):
            model.get_parameter(name).mul_(64.0)
    assert torch.allclose(model(batch), before, rtol=0, atol=0.01 * float(before.detach().abs().max()))


def test_all_that_the_resnet_trains_is_invariant_and_one_rounding_is_one_rounding():
    images, setting = load_digits(), small()
    torch.manual_seed(0)
    plain = networks._first(setting, Variant(DECAY), images)
    torch.manual_seed(0)
    rounded = networks._first(setting, Variant(ROUNDED, ROUNDED), images)
    trained = [name for name, param in plain.named_parameters() if param.requires_grad]
    assert trained == networks.invariant_names(setting, plain)
    for (name, one), other in zip(plain.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one, other) == (name not in trained)
        assert torch.allclose(one, other, rtol=2e-7, atol=0)


def test_settings_of_every_step_are_the_variants():
    """Weight decay and learning rate after three steps, of which the last is after the drop."""
    images = load_digits()
    found = {}
    for variant in find(["explr-angle"])[0].config("smoke").variants:
        early = replace(variant, drops_at=(2,))
        setting = small(early, steps=3, epoch=3)
        state = train(networks.recipe(setting, early, seed=0, images=images)).state
        group = state["optimizer"]["param_groups"][0]
        found[variant.name] = (group["lr"], group["weight_decay"])
    assert found[KEEPS] == pytest.approx((0.01, 0.05))
    assert found[LESS_DECAY] == pytest.approx((0.1, 5e-4))


def test_epoch_angles_go_on_after_an_interruption():
    images, variant = load_digits(), Variant(FOLDED, FOLDED, drops_at=(4,))
    setting = small(variant, steps=6, epoch=2)
    recipe = networks.recipe(setting, variant, seed=0, images=images)
    whole = train(recipe).curves
    half = train(replace(recipe, steps=4))
    rest = train(networks.recipe(setting, variant, seed=0, images=images), start=half.state).curves
    np.testing.assert_array_equal(rest["epoch_angle"][-1], whole["epoch_angle"][-1])
    assert np.isnan(whole["epoch_angle"][0]).all() and (whole["epoch_angle"][1:] > 0).all()


def test_the_angle_of_an_epoch_is_that_of_the_cosine():
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0])
    assert networks.angle(one, other) == pytest.approx(np.pi / 4)
    assert networks.angle(one, -one) == pytest.approx(np.pi)


def test_means_and_angles_of_a_window():
    run = {
        "step": np.array([0.0, 5, 10]),
        "test_accuracy": np.array([0.1, 0.2, 0.4]),
        "sampled_step": np.arange(10),
        "layer_angle": np.where(np.arange(10)[:, None] < 5, 3.0, np.array([3.0, 4.0, 50.0])),
    }
    assert mean_in(run, "test_accuracy", (5, 10)) == pytest.approx(30.0)
    assert rms_angle(run, (5, 10)) == pytest.approx(4.0)


@pytest.mark.parametrize(("apart", "verdict"), [(0.0, SHOWN), (0.05, CONTRADICTED)])
def test_curves_that_are_apart_do_not_coincide(apart, verdict):
    config = find(["explr-stepdecay"])[0].config("desk")
    step = np.arange(0.0, config.steps + 1, config.epoch)
    found = {}
    for name, (at, seed) in networks.tasks(config).items():
        noise = np.random.default_rng([seed, at]).normal(0, 1e-3, step.shape)
        shift = apart if config.variants[at].name == FOLDED else 0.0
        curve = 0.6 + shift + noise
        found[name] = {"step": step, "test_accuracy": curve, "train_accuracy": curve, "loss": curve}
    claims = [claim for claim in collect_stepdecay(config, found).claims if claim.text.startswith("Folded")]
    assert {claim.verdict for claim in claims} == {verdict}


def stand_in() -> ImageSet:
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 10
    return ImageSet(images, labels, images, labels, tuple("abcdefghij"), "random")


@pytest.mark.parametrize(
    ("name", "at"),
    [("explr-constant", 1), ("explr-stepdecay", 2), ("explr-cosine", 1), ("explr-v2", 1), ("explr-angle", 0)],
)
@pytest.mark.slow
def test_the_papers_settings_start_and_run_on_a_stand_in(name, at):
    paper = find([name])[0].config("paper")
    tiny = replace(paper, batch_size=4, width=2, epoch=10, statistics=(1, 4), train_images=4)
    recipe = networks.recipe(tiny, paper.variants[at], seed=0, images=stand_in())
    trained = train(replace(recipe, steps=10))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["test_loss"]).all()


@pytest.mark.slow
def test_the_papers_resnet18_starts_and_runs_on_a_stand_in():
    paper = find(["nrq-networks"])[0].config("paper")
    tiny = replace(paper, batch_size=4, width=2, measure_every=10, statistics=(1, 4), train_images=4)
    recipe = networks_runs.recipe(tiny, paper.lines[-1], seed=0, images=stand_in())
    trained = train(replace(recipe, steps=10))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["test_loss"]).all()
