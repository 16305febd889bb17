"""Noise scale, curvature and turning over many steps, against worlds in which they are known."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pytest
import torch

import equilibria as eq
from equilibria.diagnosis import diagnose
from equilibria.diagnosis.noise import _turning_error, gradient_noise
from equilibria.views.run.noise import noise_section

SIZE = 32  # x SIZE weights: all of them are among the coordinates
STEPS = 2000


class Bowl:
    """Weights of modes with different curvature, and Gaussian gradient noise: truth summed up over the window.

    Plain SGD, momentum and AdamW settle in it; the loss is stationary, and the last move is known exactly.
    """

    def __init__(self, make, *, noise=1.0, bend=1.0, steps=STEPS, seed=0, log=True, bursts=1.0, **watched):
        torch.manual_seed(seed)
        self.steps = steps
        self.weights = [torch.nn.Parameter(torch.zeros(SIZE, SIZE)) for _ in range(2)]
        model = torch.nn.ParameterDict({f"w{place}": weight for place, weight in enumerate(self.weights)})
        centres = [3 * torch.randn(SIZE, SIZE) for _ in range(2)]  # far out: steps turn the weights by small angles
        rates = bend * torch.logspace(-2, 0, SIZE * SIZE).reshape(SIZE, SIZE)
        self.rates = [rates, 0.3 * rates]
        for weight, centre in zip(self.weights, centres, strict=True):
            weight.data.copy_(centre)
        optimizer = make(model.parameters())
        is_adam = isinstance(optimizer, torch.optim.AdamW)
        sums = np.zeros((2, 4))
        before = [weight.detach().clone() for weight in self.weights]
        options = {"every": 1, "batch_size": 8, "steps_per_epoch": 10**6, "invariant": ["w0", "w1"], **watched}
        with eq.watch(model, optimizer, **options) as self.monitor:
            for step in range(steps):
                loss = 0.0
                for place, (weight, rate) in enumerate(zip(self.weights, self.rates, strict=True)):
                    away = weight.detach() - centres[place]
                    mean = rate * away
                    weight.grad = mean + noise * torch.randn(SIZE, SIZE) * (bursts if step % 61 == 0 else 1.0)
                    loss += 0.5 * float((rate * away**2).sum())
                    root = optimizer.state[weight]["exp_avg_sq"].sqrt() if is_adam and step else 1.0
                    move = weight.detach() - before[place]
                    before[place] = weight.detach().clone()
                    if step >= steps // 2:
                        parts = (
                            mean**2 / root,
                            weight.grad**2 / root,
                            rate * move**2,
                            move**2 / (weight.detach() ** 2).sum(),
                        )
                        sums[place] += [float(part.sum()) for part in parts]
                optimizer.step()
                if log:
                    self.monitor.log(loss=loss)
        self.shares = sums[:, 0] / sums[:, 1]
        self.share = sums[:, 0].sum() / sums[:, 1].sum()
        self.curvatures = sums[:, 2] / sums[:, 3]
        self.noise = self.monitor.noise()


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "sgdm": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, betas=(0.9, 0.99), weight_decay=0.0),
}
_CACHED: dict[str, Bowl] = {}


def bowl(name):
    if name not in _CACHED:
        # Adam divides by the noise: with a hundredth of it, curvature acts as strongly as under SGD.
        is_adam = name == "adamw"
        _CACHED[name] = Bowl(OPTIMIZERS[name], noise=0.01 if is_adam else 1.0, steps=2 * STEPS if is_adam else STEPS)
    return _CACHED[name]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_mean_gradients_share_is_that_of_the_world(name):
    world = bowl(name)
    for layer, share in zip((*world.noise.layers, world.noise.network), (*world.shares, world.share), strict=True):
        assert layer.mean_share == pytest.approx(share, abs=4 * layer.share_error, rel=0.03)
        assert layer.share_error < 0.1 * share
        assert layer.noise_scale == pytest.approx(1 / layer.mean_share - 1)
        assert (layer.first_step, layer.last_step) == (world.steps // 2, world.steps - 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_curvature_is_that_along_the_step(name):
    world = bowl(name)
    for layer, curvature in zip(world.noise.layers, world.curvatures, strict=True):
        assert layer.curvature == pytest.approx(curvature, abs=4 * layer.curvature_error, rel=0.03)
        assert layer.curvature_error < 0.15 * curvature
        assert (layer.lr_curvature is None) == (name == "adamw")


def test_plain_sgd_in_terms_of_lr_times_curvature():
    """lr_eff h = 2 m, where the noise is isotropic: lr g'Hg/|g|^2 = 2 m."""
    for layer in bowl("sgd").noise.layers:
        assert layer.lr_curvature == pytest.approx(2 * layer.mean_share, rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_turning_falls_below_that_of_independent_steps(name):
    layers = bowl(name).noise.layers
    for layer in layers:
        assert set(layer.turning) >= {2**power for power in range(10)}
        assert layer.turning[1] == pytest.approx(1, rel=0.2)
        assert layer.turning[512] < layer.turning[64] < 0.9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_turning_under_pure_noise_is_that_of_independent_steps(name):
    """Gradients without a mean: 1 for every rule, although momentum makes D(n) up to 19 times n D(1)."""
    world = Bowl(OPTIMIZERS[name], bend=0.0, steps=2100, log=False)
    for layer in world.noise.layers:
        assert [layer.turning[n] for n in (2, 16, 32)] == pytest.approx([1, 1, 1], rel=0.03)
        assert list(layer.turning.values()) == pytest.approx([1] * len(layer.turning), rel=0.15)
    shown = noise_section(world.noise)
    assert "1: gradients are independent; below 1" in shown and "D(16) ÷ independent" in shown


def test_kappa_is_in_the_table_and_in_the_report():
    noise = bowl("adamw").noise
    gains = bowl("adamw").monitor.samples().to_pylist()
    late = [row["update_gain"] for row in gains if row["param"] == "w0" and row["step"] >= STEPS]
    assert noise.layers[0].update_gain == pytest.approx(np.nanmean(np.array(late, dtype=float)), rel=1e-6)
    for shown in (str(noise), noise_section(noise)):
        assert "κ" in shown and "squared update over that of independent gradients" in shown
    assert bowl("sgd").noise.layers[0].update_gain is None and "κ" not in str(bowl("sgd").noise)


def test_turning_is_left_out_where_rare_long_steps_make_most_of_it():
    """One step in 61 makes nine tenths of D(1); one comparison over 16 steps meets it, or does not."""
    noise = Bowl(OPTIMIZERS["sgd"], bursts=20.0).noise
    for layer in noise.layers:
        assert not any(n >= 16 for n in layer.turning)
        assert re.search(r"comparisons over \d+ steps give D\(n\) with a standard error of", layer.turning_doubt)


@pytest.mark.parametrize("lasting", [1, 40])
@pytest.mark.parametrize("spacing", [1, 4])
def test_the_error_of_turning_is_that_of_stretches_drawn_at_random(lasting, spacing):
    """Squared angles whose size scatters from step to step, and in spells of some steps."""
    draw, count, trials = np.random.default_rng(3), 400_000, 2000
    angle_sq = draw.exponential(size=count) * np.repeat(draw.gamma(2.0, size=count // lasting), lasting)
    sums, steps = np.cumsum(np.append(0.0, angle_sq)), np.arange(count)
    for length in (4, 16, 128):
        begins = draw.integers(0, count - length, size=(trials, 3))
        drawn = ((sums[begins + length] - sums[begins]) / length).mean(axis=1).var() / angle_sq.mean() ** 2
        stated = _turning_error(steps[::spacing], angle_sq[::spacing], steps=length, stretches=3) ** 2
        # Three standard errors of the variance between blocks, which sparse samples raise, and of that of the draws.
        off = 3 * (spacing * (2 * length / count) ** 0.5 + (2 / trials) ** 0.5)
        assert stated == pytest.approx(drawn, rel=off)


def test_a_reliable_noise_scale_makes_one_finding():
    world = bowl("sgd")
    assert world.noise.network.reliable, world.noise.network.doubt
    (finding,) = (finding for finding in world.monitor.findings() if finding.kind == "batch_size")
    scale = world.noise.network.noise_scale
    assert finding.severity == "note"
    assert finding.subject.endswith(f"{8 * scale:.0f} examples for a batch of 8")
    share = world.noise.network.mean_share
    assert f"about {(1 - share) ** -0.5:.2f} times as far as two present ones" in finding.remedy
    assert "over steps 1,000-1,999" in finding.evidence


def again(world, *, log=True, **metadata):
    """The findings and the noise of a world with other metadata."""
    samples, known = world.monitor.samples(), {**world.monitor.metadata, **metadata}
    metrics = world.monitor.metrics() if log else None
    kinds = {finding.kind for finding in diagnose(samples, metadata=known, metrics=metrics)}
    return gradient_noise(samples, metadata=known, metrics=metrics), "batch_size" in kinds


def test_nothing_is_reliable_without_the_loss():
    noise, is_found = again(bowl("sgd"), log=False)
    assert noise.network.mean_share == bowl("sgd").noise.network.mean_share
    assert "the loss is not logged" in noise.network.doubt
    assert "the loss is not logged" in noise.layers[0].curvature_doubt
    assert not is_found


@pytest.mark.parametrize(("epoch", "words"), [(None, "tell eq.watch"), (20, "batches depend on each other")])
def test_batches_of_a_short_epoch_are_not_independent(epoch, words):
    noise, is_found = again(bowl("sgdm"), steps_per_epoch=epoch)
    assert words in noise.layers[0].doubt
    assert not noise.layers[0].reliable
    assert not is_found


def test_a_falling_loss_is_no_plateau():
    world = bowl("sgd")
    metrics = world.monitor.metrics()
    values = metrics["value"].to_numpy() - 20 * metrics["step"].to_numpy()
    falling = metrics.set_column(2, "value", pa.array(values))
    noise = gradient_noise(world.monitor.samples(), metadata=world.monitor.metadata, metrics=falling)
    assert "the loss falls by 20 per step over steps 1,000-1,999" in noise.network.doubt
    assert not any(layer.reliable for layer in noise.layers)


def test_layers_that_are_not_known_to_be_scale_invariant_are_doubted():
    world = bowl("sgd")
    params = [{**entry, "invariant": entry["name"] == "w1"} for entry in world.monitor.metadata["params"]]
    noise, is_found = again(world, params=params)
    assert ["not known to be scale-invariant" in layer.doubt for layer in noise.layers] == [True, False]
    assert not is_found or noise.network.reliable


def test_few_samples_are_said_to_be_few():
    world = Bowl(OPTIMIZERS["sgd"], steps=40)
    assert world.noise.network.doubt
    assert world.noise.layers[0].mean_share is None
    assert world.noise.layers[0].doubt == "20 samples; 30 are needed"


def test_an_optimizer_without_a_law_has_a_curvature_and_no_noise_scale():
    world = Bowl(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), steps=1000)
    for layer, curvature in zip(world.noise.layers, world.curvatures, strict=True):
        assert layer.mean_share is None
        assert "no law" in layer.doubt
        assert layer.curvature == pytest.approx(curvature, abs=4 * layer.curvature_error)


def test_no_samples_make_no_numbers():
    model = torch.nn.Linear(3, 3)
    with eq.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        noise = monitor.noise()
    assert noise.layers == ()
    assert not noise.network.reliable
    assert "network" in str(noise)


def test_the_network_is_no_mean_of_ratios():
    """Of two layers, the one with the larger gradient counts for more."""
    world = bowl("sgd")
    weights = np.array([1.0, 1.0]) * [
        np.mean(world.monitor.samples()["grad_norm"].to_numpy()[place::2] ** 2) for place in (0, 1)
    ]
    expected = np.average([layer.mean_share for layer in world.noise.layers], weights=weights)
    assert world.noise.network.mean_share == pytest.approx(expected, rel=0.02)
    assert dataclasses.replace(world.noise.network, doubt="x").reliable is False
