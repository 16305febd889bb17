"""eq-diffusion: what a kept trajectory holds, its statistics by hand, and identities on walks where they are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from equilibria.lab.beyond.diffusion import _network
from equilibria.lab.beyond.pull_back import (
    ADAMW,
    MAIN,
    NETS,
    SGD,
    SGDM,
    SMALL,
    Config,
    Stage,
    _by_spectrum,
    momentum_share,
    noise_scales,
    over_many_steps,
    scaling,
)
from equilibria.lab.beyond.trajectory import (
    NoisyDraws,
    autocorrelation,
    follow,
    gradient_dot_move,
    layer_statistics,
)


@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30)
def test_autocorrelation_is_the_mean_of_products(steps, entries, seed):
    rows = np.random.default_rng(seed).normal(size=(steps, entries))
    expected = [np.mean([rows[t] @ rows[t + k] for t in range(steps - k)]) for k in range(steps)]
    assert autocorrelation(rows, steps - 1) == pytest.approx(expected, abs=1e-9)


def small_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    )


def one_batch(size):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def loss_slope(net, vector):
    """The gradient of all parameters at a flat vector of them."""
    torch.nn.utils.vector_to_parameters(vector, net.parameters())
    inputs, targets = one_batch(32)
    gradients = torch.autograd.grad(cross_entropy(net(inputs.double()), targets), list(net.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_a_trajectory_holds_the_steps_and_the_curvature_along_them():
    """With one batch for ever the Hessian is that of the training loss: its products by differences of gradients."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, weight_decay=0.01)
    path = follow(net, optimizer, one_batch, batch_size=32, layers=["0.weight"], settle=5, steps=9, points=3)
    weights, gradients = path.weights, path.gradients
    assert weights[1:] == pytest.approx(0.995 * weights[:-1] - 0.5 * gradients[:-1], abs=1e-6)
    assert path.layers == (slice(0, 24),)
    assert path.shares == pytest.approx([1.0], abs=1e-5)  # all batches are the same: no noise
    again = small_net().double()
    by_hand = []
    for step in (3, 6):
        at, move = (torch.from_numpy(row).double() for row in (weights[step], weights[step] - weights[step - 1]))
        assert loss_slope(again, at).numpy() == pytest.approx(gradients[step], abs=2e-6)
        bent = (loss_slope(again, at + 1e-4 * move) - loss_slope(again, at - 1e-4 * move)) / 2e-4
        by_hand.append([float(bent[:24] @ move[:24]), float(bent @ move)])
    assert path.curvature == pytest.approx(np.array(by_hand), rel=1e-3)
    assert gradient_dot_move(weights, gradients)[0] == pytest.approx(
        float(gradients[1] @ (weights[1] - weights[0])), rel=1e-5
    )


def test_draws_repeat_with_their_seed_and_have_their_share_of_random_labels():
    images, labels = torch.arange(40.0).view(40, 1), torch.zeros(40, dtype=torch.int64)
    labels[0] = 9

    def drawn(seed):
        return NoisyDraws(images, labels, label_noise=0.3, seed=seed)(20_000)

    (inputs, targets), (same, _), (other, _) = drawn(1), drawn(1), drawn(2)
    assert torch.equal(inputs, same) and not torch.equal(inputs, other)
    wrong = (targets != labels[inputs.flatten().long()]).double().mean()
    assert wrong == pytest.approx(0.3 * 0.9, abs=0.02)  # one in ten random labels is right


def walk(pull_back, *, eps, steps, dim):
    """Plain SGD on tangent noise and a force towards a slow average of the direction; its weights and gradients."""
    draw, lr = np.random.default_rng(5), 0.1
    weight, centre = draw.normal(size=dim), np.zeros(dim)
    weight *= (lr**2 / (2 * eps)) ** 0.25 / np.linalg.norm(weight)  # the equilibrium, up to the force
    weights, gradients = [], []
    for _ in range(steps + 800):
        norm = np.linalg.norm(weight)
        direction = weight / norm
        centre += 0.05 * (direction - centre)
        gradient = draw.normal(size=dim) / np.sqrt(dim) + pull_back * (direction - centre)
        gradient = (gradient - direction * (direction @ gradient)) / norm
        weights.append(weight)
        gradients.append(gradient)
        weight = (1 - eps) * weight - lr * gradient
    return np.array(weights[800:]), np.array(gradients[800:])


CONFIG = Config(main=Stage(1.0, 0, 4096, 1), small=Stage(1 / 8, 0, 64, 1), lags=1843)


def planted(pull_back):
    weights, gradients = walk(pull_back, eps=2.5e-3, steps=4096, dim=400)
    rho, r, cosines = layer_statistics(weights, gradients, lags=CONFIG.lags, distances=CONFIG.distances(CONFIG.main))
    return {"main_gradients": rho[None], "main_moves": r[None], "main_cosines": cosines[None]}


def test_identities_hold_on_a_walk_that_pulls_back_and_fail_without_its_correlations():
    run = planted(2.0)
    apart = 1 - run["main_cosines"][0]
    assert apart[5] < 0.8 * 32 * apart[0]  # it does pull back
    errors = over_many_steps(CONFIG, SGD, run)
    assert errors["cosine"][0] < 0.01 and errors["moves"][0] < 0.01 and errors["first order"][0] < 0.01
    assert abs(errors["sum"][0]) < 0.02
    without = {**run, "main_gradients": np.eye(1, CONFIG.lags + 1), "main_moves": np.eye(1, CONFIG.lags + 1)}
    errors = over_many_steps(CONFIG, SGD, without)
    assert errors["cosine"][0] > 0.2 and errors["moves"][0] > 0.2 and errors["first order"][0] > 0.2


def test_every_optimizer_has_the_same_decay_in_force_and_its_rule_of_scaling():
    for optimizer in (SGD, SGDM, ADAMW):
        assert CONFIG.decay(optimizer, 1.0) == pytest.approx(2.5e-3)
        assert CONFIG.decay(optimizer, 4.0) == pytest.approx(1e-2)
    assert CONFIG.settings(ADAMW, 4.0)["lr"] == pytest.approx(2 * CONFIG.settings(ADAMW, 1.0)["lr"])
    assert [CONFIG.batch(stage) for stage in CONFIG.stages(SGD).values()] == [128, 16, 512]


def test_ratios_of_a_run_are_those_of_its_numbers():
    run = {
        "main_gradients": np.array([[1.0, -0.2]]),
        "main_shares": np.array([0.25]),
        "main_buffer": np.array([-0.05]),
        "small_cosines": np.exp(-np.array([[1e-3, 2e-3, 4e-3, 7.2e-3, 1e-2]])),
        "main_cosines": np.exp(-np.array([[8.1e-3]])),
    }
    assert np.concatenate(noise_scales(CONFIG, run, MAIN)) == pytest.approx([512, 384])
    predicted, measured = scaling(CONFIG, run, MAIN)
    assert (predicted[0], measured[0]) == pytest.approx((np.sqrt(0.9), np.sqrt(7.2 / 8.1)))
    assert momentum_share(run)[0] == pytest.approx(0.09 * 1.9 / 1.8)
    assert CONFIG.distances(CONFIG.small)[3] == 8 and SMALL in CONFIG.stages(SGDM)


@pytest.mark.parametrize("name", NETS)
def test_the_layers_are_scale_invariant(name):
    torch.manual_seed(0)
    net = _network(name, 4)
    images = torch.randn(16, 1, 8, 8)
    before = net(images)
    layers = [param for key, param in net.named_parameters() if param.ndim > 1 and not key.startswith("head")]
    assert len(layers) == 3
    with torch.no_grad():
        for param in layers:
            param *= 3
    assert (net(images) - before).abs().max() < 2e-3  # the normalisation adds 1e-5 to a variance


def test_a_refused_spectrum_counts_as_all_of_it_off():
    fitting, refused = (_by_spectrum([1, 2, 4, 8], turned, 16) for turned in ([1, 1.9, 3.5, 6.1], [1, 4, 16, 64]))
    assert float(fitting) > 6.1 and float(refused) == 0
