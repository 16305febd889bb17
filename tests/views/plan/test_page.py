"""The page of a plan: self-contained, safe with any text, and true to the plan."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from tests.helpers.page_reader import read_page, words
from tests.helpers.pages import EVIL, check_nothing_is_loaded, check_policy, data_of

from equilibria.errors import EquilibriaError
from equilibria.planning import Finding, plan
from equilibria.theory import SGD, AdamW, Lion
from equilibria.theory.schedules import Cosine, FromValues, MultiStep, Warmup
from equilibria.views.plan.page import chart_data, plan_headline, plan_page

EPOCH = 391
RULE = SGD(0.1, 5e-4, momentum=0.9)


def step_plan():
    milestones = [60 * EPOCH, 120 * EPOCH, 160 * EPOCH]
    schedule = MultiStep(0.1, milestones=milestones, factor=0.2)
    return plan(RULE, schedule, steps=200 * EPOCH, steps_per_epoch=EPOCH)


PLANS = {
    "steps": step_plan(),
    "warm-up and cosine": plan(AdamW(1e-3, 0.1), Warmup(Cosine(1e-3, steps=1900), steps=100), steps=2000),
    "constant": plan(RULE, 0.1, steps=5000, steps_per_epoch=100),
    "far start": plan(RULE, 0.1, steps=4000, init_norm=40.0, unit_grad_sq=10.0),
    "small start": plan(Lion(1e-4, 1.0), 1e-4, steps=9000, init_norm=1.0, dim=1e6, dtype="bfloat16"),
    "lr 0 at both ends": plan(RULE, FromValues([0.0] * 3 + [0.1] * 100 + [0.01] * 94 + [0.0] * 3), steps=200),
    "long rest": plan(RULE, FromValues([0.0] * 30 + [0.1] * 100 + [0.0] * 70), steps=200),
    "wd ends": plan(RULE, 0.1, steps=100, weight_decay=FromValues([5e-4] * 50 + [0.0] * 50)),
    "one step": plan(RULE, 0.1, steps=1),
}
PAGES = {name: plan_page(result).document() for name, result in PLANS.items()}
each_plan = pytest.mark.parametrize("name", PLANS)


@each_plan
def test_nothing_is_loaded_from_anywhere(name):
    check_nothing_is_loaded(PAGES[name], style="--predicted")


def test_the_policy_allows_exactly_the_scripts_of_the_page():
    check_policy(PAGES["steps"])


@each_plan
def test_the_page_is_small_enough_to_mail(name):
    assert len(PAGES[name].encode()) < 6_000_000


@each_plan
def test_the_data_are_the_curve(name):
    curve, shown = PLANS[name].curve, data_of(PAGES[name])
    unit = PLANS[name].situation.steps_per_epoch or 1
    columns = {"angle": curve.angle, "equilibrium": curve.angle_equilibrium, "by_lr": curve.angle_by_lr, "lr": curve.lr}
    np.testing.assert_allclose(shown["x"], curve.step / unit, rtol=1e-11)
    for key, column in columns.items():
        expected = np.where(column > 0, column, np.nan)
        np.testing.assert_allclose(np.array(shown[key], dtype=float), expected, rtol=1e-5, err_msg=key)
    assert [phase["number"] for phase in shown["phases"]] == [phase.number for phase in PLANS[name].phases]
    assert shown["phases"][-1]["to"] == shown["end"]


def test_a_step_without_lr_is_a_hole_in_the_curves():
    shown = data_of(PAGES["lr 0 at both ends"])
    for key in ("angle", "equilibrium", "norm_ratio", "lr"):
        holes = [index for index, value in enumerate(shown[key]) if value is None]
        assert holes == [0, 1, 2, 197, 198, 199], key
    assert "in 3 % of the run lr or wd is 0" in words(PAGES["lr 0 at both ends"])


@each_plan
def test_every_phase_has_its_row(name):
    rows = re.findall(r"<tr[^>]*><th scope=\"row\">(\d+)</th>(.*?)</tr>", PAGES[name])
    assert [int(number) for number, _ in rows] == [phase.number for phase in PLANS[name].phases]
    for phase, (_, cells) in zip(PLANS[name].phases, rows, strict=True):
        moments = (phase.start, phase.middle, phase.end)
        far = sum(m.angle_ratio is not None and abs(m.angle_ratio - 1) > 0.05 for m in moments)
        assert cells.count('class="out"') == len(re.findall("▼|▲", cells)) == far
        assert ("✕" in cells) == (phase.end.angle_ratio is not None and not phase.settles)


def test_the_table_of_the_step_schedule():
    rows = re.findall(r"<tr[^>]*>(<th scope=\"row\">.*?)</tr>", PAGES["steps"])
    table = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]
    first = ["1", "0–60", "0.1", "0.0005", "0.00725", "1.00", "1.00", "1.00", "at once", "60", "✓ settled"]
    assert table[0] == first
    assert table[1][1:8] == ["60–120", "0.02", "0.0005", "0.00324", "0.45▼ slower", "0.98", "1.00"]
    assert table[1][8:] == ["23", "60", "✓ settled"]
    assert table[2][5:8] == ["0.45▼ slower", "0.56▼ slower", "0.68▼ slower"]
    assert table[3][-1] == "✕ too slow"


@each_plan
def test_every_finding_is_shown(name):
    page, shown = PAGES[name], words(PAGES[name])
    assert page.count('<article class="finding') == max(1, len(PLANS[name].findings))
    for finding in PLANS[name].findings:
        for text in (finding.subject, finding.evidence, finding.remedy, finding.law):
            assert text.replace("lr x wd", "lr × wd")[1:] in shown  # the first letter may be a capital


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("steps", "Phases 3 and 4 never reach equilibrium: 52 % of the run turns slower than in equilibrium"),
        ("constant", "The weights turn as in equilibrium, for the whole run"),
        ("long rest", "The weights turn as in equilibrium; in 50 % of the run lr or wd is 0"),
        ("one step", "The weights turn as in equilibrium, for the whole run"),
    ],
)
def test_the_headline_sums_up_the_schedule(name, sentence):
    assert plan_headline(PLANS[name]) == sentence
    assert sentence in words(PAGES[name])


@pytest.mark.parametrize(("norm", "word"), [(40.0, "slower"), (4.0, "faster")])
def test_the_headline_counts_the_steps_outside_the_tolerance(norm, word):
    result = plan(RULE, 0.1, steps=20_000, init_norm=norm, unit_grad_sq=10.0)
    share = f"{100 * (1 - result.settled_share):.0f} %"
    assert f"{share} of the run turns {word} than" in plan_headline(result)


def test_both_directions_in_one_headline():
    values = np.concatenate([np.full(1000, 0.01), np.full(1000, 0.1), np.full(1000, 0.01)])
    result = plan(SGD(0.1, 5e-2, momentum=0.9), FromValues(values), steps=3000, init_norm=0.5, unit_grad_sq=10.0)
    assert re.search(r"\d+ % of the run turns slower and \d+ % faster than in equilibrium", plan_headline(result))


@pytest.mark.parametrize("rule", [RULE, AdamW(1e-3, 0.1)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_inside_the_norm_band_the_angle_is_within_the_tolerance(rule, scale):
    settled = rule.equilibrium(unit_grad_sq=1.0, dim=100.0).norm
    result = plan(rule, rule.lr, steps=40_000, init_norm=scale * settled, unit_grad_sq=1.0, dim=100.0)
    shown = chart_data(result)
    ratio, norm = np.array(shown["ratio"]), np.array(shown["norm_ratio"])
    inside = (norm > shown["band"][0]) & (norm < shown["band"][1])
    assert 10 < inside[1:].sum() < len(inside) - 10
    later = slice(2, None)  # at the first steps the optimizer state is still empty
    assert np.mean((np.abs(ratio - 1) <= 0.05)[later] == inside[later]) > 0.95


@each_plan
def test_the_axes_show_every_constant_phase(name):
    shown = data_of(PAGES[name])
    low, high = shown["angle_range"]
    for phase in PLANS[name].phases:
        if phase.flat and phase.end.angle > 0:
            assert all(low < moment.angle < high for moment in (phase.start, phase.middle, phase.end))
    assert high / low >= 3.99
    assert shown["norm_range"][0] < shown["band"][0] < 1 < shown["band"][1] < shown["norm_range"][1]


def test_a_ramp_to_zero_does_not_stretch_the_axes():
    shown = data_of(PAGES["warm-up and cosine"])
    for key in ("angle_range", "norm_range"):
        assert np.log10(shown[key][1] / shown[key][0]) < 3.5
    assert max(ratio for ratio in shown["norm_ratio"] if ratio) > shown["norm_range"][1]


def test_text_from_outside_stays_text():
    evil = dataclasses.replace(step_plan(), findings=(Finding("warning", EVIL, EVIL, EVIL, EVIL),))
    page = plan_page(evil, title=EVIL).document()
    plain, reader = read_page(PAGES["steps"]), read_page(page)
    count = len([tag for tag, _ in plain.elements if tag == "script"])
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == count == 3
    assert not any(tag == "img" for tag, _ in reader.elements)
    assert "".join(text for tag, text in reader.text if tag == "title") == EVIL
    assert words(page).count(EVIL) >= 6  # title twice, subject, evidence, remedy, law


def test_a_dollar_in_the_title_is_not_a_placeholder():
    assert "costs $data and $" in words(plan_page(PLANS["constant"], title="costs $data and $").document())


def test_the_page_is_the_same_every_time():
    assert plan_page(PLANS["steps"]).document() == PAGES["steps"]


def test_writing_leaves_one_file(tmp_path):
    path = tmp_path / "plan.html"
    plan_page(PLANS["constant"]).write(path)  # an older page
    assert plan_page(PLANS["steps"], title="ResNet-18").write(str(path)) == path
    assert path.read_text(encoding="utf-8") == plan_page(PLANS["steps"], title="ResNet-18").document()
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.html"]


def test_writing_follows_a_link(tmp_path):
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    plan_page(PLANS["constant"]).write(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").stat().st_size > 1_000_000


def test_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, reason in {
        tmp_path / "missing" / "plan.html": "missing is not a folder",
        tmp_path / "file" / "plan.html": "file is not a folder",
        tmp_path: "which is a folder",
        tmp_path / ("x" * 300): "cannot be written: File name too long",
    }.items():
        with pytest.raises(EquilibriaError, match=reason):
            plan_page(PLANS["constant"]).write(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EquilibriaError, match="not a regular file"):
        plan_page(PLANS["constant"]).write(tmp_path / "pipe")


def test_without_weight_decay_the_page_shows_what_there_is():
    free = plan(SGD(0.1, 0.0), FromValues([0.1] * 100 + [0.02] * 100), steps=200, init_norm=3.0, unit_grad_sq=40.0)
    page = plan_page(free).document()
    told, drawn = words(page), data_of(page)
    assert drawn["band"] is None and set(drawn["equilibrium"]) == {None}
    assert drawn["norm"] == [float(f"{norm:.6g}") for norm in free.curve.norm]
    low, high = drawn["norm_range"]
    assert low < free.curve.norm.min() and high > free.curve.norm.max()
    assert "Without weight decay there is no equilibrium, and the angle fades" in told
    assert "Why: the norm only grows" in told
    assert f"{free.phases[1].end.angle:.3g}" in told and f"{free.phases[1].end.norm:.3g}" in told
    for absent in ("area-gap", "line-equilibrium", "÷ equilibrium", "equilibrium of lr × wd"):
        assert absent not in page.split("<main>")[1].split("<script")[0]


def test_the_page_names_the_equilibrium_that_training_starts_in():
    values = FromValues([0.0] * 10 + [0.02] * 90 + [0.1] * 100)
    assert "starts in equilibrium of lr 0.02;" in words(plan_page(plan(RULE, values, steps=200)).document())


def test_plotly_is_imported_for_a_page_only():
    code = "import sys, equilibria.views.plan.page; assert not any('plotly' in name for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
