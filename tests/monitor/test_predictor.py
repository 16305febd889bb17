"""The forecast beside weights on a random walk, every optimizer written out in numpy (`walks`)."""

from __future__ import annotations

import dataclasses
import io
import itertools
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.monitored_walks import Walk, walk

from equilibria.monitor import recursion
from equilibria.monitor.countdown import Countdown
from equilibria.monitor.predictor import OptimizerMemory, Prediction, Predictor
from equilibria.monitor.reading import MeasuredStep
from equilibria.theory import states
from equilibria.theory.rules import SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.settling import relaxation, settling_steps

LENGTH = 240
UNIT_GRAD_SQ = 25.0  # not 1: what is in units of L must be seen to be
PLAIN = SGD(0.01, 0.5)
RULES: dict[str, Rule] = {  # each settles within the walk
    "SGD": PLAIN,
    "heavy ball": SGD(0.01, 0.05, momentum=0.9),
    "Nesterov": SGD(0.01, 0.05, momentum=0.9, nesterov=True),
    "dampening": SGD(0.02, 0.05, momentum=0.9, dampening=0.5),
    "SGDW": SGDW(0.005, 1.0, momentum=0.9),
    "AdamW": AdamW(0.005, 1.0, betas=(0.9, 0.99)),
    "Adam with L2": AdamL2(0.005, 0.2, betas=(0.9, 0.99)),
    "Lion": Lion(0.003, 1.0, betas=(0.9, 0.99)),
    "Muon": Muon(0.01, 0.4, momentum=0.9),
    "Muon without Nesterov": Muon(0.01, 0.4, momentum=0.9, nesterov=False),
}
# What the theory leaves out, beside the Monte Carlo error: Adam's second moment of 1/(1-b2) = 100 steps fluctuates
# (0.5 %), Lion and constant updates hold for many entries (1/d = 0.7 %, and 2 % while their momentum changes).
THEORY = {"AdamW": 0.005, "Adam with L2": 0.005, "Lion": 0.015, "Muon": 0.01, "Muon without Nesterov": 0.01}


def scheduled(rule: Rule, schedule: str) -> list[Rule]:
    """The rule at every step."""
    wave = np.cos(np.pi * np.arange(LENGTH) / LENGTH)
    if schedule == "momentum":  # as the one-cycle schedule has it
        momenta = [{"momentum": value} for value in (0.85 + 0.1 * np.abs(wave)).tolist()]
        if isinstance(rule, AdamW | AdamL2 | Lion):
            momenta = [{"betas": (each["momentum"], rule.betas[1])} for each in momenta]
        return [dataclasses.replace(rule, **each) for each in momenta]  # type: ignore[arg-type]
    factors = {
        "constant": np.ones(LENGTH),
        "stepped": np.where(np.arange(LENGTH) < LENGTH // 2, 1.0, 0.2),
        "cosine": 0.05 + 0.95 * (1 + wave) / 2,
    }[schedule]
    return [dataclasses.replace(rule, lr=rule.lr * factor) for factor in factors.tolist()]


@cache
def walked(name: str, schedule: str) -> tuple[list[Rule], Walk]:
    rules = scheduled(RULES[name], schedule)
    return rules, walk(rules, norm=1.5, unit_grad_sq=UNIT_GRAD_SQ)


def follow(
    found: Walk,
    rules: list[Rule],
    *,
    every: int = 1,
    first: int = 0,
    skipped: frozenset[int] = frozenset(),
    predictor: Predictor | None = None,
) -> dict[int, Prediction]:
    """The forecast at every sampled step; it begins at ``first`` unless a predictor that is under way is given."""
    begins = predictor is None
    held = predictor or Predictor(found.entries)
    sampled: dict[int, Prediction] = {}
    for step in range(first, len(rules), every):
        new = begins and step == first
        since = rules[step : step + 1] if new else rules[held.next_step : step + 1]
        memory = found.memories[step] if new else None
        sampled[step] = held.predict(step, found.steps[step], since, memory=memory, skipped=step in skipped)
    return sampled


def ratios(found: Walk, sampled: dict[int, Prediction], *, settled_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Measured over predicted of every weight: mean norm, and RMS angle, once the walk has forgotten its start."""
    steps = [step for step in sampled if step >= settled_in]
    norm, angle = (np.array([getattr(found.steps[step], name) for step in steps]) for name in ("norm", "angle"))
    predicted_norm, predicted_angle = (
        np.array([getattr(sampled[step], name) for step in steps]) for name in ("norm", "angle")
    )
    rms = [np.sqrt(np.mean(values**2, axis=0)) for values in (angle, predicted_angle)]
    return np.mean(norm / predicted_norm, axis=0), rms[0] / rms[1]


def assert_on_theory(values: np.ndarray, beside: float) -> None:
    """The mean over weights is 1 up to four standard errors and what the theory leaves out."""
    error = values.std(ddof=1) / len(values) ** 0.5
    assert error < 0.01, "too few weights to say anything"
    assert abs(values.mean() - 1) < 4 * error + beside, f"{values.mean():.5f} +- {error:.5f}"


CASES = [
    (name, schedule)
    for name, schedule in itertools.product(RULES, ["constant", "stepped", "cosine", "momentum"])
    if not (name == "SGD" and schedule == "momentum")
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_the_forecast_is_where_the_walk_is(name, schedule):
    """Sampled at every 7th step, L in between is known only from its ends: 0.2 % more."""
    rules, found = walked(name, schedule)
    beside = 2 * THEORY[name] if schedule == "momentum" and name in THEORY else THEORY.get(name, 0.002)
    for every, more in ((1, 0.0), (7, 0.002)) if schedule in ("constant", "momentum") else ((7, 0.002),):
        norm, angle = ratios(found, follow(found, rules, every=every), settled_in=20)
        assert_on_theory(norm, beside + more)
        assert_on_theory(angle, 2 * beside + more)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("every", [1, 7])
def test_a_forecast_that_begins_in_the_middle_takes_over_the_memory(name, every):
    """From the first step on: a momentum forgotten would cost the angle up to 60 %, a second moment more."""
    rules, found = walked(name, "constant")
    sampled = follow(found, rules, every=every, first=100)
    norm, angle = ratios(found, sampled, settled_in=100)
    assert_on_theory(norm, THEORY.get(name, 0.002) + 0.002)
    assert_on_theory(angle, 2 * THEORY.get(name, 0.002) + 0.002)
    early = {step: forecast for step, forecast in sampled.items() if step < 110}
    _, angle = ratios(found, early, settled_in=100)
    # One momentum of 150 entries is a single draw: its own angle is off by a few per cent, the mean of 32 is not.
    assert abs(angle.mean() - 1) < 0.02


@pytest.mark.parametrize("schedule", ["constant", "stepped", "cosine"])
def test_plain_sgd_is_exact_step_by_step(schedule):
    """Driven by the true L of every step the recursion is an identity, for every single weight."""
    rules, found = walked("SGD", schedule)
    for step, forecast in follow(found, rules).items():
        assert forecast.norm == pytest.approx(found.steps[step].norm, rel=1e-11)
        assert forecast.angle == pytest.approx(found.steps[step].angle, rel=1e-9)


def test_plain_sgd_stays_exact_through_skipped_steps():
    rules = scheduled(PLAIN, "cosine")
    skipped = frozenset({0, 5, 6, 100, 239})
    found = walk(rules, skipped=skipped, weights=4)
    for step, forecast in follow(found, rules, skipped=skipped).items():
        if step == 0:  # nothing is known of the gradient yet, nor whether the weight is scale-invariant
            assert np.isnan(forecast.norm).all()
            continue
        assert forecast.norm == pytest.approx(found.steps[step].norm, rel=1e-11)
        if step in skipped:
            assert np.isnan(forecast.angle).all()
        else:
            assert forecast.angle == pytest.approx(found.steps[step].angle, rel=1e-9)


@pytest.mark.parametrize("name", ["heavy ball", "AdamW", "Muon"])
def test_a_step_that_was_skipped_leaves_no_trace(name):
    rules = [RULES[name]] * LENGTH
    skipped = frozenset(range(3, LENGTH, 9))
    with_skips = walk(rules, skipped=skipped, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5)
    norm, angle = ratios(
        with_skips,
        {
            step: forecast
            for step, forecast in follow(with_skips, rules, skipped=skipped).items()
            if step not in skipped
        },
        settled_in=20,
    )
    assert_on_theory(norm, THEORY.get(name, 0.002))
    assert_on_theory(angle, 2 * THEORY.get(name, 0.002))


@pytest.mark.parametrize("name", ["SGD", "heavy ball", "AdamW", "Adam with L2"])
def test_an_unknown_drift_of_the_gradients_is_followed(name):
    """L grows a hundredfold in between, which the weights follow only slowly."""
    rules = [RULES[name]] * LENGTH
    found = walk(rules, unit_grad_sq=np.geomspace(1, 100, LENGTH).tolist())
    norm, angle = ratios(found, follow(found, rules, every=7), settled_in=20)
    assert_on_theory(norm, THEORY.get(name, 0.002) + 0.005)
    assert_on_theory(angle, 2 * THEORY.get(name, 0.002) + 0.01)


@pytest.mark.parametrize("name", ["heavy ball", "dampening", "Nesterov"])
@pytest.mark.parametrize("persistence", [0.4, -0.4])
def test_gradients_that_resemble_the_last_one(name, persistence):
    """<v, g> changes L by up to a factor of 3; left out, the norm would be off by 10 to 20 %."""
    rules = [RULES[name]] * LENGTH
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5, persistence=persistence)
    sampled = follow(found, rules)
    norm, _ = ratios(found, sampled, settled_in=120)
    assert_on_theory(norm, 0.02)
    last = np.mean([forecast.norm_equilibrium for step, forecast in sampled.items() if step > 200])
    assert last == pytest.approx(np.mean([step.norm for step in found.steps[200:]]), rel=0.03)
    own = np.mean([forecast.momentum_unit_grad_sq for step, forecast in sampled.items() if step > 120])
    assert (own > 1.2 * UNIT_GRAD_SQ) if persistence > 0 else (own < 0.8 * UNIT_GRAD_SQ)


# ---- equilibrium, settling, invariance


@pytest.mark.parametrize("name", RULES)
def test_equilibrium_is_where_the_walk_ends(name):
    """After six time constants of the slowest, Adam's."""
    rules = [RULES[name]] * 1500
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5, weights=8)
    sampled = follow(found, rules, every=10)
    late = [step for step in sampled if step >= 1000]
    norm = np.mean([found.steps[step].norm / sampled[step].norm_equilibrium for step in late], axis=0)
    squares = np.mean([(found.steps[step].angle / sampled[step].angle_equilibrium) ** 2 for step in late], axis=0)
    assert_on_theory(norm, THEORY.get(name, 0.002))
    assert_on_theory(np.sqrt(squares), 2 * THEORY.get(name, 0.002))
    assert np.mean([sampled[step].settled for step in late]) > 0.8
    assert np.mean([sampled[step].steps_to_settle for step in late]) < 20


def test_steps_to_settle_are_counted_down_by_the_steps_themselves():
    rules = [PLAIN] * 500
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.2, weights=16)
    sampled = follow(found, rules)
    early, later = (sampled[step].steps_to_settle.mean() for step in (50, 100))
    assert early - later == pytest.approx(50, rel=0.1)
    settles = np.mean([next(step for step in sampled if sampled[step].settled[row]) for row in range(16)])
    assert settles == pytest.approx(50 + early, rel=0.1)
    assert not sampled[0].settled.any()


def test_settled_has_a_little_patience_and_no_more():
    """Inside 5 % it settles; it then stays so up to 7.5 %, and comes back only inside 5 %."""
    rule, entries = PLAIN, 100
    goal = float(rule.equilibrium(unit_grad_sq=1.0).norm)
    predictor, words = Predictor(np.array([float(entries)])), []
    for at, angle in enumerate([0.90, 0.96, 0.94, 0.93, 0.92, 0.94, 0.96, 1.06, 1.09, 1.06, 1.04]):
        ww = (goal**4 / angle**2) ** 0.5  # the angle goes with ||w||^-2
        step = one_step(ww=ww, gg=1.0 / ww, ee=rule.lr**2 / ww)
        memory = cold(1) if at == 0 else None
        words.append(bool(predictor.predict(at, step, [rule], memory=memory, skipped=False).settled[0]))
    assert words == [False, True, True, True, False, False, True, True, False, False, True]


def one_step(**products: float) -> MeasuredStep:
    """A step of one weight."""
    held = {"ww": 1.0, "wg": 0.0, "gg": 1.0, "we": 0.0, "ee": 1e-4, "vg": np.nan, "shrink": 0.0, **products}
    return MeasuredStep(**{name: np.array([value]) for name, value in held.items()})


def cold(count: int) -> OptimizerMemory:
    return OptimizerMemory(np.zeros(count), np.zeros(count), np.zeros(count), 0.0, np.ones(count, dtype=bool))


@pytest.mark.parametrize(("cosine", "expected"), [(0.0, True), (0.015, True), (0.025, False), (1.0, False)])
def test_a_weight_whose_gradient_has_a_radial_part_has_no_forecast(cosine, expected):
    """100 entries: a random direction has a cosine of 0.1, and a fifth of that is the limit."""
    predictor = Predictor(np.array([100.0]))
    found = predictor.predict(0, one_step(wg=cosine), [PLAIN], memory=cold(1), skipped=False)
    assert found.invariant[0] == expected
    for name in ("angle", "norm", "angle_equilibrium", "norm_equilibrium", "steps_to_settle"):
        assert np.isfinite(getattr(found, name)[0]) == expected, name
    assert not found.settled[0] or expected


# ---- what must not break


ODD = [0.0, np.nan, np.inf, 1e-300, 1e-100, 1e-45, 1e45, 1e300]


@given(
    name=st.sampled_from(list(RULES)),
    odd=st.lists(st.tuples(*[st.sampled_from([1.0, 1.0, 1.0, *ODD])] * 3), min_size=1, max_size=6),
    settings=st.tuples(*[st.sampled_from([0.0, 1e-300, 1e-12, 0.1, 1.0, 30.0, 1e200])] * 2),
    spacing=st.integers(1, 3),
)
def test_anything_at_all_gives_nan_and_no_error(name, odd, settings, spacing):
    """Zero and infinite weights, gradients and moves; settings far out of reach; one good weight beside them."""
    rule = dataclasses.replace(RULES[name], lr=settings[0], weight_decay=settings[1])
    predictor = Predictor(np.array([100.0, 100.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at, (ww, gg, ee) in enumerate(odd):
            pair = {"ww": [ww, 1.0], "wg": [0.0, 0.0], "gg": [gg, 1.0], "we": [0.0, 0.0], "ee": [ee, 1e-4]}
            both = {"vg": [gg, 0.1], "shrink": [0.0, 0.0], **pair}
            step = MeasuredStep(**{key: np.array(values) for key, values in both.items()})
            rules = [rule] * (spacing if at else 1)
            memory = cold(2) if at == 0 else None
            found = predictor.predict(at * spacing, step, rules, memory=memory, skipped=at == 2)
            for field in dataclasses.fields(Prediction):
                assert getattr(found, field.name).shape == (2,)
            assert not np.isinf(found.norm).any()


@cache
def first_forecasts(name: str) -> dict[int, Prediction]:
    rules, walk_of_rule = walked(name, "constant")
    return follow(walk_of_rule, rules[:30])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "odd", [{"gg": 0.0}, {"gg": np.nan}, {"ww": 0.0}, {"ww": np.nan, "gg": np.nan}, {"gg": np.inf}]
)
def test_one_bad_weight_costs_the_others_nothing(name, odd):
    """Such as the convolutions behind a normalisation that begins at zero: their first gradient is exactly zero."""
    rules, found = walked(name, "constant")
    rules = rules[:30]
    alone = first_forecasts(name)
    spoilt = Walk(found.dim, list(found.steps), list(found.memories))
    for at in range(3):
        changed = {
            field.name: getattr(found.steps[at], field.name).copy() for field in dataclasses.fields(MeasuredStep)
        }
        for key, value in odd.items():
            changed[key][0] = value
        spoilt.steps[at] = MeasuredStep(**changed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        beside = follow(spoilt, rules)
    for step in (0, 1, 10, 29):
        for field in ("norm", "angle", "norm_equilibrium", "angle_equilibrium"):
            expected, got = (getattr(each[step], field)[1:] for each in (alone, beside))
            # The law of approach of Adam with L2 is that of the group's mean gradient.
            assert got == pytest.approx(expected, rel=1e-12 if name != "Adam with L2" else 0.02), (step, field)


@pytest.mark.parametrize("name", [name for name in RULES if name != "Adam with L2"])  # whose decay is a gradient too
def test_a_weight_whose_gradient_is_zero_at_first_is_followed_from_then_on(name):
    """It only decays until then, and its optimizer state stays empty."""
    late = 70
    rules = [RULES[name]] * LENGTH
    found = walk(rules, unit_grad_sq=[0.0] * late + [UNIT_GRAD_SQ] * (LENGTH - late), norm=1.5)
    norm, angle = ratios(found, follow(found, rules), settled_in=late)
    assert_on_theory(norm, THEORY.get(name, 0.002))
    assert_on_theory(angle, 2 * THEORY.get(name, 0.002))


@pytest.mark.parametrize("name", ["SGD", "heavy ball", "Nesterov", "dampening"])
@pytest.mark.parametrize("every", [1, 7])
def test_a_weight_that_has_no_gradient_at_first_is_followed_from_then_on(name, every):
    """torch leaves it alone until then."""
    late = 70
    rules, found = walked(name, "constant")
    nothing = MeasuredStep(**{field.name: np.full(32, np.nan) for field in dataclasses.fields(MeasuredStep)})
    delayed = Walk(found.dim, [nothing] * late + found.steps[:-late], [found.memories[0]] * LENGTH)
    norm, angle = ratios(delayed, follow(delayed, rules, every=every), settled_in=late)
    assert_on_theory(norm, 0.004)
    assert_on_theory(angle, 0.006)


@pytest.mark.parametrize("name", RULES)
def test_without_decay_there_is_a_forecast_but_no_equilibrium(name):
    rules = [dataclasses.replace(RULES[name], weight_decay=0.0)] * 100
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5)
    sampled = follow(found, rules)
    norm, angle = ratios(found, sampled, settled_in=20)
    assert_on_theory(norm, THEORY.get(name, 0.002))
    assert_on_theory(angle, 2 * THEORY.get(name, 0.002))
    for field in ("angle_equilibrium", "norm_equilibrium", "steps_to_settle"):
        assert np.isnan(getattr(sampled[50], field)).all()
    assert not sampled[50].settled.any()


@pytest.mark.parametrize("name", RULES)
def test_a_learning_rate_of_zero_stands_still(name):
    rules = [RULES[name]] * 50 + [dataclasses.replace(RULES[name], lr=0.0)] * 10
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5)
    sampled = follow(found, rules)
    assert sampled[59].angle == pytest.approx(0.0, abs=1e-9)
    assert sampled[59].norm == pytest.approx(sampled[50].norm, rel=1e-12)
    assert np.isnan(sampled[55].angle_equilibrium).all()


@pytest.mark.parametrize("name", [name for name in RULES if name != "Adam with L2"])
def test_a_decay_beyond_reach_is_nan_and_no_error(name):
    rules = [dataclasses.replace(RULES[name], lr=3.0, weight_decay=3.0)] * 5
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ)
    for forecast in follow(found, rules).values():
        assert np.isnan(forecast.norm_equilibrium).all()
        assert np.isnan(forecast.steps_to_settle).all()


# ---- momentum that comes and goes, as torch has it


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_that_is_switched_off_and_on(dampening):
    """torch keeps the buffer of the last step with momentum, and damps it from its second step on."""
    on = SGD(0.01, 0.05, momentum=0.9, dampening=dampening)
    off = SGD(0.01, 0.05)
    rules: list[Rule] = [off] * 20 + [on] * 60 + [off] * 20 + [on] * 60
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5)
    sampled = follow(found, rules)
    norm, angle = ratios(found, {step: sampled[step] for step in range(100, 110)}, settled_in=100)
    assert_on_theory(norm, 0.002)
    assert abs(angle.mean() - 1) < 0.03
    norm, _ = ratios(found, sampled, settled_in=0)
    assert_on_theory(norm, 0.002)


# ---- checkpoints


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("every", [1, 7])
def test_a_checkpoint_goes_on_identically(name, every):
    rules, found = walked(name, "cosine")
    half = 15 * every
    through = follow(found, rules[: 30 * every], every=every)
    first = Predictor(found.entries)
    for step in range(0, half, every):
        since = rules[first.next_step : step + 1]
        first.predict(step, found.steps[step], since, memory=found.memories[0] if step == 0 else None, skipped=False)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = Predictor(found.entries)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    rest = follow(found, rules[: 30 * every], every=every, first=half, predictor=resumed)
    for step, forecast in rest.items():
        for field in dataclasses.fields(Prediction):
            assert np.array_equal(getattr(forecast, field.name), getattr(through[step], field.name), equal_nan=True)


def test_a_checkpoint_before_the_first_sample():
    fresh = Predictor(np.array([10.0]))
    other = Predictor(np.array([10.0]))
    other.load_state_dict(fresh.state_dict())
    assert other.next_step == 0
    assert np.isnan(other.predict(0, one_step(), [PLAIN], memory=None, skipped=False).norm).all()


def test_a_checkpoint_is_no_view():
    rules, found = walked("heavy ball", "constant")
    held = Predictor(found.entries)
    held.predict(0, found.steps[0], rules[:1], memory=found.memories[0], skipped=False)
    state = held.state_dict()
    before = {name: tensor.clone() for name, tensor in state["moments"].items()}  # type: ignore[attr-defined]
    follow(found, rules, first=1, predictor=held)
    for name, tensor in before.items():
        assert torch.equal(tensor, state["moments"][name])  # type: ignore[index]


# ---- speed does not cost accuracy


@pytest.mark.parametrize("name", ["heavy ball", "Nesterov", "Lion"])
def test_the_time_to_settle_hardly_notices_that_settings_are_rounded(name):
    rule = dataclasses.replace(RULES[name], lr=RULES[name].lr * 1.00444)
    found = walk([rule] * 2, norm=30.0, unit_grad_sq=UNIT_GRAD_SQ)
    sampled = follow(found, [rule] * 2)
    exact = relaxation(rule).steps(found.steps[1].norm / sampled[1].norm_equilibrium, tolerance=0.05)
    assert sampled[1].steps_to_settle == pytest.approx(exact, rel=0.006)


def test_rules_of_several_kinds_within_one_spacing():
    """Betas that change between two samples, by which Lion's memory has another length."""
    slow, fast = Lion(0.003, 1.0, betas=(0.9, 0.99)), Lion(0.003, 1.0, betas=(0.95, 0.9))
    rules: list[Rule] = ([slow] * 5 + [fast] * 5) * 20
    found = walk(rules, unit_grad_sq=UNIT_GRAD_SQ, norm=1.5)
    norm, angle = ratios(found, follow(found, rules, every=7), settled_in=20)
    assert_on_theory(norm, 0.03)
    assert_on_theory(angle, 0.05)
    assert recursion.memory_size(slow) != recursion.memory_size(fast)


@pytest.mark.parametrize("name", ["AdamW", "Adam with L2"])
def test_adams_time_to_settle_is_the_recursions(name):
    """After a drop of lr, at any sample on the way: the steps that the recursion still needs."""
    after = dataclasses.replace(RULES[name], lr=RULES[name].lr / 5, betas=(0.9, 0.999))
    before = dataclasses.replace(after, lr=RULES[name].lr)
    drop, length = 700, 1500
    rules = [before] * drop + [after] * (length - drop)
    found = walk(rules, weights=8, dim=100, unit_grad_sq=UNIT_GRAD_SQ)
    sampled = follow(found, rules, every=7)
    start = states.settled(before, unit_grad_sq=UNIT_GRAD_SQ, dim=100.0)
    truth = settling_steps(after, start, unit_grad_sq=UNIT_GRAD_SQ, dim=100.0)
    for step in (700, 707, 910):  # L and the norm scatter by some per cent: the steps do too
        assert np.median(sampled[step].steps_to_settle) == pytest.approx(truth - (step - drop), rel=0.25, abs=30)


@pytest.mark.parametrize(
    ("time_constant", "spacing", "samples"),
    [
        (4000, 1, 200),  # a twentieth of the time constant: L drifts within it
        (100, 1, 20),  # enough to be steady, where they fit into half of it
        (24, 1, 12),  # half of it
        (24, 12, 5),  # but never fewer: the target of the norm would be as restless as single gradients
    ],
)
def test_the_mean_of_the_gradient_forgets_within_the_time_constant(time_constant, spacing, samples):
    """L doubles; after as many samples as the mean reaches back over, 1/e of the difference is left."""
    rule = SGD(0.01, 0.1 / 0.4 / time_constant * 10, momentum=0.9)
    assert 1 / relaxation(rule).rate == pytest.approx(time_constant)
    held, still = Predictor(np.full(1, 100.0)), np.zeros(1)
    goals = []
    for number in range(4 * samples + 300):
        grad_sq = np.full(1, 1.0 if number < 3 * samples + 200 else 2.0)
        step = MeasuredStep(ww=np.ones(1), wg=still, gg=grad_sq, we=still, ee=1e-4 * grad_sq, vg=still, shrink=still)
        memory = OptimizerMemory(still, still, still, 0.0, np.ones(1, dtype=bool)) if number == 0 else None
        steps = [rule] * (spacing if number else 1)
        found = held.predict(number * spacing, step, steps, memory=memory, skipped=False)
        goals.append(float(found.norm_equilibrium[0] ** 4))
    before, after = goals[3 * samples + 199], goals[4 * samples + 199]
    assert after / before == pytest.approx(2 - (1 - 1 / samples) ** samples, rel=1e-3)


@pytest.mark.parametrize(
    ("turns", "estimated"),
    [
        (True, [1, 5, 21, 85]),
        (False, [1, 5, 21, 41, 61, 81]),  # not as a count of 0 promises: again after 20 samples
    ],
)
def test_a_count_of_zero_is_estimated_again_if_the_weight_does_not_turn_as_it_promises(turns, estimated):
    countdown, samples = Countdown(1), []

    def estimate() -> np.ndarray:
        samples.append(sample)
        return np.zeros(1)

    for sample in range(1, 101):
        countdown.left(sample, (0.1, 0.01), estimate, restart=False, turns=np.array([turns]))
    assert samples == estimated
