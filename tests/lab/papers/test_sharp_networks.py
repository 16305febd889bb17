"""Claims of the sharp-* experiments on networks, on synthetic curves; their settings at paper scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from equilibria.lab.data import ImageSet
from equilibria.lab.harness.claim import COMPARISON, CONTRADICTED, EXCLUDED, SHOWN
from equilibria.lab.papers.sharp import fig2_vgg as vgg
from equilibria.lab.papers.sharp import fig8_resnet as resnet
from equilibria.lab.papers.sharp import fig13_ablations as ablations
from equilibria.lab.papers.sharp.full_batch import (
    FINAL_SCALE,
    INVARIANT_RESNET,
    STANDARD_RESNET,
    Config,
    DescentVariant,
    invariant_part,
    least_loss,
    network,
    read_descent,
    recipe,
    returns,
    run_task,
    tasks,
)
from equilibria.lab.training import train


def steps(variant: DescentVariant) -> np.ndarray:
    measured, before = [0], 0
    for until, every in variant.parts:
        measured += [step for step in range(before + 1, until + 1) if step % every == 0 or step == until]
        before = until
    return np.array(measured, dtype=np.float64)


def planted(config: Config, *, gain: float):
    """Sharpness along 2 / effective lr, which weight decay lowers down to a floor; accuracy rises as it falls."""
    findings = {}
    for name, (place, seed) in tasks(config).items():
        variant, rng = config.variants[place], np.random.default_rng([place, seed])
        step = steps(variant)
        floor, start = 300.0, 150.0 / variant.lr
        edge = np.maximum(start * np.exp(-2 * variant.intrinsic_lr * step), floor if variant.weight_decay else 0)
        wobble = 1 + 0.05 * np.abs(np.sin(step / 7)) + 0.001 * rng.random(len(step))
        first = np.where(step < 100, 3.0, 1.0)
        better = gain * np.log(start / edge) / np.log(start / floor)
        bursts = (variant.scale > FINAL_SCALE) & (step > config.early[1]) & (step % 1000 == 0)
        sides = {
            "sharpness": 1.05 * edge * wobble * first,
            "norm_sq": edge * variant.lr / 2,
            "train_loss": least_loss(config, variant) + 0.01 * wobble,
            "train_accuracy": np.where(step < 100, 0.9, 1.0),
        }
        findings[name] = {
            "step": step,
            "loss": least_loss(config, variant) + 0.01 * (1 + 0.3 * np.sin(step / 9)) * np.where(bursts, 100, 1),
            "test_accuracy": 0.57 + better + 1e-4 * rng.standard_normal(len(step)),
            "grad_norm_sq": np.ones_like(step),
            **sides,
            **{f"{name}_before": values for name, values in sides.items()},
        }
    return findings


def judged(module, findings, words: str):
    """The claims of a desk run whose text contains these words."""
    return [claim for claim in module.collect(module.EXPERIMENT.config("desk"), findings).claims if words in claim.text]


@pytest.mark.parametrize("module", [vgg, ablations, resnet])
def test_a_planted_reduction_is_shown(module):
    config = module.EXPERIMENT.config("desk")
    outcome = module.collect(config, planted(config, gain=0.05))
    assert {claim.text: claim.verdict for claim in outcome.claims if claim.verdict not in (SHOWN, EXCLUDED)} == {}


@pytest.mark.parametrize("module", [vgg, resnet])
def test_a_loss_of_accuracy_contradicts(module):
    config = module.EXPERIMENT.config("desk")
    claims = module.collect(config, planted(config, gain=-0.05)).claims
    assert {claim.verdict for claim in claims if "test accuracy rises" in claim.text} == {CONTRADICTED}


@pytest.mark.parametrize(("scale", "printed"), [("paper", [84.3, 66.4]), ("desk", [])])
def test_the_papers_accuracies_are_compared_with_runs_on_its_images_alone(scale, printed):
    config = vgg.EXPERIMENT.config(scale)
    claims = vgg.collect(config, planted(config, gain=0.05)).claims
    assert [(claim.printed, claim.role) for claim in claims if "best test accuracy" in claim.text] == [
        (number, COMPARISON) for number in printed
    ]


def test_sharpness_that_does_not_fall_contradicts():
    config = vgg.EXPERIMENT.config("desk")
    findings = planted(config, gain=0.0)
    level = np.full_like(findings[f"decay-{config.seeds[0]}"]["step"], 5000.0)
    flat = {
        name: {**run, "sharpness": level, "sharpness_before": level} if name.startswith("decay") else run
        for name, run in findings.items()
    }
    (claim,) = judged(vgg, flat, "falls")
    assert claim.verdict == CONTRADICTED


def test_sharpness_and_edge_are_means_over_two_steps():
    """One side of the valley alone would be below the edge, the other far above it."""
    config = vgg.EXPERIMENT.config("desk")
    findings = planted(config, gain=0.05)
    sides = {
        name: {**run, "sharpness": 0.8 * run["sharpness"], "sharpness_before": 1.2 * run["sharpness"]}
        for name, run in findings.items()
    }
    for words in ("middle window", "how often sharpness is above"):
        (one,), (two,) = judged(vgg, findings, words), judged(vgg, sides, words)
        assert two.measured == pytest.approx(one.measured) and two.verdict in (SHOWN, EXCLUDED)
    below = {name: {**run, "sharpness": 0.5 * run["sharpness"]} for name, run in sides.items()}
    (claim,) = judged(vgg, below, "how often sharpness is above")
    assert claim.verdict == CONTRADICTED


def test_the_first_ratio_is_that_of_the_papers_learning_rate():
    config = vgg.EXPERIMENT.config("desk")
    findings = planted(config, gain=0.05)
    (claim,) = judged(vgg, findings, "first weights")
    run, c = findings[f"decay-{config.seeds[0]}"], 1 - 0.1 * 5e-4
    assert claim.measured == pytest.approx(run["sharpness"][0] * 0.1 / (2 * c * run["norm_sq"][0]), rel=1e-3)
    flatter = {name: {**run, "sharpness_before": run["sharpness"] / 20} for name, run in findings.items()}
    flatter = {name: {**run, "sharpness": run["sharpness_before"]} for name, run in flatter.items()}
    (claim,) = judged(vgg, flatter, "first weights")
    assert claim.verdict == CONTRADICTED


def test_a_loss_that_only_falls_does_not_come_and_go():
    """Not even by the mean over the steps before the window, which its first measurement has."""
    config = vgg.EXPERIMENT.config("desk")
    findings = planted(config, gain=0.05)
    trend = {
        name: {**run, "loss": least_loss(config, config.variants[0]) + 0.01 * np.exp(-run["step"] / 400)}
        for name, run in findings.items()
    }
    (claim,) = judged(vgg, trend, "comes and goes")
    assert claim.verdict == CONTRADICTED and claim.measured == 0


@pytest.mark.parametrize(
    ("values", "count"),
    [([5, 4, 3, 2, 1], 0), ([1, 2, 3], 0), ([1, 2, 1, 2, 1, 2], 2), ([10, 9, 10, 9, 10], 0), ([4, 3, 2, 2.2, 2.4], 1)],
)
def test_returns_are_rises_after_falls(values, count):
    assert returns(np.array(values, dtype=np.float64), factor=1.2) == count


def test_as_many_bursts_at_every_scale_are_not_more_of_them():
    config = ablations.EXPERIMENT.config("desk")
    findings = planted(config, gain=0.05)
    excess = findings["scale-twice-20"]["loss"] - least_loss(config, config.variants[-1])
    same = {
        name: {**findings[name], "loss": least_loss(config, config.variants[place]) + excess}
        for name, (place, _) in tasks(config).items()
    }
    (claim,) = judged(ablations, same, "bursts are more frequent")
    assert claim.verdict == CONTRADICTED and claim.measured == 0


def stand_in(size: int, *, classes: int = 10, count: int = 20) -> ImageSet:
    images = torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % classes
    return ImageSet(images, labels, images, labels, tuple("abcdefghij"[:classes]), "random")


@pytest.mark.parametrize(
    ("module", "name"), [(vgg, "decay"), (ablations, "lr 10"), (resnet, "scale-invariant"), (resnet, "standard")]
)
@pytest.mark.slow
def test_the_papers_settings_start_and_run_on_a_stand_in(module, name):
    paper = module.EXPERIMENT.config("paper")
    tiny = replace(paper, width=2, ghost=10 if paper.ghost else 0, hessian_images=10 if paper.ghost else 0)
    (variant,) = [variant for variant in paper.variants if variant.name == name]
    trained = train(recipe(tiny, variant, seed=0, images=stand_in(8), part=(10, 10)))
    assert trained.curves["step"].tolist() == [0, 10] and np.isfinite(trained.curves["sharpness"]).all()
    assert trained.covers == ("ghost batches" if paper.ghost else "one batch")


def test_the_parts_of_a_descent_are_one_descent(monkeypatch):
    """Measured at other intervals, the weights are the same."""
    images = stand_in(8, classes=4, count=12)
    monkeypatch.setattr("equilibria.lab.papers.sharp.full_batch.load", lambda config, seed: images)
    cut = DescentVariant("cut", 0.05, 0.1, ((4, 2), (10, 5)))
    whole = replace(cut, name="whole", parts=((10, 10),))
    config = Config((cut, whole), early=(0, 4), late=(8, 10), size=8, width=2, stages=(1, 1))
    parts, once = run_task(config, (0, 3)), run_task(config, (1, 3))
    assert parts["step"].tolist() == [0, 2, 4, 5, 10]
    for name in ("norm_sq", "test_loss", "train_loss", "grad_norm_sq"):
        assert parts[name][-1] == once[name][-1]


def test_every_measurement_is_of_its_step_and_of_the_one_before():
    """And leaves the weights as they are, bit for bit."""
    images = stand_in(8, classes=4, count=12)
    variant = DescentVariant("one", 0.05, 0.1, ((6, 1),))
    config = Config((variant,), early=(0, 1), late=(5, 6), size=8, width=2, stages=(1, 1))
    every = train(recipe(config, variant, seed=0, images=images, part=(6, 1)))
    once = train(recipe(config, variant, seed=0, images=images, part=(6, 6)))
    for name in ("norm_sq", "train_loss", "train_accuracy", "sharpness"):
        values, before = every.curves[name], every.curves[f"{name}_before"]
        assert before[0] == pytest.approx(values[0], rel=0.02)
        # The undone step is off by rounding; sharpness by its tolerance.
        assert before[1:] == pytest.approx(values[:-1], rel=0.02 if name == "sharpness" else 1e-4)
    assert np.ptp(every.curves["norm_sq"]) > 1e-3 * every.curves["norm_sq"][0]
    for one, other in zip(every.model.parameters(), once.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_resumed_descent_gives_the_same_numbers(tmp_path):
    images = stand_in(8, classes=4, count=12)
    variant = DescentVariant("one", 0.05, 0.1, ((8, 2),))
    config = Config((variant,), early=(0, 1), late=(5, 6), size=8, width=2, stages=(1, 1))
    whole = train(recipe(config, variant, seed=0, images=images, part=(8, 2))).curves

    def killed(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            recipe(config, variant, seed=0, images=images, part=(8, 2)),
            folder=tmp_path,
            checkpoint_steps=1,
            progress=killed,
        )
    again = train(recipe(config, variant, seed=0, images=images, part=(8, 2)), folder=tmp_path).curves
    for name, values in whole.items():
        np.testing.assert_array_equal(again[name], values)


def test_the_gradient_of_a_measurement_is_that_of_the_last_step():
    images = stand_in(8, classes=4, count=12)
    variant = DescentVariant("one", 0.05, 0.1, ((6, 3),))
    config = Config((variant,), early=(0, 1), late=(5, 6), size=8, width=2, stages=(1, 1))
    before = train(recipe(config, variant, seed=0, images=images, part=(5, 5))).model.train()
    loss = functional.cross_entropy(before(images.train_images), images.train_labels)
    grads = torch.autograd.grad(loss, list(before.parameters()))
    measured = train(recipe(config, variant, seed=0, images=images, part=(6, 3))).curves["grad_norm_sq"]
    assert np.isnan(measured[0])  # no step was taken yet
    # Float32 sums in another memory layout.
    assert measured[-1] == pytest.approx(sum(float(grad.square().sum()) for grad in grads), rel=1e-4)


def test_the_invariant_part_of_the_standard_network_is_most_of_it_but_not_all():
    config = Config(
        (DescentVariant("any", 0.1, 0.01, ((1, 1),), network=STANDARD_RESNET),), late=(0, 1), width=2, depth=8
    )
    images = stand_in(8, classes=4, count=12)
    part = invariant_part(config, config.variants[0], images)
    net = network(config, config.variants[0], images)
    sizes = {name: param.numel() for name, param in net.named_parameters()}
    assert sum(sizes[name] for name in part) > 0.8 * sum(sizes.values())
    assert "blocks.0.conv1.weight" in part and len(part) < len(sizes)
    before = net(images.train_images)
    with torch.no_grad():
        for name in part:
            net.get_parameter(name).mul_(3)
    torch.testing.assert_close(net(images.train_images), before, rtol=1e-2, atol=1e-2)  # eps of BatchNorm


def test_the_least_loss_is_that_of_the_last_batchnorm():
    config = Config((DescentVariant("any", 0.1, 0.0, ((1, 1),)),), late=(0, 1), classes=())
    assert least_loss(config, config.variants[0]) == pytest.approx(np.log(100 / 91))  # the paper's, appendix R
    assert least_loss(config, replace(config.variants[0], network=STANDARD_RESNET)) == 0
    assert least_loss(config, replace(config.variants[0], network=INVARIANT_RESNET)) > 0


def test_the_edge_has_the_factor_that_decay_brings():
    config = Config((DescentVariant("any", 0.5, 0.4, ((1, 1),)),), late=(0, 1))
    sides = {"sharpness": 1.0, "train_loss": 1.0, "train_accuracy": 1.0, "norm_sq": 2.5}
    run = {name: np.ones(1) for name in ("step", "loss", "test_accuracy", "grad_norm_sq")}
    run |= {name + side: np.array([value]) for name, value in sides.items() for side in ("", "_before")}
    assert read_descent(config, config.variants[0], run).edge.tolist() == [8.0]  # 2 * 0.8 * 2.5 / 0.5
    changed = read_descent(
        config, config.variants[0], {**run, "norm_sq": np.array([7.5]), "sharpness": np.array([6.0])}
    )
    assert changed.edge.tolist() == [16.0] and changed.ratio.tolist() == [0.1875]
    assert changed.unit_gradient.tolist() == [2.5]  # the gradient is that of the step before
