"""The measured growth gain: known worlds, restarts, checkpoints, and rows that another law predicts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import equilibria as eq
from equilibria.diagnosis.invariance import InvarianceTest
from equilibria.monitor import sample_rows
from equilibria.monitor.gain import GainPrediction, GainPredictor
from equilibria.monitor.reading import MeasuredStep
from equilibria.records.tables import GAIN_LAW, INVARIANT_LAW, NUMBERS
from equilibria.theory.gain import equilibrium_from_gain, norm_budget
from equilibria.theory.rules import SGD, AdamW, Rule

ENTRIES = np.array([400.0, 400.0, 400.0])
GAINS = np.array([19.0, 40.0, 4.0])
SIZE = 20.0  # length of an update per lr


class World:
    """Weights that obey the law with planted gains, and turn lr u / ||w||^p; noise scatters both."""

    def __init__(self, rule: Rule, *, scale: float = 1.0, noise: float = 0.0) -> None:
        self.rule, self.power = rule, 2 if isinstance(rule, SGD) else 1
        self.size = SIZE * scale**self.power
        self.log_norm_sq = np.full(3, np.log(100.0)) + 2 * np.log(scale)
        self.noise, self.draw = noise, np.random.default_rng(0)

    def decay(self, lr: float) -> float:
        if isinstance(self.rule, SGD):
            return lr * self.rule.weight_decay * (1 - self.rule.dampening) / (1 - self.rule.momentum)
        return lr * self.rule.weight_decay

    def step(self, lr: float) -> MeasuredStep:
        ww = np.exp(self.log_norm_sq)
        angle = lr * self.size / ww ** (self.power / 2) * np.exp(self.noise * self.draw.normal(size=3))
        growth = GAINS * angle**2 * (1 + 2 * self.noise * self.draw.normal(size=3)) - 2 * self.decay(lr)
        after = ww * np.exp(growth)
        along = np.sqrt(ww * after) * np.cos(angle)  # <w, w'>
        shrink = lr * self.rule.weight_decay
        we, ee = along - (1 - shrink) * ww, after - 2 * (1 - shrink) * along + (1 - shrink) ** 2 * ww
        self.log_norm_sq = np.log(after)
        gg = np.full(3, 1.0)
        return MeasuredStep(ww=ww, wg=0 * ww, gg=gg, we=we, ee=ee, vg=np.nan * ww, shrink=np.full(3, shrink))


def follow(world: World, lrs: np.ndarray, every: int, predictor: GainPredictor | None = None) -> list[GainPrediction]:
    predictor, rules, predictions = predictor or GainPredictor(ENTRIES), [], []
    for step, lr in enumerate(lrs):
        measured = world.step(float(lr))
        rules.append(dataclasses.replace(world.rule, lr=float(lr)))
        if step % every == 0:
            nothing = np.zeros(3, dtype=bool)
            predictions.append(predictor.predict(step, measured, rules, changed=nothing, skipped=False))
            predictions[-1] = dataclasses.replace(predictions[-1], gain=predictor.gain.copy())
            rules = []
    return predictions


def cosine(steps: int, peak: float) -> np.ndarray:
    return peak * (0.55 + 0.45 * np.cos(np.pi * np.arange(steps) / steps))


@pytest.mark.parametrize(
    "rule",
    [AdamW(1e-3, 0.1), SGD(0.1, 5e-3, momentum=0.9), SGD(0.1, 5e-3, momentum=0.9, dampening=0.5)],
    ids=["AdamW", "SGD", "dampened SGD"],
)
@pytest.mark.parametrize("every", [1, 10])
def test_planted_gains_are_measured_and_predict_the_norm(rule: Rule, every: int):
    world = World(rule)
    last = follow(world, cosine(1000, rule.lr), every)[-1]
    np.testing.assert_allclose(last.gain, GAINS, rtol=0.01)  # sampled every 10 steps, lr and norm move in between
    here = World(rule)
    for lr in cosine(1000, rule.lr)[: 1000 - every]:
        here.step(float(lr))
    measured = here.step(float(cosine(1000, rule.lr)[1000 - every]))
    np.testing.assert_allclose(last.norm, measured.norm, rtol=2e-3)
    np.testing.assert_allclose(last.angle, measured.angle, rtol=5e-3)


def test_the_standard_error_covers_the_planted_gain():
    last = follow(World(AdamW(1e-3, 0.1), noise=0.2), np.full(2000, 1e-3), 1)[-1]
    assert np.all(np.abs(last.gain - GAINS) < 4 * last.gain_error)
    # 15 steps in each of 8 batches: the growth of a step scatters by 40 %, its squared angle by 43 %
    assert np.all((last.gain_error / GAINS > 0.005) & (last.gain_error / GAINS < 0.15))


@pytest.mark.parametrize("rule", [AdamW(1e-3, 0.1), SGD(0.1, 1e-4, momentum=0.9)], ids=["AdamW", "SGD"])
def test_equilibrium_is_that_of_the_theory_and_the_time_to_it_that_of_the_law(rule: Rule):
    world = World(rule)
    last = follow(world, np.full(400, rule.lr), 1)[-1]
    eps = world.decay(rule.lr)
    ww = np.exp(world.log_norm_sq)
    angle = rule.lr * world.size / ww ** (world.power / 2)
    theory = equilibrium_from_gain(last.gain, decay_in_force=eps, norm=np.sqrt(ww), angle=angle, norm_power=world.power)
    np.testing.assert_allclose(last.angle_equilibrium, theory.angle, rtol=1e-12)
    np.testing.assert_allclose(last.norm_equilibrium, theory.norm, rtol=0.02)  # u is a mean of the last five samples
    for row in range(3):
        steps = int(last.steps_to_settle[row])
        assert steps > 0
        ahead = World(rule)
        ahead.log_norm_sq = world.log_norm_sq.copy()
        for _ in range(steps):
            ahead.step(rule.lr)
        turned = ahead.step(rule.lr).angle[row] / theory.angle[row]
        assert abs(abs(turned - 1) - 0.05) < 0.01, (row, steps, turned)


@given(st.floats(-3, 3))
@settings(max_examples=5, deadline=None)
def test_the_unit_of_the_weights_does_not_matter(exponent: float):
    rule, scale = AdamW(1e-3, 0.1), 10.0**exponent
    plain, scaled = (follow(World(rule, scale=factor), cosine(200, 1e-3), 2)[-1] for factor in (1.0, scale))
    np.testing.assert_allclose(scaled.gain, plain.gain, rtol=1e-6)
    np.testing.assert_allclose(scaled.norm, plain.norm * scale, rtol=1e-9)
    np.testing.assert_allclose(scaled.steps_to_settle, plain.steps_to_settle, rtol=1e-6)


def test_nothing_is_known_before_eight_batches_and_no_equilibrium_without_decay_or_gain():
    early = follow(World(AdamW(1e-3, 0.1)), np.full(79, 1e-3), 1)[-1]
    assert np.isnan(early.gain).all() and np.isnan(early.angle).all() and np.isnan(early.angle_equilibrium).all()
    free = follow(World(AdamW(1e-3, 0.0)), np.full(100, 1e-3), 1)[-1]
    assert np.isfinite(free.gain).all() and np.isfinite(free.angle).all()
    assert np.isnan(free.angle_equilibrium).all() and np.isnan(free.steps_to_settle).all() and not free.settled.any()


def test_a_change_from_outside_starts_the_recursion_again_and_is_no_growth():
    rule, world, predictor = AdamW(1e-3, 0.1), World(AdamW(1e-3, 0.1)), GainPredictor(ENTRIES)
    follow(world, np.full(300, 1e-3), 1, predictor)
    world.log_norm_sq[0] += 2.0
    changed = np.array([True, False, False])
    measured = world.step(1e-3)
    after = predictor.predict(300, measured, [rule], changed=changed, skipped=False)
    np.testing.assert_allclose(after.norm, measured.norm, rtol=2e-3)
    assert after.norm[0] == measured.norm[0]
    for step in range(301, 420):
        last = predictor.predict(step, world.step(1e-3), [rule], changed=~changed & changed, skipped=False)
    np.testing.assert_allclose(last.gain, GAINS, rtol=0.01)


def test_an_announced_rescaling_is_followed():
    rule, world, predictor = AdamW(1e-3, 0.1), World(AdamW(1e-3, 0.1)), GainPredictor(ENTRIES)
    follow(world, np.full(300, 1e-3), 1, predictor)
    world.log_norm_sq += 2 * np.log(0.5)
    measured, nothing = world.step(1e-3), np.zeros(3, dtype=bool)
    factors = [(0, np.full(3, 0.5))]
    after = predictor.predict(300, measured, [rule], changed=nothing, skipped=False, rescalings=factors)
    np.testing.assert_allclose(after.norm, measured.norm, rtol=2e-3)


def test_a_skipped_step_moves_nothing():
    rule, world, predictor = AdamW(1e-3, 0.1), World(AdamW(1e-3, 0.1)), GainPredictor(ENTRIES)
    follow(world, np.full(300, 1e-3), 1, predictor)
    before, nothing = predictor.gain.copy(), np.zeros(3, dtype=bool)
    held = world.log_norm_sq.copy()
    for step in range(300, 400):
        measured = world.step(1e-3)
        if step % 2:
            world.log_norm_sq = held.copy()  # the optimizer did not take this step
        held = world.log_norm_sq.copy()
        last = predictor.predict(step, measured, [rule], changed=nothing, skipped=bool(step % 2))
    np.testing.assert_allclose(last.gain, before, rtol=0.01)


def test_a_checkpoint_continues_bit_for_bit():
    rule, world, nothing = AdamW(1e-3, 0.1), World(AdamW(1e-3, 0.1), noise=0.1), np.zeros(3, dtype=bool)
    first = GainPredictor(ENTRIES)
    follow(world, np.full(333, 1e-3), 1, first)
    second = GainPredictor(ENTRIES)
    second.load_state_dict(first.state_dict())
    for step in range(333, 480):
        measured = world.step(1e-3)
        a, b = (each.predict(step, measured, [rule], changed=nothing, skipped=False) for each in (first, second))
        for field in dataclasses.fields(GainPrediction):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


# ---- among the other rows of a sample


def sampled(
    monkeypatch: pytest.MonkeyPatch | None = None, *, invariant: tuple[str, ...] | None = ("0.weight",)
) -> dict[str, list[object]]:
    """Samples of a normalised layer, by default with a label, and of a head that is not invariant."""
    if monkeypatch is not None:
        whole = GainPredictor.predict

        def silent(self: GainPredictor, *args: object, **options: object) -> GainPrediction:
            result = whole(self, *args, **options)  # type: ignore[arg-type]
            unknown = {name: np.full(len(result.angle), np.nan) for name in sample_rows._NUMBERS}
            return dataclasses.replace(result, **unknown, settled=np.zeros(len(result.angle), dtype=bool))

        monkeypatch.setattr(GainPredictor, "predict", silent)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    with eq.watch(net, optimizer, every=1, invariant=invariant) as monitor:
        for _ in range(150):
            inputs = torch.randn(16, 12)
            nn.functional.cross_entropy(net(inputs), torch.randint(3, (16,))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return monitor.samples().to_pydict()


def test_the_law_of_invariant_weights_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch):
    both, alone = sampled(), sampled(monkeypatch)
    rows = [row for row, name in enumerate(both["param"]) if name == "0.weight"]
    assert {both["law"][row] for row in rows} == {INVARIANT_LAW}
    for name in (*NUMBERS, "state", "note", "law"):
        assert [both[name][row] for row in rows] == [alone[name][row] for row in rows], name
    others = [row for row, name in enumerate(both["param"]) if name == "3.weight"]
    assert both["law"][others[-1]] == GAIN_LAW and both["angle_predicted"][others[-1]] is not None
    assert alone["angle_predicted"][others[-1]] is None


def test_a_weight_that_may_be_invariant_is_predicted_by_its_gain_once_that_is_known(monkeypatch: pytest.MonkeyPatch):
    """While it is undecided; the law of invariant weights may be off by 26 per cent there, and is not judged."""
    monkeypatch.setattr(InvarianceTest, "add", lambda *_: None)
    samples = sampled(invariant=None)
    rows = [row for row, name in enumerate(samples["param"]) if name == "0.weight"]
    laws = [samples["law"][row] for row in rows]
    first = laws.index(GAIN_LAW)
    assert INVARIANT_LAW in laws[:first] and set(laws[first:]) == {GAIN_LAW}
    assert first == next(place for place, row in enumerate(rows) if samples["gain"][row] is not None) + 1


def test_the_three_terms_of_a_step_follow_from_the_columns():
    samples = sampled()
    rows = [row for row, name in enumerate(samples["param"]) if name == "3.weight"]
    column = {name: np.array([samples[name][row] for row in rows], dtype=float) for name in NUMBERS}
    shrink = column["lr"] * column["weight_decay"]
    growth, moved_sq = column["growth"], column["relative_update"] ** 2
    np.testing.assert_allclose(1 + growth[:-1], (column["norm"][1:] / column["norm"][:-1]) ** 2, rtol=1e-6)
    along = (growth - moved_sq) / 2 + shrink  # <w, e> / ||w||^2 of w' = (1 - s) w + e
    budget = norm_budget(
        column["norm"] ** 2,
        shrink=shrink,
        w_dot_update=along * column["norm"] ** 2,
        update_sq=(moved_sq + 2 * shrink * along - shrink**2) * column["norm"] ** 2,
    )
    np.testing.assert_allclose(budget.total, growth, rtol=1e-9, atol=1e-15)
