"""Steps on a sphere against geometry, walks on random gradients, and walks with weight decay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory import SGD, AdamL2, AdamW, Lion, Muon
from equilibria.theory.muon import orthogonalised
from equilibria.theory.schedules import Cosine, Warmup
from equilibria.theory.sphere import from_sphere, sphere_angle, sphere_motion, to_sphere


@given(seed=st.integers(0, 2**32 - 1), lr=st.floats(1e-6, 10.0))
def test_the_angle_is_that_of_the_triangle(seed, lr):
    w, u = np.random.default_rng(seed).standard_normal((2, 5))
    after = w - lr * u
    ratio, cosine = lr * np.linalg.norm(u) / np.linalg.norm(w), u @ w / np.linalg.norm(u) / np.linalg.norm(w)
    chord = np.linalg.norm(after / np.linalg.norm(after) - w / np.linalg.norm(w))
    assert float(sphere_angle(ratio, cosine)) == pytest.approx(2 * math.asin(min(chord / 2, 1.0)), rel=1e-6)


def test_angles_stay_right_where_they_are_tiny():
    assert float(sphere_angle(1e-9, 0.3)) == pytest.approx(1e-9 * math.sqrt(1 - 0.09), rel=1e-8)


class Walk:
    """AdamW, Lion or Muon written out, on tangent noise of a length that falls as 1 / ||w||; float64."""

    def __init__(self, rule, shape, *, norm, seed, held):
        self.rule, self.held, self.t = rule, held, 0
        self.w = np.random.default_rng([seed, 0]).standard_normal(shape)
        self.w *= norm / np.linalg.norm(self.w)
        self.norm, self.first, self.second = norm, np.zeros(shape), np.zeros(shape)
        self.noise = np.random.default_rng([seed, 1])

    def step(self, lr, weight_decay, *, noise=None, factor=1.0):
        w, rule = self.w, self.rule
        size = np.linalg.norm(w)
        g = self.noise.standard_normal(w.shape) if noise is None else noise
        g = factor * (g - np.sum(g * w) / size**2 * w) / size
        self.t += 1
        if isinstance(rule, AdamW):
            b1, b2 = rule.betas
            self.first = b1 * self.first + (1 - b1) * g
            self.second = b2 * self.second + (1 - b2) * g * g
            u = self.first / (1 - b1**self.t) / np.sqrt(self.second / (1 - b2**self.t))
        elif isinstance(rule, Lion):
            b1, b2 = rule.betas
            u = np.sign(b1 * self.first + (1 - b1) * g)
            self.first = b2 * self.first + (1 - b2) * g
        else:
            mu = rule.momentum
            self.first = mu * self.first + (1 - mu) * g
            u = rule.gain(w.shape) * orthogonalised((1 - mu) * g + mu * self.first)
        after = (1 - lr * weight_decay) * w - lr * u
        if self.held:
            after *= self.norm / np.linalg.norm(after)
        cosine = np.sum(after * w) / np.linalg.norm(after) / size
        self.w = after
        return math.acos(min(cosine, 1.0)), np.sum(u * w) / np.linalg.norm(u) / size


RULES = [AdamW(0.01, 0.0, betas=(0.9, 0.99)), Lion(0.005, 0.0, betas=(0.9, 0.95)), Muon(0.05, 0.0, momentum=0.8)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_motion_on_a_sphere_against_walks(rule):
    """4 walks of 1,500 steps and 384 entries: 1 % of the angle is several standard errors."""
    shape, norm, burn, steps, lag = (24, 16), 3.0, 300, 1500, 200
    angles, cosines, far = [], [], []
    for seed in range(4):
        walk = Walk(rule, shape, norm=norm, seed=seed, held=True)
        for _ in range(burn):
            walk.step(rule.lr, 0.0)
        marks = []
        for _ in range(steps):
            marks.append(walk.w)
            angle, cosine = walk.step(rule.lr, 0.0)
            angles.append(angle)
            cosines.append(cosine)
        far += [np.sum(a * b) / norm**2 for a, b in zip(marks, marks[lag:], strict=False)]
    motion = sphere_motion(rule, norm, shape=shape)
    assert math.sqrt(np.mean(np.square(angles))) == pytest.approx(motion.angle, rel=0.01)
    assert np.mean(cosines) == pytest.approx(motion.cosine, rel=0.1)
    # exp(-diffusion lag / 2) after the steps in which momentum fills; the scatter of four walks is about 10 %
    assert -2 * math.log(np.mean(far)) / lag == pytest.approx(motion.diffusion, rel=0.2)


GROWING = [
    AdamW(3.4e-3, 0.1, betas=(0.9, 0.99)),
    Lion(7e-4, 0.5, betas=(0.9, 0.95)),
    Muon(6.7e-3, 0.05, momentum=0.8),
]


@pytest.mark.parametrize("rule", GROWING, ids=lambda rule: type(rule).__name__)
def test_angles_with_weight_decay_and_on_the_sphere_agree_through_warm_up_and_fall(rule):
    """The same gradients: in the mean over 50 steps angles agree to 0.5 %, from a norm far from equilibrium on.

    The norm grows by about 0.1 % per step, little within the memory of the momentum: gradients of different sizes in
    one momentum are what a sphere does not have.
    """
    shape, norm, steps = (24, 16), 1.5, 600
    schedule = Warmup(Cosine(rule.lr, steps=steps, end=rule.lr / 20), steps=60)
    held = to_sphere(rule, schedule, steps=steps, init_norm=norm, shape=shape)
    lrs = schedule.values(steps)
    free, on_sphere, ends = np.zeros(steps), np.zeros(steps), []
    for seed in range(200, 206):
        plain, fixed = (Walk(rule, shape, norm=norm, seed=seed, held=one) for one in (False, True))
        free += [plain.step(lrs[t], rule.weight_decay)[0] / 6 for t in range(steps)]
        on_sphere += [fixed.step(held.lr[t], 0.0)[0] / 6 for t in range(steps)]
        ends.append(np.linalg.norm(plain.w))
    assert np.mean(ends) / norm > 1.08  # it is no trivial case: the norm moves
    blocks, others = (angles.reshape(-1, 50).mean(1) for angles in (free, on_sphere))
    np.testing.assert_allclose(others, blocks, rtol=0.005)
    np.testing.assert_allclose(held.angle.reshape(-1, 50).mean(1), blocks, rtol=0.03)  # the prediction, of six walks
    assert held.radius == norm


@given(
    lr=st.floats(1e-4, 1e-2),
    decay=st.floats(0.0, 3.0),
    norm=st.floats(0.1, 10.0),
    kind=st.sampled_from([AdamW, Lion, Muon]),
)
def test_to_the_sphere_and_back(lr, decay, norm, kind):
    rule, schedule = kind(lr, decay), Warmup(Cosine(lr, steps=80, end=0.0), steps=10)
    there = to_sphere(rule, schedule, steps=80, init_norm=norm, shape=(8, 4))
    back = from_sphere(rule, there.lr, steps=80, radius=norm, shape=(8, 4))
    np.testing.assert_allclose(back.lr, schedule.values(80), rtol=1e-9, atol=1e-18)
    np.testing.assert_allclose(back.norm, there.norm, rtol=1e-9)
    np.testing.assert_allclose(back.angle, there.angle, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rule", [AdamW(3e-3, 0.1, betas=(0.9, 0.99)), Muon(6e-3, 0.05, momentum=0.8)], ids=repr)
def test_a_measured_norm_gives_the_same_angles_under_any_gradients(rule):
    """Gradients that last for hundreds of steps: the predicted norm is off, the measured one is not."""
    shape, steps, lag = (24, 16), 400, 300
    rng, lasting = np.random.default_rng(3), None
    noise = np.random.default_rng(4).standard_normal((steps, *shape))
    for step in range(steps):
        fresh = rng.standard_normal(shape)
        lasting = fresh if lasting is None else (1 - 1 / lag) * lasting + math.sqrt(2 / lag) * fresh
        noise[step] += lasting
    plain = Walk(rule, shape, norm=1.5, seed=1, held=False)
    norms, free = [], []
    for step in range(steps):
        norms.append(float(np.linalg.norm(plain.w)))
        free.append(plain.step(rule.lr, rule.weight_decay, noise=noise[step])[0])
    off = {}
    for name, norm in (("measured", norms), ("predicted", None)):
        held = to_sphere(rule, rule.lr, steps=steps, init_norm=1.5, norm=norm, shape=shape)
        fixed = Walk(rule, shape, norm=1.5, seed=1, held=True)
        angles = np.array([fixed.step(held.lr[step], 0.0, noise=noise[step])[0] for step in range(steps)])
        off[name] = np.abs(angles.reshape(-1, 50).mean(1) / np.reshape(free, (-1, 50)).mean(1) - 1).max()
    assert off["measured"] < 0.005 and off["predicted"] > 0.02


FAST = [AdamW(0.02, 3.0, betas=(0.9, 0.99)), Lion(7e-3, 8.0, betas=(0.9, 0.95)), Muon(0.08, 0.7, momentum=0.8)]


@pytest.mark.parametrize("rule", FAST, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("radius", [None, 0.7])
def test_with_scaled_gradients_every_direction_is_that_with_weight_decay(rule, radius):
    """Bursts and lasting gradients, a norm that falls to a fraction within one memory, warm-up: to rounding."""
    shape, steps = (6, 4), 150
    rng = np.random.default_rng(8)
    noise = rng.standard_normal((steps, *shape)) * rng.lognormal(0.0, 1.5, (steps, 1, 1)) + rng.standard_normal(shape)
    schedule = Warmup(Cosine(rule.lr, steps=steps, end=0.0), steps=15)
    lrs = schedule.values(steps)
    plain, norms, directions = Walk(rule, shape, norm=8.0, seed=1, held=False), [], []
    for step in range(steps):
        norms.append(float(np.linalg.norm(plain.w)))
        plain.step(lrs[step], rule.weight_decay, noise=noise[step])
        directions.append(plain.w / np.linalg.norm(plain.w))
    assert min(norms) < 0.5 * norms[0]
    off = {}
    for scaled in (True, False):
        held = to_sphere(rule, schedule, steps=steps, norm=norms, radius=radius, scale_gradients=scaled, shape=shape)
        fixed = Walk(rule, shape, norm=held.radius, seed=1, held=True)
        apart = 0.0
        for step in range(steps):
            fixed.step(held.lr[step], 0.0, noise=noise[step], factor=held.gradient[step])
            apart = max(apart, float(np.linalg.norm(fixed.w / held.radius - directions[step])))
        off[scaled] = apart
    assert off[True] < 1e-11 and off[False] > 1e-3


@given(norm=st.floats(0.1, 10.0), factor=st.floats(0.1, 10.0))
def test_learning_rates_scale_with_the_radius(norm, factor):
    first, second = (
        to_sphere(AdamW(1e-2, 0.5), 1e-2, steps=20, init_norm=norm, radius=radius, dim=64) for radius in (1.0, factor)
    )
    np.testing.assert_allclose(second.lr, factor * first.lr, rtol=1e-12)


@pytest.mark.parametrize("rule", [AdamW(1e-3, 0.3), Lion(1e-4, 2.0), Muon(0.02, 0.1)], ids=repr)
def test_a_sphere_of_the_equilibrium_norm_turns_by_the_equilibrium_angle(rule):
    norm = rule.equilibrium(shape=(8, 4)).norm if isinstance(rule, Muon) else rule.equilibrium(dim=32).norm
    there = rule.equilibrium(shape=(8, 4)) if isinstance(rule, Muon) else rule.equilibrium(dim=32)
    motion = sphere_motion(rule, norm, shape=(8, 4))
    eps = rule.decay_per_step
    assert motion.angle == pytest.approx(there.angle, rel=2 * eps)
    assert motion.diffusion == pytest.approx(2 * eps, rel=3 * eps)
    assert motion.lr * motion.weight_decay == pytest.approx(motion.diffusion / 2)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: sphere_motion(SGD(0.1), 1.0, dim=3), "rule"),
        (lambda: to_sphere(AdamL2(0.1, 0.1), 0.1, steps=3, dim=3), "rule"),
        (lambda: sphere_motion(AdamW(0.1), 1.0), "dim"),
        (lambda: sphere_motion(Muon(0.1), 1.0), "shape"),
        (lambda: sphere_motion(AdamW(0.1), 0.0, dim=3), "norm"),
        (lambda: to_sphere(AdamW(0.1, 20.0), 0.1, steps=3, dim=3, init_norm=1.0), "schedule"),
        (lambda: to_sphere(AdamW(0.1), 0.1, steps=3, dim=3, norm=[1.0, 1.0]), "norm"),
        (lambda: from_sphere(AdamW(0.1), 0.1, steps=3, dim=3, radius=-1.0), "radius"),
    ],
)
def test_bad_input_raises(call, argument):
    with pytest.raises(EquilibriaError, match="expected") as caught:
        call()
    assert caught.value.argument == argument
