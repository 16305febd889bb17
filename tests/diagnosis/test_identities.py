"""Identities of the measurement: exact on exact samples, broken by what breaks their assumptions, by nothing else."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from tests.helpers.sample_worlds import World, bfloat16, edited, together, world

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.identities import check_identities
from equilibria.theory import SGD, SGDW, AdamW
from equilibria.theory.citations import cite

PLAIN, HEAVY_BALL = SGD(0.1, 5e-3), SGD(0.1, 2e-3, momentum=0.9)
LOG_COS, WINDOW = "angles.log_cos_balance", "norms.window_identity"


@cache
def plain() -> World:
    return world(PLAIN, 400, start=1.3, correlation=0.4)


def checks(run: World, samples=None):
    return check_identities(run.samples if samples is None else samples, metadata=run.metadata)


def laws(run: World) -> list[str]:
    return sorted({check.law for check in checks(run)})


@pytest.mark.parametrize(
    ("rule", "schedule", "expected"),
    [
        (PLAIN, None, [LOG_COS, WINDOW]),
        (PLAIN, lambda step: 0.1 * (1 + math.cos(step / 200)), [LOG_COS]),
        (SGDW(0.1, 5e-3), None, [LOG_COS]),
        (SGD(0.1, 0.0), None, [LOG_COS, WINDOW]),
        (HEAVY_BALL, None, [WINDOW]),
        (SGD(0.1, 2e-3, momentum=0.9, dampening=0.5), None, [WINDOW]),
        (HEAVY_BALL, lambda step: 0.1 * (1 + math.cos(step / 200)), []),
        (SGD(0.1, 2e-3, momentum=0.9, nesterov=True), None, []),
        (AdamW(1e-2, 0.1), None, []),
    ],
)
def test_identities_hold_on_exact_samples_whatever_the_gradients_do(rule, schedule, expected):
    run = world(rule, 300, start=1.3, correlation=0.4, lr=schedule, unit_grad_sq=lambda step: 1 + step / 100)
    assert laws(run) == expected
    for check in checks(run):
        assert check.relative_error < 1e-9
        assert check.holds and check.steps == 299 and check.first_step == 0
        assert cite(check.law)


def test_both_sides_are_sums_over_the_samples():
    rows = [row for row in plain().samples.to_pylist() if row["param"] == "conv2.weight"]
    found = {check.law: check for check in checks(plain()) if check.param == "conv2.weight"}
    turned = math.fsum(-math.log(math.cos(row["angle"])) for row in rows[:-1])
    decayed = -math.fsum(math.log1p(-row["lr"] * row["weight_decay"]) for row in rows[:-1])
    assert found[LOG_COS].left == pytest.approx(turned, rel=1e-10)
    assert found[LOG_COS].right == pytest.approx(decayed + math.log(rows[-1]["norm"] / rows[0]["norm"]), rel=1e-10)
    assert found[WINDOW].left == pytest.approx(np.mean([row["update_norm"] ** 2 for row in rows[1:-1]]), rel=1e-10)


def test_float32_norms_are_within_the_tolerance():
    table = plain().samples
    columns = {name: table[name].to_numpy().astype(np.float32) for name in ("norm", "angle", "update_norm")}
    found = checks(plain(), edited(table, **columns))
    assert all(check.holds for check in found)
    assert max(check.relative_error for check in found) > 1e-9, "nothing was rounded"


def test_a_stretch_ends_where_steps_are_missing_or_weights_were_changed():
    run = world(PLAIN, 300, not_finite=[100], changed_outside={200: 1.1})
    mine = [check for check in checks(run) if check.param == "conv1.weight" and check.law == LOG_COS]
    assert [(check.first_step, check.steps) for check in mine] == [(0, 99), (101, 98), (200, 99)]
    assert max(check.relative_error for check in checks(run)) < 1e-9


def test_a_stretch_of_the_window_identity_ends_where_the_settings_change():
    run = world(HEAVY_BALL, 300, lr=lambda step: 0.1 if step < 200 else 0.05)
    mine = [check for check in checks(run) if check.param == "conv1.weight"]
    assert [(check.first_step, check.steps) for check in mine] == [(0, 199), (200, 99)]
    assert max(check.relative_error for check in mine) < 1e-9


def test_samples_that_are_not_consecutive_cannot_be_checked():
    assert checks(world(PLAIN, 300, every=2)) == ()
    assert checks(world(PLAIN, 10)) == ()


def test_a_radial_gradient_breaks_the_balance_unless_it_was_measured():
    share = 0.3
    run = world(PLAIN, 400, radial=share)
    for check in checks(run):
        # The left side holds the decay 1 + share, the right side only 1 (to first order, near equilibrium).
        assert check.relative_error == pytest.approx(1 - 1 / (1 + share), abs=0.05)
        assert check.holds and check.tolerance == pytest.approx(0.01 + share / (1 + share), abs=0.05)
    unseen = checks(run, edited(run.samples, cosine=np.zeros(len(run.samples))))
    assert unseen and not any(check.holds for check in unseen)


def test_angles_measured_wrongly_do_not_balance_and_are_reported():
    run = world(PLAIN, 1000)
    angles = run.samples["angle"].to_numpy() * np.where(np.array(run.samples["param"]) == "conv2.weight", 1.02, 1.0)
    table = edited(run.samples, angle=angles)
    failed = [check for check in checks(run, table) if not check.holds]
    assert [(check.param, check.law) for check in failed] == [("conv2.weight", LOG_COS)]
    assert failed[0].relative_error == pytest.approx(1 - 1 / 1.02**2, rel=0.01)
    (finding,) = diagnose(table, metadata=run.metadata)
    assert finding.severity == "note" and finding.law == LOG_COS and "conv2.weight" in finding.subject


def test_the_tolerance_knows_how_coarse_the_weights_are():
    fine = world(PLAIN, 300, dtype="bfloat16", kept_as=bfloat16)
    coarse = [check.tolerance for check in checks(fine)]
    exact = [check.tolerance for check in checks(world(PLAIN, 300))]
    assert min(coarse) > max(exact)


def test_parameters_without_law_or_invariance_are_left_alone():
    run = world(PLAIN, 100)
    assert check_identities(run.samples, metadata={}) == ()
    assert checks(run, edited(run.samples, cosine=np.full(len(run.samples), 0.1))) == ()


def test_stretches_of_several_lengths_and_rules_are_checked_as_if_alone():
    short, long = world(HEAVY_BALL, 60, layers=["a", "b"], seed=1), world(PLAIN, 90, layers=["c", "d"], not_finite=[40])
    both = together(long, short)
    assert checks(both) == (*checks(long), *checks(short))
    assert len({(check.law, check.steps) for check in checks(both)}) > 3
