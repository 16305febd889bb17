"""Parts of the smd experiments on networks that have logic of their own, and the papers' settings on stand-ins."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.lab.data import ImageSet, imagenet
from equilibria.lab.harness.registry import experiments
from equilibria.lab.papers.smd import fig2d_correlation as correlation
from equilibria.lab.papers.smd import fig3_multistage as multistage
from equilibria.lab.papers.smd import fig7_linear_scaling as linear_scaling
from equilibria.lab.papers.smd import fig7_linear_scaling as linear_scaling_runs
from equilibria.lab.papers.smd import fig9_architectures as architectures
from equilibria.lab.papers.smd import plus_app_e_momentum as momentum
from equilibria.lab.papers.smd.fig2_fixed_lr import arrivals
from equilibria.lab.papers.smd.layer_angles import inside, layer_column, running_mean
from equilibria.lab.papers.smd.measures import GradientNorms, NoiseMeasure, SpanAngles, batch_gradients, convolutions
from equilibria.lab.papers.smd.trainings import Images, ImageTraining, Network, Sgd, batches, load, make_network, recipe
from equilibria.lab.training import Training, by_layer, train

DIGITS = Images("digits", flip=False)
TINY = Network(width=4, blocks=(1,))
SGD = Sgd("SGDM", lr=0.1, weight_decay=5e-3, other_lr=0.01, momentum=0.9)


def small_training(**changes) -> ImageTraining:
    made = ImageTraining(images=DIGITS, network=TINY, sgd=SGD, batch_size=16, steps=8, measure_every=1, watch_every=1)
    return replace(made, **changes)


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load(DIGITS)


@pytest.fixture
def training(digits) -> Training:
    return Training(recipe(small_training(), digits, seed=0))


def some_batches(digits, *, size: int = 16, count: int = 4):
    return list(islice(batches(DIGITS, digits, batch_size=size, seed=9), count))


# ---- gradients of batches


def test_gradients_are_those_of_a_step_and_leave_no_trace(training, digits):
    given = some_batches(digits)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    found = list(batch_gradients(training, given))
    assert all(torch.equal(before[name], value) for name, value in training.model.state_dict().items())
    assert all(weight.grad is None for weight in training.model.parameters())
    inputs, targets = given[1]
    functional.cross_entropy(training.model(inputs), targets).backward()
    for weight, gradient in zip(convolutions(training), found[1], strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_gradients_of_ghost_batches_are_means_over_batches_that_are_normalised_apart(digits):
    ghosts = Training(recipe(small_training(ghost=8), digits, seed=0))
    (batch,) = some_batches(digits, count=1)
    (found,) = batch_gradients(ghosts, [batch])
    halves = list(zip(batch[0].split(8), batch[1].split(8), strict=True))
    parts = list(batch_gradients(Training(recipe(small_training(), digits, seed=0)), halves))
    for gradient, *of_halves in zip(found, *parts, strict=True):
        torch.testing.assert_close(gradient, sum(of_halves) / 2)
    ghosts.advance(batch)
    for weight, gradient in zip(convolutions(ghosts), found, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_the_noise_of_equal_batches_is_nothing_and_their_signal_all(training, digits):
    (batch,) = some_batches(digits, count=1)
    found = NoiseMeasure([batch, batch])(training)
    (gradients,) = batch_gradients(training, [batch])
    pairs = zip(gradients, convolutions(training), strict=True)
    expected = [float(g.double().square().sum() * w.detach().double().square().sum()) for g, w in pairs]
    np.testing.assert_allclose(found["signal_sq"], expected, rtol=1e-5)
    assert np.all(found["noise_sq"] <= 1e-6 * found["signal_sq"])


def test_summed_gradients_grow_with_the_batch_that_is_summed_over(training, digits):
    (batch,) = some_batches(digits, count=1)
    twice = tuple(torch.cat([part, part]) for part in batch)  # BatchNorm sees the same statistics
    found = GradientNorms({"one": [batch], "two": [twice]}, every=1)(training)
    np.testing.assert_allclose(found["two"], 2 * found["one"], rtol=1e-4)


def test_between_two_times_there_are_no_gradient_norms(training, digits):
    training.step = 3
    found = GradientNorms({"one": some_batches(digits, count=1)}, every=2)(training)
    assert np.isnan(found["one"]).all()


# ---- angles


def test_angles_over_one_step_are_those_that_watching_finds_in_the_same_order(digits):
    trained = train(recipe(small_training(measures={"spans": SpanAngles((1, 4))}), digits, seed=0))
    layers = by_layer(trained.samples, ["angle"])
    np.testing.assert_allclose(trained.curves["angle_1"][1:], layers.columns["angle"], rtol=1e-3)
    there = np.isfinite(trained.curves["angle_4"][:, 0])
    assert trained.curves["step"][there].tolist() == [4, 8]


def test_spans_go_on_after_an_interruption(digits):
    whole, part = SpanAngles((4,)), SpanAngles((4,))
    first = train(recipe(small_training(steps=6, measures={"spans": part}), digits, seed=0))
    gone_on = SpanAngles((4,))
    second = train(recipe(small_training(measures={"spans": gone_on}), digits, seed=0), start=first.state)
    straight = train(recipe(small_training(measures={"spans": whole}), digits, seed=0))
    assert np.array_equal(second.curves["angle_4"][-1], straight.curves["angle_4"][-1])


def test_a_running_mean_of_a_line_is_the_line_inside():
    line = np.stack([np.arange(20.0), -np.arange(20.0)], axis=1)
    np.testing.assert_allclose(running_mean(line, 5)[2:-2], line[2:-2], atol=1e-12)


def test_windows_and_layers_that_are_not_there_raise():
    with pytest.raises(EquilibriaError, match="expected one with samples"):
        inside(np.arange(5), (7, 9))
    with pytest.raises(EquilibriaError, match="expected one of: a, b"):
        layer_column({"names": np.array(["a", "b"])}, "c")


def test_arrival_is_the_first_step_that_stays_near_the_theory_or_the_last_of_all():
    off = np.array([[2.0, 2.0, 1.0], [1.02, 2.0, 1.2], [1.0, 2.0, 1.04], [1.2, 2.0, 1.0]])
    assert arrivals(np.array([0, 10, 20, 30]), off, stay=2).tolist() == [10, 30, 20]
    assert arrivals(np.array([0, 10, 20, 30]), off, stay=1).tolist() == [10, 30, 0]


def test_the_law_of_later_stages_begins_where_the_stage_before_ended():
    """Two drops at once are one by the square: with no time between them the law must be that of k^2."""
    config = replace(multistage.EXPERIMENT.config("desk"), drops=(700, 701, 702), steps=703)
    _, third, fourth = multistage._predicted(config)
    assert third == pytest.approx(config.divisor**-1.0, rel=0.01)
    assert fourth == pytest.approx(config.divisor**-1.5, rel=0.01)


def test_linear_scaling_trains_on_equally_many_images():
    config = experiments()["smd-linear-scaling"].config("desk")
    for place in range(len(config.rules)):
        trainings = [config.training(place, factor) for factor in config.factors]
        assert len({training.steps * training.batch_size for training in trainings}) == 1
        assert len({training.sgd.lr / training.batch_size for training in trainings}) == 1
    assert config.spans(1) == (4, 16, 1024) and config.spans(16) == (64,)
    assert linear_scaling_runs.key(config, 1, 16, 50) == "sgdm-16-50"


@pytest.mark.parametrize(("steps", "ratio"), [(0, 1.0), (20, 2.0)])
def test_directions_that_diffuse_twice_as_fast_are_found_to_even_near_a_right_angle(steps, ratio):
    """A random walk on the sphere: the angle itself saturates, and would tell less than half of it."""
    rng, ends = np.random.default_rng(0), {}
    for number in (20, 20 + steps):
        walkers = np.tile(np.eye(1, 400), (2000, 1))
        for _ in range(number):
            walkers += rng.normal(0, 0.014, walkers.shape)
            walkers /= np.linalg.norm(walkers, axis=1, keepdims=True)
        ends[number] = np.arccos(walkers[:, :1])
    found = linear_scaling.diffusion(ends[20 + steps]) / linear_scaling.diffusion(ends[20])
    assert found[0] == pytest.approx(ratio, rel=0.02)
    assert steps == 0 or ends[40].mean() / ends[20].mean() < 1.3 < 2**0.5


def test_right_after_a_drop_the_norm_has_begun_to_follow():
    """By the closed form with time constant 500 over steps 10 to 100; momentum lags some steps behind it."""
    steps = np.arange(10, 100)
    closed = np.sqrt(np.mean(10 / (1 + 9 * np.exp(-steps / 500))))
    assert architectures._lagging(architectures.Config()) == pytest.approx(closed, rel=0.01)
    assert closed == pytest.approx(1.05, abs=0.01)


def test_the_share_of_the_mean_gradient_comes_back_from_the_growth_it_leads_to():
    """Squares of sums over n batches: n of noise, n^2 of signal."""
    for share in (0.0, 0.03, 1.0):
        grown = np.sqrt((4 + 16 * share) / (1 + share))
        assert linear_scaling.signal_share(grown, 4) == pytest.approx(share, abs=1e-12)
        assert linear_scaling.enlargement(share, 16) == pytest.approx(np.sqrt((16 + 256 * share) / (1 + share)))


# ---- the papers' settings


def small(network: Network) -> Network:
    """As deep in stages, narrow: it must start and run, not learn."""
    return replace(
        network, width={"mobilenet-v2": 8, "shufflenet-v2+": 34}.get(network.kind, 2), blocks=(1,) * len(network.blocks)
    )


def paper_trainings() -> dict[str, ImageTraining]:
    configs = {
        name: experiments()[name].config("paper") for name in experiments() if "paper" in experiments()[name].scales
    }
    return {
        "fixed-lr": configs["smd-fixed-lr"].training(1),
        "multistage": replace(configs["smd-multistage"].training(), rescale=True),
        "noise": configs["smd-noise"].training(),
        "linear-scaling": configs["smd-linear-scaling"].training(1, 4),
        "mobilenet": configs["smd-architectures"].training(0),
        "shufflenet": configs["smd-architectures"].training(1),
    }


@pytest.mark.parametrize("name", ["fixed-lr", "multistage", "noise", "linear-scaling", "mobilenet", "shufflenet"])
@pytest.mark.slow
def test_the_papers_settings_start_and_run_on_a_stand_in(name):
    paper = paper_trainings()[name]
    pixels = torch.randint(256, (8, 3, 40, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    stand_in = ImageSet(pixels, torch.arange(8) % 10, pixels, torch.arange(8) % 10, tuple("abcdefghij"), "random")
    small_images = replace(paper.images, size=64)
    tiny = replace(paper, network=small(paper.network), images=small_images, batch_size=8, ghost=4, steps=10)
    tiny = replace(tiny, drops=(5,) if paper.drops else (), warm_up=min(paper.warm_up, 3), watch_every=5)
    trained = train(recipe(tiny, stand_in, seed=0))
    assert trained.curves["step"][-1] == 10 and np.isfinite(trained.curves["loss"][-1])
    assert trained.covers == "ghost batches"
    last = by_layer(trained.samples, ["angle"]).columns["angle"][-1]
    assert (last > 0).all()  # blocks that begin as their shortcuts do not turn in the first step


@pytest.mark.parametrize("name", ["smd-fixed-lr", "smd-multistage", "smd-noise", "smd-linear-scaling"])
def test_the_papers_layer_is_one_of_the_network(name):
    config = experiments()[name].config("paper")
    stand_in = ImageSet(*(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1).long()) * 2, ("a",), "zeros")
    assert config.layer in dict(make_network(small(config.network), stand_in).named_parameters())


@pytest.mark.parametrize(("accuracy", "verdict"), [(76.3, "shown"), (74.9, "contradicted")])
def test_top_1_accuracies_of_table_1_are_claims_of_imagenet_alone(accuracy, verdict):
    scattered = {branch: [accuracy - 0.1, accuracy, accuracy + 0.1] for branch in multistage.BRANCHES}
    claims = multistage._judge_top_1({"test_accuracy": scattered})
    assert [(claim.printed, claim.verdict) for claim in claims] == [(76.25, verdict), (76.27, verdict)]
    assert (
        multistage.EXPERIMENT.config("paper").images.data
        == "imagenet"
        != multistage.EXPERIMENT.config("desk").images.data
    )


# ---- ImageNet


def write_imagenet(folder, *, count: int = 3) -> None:
    for part in ("train", "val"):
        np.save(folder / f"imagenet_{part}_x.npy", np.arange(count * 48, dtype=np.uint8).reshape(count, 3, 4, 4))
        np.save(folder / f"imagenet_{part}_y.npy", np.arange(count, dtype=np.int16))


def test_imagenet_is_read_from_arrays(tmp_path):
    write_imagenet(tmp_path)
    found = imagenet(tmp_path)
    assert found.classes == 3 and found.train_labels.dtype == torch.int64
    assert found.train_images.dtype == torch.uint8 and found.test_images[1, 0, 0, 1] == 49


def test_where_imagenet_is_missing_or_of_another_form_it_says_what_to_make(tmp_path):
    with pytest.raises(EquilibriaError, match=r"ImageNet was not found in .*imagenet_train_x.npy"):
        imagenet(tmp_path)
    write_imagenet(tmp_path)
    np.save(tmp_path / "imagenet_val_y.npy", np.zeros(7, dtype=np.int16))
    with pytest.raises(EquilibriaError, match=r"labels of \(7,\); expected"):
        imagenet(tmp_path)


# ---- momentum, and its correlation with the gradient


def momentum_run(config, momentum: float, seed: int, *, loss: float, far: float = 1.0) -> dict[str, np.ndarray]:
    """A level training at the law's angle, with a little noise."""
    rng = np.random.default_rng([seed, round(10 * momentum)])
    sampled, step = np.arange(0, config.steps, config.watch_every), np.arange(0, config.steps + 1, config.span)
    law = float(config.sgd(momentum).rule.equilibrium().angle)
    curve = loss + rng.normal(0, 1e-3, len(step))
    return {
        "sampled_step": sampled,
        "angle": law * (1 + rng.normal(0, 1e-3, (len(sampled), 3))),
        "angle_equilibrium": np.full((len(sampled), 3), law),
        "step": step,
        f"angle_{config.span}": far * (1 + rng.normal(0, 1e-3, (len(step), 3))),
        **dict.fromkeys(("loss", "test_loss", "test_accuracy"), curve),
    }


@pytest.mark.parametrize(("rise", "verdict"), [(0.1, "shown"), (-0.1, "contradicted")])
def test_a_loss_that_falls_with_momentum_contradicts_the_paper(rise, verdict):
    config = momentum.EXPERIMENT.config("desk")
    findings = {
        name: momentum_run(config, *task, loss=1.0 + rise * task[0]) for name, task in momentum.tasks(config).items()
    }
    claims = momentum.collect(config, findings).claims
    assert [claim.verdict for claim in claims if "angle" in claim.text and "200" not in claim.text] == 5 * ["shown"]
    assert [claim.verdict for claim in claims if "loss" in claim.text] == 4 * [verdict]


def test_the_correlation_is_of_means_over_the_window():
    sampled = np.arange(8)
    run = {
        "sampled_step": sampled,
        "momentum_unit_grad_sq": np.where(sampled < 4, 100.0, [0, 0, 0, 0, 1.0, -1.0, 3.0, 1.0])[:, None],
        "unit_grad_sq": np.full((8, 1), 2.0),
    }
    assert correlation.with_buffer(run, (4, 8)).tolist() == [0.5]
