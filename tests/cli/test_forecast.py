"""`equilibria forecast` as a user types it: tables, strict JSON, the page, exit codes, errors of one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tests.helpers.planted_walks import Walk

from equilibria.cli import app
from equilibria.cli._scenarios import DecayPart, parse_what_if
from equilibria.forecasting import Scenario, backtest, what_if
from equilibria.records import RecordWriter
from equilibria.theory.schedules import Cosine, MultiStep

WALK = Walk(layers=2).run(np.where(np.arange(300) < 220, 0.1, 0.01))


@pytest.fixture(autouse=True)
def _fixed_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "walk"
    metadata = {**WALK.metadata, "steps_per_epoch": 10}
    with RecordWriter(path, metadata=metadata) as writer:
        writer.append({name: WALK.table[name].combine_chunks() for name in WALK.table.column_names})
    return path


def run(recorded: Path, line: str) -> Result:
    return CliRunner().invoke(app, ["forecast", str(recorded), *shlex.split(line)])


def run_json(recorded: Path, line: str) -> dict:
    result = run(recorded, f"{line} --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_scenarios_that_were_typed_are_those_of_the_library(recorded):
    what_ifs = ("no drop=--milestones 22", "all=rescale wd x2", "cosine=schedule cosine lr 0.05")
    typed = " ".join(f"--what-if '{text}'" for text in what_ifs)
    got = run_json(recorded, f"--schedule step --milestones 22,36 --epochs 50 {typed}")
    drops = MultiStep(0.1, milestones=[220, 360], factor=0.1)  # --lr is the largest recorded, epochs are those recorded
    want = what_if(
        WALK,
        {
            "as planned": drops,
            "no drop": MultiStep(0.1, milestones=[220], factor=0.1),
            "all": Scenario(drops, rescale=True, weight_decay=1e-2),
            "cosine": Cosine(0.05, steps=500),
        },
        steps=500,
    )
    assert list(got["scenarios"]) == list(want.forecasts)
    for name, scenario in got["scenarios"].items():
        for layer, forecast in zip(scenario["layers"], want.forecasts[name].layers, strict=True):
            np.testing.assert_allclose(layer["angle"]["high"], forecast.angle.high, rtol=1e-9)
            assert layer["outcome"]["integrated_angle"]["value"] == forecast.integrated_angle.value
    assert (got["first"], got["steps"], got["steps_per_epoch"]) == (300, 500, 10)


def test_without_a_schedule_the_last_lr_stays(recorded):
    (layer, _) = run_json(recorded, "--steps 400")["scenarios"]["as planned"]["layers"]
    assert set(layer["lr"]) == {0.01}


def test_the_tables_and_the_page(recorded, tmp_path):
    page = tmp_path / "forecast.html"
    result = run(recorded, f"--steps 400 --what-if more=--wd=x3 --suggest 0:0.02,350:0.01 --html {page}")
    assert result.exit_code == 0, result.output
    for words in ("· measured   █ forecast", "worst layer", "more", "Assumed", "the plan as given", f"Page: {page}"):
        assert words in result.stdout
    assert page.stat().st_size > 1e6
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_the_back_test(recorded, tmp_path):
    got, want = run_json(recorded, "--from 200"), backtest(WALK, start=200)
    assert got["scores"]["forecast"]["angle"] == want.scores["forecast"].angle
    assert got["angle_coverage"] == want.angle_coverage
    assert [layer["layer"] for layer in got["layers"]] == ["layer0", "layer1"]
    result = run(recorded, f"--from 200 --html {tmp_path / 'test.html'}")
    assert "angle proportional to lr" in result.stdout and "layer1" in result.stdout
    assert (tmp_path / "test.html").exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "got neither --steps nor --epochs"),
        ("--steps 300", "of which 300 are recorded; expected the length of the whole run"),
        ("--steps 400 --schedule step", "needs exactly one of --milestones"),
        ("--steps 400 --what-if rescaled", "expected NAME=FLAGS"),
        ("--steps 400 --what-if a=--rescal", "No such option"),
        ("--steps 400 --what-if 'a=--steps 500'", "the same for all"),
        ("--steps 400 --what-if a=--rescale --what-if a=--rescale", "two scenarios named 'a'"),
        ("--steps 400 --what-if 'a=--milestones 350'", "--what-if a: got --milestones with --schedule constant"),
        ("--steps 400 --suggest fast", "expected now, equilibrium, radians"),
        ("--steps 400 --suggest 5:0.01", "expected it at step 0"),
        ("--steps 400 --suggest -1", "expected 0 <= --suggest"),
        ("--from 200 --wd x2", "got --wd with --from"),
        ("--from 10", "at least 20 are needed"),
        ("--from 299", "expected at least"),
        ("--steps 400 --wd 10:x2,x3", "or POSITION:VALUE"),
        ("--steps 400 --wd 500:x2", "expected a position within the run of 400 steps"),
        ("--from 200 --start 100", "got --start with --from"),
        ("--steps 400 --html /no/such/folder/page.html", "is not a folder"),
    ],
)
def test_bad_input_gives_one_line(recorded, line, reason):
    result = run(recorded, line)
    assert result.exit_code != 0
    assert reason in str(result.exception) or reason in result.output
    assert "\n" not in str(result.exception)


def test_a_folder_without_a_run_is_no_run(tmp_path):
    result = run(tmp_path, "--steps 10")
    assert result.exit_code != 0 and "is not a run" in str(result.exception)


def test_words_without_dashes_are_flags_too():
    assert parse_what_if("late drop=milestones 10,20 rescale") == (
        "late drop",
        {"milestones": "10,20", "rescale": True},
    )
    assert parse_what_if("wd=wd x2") == ("wd", {"wd": (DecayPart(None, True, 2.0),)})


def test_what_is_suggested_can_be_typed(recorded):
    line = "--schedule step --milestones 200,400 --steps 500 --start 150"
    (*_, best) = run_json(recorded, f"{line} --suggest now")["suggestion"]["proposals"]
    assert best["changes"] and best["flags"]
    typed = run_json(recorded, f"{line} --what-if 'typed={best['flags']}'")
    assert typed["first"] == 150
    outcome = typed["scenarios"]["typed"]["layers"]
    travelled = np.mean([layer["outcome"]["integrated_angle"]["value"] for layer in outcome])
    assert travelled == pytest.approx(best["integrated_angle"], rel=1e-9)


def test_the_back_test_of_a_rescaled_run(recorded):
    got, want = run_json(recorded, "--from 190 --rescale"), backtest(WALK, start=190, rescale=True)
    assert got["scores"]["forecast"]["angle"] == want.scores["forecast"].angle
    assert any("rescaled" in finding["subject"] for finding in got["findings"])
