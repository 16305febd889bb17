"""Translations against real optimizers on a scale-invariant loss, and against the laws they claim to keep."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers import random_walk

from equilibria.errors import EquilibriaError
from equilibria.forecasting import translate
from equilibria.theory import SGD, SGDW, AdamL2, AdamW, Identified, Lion, Muon
from equilibria.theory.angles import angular_diffusion, n_step_angles, update_memory
from equilibria.theory.identified import PowerLaw
from equilibria.theory.settling import relaxation
from equilibria.theory.states import settled
from equilibria.theory.translation import (
    MATCHES,
    translate_batch,
    translate_decay,
    translate_optimizer,
    translate_scale,
)

L, D = 3.0, 200.0
SCALE = {"unit_grad_sq": L, "dim": D}


def torch_optimizer(rule, params):
    common = {"lr": rule.lr, "weight_decay": rule.weight_decay}
    if isinstance(rule, SGD):
        return torch.optim.SGD(
            params, momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov, **common
        )
    if isinstance(rule, SGDW):
        return random_walk.SGDW(params, momentum=rule.momentum, **common)
    if isinstance(rule, AdamW):
        return torch.optim.AdamW(params, betas=rule.betas, eps=1e-30, **common)
    if isinstance(rule, AdamL2):
        return torch.optim.Adam(params, betas=rule.betas, eps=1e-30, **common)
    if isinstance(rule, Lion):
        return random_walk.Lion(params, betas=rule.betas, **common)
    return torch.optim.Muon(params, momentum=rule.momentum, nesterov=rule.nesterov, eps=1e-30, **common)


def directions(rule, factor, steps=150):
    """Weights divided by ``factor`` along a training run from ``factor`` times the same start, on a loss of w/||w||."""
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    w = torch.nn.Parameter(factor * w)
    slopes = torch.randn(steps, 4, 6, dtype=torch.float64, generator=generator)
    target = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    optimizer = torch_optimizer(rule, [w])
    path = []
    for slope in slopes:
        optimizer.zero_grad()
        unit = w / w.norm()
        loss = 0.3 * (unit * slope).sum() + ((unit - target) ** 2 * (1 + slope**2)).sum()
        loss.backward()
        optimizer.step()
        path.append(w.detach().clone() / factor)
    return torch.stack(path)


TORCH_RULES = [
    SGD(0.3, 0.01),
    SGD(0.1, 0.01, momentum=0.9),
    SGD(0.1, 0.01, momentum=0.9, dampening=0.5),
    SGD(0.1, 0.01, momentum=0.9, nesterov=True),
    SGDW(0.1, 0.01, momentum=0.9),
    AdamW(0.05, 0.1),
    AdamW(0.05, 0.1, betas=(0.8, 0.9)),
    AdamL2(0.05, 0.02),
    Lion(0.03, 0.1),
]


@pytest.mark.parametrize("k", [0.37, 10.0])
@pytest.mark.parametrize("rule", TORCH_RULES, ids=repr)
def test_scaled_start_takes_exactly_the_same_path(rule, k):
    """k times the weights, step by step, with torch's own optimizers; and the untranslated run does something else."""
    original = directions(rule, 1.0)
    moved = translate_scale(rule, k)
    assert moved.weight == k
    assert (directions(moved.rule, k) - original).abs().max() < 1e-9
    assert (directions(rule, k) - original).abs().max() > 1e-2


def test_scaled_start_of_muon():
    """Powers of two, since torch orthogonalises in bfloat16."""
    rule = Muon(0.05, 0.1)
    original = directions(rule, 1.0)
    assert (directions(translate_scale(rule, 4.0).rule, 4.0) - original).abs().max() < 1e-9
    assert (directions(rule, 4.0) - original).abs().max() > 1e-2


@pytest.mark.parametrize("rule", [*TORCH_RULES, Muon(0.05, 0.1)], ids=repr)
def test_scaling_moves_the_equilibrium_with_the_weights(rule):
    k = 2.5
    new = translate_scale(rule, k).rule
    grown = settled(new, **SCALE).norm_sq / settled(rule, **SCALE).norm_sq
    assert math.sqrt(grown) == pytest.approx(k, rel=1e-9)
    assert new.equilibrium(**SCALE).angle == pytest.approx(rule.equilibrium(**SCALE).angle, rel=1e-9)
    back = translate_scale(new, 1 / k).rule
    assert (back.lr, back.weight_decay) == (pytest.approx(rule.lr), pytest.approx(rule.weight_decay))


# Batch ---------------------------------------------------------------------------------------------------------------

SMALL_RULES = [
    SGD(0.01, 1e-3),
    SGD(0.01, 1e-4, momentum=0.9),
    SGD(0.01, 1e-4, momentum=0.9, nesterov=True),
    SGDW(0.01, 1e-3, momentum=0.9),
    AdamW(1e-3, 1e-2, betas=(0.9, 0.99)),
    AdamL2(1e-4, 1e-4, betas=(0.9, 0.99)),
    Lion(1e-4, 1e-2),
    Muon(1e-3, 1e-2),
]


@pytest.mark.parametrize("b", [0.25, 8.0])
@pytest.mark.parametrize("rule", SMALL_RULES, ids=repr)
def test_batch_translation_keeps_diffusion_and_settling_per_sample(rule, b):
    """Noise-dominated: the unit gradient falls as 1/batch. First order in lr * wd, which is 1e-5 or less here."""
    result = translate_batch(rule, b)
    new, later = result.rule, {"unit_grad_sq": L / b, "dim": D}
    assert angular_diffusion(new, **later) == pytest.approx(b * angular_diffusion(rule, **SCALE), rel=1e-3)
    assert relaxation(new, **later).rate == pytest.approx(b * relaxation(rule, **SCALE).rate, rel=2e-2)
    ratio = new.equilibrium(**later).angle / rule.equilibrium(**SCALE).angle
    assert ratio == pytest.approx(math.sqrt(b), rel=5e-3)
    assert f"angle per step: x {math.sqrt(b):.4g}" in result.changed
    norm = math.sqrt(settled(new, **later).norm_sq / settled(rule, **SCALE).norm_sq)
    assert norm == pytest.approx(1, rel=2e-3)
    assert any("equilibrium norm" in text for text in result.kept)


FIXED_SIZE = [rule for rule in SMALL_RULES if isinstance(rule, AdamW | Lion | Muon)]


@pytest.mark.parametrize("b", [0.25, 8.0])
@pytest.mark.parametrize("rule", FIXED_SIZE, ids=repr)
def test_where_updates_have_a_fixed_size_lr_and_decay_share_the_factor_of_the_batch(rule, b):
    """As docs/how-do-i/lr-wd-batch-size.md recommends; what is said of the linear rule holds."""
    result = translate_batch(rule, b)
    root = math.sqrt(b)
    assert (result.rule.lr, result.rule.weight_decay) == pytest.approx((root * rule.lr, root * rule.weight_decay))
    linear = dataclasses.replace(rule, lr=b * rule.lr)
    assert angular_diffusion(linear, **SCALE) == pytest.approx(angular_diffusion(result.rule, **SCALE), rel=1e-6)
    assert linear.equilibrium(**SCALE).time_constant == pytest.approx(result.rule.equilibrium(**SCALE).time_constant)
    norm = math.sqrt(settled(linear, **SCALE).norm_sq / settled(rule, **SCALE).norm_sq)
    assert norm == pytest.approx(root, rel=3e-3)  # first order in lr * wd
    assert f"lr={linear.lr:.4g}, weight_decay={rule.weight_decay:.4g}" in result.alternative
    assert f"it loses the equilibrium norm, x {root:.4g}." in result.alternative


def test_the_linear_rule_is_no_alternative_where_it_is_the_rule_or_nothing_changes():
    assert translate_batch(SGD(0.01, 1e-3), 4).alternative == ""
    assert translate_batch(AdamW(1e-3, 1e-2), 1).alternative == ""


def test_batch_translation_turns_as_far_per_epoch():
    """512 samples in 512 or in 64 steps: the angle over many steps is the same up to the momentum window."""
    rule = SGD(0.01, 1e-3, momentum=0.9)
    new = translate_batch(rule, 8).rule
    many, few = n_step_angles(rule, 8 * 4000)[-1], n_step_angles(new, 4000)[-1]
    assert few == pytest.approx(many, rel=5e-3)


# Weight decay --------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(rule=st.sampled_from(SMALL_RULES), share=st.floats(0.05, 20))
def test_holding_the_angle_at_another_decay(rule, share):
    """Angle, diffusion and time constant are exact; the norm moves by the stated factor."""
    result = translate_decay(rule, rule.weight_decay * share)
    new = result.rule
    assert new.weight_decay == pytest.approx(rule.weight_decay * share)
    before, after = rule.equilibrium(**SCALE), new.equilibrium(**SCALE)
    assert after.angle == pytest.approx(before.angle, rel=1e-9)
    assert after.time_constant == pytest.approx(before.time_constant, rel=1e-5)
    assert angular_diffusion(new, **SCALE) == pytest.approx(angular_diffusion(rule, **SCALE), rel=1e-9)
    norm = math.sqrt(settled(new, **SCALE).norm_sq / settled(rule, **SCALE).norm_sq)
    if f"{norm:.4g}" == "1":
        assert "equilibrium norm" in result.kept
    else:
        assert result.changed[0] == f"equilibrium norm: x {norm:.4g}"


# Optimizer -----------------------------------------------------------------------------------------------------------

SOURCES = [
    SGD(0.1, 5e-4, momentum=0.9),
    SGD(0.05, 1e-3, momentum=0.9, nesterov=True),
    SGDW(0.1, 5e-4, momentum=0.9),
    AdamW(1e-3, 0.1),
    AdamL2(1e-3, 1e-3),
    Lion(1e-4, 1.0),
]
TARGETS = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgdw", {"momentum": 0.9}),
    ("adamw", {"betas": (0.9, 0.95)}),
    ("lion", {}),
]


def speeds(rule):
    return {
        "angle": rule.equilibrium(**SCALE).angle,
        "diffusion": angular_diffusion(rule, **SCALE),
        "time_constant": rule.equilibrium(**SCALE).time_constant,
    }


@pytest.mark.parametrize("match", ["angle", "diffusion", "time_constant"])
@pytest.mark.parametrize(("to", "options"), TARGETS, ids=lambda x: str(x))
@pytest.mark.parametrize("rule", SOURCES, ids=repr)
def test_other_optimizer_has_the_matched_speed_and_norm(rule, to, options, match):
    result = translate_optimizer(rule, to, match=match, **SCALE, **options)
    new = result.rule
    for name, value in options.items():
        assert getattr(new, name) == value
    before, after = speeds(rule), speeds(new)
    assert after[match] == pytest.approx(before[match], rel=1e-6)
    assert settled(new, **SCALE).norm_sq == pytest.approx(settled(rule, **SCALE).norm_sq, rel=1e-8)
    factors = {text.split(":")[0]: float(re.search(r"x (\S+)$", text).group(1)) for text in result.changed}
    names = {"angle": "angle per step", "diffusion": "angular diffusion per step", "time_constant": "time constant"}
    for other in set(names) - {match}:
        if names[other] in result.kept:  # to the four digits that are shown
            assert after[other] == pytest.approx(before[other], rel=5e-4)
        else:
            assert factors[names[other]] == pytest.approx(after[other] / before[other], rel=1e-3)
            assert factors[names[other]] != 1
    assert names[match] in result.kept and result.kept[-1] == "equilibrium norm"


@pytest.mark.parametrize("match", ["angle", "diffusion", "time_constant"])
def test_to_itself_is_the_identity(match):
    rule = SGD(0.1, 5e-4, momentum=0.9)
    same = translate_optimizer(rule, "sgd", match=match).rule
    assert same.momentum == 0.9
    assert (same.lr, same.weight_decay) == (pytest.approx(0.1), pytest.approx(5e-4))


def test_angle_and_time_constant_cannot_both_be_matched():
    """angle^2 x time constant: (1-a)/(2(1+a)) for SGD, twice that for AdamW."""
    for rule, product in ((SGD(0.1, 1e-5, momentum=0.9), 0.1 / 3.8), (AdamW(1e-3, 1e-3, betas=(0.9, 0.9)), 0.1 / 1.9)):
        e = speeds(rule)
        assert e["angle"] ** 2 * e["time_constant"] == pytest.approx(product, rel=2e-3)


@pytest.mark.parametrize("name", ["dim", "unit_grad_sq"])
@pytest.mark.parametrize("value", [1e308, 1e-308])
def test_a_scale_at_the_ends_of_float64_is_refused(name, value):
    """Its squares are infinite or zero, and lr would be divided by one."""
    scale = {"dim": 1000.0, "unit_grad_sq": 1.0, name: value}
    with pytest.raises(EquilibriaError, match=f"expected 1e-100 <= {name} <= 1e") as raised:
        translate(AdamW(1e-3, 0.1), to="sgd", **scale)
    assert raised.value.argument == name


@pytest.mark.parametrize("wd", [5e-4, 6.5e-3, 0.05])
@pytest.mark.parametrize(("to", "options"), [("sgdw", {}), ("sgdw", {"momentum": 0.5}), ("sgd", {"momentum": 0.5})])
def test_the_matched_time_constant_is_the_one_of_the_equilibrium(wd, to, options):
    """Also just below the oscillation threshold (6.6e-4), and above it, where the approach is as fast as it gets."""
    rule = SGD(0.1, wd, momentum=0.9)
    new = translate_optimizer(rule, to, match="time_constant", **options).rule
    assert new.equilibrium().time_constant == pytest.approx(rule.equilibrium().time_constant, rel=1e-9)
    assert new.equilibrium().monotone


@pytest.mark.parametrize("rule", [AdamW(1e-3, 0.1), AdamW(1e-4, 0.01), SGD(0.1, 5e-4, momentum=0.9), SGD(0.1, 5e-4)])
@pytest.mark.parametrize("b", [1.0, 4.0])
def test_settling_time_per_sample_is_listed_as_kept_only_where_it_is(rule, b):
    """AdamW(1e-3, .1) takes 6183 steps, and with batches of four 11191 / 4: its second moment lags."""
    result = translate_batch(rule, b)
    ratio = b * result.rule.equilibrium().time_constant / rule.equilibrium().time_constant
    name = "settling time in samples (epochs)"
    if abs(ratio - 1) < 0.01:
        assert name in result.kept
    else:
        assert any(text.startswith(f"{name}: x {ratio:.4g} ") for text in result.changed)
    assert (name in result.kept) == (b == 1 or rule in (AdamW(1e-4, 0.01), SGD(0.1, 5e-4)))
    assert not any(": x 1 " in f"{text} " for text in result.changed)


def test_the_settling_time_of_adam_with_l2_has_a_condition():
    """Its time constant depends on the gradient scale, which a change of batch size does not ask for."""
    rule = AdamL2(1e-3, 1e-3)
    result = translate_batch(rule, 4)
    assert not any("settling" in text for text in result.kept)
    assert any("1000 steps" in text for text in result.changed)
    ratios = [
        4
        * result.rule.equilibrium(unit_grad_sq=g / 4, dim=10).time_constant
        / rule.equilibrium(unit_grad_sq=g, dim=10).time_constant
        for g in (1e-6, 1e6)
    ]
    assert ratios[0] > 1.2 and ratios[1] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("rule", SMALL_RULES, ids=repr)
def test_nothing_changes_where_nothing_is_translated(rule):
    assert translate_scale(rule, 1.0).changed == ()
    assert translate_decay(rule, rule.weight_decay).changed == ()
    left = translate_batch(rule, 1.0).changed
    assert left == () or isinstance(rule, AdamL2)
    if isinstance(rule, Muon):
        assert translate_optimizer(rule, "muon", shape=(8, 4)).changed == ()
    elif not isinstance(rule, AdamL2):
        to = {SGD: "sgd", SGDW: "sgdw", AdamW: "adamw", Lion: "lion"}[type(rule)]
        assert translate_optimizer(rule, to, **SCALE).changed == ()


def test_one_door():
    rule = SGD(0.1, 5e-4, momentum=0.9)
    assert translate(rule, scale=3.0) == translate_scale(rule, 3.0)
    assert translate(rule, batch=3.0) == translate_batch(rule, 3.0)
    assert translate(rule, weight_decay=3.0) == translate_decay(rule, 3.0)
    assert translate(rule, to="sgdw", match="diffusion", momentum=0.5) == translate_optimizer(
        rule, "sgdw", match="diffusion", momentum=0.5
    )


@pytest.mark.parametrize("to", ["sgd", "sgdw"])
def test_without_a_scale_between_rules_that_share_it(to):
    """Between SGD-type rules L drops out of the matched settings."""
    rule = SGD(0.1, 5e-4, momentum=0.9)
    plain = translate_optimizer(rule, to, momentum=0.5).rule
    scaled = translate_optimizer(rule, to, momentum=0.5, unit_grad_sq=7.0).rule
    assert dataclasses.astuple(plain) == pytest.approx(dataclasses.astuple(scaled))


# ---- Muon, shape by shape


SHAPES = [(64, 64), (32, 128), (128, 32), (1, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize("rule", [AdamW(1e-3, 0.1), Lion(1e-4, 1.0), Muon(0.02, 0.1, adjust_lr_fn="spectral_norm")])
def test_to_muon_and_back(rule, match, shape):
    scale = {"dim": float(math.prod(shape))}
    muon = translate_optimizer(rule, "muon", match=match, shape=shape, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    there = muon.rule.equilibrium()
    here = rule.equilibrium(shape=shape) if isinstance(rule, Muon) else rule.equilibrium(**scale)
    assert there.norm == pytest.approx(here.norm, rel=1e-9)
    if match != "diffusion":
        assert getattr(there, match) == pytest.approx(getattr(here, match), rel=1e-9)
    own = {"momentum": rule.momentum, "adjust_lr_fn": rule.adjust_lr_fn} if isinstance(rule, Muon) else {}
    back = translate_optimizer(muon.rule, type(rule).__name__.lower(), match=match, **own).rule
    assert (back.lr, back.weight_decay) == pytest.approx((rule.lr, rule.weight_decay), rel=1e-9)


def test_sgd_to_muon_needs_the_gradient():
    with pytest.raises(EquilibriaError, match=r"expected both, to match the norms of SGD and Muon"):
        translate_optimizer(SGD_RULE, "muon", shape=(4, 4))
    new = translate_optimizer(SGD_RULE, "muon", shape=(4, 4), unit_grad_sq=3.0).rule
    assert new.equilibrium().norm == pytest.approx(SGD_RULE.equilibrium(3.0).norm)


# ---- measured laws, against the closed rules that they were made of


def measured(rule, **step):
    """The measured law that an experiment with this rule would give."""
    step, decay = PowerLaw(step.pop("factor", 1.0), lr=1.0, **step), PowerLaw(1.0, lr=1.0, weight_decay=1.0)
    return Identified(rule.lr, rule.weight_decay, name="own", step=step, decay=decay, memory=update_memory(rule))


def measured_adamw():
    return measured(AdamW(1e-3, 0.1, betas=(0.9, 0.99)), factor=math.sqrt(0.1 / 1.9), entries=0.5)


def measured_sgd():
    return measured(SGDW(0.1, 5e-3), grad=1.0)


@pytest.mark.parametrize(
    ("law", "rule"),
    [(measured_adamw(), AdamW(1e-3, 0.1, betas=(0.9, 0.99))), (measured_sgd(), SGDW(0.1, 5e-3))],
    ids=["AdamW", "SGDW"],
)
@given(factor=st.floats(0.2, 5.0))
def test_a_measured_law_is_translated_as_the_rule_behind_it(law, rule, factor):
    for translated in (
        lambda one: translate_scale(one, factor),
        lambda one: translate_batch(one, factor),
        lambda one: translate_decay(one, factor),
        lambda one: translate_optimizer(one, "lion", unit_grad_sq=2.0, dim=100),
    ):
        new, expected = translated(law).rule, translated(rule).rule
        assert (new.lr, new.weight_decay) == pytest.approx((expected.lr, expected.weight_decay), rel=1e-6)


@pytest.mark.parametrize("match", MATCHES)
def test_to_a_measured_law(match):
    lion = Lion(2e-4, 1.0)
    new = translate_optimizer(lion, measured_adamw(), match=match, dim=100).rule
    here, there = lion.equilibrium(dim=100), new.equilibrium(dim=100)
    assert there.norm == pytest.approx(here.norm)
    assert isinstance(new, Identified) and new.name == "own"
    if match != "diffusion":
        assert getattr(there, match) == pytest.approx(getattr(here, match))


def test_turning_of_a_measured_law_over_many_steps():
    rule = AdamW(1e-3, 0.1, betas=(0.9, 0.99))
    np.testing.assert_allclose(n_step_angles(measured_adamw(), 50), n_step_angles(rule, 50), rtol=1e-9)


SGD_RULE = SGD(0.1, 5e-4, momentum=0.9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: translate_scale(SGD_RULE, 0.0),
        lambda: translate_scale(SGD_RULE, math.nan),
        lambda: translate_scale(SGD_RULE, 1e200),
        lambda: translate_scale(SGD_RULE, 1e-200),
        lambda: translate_scale(AdamL2(0.1, 0.1), 1e200),
        lambda: translate_scale(Lion(0.1, 0.1), 1e-308),
        lambda: translate(None, scale=2.0),
        lambda: translate(None, batch=2.0),
        lambda: translate(None, weight_decay=2.0),
        lambda: translate(None, to="sgd"),
        lambda: translate_batch(SGD_RULE, -2),
        lambda: translate_batch(SGD_RULE, math.inf),
        lambda: translate_decay(SGD_RULE, 0.0),
        lambda: translate_decay(SGD(0.1, 0.0), 1e-3),
        lambda: translate_optimizer(SGD_RULE, "muon"),
        lambda: translate_optimizer(SGD_RULE, "adam"),
        lambda: translate_optimizer(SGD_RULE, "adamw"),
        lambda: translate_optimizer(SGD_RULE, "adamw", unit_grad_sq=1.0),
        lambda: translate_optimizer(SGD_RULE, "adamw", unit_grad_sq=-1.0, dim=10),
        lambda: translate_optimizer(Muon(0.1, 0.1), "sgd", unit_grad_sq=1.0, dim=10),
        lambda: translate_optimizer(SGD_RULE, "sgdw", match="norm"),
        lambda: translate_optimizer(SGD(0.1, 0.0), "sgdw"),
        # A second moment over 1000 steps cannot settle in 50:
        lambda: translate_optimizer(SGD(0.1, 0.05), "adamw", match="time_constant", unit_grad_sq=1.0, dim=10),
        lambda: translate(SGD_RULE),
        lambda: translate(SGD_RULE, scale=2.0, batch=2.0),
        lambda: translate(SGD_RULE, scale=2.0, match="angle"),
    ],
)
def test_bad_input_raises(call):
    with pytest.raises(EquilibriaError, match=r"got .*expected"):
        call()


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        (lambda: translate(SGD_RULE, to="muon"), "shape", r"got to='muon' without a shape; expected shape=\(rows, col"),
        (
            lambda: translate(Muon(0.1, 0.1), to="adamw"),
            "shape",
            r"got Muon\(\.\.\.\) as the rule without a shape; .*matrices of other sides",
        ),
        (
            lambda: translate(Muon(0.1, 0.1, shape=(3, 4)), to="adamw", dim=12),
            "dim",
            r"got dim=12 with a shape; expected the shape alone",
        ),
        (
            lambda: translate(SGD_RULE, to=measured_sgd(), dim=100),
            "unit_grad_sq",
            r"got unit_grad_sq=None, dim=100; expected unit_grad_sq, to match the norms of SGD and own",
        ),
        (
            lambda: translate(SGD_RULE, to=measured_sgd(), betas=(0.9, 0.9)),
            "betas",
            r"got betas with to=the measured law of own, which has no such setting",
        ),
        (
            lambda: translate(AdamW(1e-3, 0.1), to="sphere", dim=10),
            "steps",
            r"got no steps; expected .* with to='sphere'",
        ),
        (lambda: translate(AdamW(1e-3, 0.1), to="lion", steps=10, dim=10), "steps", r"got steps with to='lion'"),
        (
            lambda: translate(SGD_RULE, to="sphere", steps=10, dim=10),
            "rule",
            r"got SGD, whose step depends on the size",
        ),
        (
            lambda: translate(SGD_RULE, to="adamw", momentum=0.9),
            "momentum",
            r"got momentum with to='adamw', which has no such setting; expected it only with to: sgd, sgdw, muon",
        ),
        (
            lambda: translate(SGD_RULE, batch=2, betas=(0.9, 0.99)),
            "betas",
            r"got betas with batch; expected it only with",
        ),
        (lambda: translate(SGD_RULE, scale=2, batch=2), "batch", r"got scale and batch; expected exactly one of"),
        (lambda: translate(SGD_RULE, to="adamw"), "unit_grad_sq", r"got unit_grad_sq=None, dim=None; expected both"),
        (lambda: translate(SGD_RULE, to="sgdw", match="norm"), "match", r"got match='norm'; expected one of: angle"),
    ],
)
def test_errors_name_the_argument_and_the_way_out(call, argument, words):
    with pytest.raises(EquilibriaError, match=words) as caught:
        call()
    assert caught.value.argument == argument
