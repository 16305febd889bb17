"""The commands as a user types them: contracts of --json, exit codes, errors of one line."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from equilibria.cli import app
from equilibria.errors import EquilibriaError
from equilibria.serve import server
from equilibria.theory import SGD, AdamW, Muon

SGD_OPTIONS = "--optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9"
STEP = "--schedule step --milestones 60,120,160 --factor 0.2 --epochs 200 --steps-per-epoch 391"


@pytest.fixture(autouse=True)
def _fixed_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def run(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def run_json(line: str) -> dict:
    result = run(line + " --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "equilibria.cli", *line.split()], capture_output=True, text=True)


def test_equilibrium_json_has_the_contracted_keys_and_the_librarys_numbers():
    got = run_json(f"equilibrium {SGD_OPTIONS} --unit-grad-sq 10")
    assert list(got) == ["norm", "angle", "relative_update", "rate", "time_constant", "monotone", "validity"]
    want = SGD(0.1, 5e-4, momentum=0.9).equilibrium(unit_grad_sq=10.0)
    assert (got["norm"], got["angle"], got["rate"]) == (want.norm, want.angle, want.rate)
    assert {"name", "met", "angle_error", "norm_error", "affects", "detail"} == set(got["validity"][0])


@pytest.mark.parametrize(
    "options",
    [
        "--optimizer sgd --lr 0.1 --wd 1e-3 --momentum 0.9 --nesterov",
        "--optimizer sgd --lr 0.1 --wd 1e-3 --momentum 0.9 --dampening 0.5",
        "--optimizer sgdw --lr 0.1 --wd 1e-3 --momentum 0.9",
        "--optimizer adamw --lr 1e-3 --wd 0.1 --betas 0.9,0.95 --dim 1000",
        "--optimizer adam --lr 1e-3 --wd 1e-3 --dim 1000 --unit-grad-sq 1",
        "--optimizer lion --lr 1e-4 --wd 1 --dim 1000",
        "--optimizer muon --lr 0.02 --wd 0.1 --shape 64,32",
    ],
)
def test_every_optimizer_has_an_equilibrium_to_print(options):
    result = run(f"equilibrium {options}")
    assert result.exit_code == 0
    assert "angle per step" in result.output and "time constant" in result.output
    assert math.isfinite(run_json(f"equilibrium {options}")["norm"] or 0.0)


def test_plan_prints_the_table_the_curve_and_the_findings():
    output = run(f"plan {SGD_OPTIONS} {STEP}").output
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit() and "-" in line]
    ratios = [row[5:8] for row in rows[:4]]
    assert ratios == [
        ["1.00", "1.00", "1.00"],
        ["0.45", "0.98", "1.00"],
        ["0.45", "0.56", "0.68"],
        ["0.31", "0.32", "0.34"],
    ]
    assert "Phases 3 and 4 never reach equilibrium" in output
    words = " ".join(output.split())
    assert "scale-invariant weights (those only) by 0.669, their momentum buffer by 1.495" in words
    assert "█" in output and "epochs" in output


def test_plan_json_has_phases_curve_and_findings():
    got = run_json(f"plan {SGD_OPTIONS} {STEP}")
    assert {"phases", "curve", "findings"} <= set(got)
    assert [round(phase["start"]["angle_ratio"], 2) for phase in got["phases"]] == [1.0, 0.45, 0.45, 0.31]
    assert {"severity", "subject", "evidence", "remedy", "law", "kind"} == set(got["findings"][0])
    lengths = {len(values) for values in got["curve"].values()}
    assert len(lengths) == 1


FREE = "--optimizer sgd --lr 0.1 --wd 0 --momentum 0.9 --init-norm 3 --unit-grad-sq 10"


def test_plan_without_weight_decay_shows_angle_and_norm_and_says_that_nothing_settles():
    got, output = run_json(f"plan {FREE} {STEP}"), run(f"plan {FREE} {STEP}").output
    rows = [line.split() for line in output.splitlines() if line.endswith("no equilibrium")]
    for row, phase in zip(rows, got["phases"], strict=True):
        moments = [phase[name] for name in ("start", "middle", "end")]
        assert row[3:6] == [f"{moment['angle']:.3g}" for moment in moments]
        assert row[6:9] == [f"{moment['norm']:.3g}" for moment in moments]
    assert "equilibrium of lr x wd" not in output and "% of the steps" not in output
    assert "Without weight decay there is no equilibrium, and the angle fades" in output


def test_plan_json_without_weight_decay_is_strict():
    text = run(f"plan {FREE} {STEP} --json").output
    got = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert set(got["curve"]["norm_equilibrium"]) == {None} and got["situation"]["start_norm"] is None
    assert got["phases"][0]["end"]["angle_ratio"] is None and got["phases"][0]["settle_steps"] is None
    assert got["settled_share"] == 0


def test_initial_weights_by_their_standard_deviation_without_weight_decay():
    got = run_json("plan --optimizer adamw --lr 1e-3 --wd 0 --steps 1000 --init-std 0.02")
    assert got["curve"]["norm"][0] == pytest.approx(0.02)
    assert got["curve"]["norm"][-1] > 0.02


def test_a_warm_up_held_per_epoch_starts_like_a_smooth_one():
    line = f"plan {SGD_OPTIONS} --epochs 20 --steps-per-epoch 50 --warmup 5"
    smooth, stairs = run_json(line), run_json(f"{line} --per-epoch")
    assert smooth["situation"]["start_norm"] == stairs["situation"]["start_norm"]
    assert stairs["situation"]["start_rule"]["lr"] == 0.1


def test_plan_json_is_valid_json_where_lr_is_zero():
    got = run_json("plan --optimizer adamw --lr 1e-3 --wd 0.1 --schedule cosine --warmup 20 --steps 1000")
    assert got["curve"]["norm_equilibrium"][0] is None
    assert got["phases"][0]["start"]["angle_ratio"] is None


@pytest.mark.parametrize(
    "schedule",
    [
        "constant --steps 50",
        "step --every 10 --factor 0.5 --steps 50",
        "linear --end-lr 0.01 --steps 50",
        "cosine --steps 50",
        "cosine --cycles 5 --steps 50",
        "polynomial --power 2 --steps 50",
        "exponential --factor 0.9 --steps 50",
        "wsd --warmup 5 --decay 10 --steps 50",
        "cosine --epochs 10 --steps-per-epoch 5 --per-epoch",
    ],
)
def test_every_schedule_can_be_planned_and_folded(schedule):
    assert run(f"plan {SGD_OPTIONS} --schedule {schedule}").exit_code == 0
    assert run(f"fold {SGD_OPTIONS} --schedule {schedule}").exit_code == 0


def test_a_schedule_from_a_file_in_both_formats(tmp_path):
    (tmp_path / "lines.txt").write_text("0.1\n0.1\n0.01\n")
    (tmp_path / "list.json").write_text("[0.1, 0.1, 0.01]")
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in str(run(f"plan {SGD_OPTIONS} --schedule file --lr-file {tmp_path / 'empty.txt'}").exception)
    long = run(f"plan {SGD_OPTIONS} --schedule file --lr-file {tmp_path / 'lines.txt'} --steps 4")
    assert "at most 3" in str(long.exception)
    without_lr = "plan --optimizer sgd --wd 5e-4 --momentum 0.9 --schedule file"
    assert run_json(f"{without_lr} --lr-file {tmp_path / 'lines.txt'}")["situation"]["steps"] == 3
    a = run_json(f"fold {SGD_OPTIONS} --schedule file --lr-file {tmp_path / 'lines.txt'} --steps 3")
    b = run_json(f"fold {SGD_OPTIONS} --schedule file --lr-file {tmp_path / 'list.json'} --steps 3")
    assert a == b and len(a["lr"]) == 3


def test_the_factor_of_an_exponential_schedule_is_per_epoch():
    got = run_json(f"plan {SGD_OPTIONS} --schedule exponential --factor 0.5 --epochs 4 --steps-per-epoch 100")
    lr = dict(zip(got["curve"]["step"], got["curve"]["lr"], strict=True))
    assert lr[0] == pytest.approx(0.1)
    assert got["phases"][-1]["end"]["lr"] == pytest.approx(0.1 * 0.5 ** (399 / 100))


def test_settings_of_muon_for_two_shapes():
    typed = "translate --optimizer adamw --lr 3e-4 --wd 0.1 --to muon --to-adjust-lr-fn match_rms_adamw"
    shapes = [(32, 32), (128, 32)]
    results = run_json(typed + "".join(f" --shape {rows},{columns}" for rows, columns in shapes))
    there = AdamW(3e-4, 0.1).equilibrium(dim=128 * 32)
    for result, shape in zip(results, shapes, strict=True):
        rule = Muon(result["rule"]["lr"], result["rule"]["weight_decay"], adjust_lr_fn="match_rms_adamw", shape=shape)
        assert rule.equilibrium().angle == pytest.approx(there.angle)
    assert rule.equilibrium().norm == pytest.approx(there.norm)
    back = run_json(
        f"translate --optimizer muon --lr {rule.lr!r} --wd {rule.weight_decay!r} --adjust-lr-fn match_rms_adamw "
        "--to adamw --shape 128x32"
    )
    assert (back["rule"]["lr"], back["rule"]["weight_decay"]) == pytest.approx((3e-4, 0.1))


def test_time_constants_in_tokens_and_epochs():
    """tau = B / (lr wd D)."""
    typed = "--optimizer adamw --lr 1e-3 --wd 0.1 --batch-size 5e5 --data-size 1e10"
    expected = {"steps": 1e4, "samples": 5e9, "epochs": 0.5}
    assert run_json(f"equilibrium {typed}")["timescale"] == pytest.approx(expected)
    assert run_json(f"plan {typed} --steps 1000")["timescale"] == pytest.approx(expected)
    assert "timescale" not in run_json("equilibrium --optimizer adamw --lr 1e-3 --wd 0.1")


def test_the_norm_of_muon_follows_from_the_shape_of_its_matrix():
    """From its equilibrium norm the plan starts settled, and the plan compares with the norm of the calculator."""
    muon = "--optimizer muon --lr 0.02 --wd 0.1 --shape 1024,512"
    norm = run_json(f"equilibrium {muon}")["norm"]
    planned = run_json(f"plan {muon} --steps 1000 --init-norm 20")
    assert planned["situation"]["start_norm"] == pytest.approx(norm)
    assert planned["phases"][0]["end"]["norm_equilibrium"] == pytest.approx(norm)
    assert planned["findings"] and not run_json(f"plan {muon} --steps 1000 --init-norm {norm}")["findings"]


def test_fold_without_lr_takes_it_from_the_file_and_spells_the_optimizer_as_others_do(tmp_path):
    (tmp_path / "lr.txt").write_text("0.1\n0.05\n")
    file = f"--wd 5e-4 --schedule file --lr-file {tmp_path / 'lr.txt'}"
    got = run_json(f"fold --optimizer SGD {file}")
    assert got == run_json(f"fold --optimizer sgd --lr 0.1 {file}") == run_json(f"fold {file}")
    assert len(got["lr"]) == 2
    with pytest.raises(EquilibriaError, match="decoupled"):
        CliRunner().invoke(app, f"fold --optimizer SGDW {file}".split(), catch_exceptions=False)
    assert run_json(f"translate {SGD_OPTIONS} --to SGDW")["optimizer"] == "SGDW"


def test_fold_json_and_csv_agree_with_the_paper():
    got = run_json(f"fold {SGD_OPTIONS} --epochs 2 --steps-per-epoch 391")
    assert {"lr", "log_scale", "growth_per_step", "overflow"} <= set(got)
    assert got["growth_per_step"] ** 391 == pytest.approx(1.481, abs=5e-4)  # "0.1 x 1.481^t", t in epochs
    rows = list(csv.DictReader(io.StringIO(run(f"fold {SGD_OPTIONS} --epochs 2 --steps-per-epoch 391 --csv").output)))
    assert [float(row["lr"]) for row in rows] == got["lr"]


def test_translate_says_what_it_keeps():
    got = run_json(f"translate {SGD_OPTIONS} --scale-batch 4")
    assert got["rule"]["lr"] == pytest.approx(0.4)
    assert run_json(f"translate {SGD_OPTIONS} --scale-init 10")["rule"]["lr"] == pytest.approx(10.0)
    assert run_json(f"translate {SGD_OPTIONS} --hold-angle-at-wd 2.5e-4")["rule"]["lr"] == pytest.approx(0.2)
    lion = run_json("translate --optimizer adamw --lr 1e-3 --wd 0.1 --to lion --dim 100")
    assert lion["optimizer"] == "Lion"
    said = run(f"translate {SGD_OPTIONS} --scale-batch 4").output
    assert "Not kept" in said and "Alternative" not in said


def test_translate_scales_both_settings_of_adamw_with_the_batch_and_says_what_the_linear_rule_loses():
    options = "translate --optimizer adamw --lr 1e-3 --wd 0.1 --scale-batch 4"
    rule = run_json(options)["rule"]
    assert (rule["lr"], rule["weight_decay"]) == pytest.approx((2e-3, 0.2))
    said = " ".join(run(options).output.split())
    assert "Alternative ? lr x 4 alone (linear: lr=0.004, weight_decay=0.1)" in said
    assert "it loses the equilibrium norm, x 2." in said


BAD = [
    ("plan --optimizer sgd --lr -0.1 --wd 5e-4 --steps 10", ["--lr=-0.1", "0 <= --lr"]),
    ("plan --optimizer sgd --lr nan --wd 5e-4 --steps 10", ["'nan'", "finite number"]),
    ("plan --optimizer sgd --lr abc --wd 5e-4 --steps 10", ["'abc'", "finite number"]),
    ("plan --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 1 --steps 10", ["--momentum=1", "0 <= --momentum < 1"]),
    ("plan --optimizer sdg --lr 0.1 --wd 5e-4 --steps 10", ["'sdg'", "sgd, sgdw"]),
    ("plan --optimizer sgd --lr 0.1 --wd 5e-4 --schedule stp --steps 10", ["'stp'", "cosine"]),
    (f"plan {SGD_OPTIONS} --schedule step --milestones 5,20 --steps 10", ["20", "10 steps"]),
    (f"plan {SGD_OPTIONS} --schedule step --milestones 8,5 --steps 10", ["5"]),
    (f"plan {SGD_OPTIONS} --schedule step --milestones 5,x --steps 10", ["5,x"]),
    ("plan --optimizer sgd --lr 100 --wd 5 --steps 10", ["--lr*--wd=500", "< 2"]),
    ("plan --optimizer adamw --lr 10 --wd 1 --steps 10", ["--lr*--wd=10", "< 1"]),
    ("plan --optimizer sgd --lr 0.1 --wd 0 --steps 10", ["--wd=0", "both --init-norm and --unit-grad-sq"]),
    ("plan --optimizer sgd --lr 0.1 --wd 0 --steps 10 --init-norm 3", ["--init-norm=3", "no --unit-grad-sq"]),
    ("plan --optimizer lion --lr 0.1 --wd 0 --steps 10", ["--wd=0", "both --init-norm and --dim"]),
    ("plan --optimizer sgd --lr 0.1 --wd -1 --steps 10", ["--wd=-1", "0 <= --wd"]),
    (f"plan {SGD_OPTIONS} --unit-grad-sq -1 --steps 10", ["--unit-grad-sq=-1", "0 < --unit-grad-sq"]),
    (f"plan {SGD_OPTIONS} --schedule linear --end-lr -1 --steps 10", ["--end-lr=-1", "0 <= --end-lr"]),
    ("plan --optimizer sgd --lr 0.1 --wd 1e-3 --nesterov --steps 10", ["--nesterov=True", "--momentum > 0"]),
    ("plan --optimizer adam --lr 1e-3 --wd 1e-3 --steps 10", ["no --unit-grad-sq, no --dim", "expected both"]),
    ("equilibrium --optimizer sgd --lr 0.1 --wd 0", ["--wd=0", "--wd > 0", "no equilibrium"]),
    (f"plan {SGD_OPTIONS}", ["--steps", "--epochs"]),
    (f"plan {SGD_OPTIONS} --epochs 5", ["--steps-per-epoch"]),
    (f"plan {SGD_OPTIONS} --steps 1e12", ["--steps=1e+12", "--steps <= 1e+07"]),
    (f"plan {SGD_OPTIONS} --steps 1.5", ["1.5", "whole number"]),
    (f"plan {SGD_OPTIONS} --schedule file --lr-file no-such-file --steps 10", ["no-such-file", "No such file"]),
    (f"plan {SGD_OPTIONS} --steps 10 --html no-such-folder/x.html", ["--html=", "no-such-folder"]),
    (f"plan {SGD_OPTIONS} --steps 10 --init-norm 3", ["--init-norm=3", "without --unit-grad-sq"]),
    (f"plan {SGD_OPTIONS} --betas 0.9,0.99 --steps 10", ["--betas", "adamw"]),
    ("plan --optimizer adamw --lr 1e-3 --wd 0.1 --betas 0.9 --steps 10", ["(0.9,)", "two numbers"]),
    ("equilibrium --optimizer adam --lr 1e-3 --wd 1e-3", ["no --unit-grad-sq, no --dim"]),
    (f"equilibrium {SGD_OPTIONS} --shape 3,4", ["--shape", "muon"]),
    (f"fold {SGD_OPTIONS} --nesterov --steps 5", ["nesterov"]),
    ("fold --optimizer adamw --lr 0.1 --wd 5e-4 --steps 5", ["got --optimizer adamw; expected sgd", "translate"]),
    ("fold --optimizer sgdw --lr 0.1 --wd 5e-4 --steps 5", ["--optimizer sgdw", "decoupled"]),
    ("fold --optimizer sgd --lr 0.1 --wd 0.05 --momentum 0.9 --steps 500", ["--lr=0.1, --wd=0.05"]),
    (f"fold {SGD_OPTIONS} --steps 5 --json --csv", ["--json", "--csv"]),
    (f"plan {SGD_OPTIONS} --schedule step --milestones 8,5 --steps 10", ["8,5", "ascending"]),
    (f"plan {SGD_OPTIONS} --milestones 5 --steps 10", ["--milestones", "--schedule: step"]),
    (f"plan {SGD_OPTIONS} --schedule cosine --decay 5 --steps 10", ["--decay", "--schedule: wsd"]),
    (f"plan {SGD_OPTIONS} --lr-file x --steps 10", ["--lr-file", "--schedule: file"]),
    (f"plan {SGD_OPTIONS} --schedule cosine --cycles 100 --steps 10", ["100", "10"]),
    (f"plan {SGD_OPTIONS} --dim 10 --steps 10", ["--dim", "adamw"]),
    ("plan --optimizer adamw --lr 1e-3 --wd 0.1 --unit-grad-sq 1 --steps 10", ["--unit-grad-sq", "sgd"]),
    (f"plan {SGD_OPTIONS} --init-std 0.02 --steps 10", ["--init-std", "adamw"]),
    ("plan --optimizer sgd --wd 5e-4 --steps 10", ["--lr"]),
    ("plan --optimizer muon --lr 0.02 --wd 0.1 --steps 10 --dim 100", ["--dim", "muon takes --shape"]),
    ("plan --optimizer muon --lr 0.02 --wd 0.1 --steps 10 --init-norm 3", ["--init-norm=3", "without --shape"]),
    ("plan --optimizer muon --lr 0.02 --wd 0 --steps 10 --init-norm 3", ["--wd=0", "no --shape"]),
    ("plan --optimizer adamw --lr 1e-3 --wd 0.1 --steps 10 --shape 3,4", ["--shape", "muon", "adamw takes --dim"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --dim 1000", ["--dim", "muon takes --shape"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --unit-grad-sq 1", ["--unit-grad-sq", "muon takes --shape"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --shape 1.5,2", ["--shape=1.5", "whole number"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --shape 0,2", ["--shape=0", "1 <= --shape"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --shape 5", ["--shape 5", "rows,columns"]),
    ("equilibrium --optimizer muon --lr 0.02 --wd 0.1 --shape a,b", ["--shape 'a,b'", "such as 1024,4096"]),
    ("equilibrium --optimizer adamw --lr 0.02 --wd 0.1 --betas a", ["--betas 'a'", "such as 0.9,0.999"]),
    (f"equilibrium {SGD_OPTIONS} --dim 1.5", ["1.5", "whole number"]),
    (f"translate {SGD_OPTIONS}", ["--scale-init", "--to"]),
    (f"translate {SGD_OPTIONS} --scale-batch 2 --scale-init 2", ["exactly one"]),
    (f"translate {SGD_OPTIONS} --to adamw", ["no --unit-grad-sq, no --dim"]),
    (f"translate {SGD_OPTIONS} --to muon", ["'muon' without a --shape", "expected --shape rows,columns"]),
    (f"translate {SGD_OPTIONS} --to sphere", ["got --to='sphere'; expected one of: sgd, sgdw, adamw, lion, muon"]),
    (f"translate {SGD_OPTIONS} --scale-batch 2 --shape 3,4", ["got --shape; expected it only with --to"]),
    (f"translate {SGD_OPTIONS} --to adamw --to-adjust-lr-fn none", ["got --to-adjust-lr-fn", "muon"]),
    (f"equilibrium {SGD_OPTIONS} --data-size 100", ["got --data-size without --batch-size"]),
    (f"equilibrium {SGD_OPTIONS} --batch-size 0", ["got --batch-size=0; expected 0 < --batch-size"]),
    (f"equilibrium {SGD_OPTIONS} --batch-size 9 --data-size 5", ["--data-size=5 at --batch-size=9", "one batch"]),
    (f"equilibrium {SGD_OPTIONS} --adjust-lr-fn none", ["got --adjust-lr-fn with --optimizer sgd", "muon"]),
    (f"translate {SGD_OPTIONS} --to rmsprop", ["--to='rmsprop'", "sgd, sgdw, adamw, lion"]),
    (f"translate {SGD_OPTIONS} --to adamw --to-momentum 0.9", ["got --to-momentum;", "--to: sgd, sgdw"]),
    (f"translate {SGD_OPTIONS} --to sgdw --to-momentum 1.9", ["--to-momentum=1.9", "0 <= --to-momentum < 1"]),
    (f"translate {SGD_OPTIONS} --scale-batch 4 --dim 10", ["got --dim;", "--to"]),
    (f"translate {SGD_OPTIONS} --scale-batch -4", ["--scale-batch=-4"]),
    (f"translate {SGD_OPTIONS} --hold-angle-at-wd 0", ["--hold-angle-at-wd=0"]),
    ("translate --optimizer sgd --lr 0.1 --wd 0 --hold-angle-at-wd 0.1", ["got --wd=0", "0 < --wd"]),
]


@pytest.mark.parametrize(("line", "fragments"), BAD)
def test_bad_input_raises_with_the_value(line, fragments):
    result = run(line)
    text = result.output + (str(result.exception) if isinstance(result.exception, EquilibriaError) else "")
    assert isinstance(result.exception, EquilibriaError | SystemExit), result.exception
    assert result.exit_code != 0
    for fragment in fragments:
        assert fragment in text
    assert not re.search(r"(?<!-)\b(weight_decay|unit_grad_sq|init_norm|steps_per_epoch|end_lr|None)\b", text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "plan --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 1.2 --steps 10",
            "--momentum=1.2; expected 0 <= --momentum",
        ),
        ("plan --optimizer sgd --lr abc --wd 5e-4 --steps 10", "got 'abc'; expected a finite number"),
        ("plan --optimizer sgd --nonsense 1", "No such option"),
        ("nonsense", "No such command 'nonsense'. (see"),
        ("reprot", "No such command 'reprot'; did you mean 'report'? (see equilibria --help)"),
        ("plan", "--optimizer"),
    ],
)
def test_the_real_process_exits_with_two_and_one_line_on_stderr(line, shown):
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, "")
    assert shown in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("equilibria: ")


def test_a_console_without_unicode_is_no_error():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    line = [sys.executable, "-m", "equilibria.cli", "plan", *SGD_OPTIONS.split(), "--steps", "100"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "phase" in done.stdout


def test_initial_weights_by_their_standard_deviation():
    """GPT's init of 0.02 under AdamW: equilibrium rms is sqrt(lr / (2 wd)) = 0.0548 at the peak."""
    line = "plan --optimizer AdamW --lr 6e-4 --wd 0.1 --schedule cosine --warmup 2000 --steps 20000"
    started = run_json(f"{line} --init-std 0.02")
    assert started["situation"]["start_norm"] == pytest.approx(math.sqrt(6e-4 / 0.2), rel=1e-3)
    assert started["curve"]["norm"][0] == pytest.approx(0.02)
    assert any("far from equilibrium" in finding["subject"] for finding in started["findings"])
    words = " ".join(run(f"{line} --init-std 0.02").output.split())
    assert "Start: rms entry = 0.02." in words and "rms entry = 0.02 against 0.0548" in words and "||w||" not in words
    assert "Start: ||w|| = 2." in run(f"{line} --init-norm 2 --dim 10000").output


@pytest.mark.parametrize("norm", ["1e-30", "1e-15", "1e-200", "1e200"])
@pytest.mark.parametrize("rule", ["adamw --lr 1e-3 --wd 0.1 --dim 100", "sgd --lr 0.1 --wd 5e-4 --unit-grad-sq 1"])
def test_an_absurd_initial_norm_is_planned_or_raises_in_one_line(norm, rule):
    done = shell(f"plan --optimizer {rule} --steps 100 --init-norm {norm}")
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    if done.returncode:
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--init-norm" in done.stderr


def test_plan_imports_nothing_heavy_except_numpy():
    code = (
        "import sys; from equilibria.cli import app; "
        f"app({(f'plan {SGD_OPTIONS} --steps 100').split()!r}, standalone_mode=False); "
        "print([m for m in ('torch', 'scipy', 'plotly', 'pyarrow', 'rich', 'numpy.ma') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", app.list_commands(None))
def test_the_help_of_every_command_ends_with_examples_that_parse(name):
    text = run(f"{name} --help").output
    examples = [line.strip() for line in text.split("\n  Example")[1].splitlines()[1:]]
    assert examples and text.endswith(examples[-1] + "\n")
    for line in examples:
        program, typed, *words = shlex.split(line.split(" > ")[0])
        assert (program, typed) == ("equilibria", name)
        app.get_command(None, name).make_context(name, words)


@pytest.mark.parametrize("name", ["equilibrium", "fold", "plan", "reproduce", "translate"])
def test_the_first_example_of_a_cheap_command_runs(name):
    line = run(f"{name} --help").output.split("\n  Example")[1].splitlines()[1]
    result = run(line.split(" > ")[0].replace("equilibria ", "", 1).strip())
    assert result.exit_code == 0 and result.output.strip(), result.output


def test_the_help_of_the_program_ends_with_examples_that_parse():
    examples = run("--help").output.split("\n  Example")[1].splitlines()[1:]
    for line in examples:
        program, name, *words = shlex.split(line)
        assert program == "equilibria"
        app.get_command(None, name).make_context(name, words)


def test_an_error_about_an_argument_is_one_about_its_flag():
    error = run(f"equilibrium {SGD_OPTIONS} --momentum 1.2").exception
    assert isinstance(error, EquilibriaError)
    assert (str(error), error.argument) == ("got --momentum=1.2; expected 0 <= --momentum < 1", "--momentum")


def test_help_shows_the_whole_first_sentence_of_every_command():
    text = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    assert "..." not in text.split("Commands:")[1].split("Examples:")[0]
    assert "rows, steps, damage and holes of every session and table." in " ".join(text.split())


@pytest.mark.parametrize("command", ["equilibrium", "translate"])
def test_help_mentions_no_option_of_another_command(command):
    assert "--lr-file" not in CliRunner().invoke(app, [command, "--help"]).output


def test_serve_prints_its_address_as_one_json_value(monkeypatch, tmp_path):
    """For scripts that take any free port."""

    def run(_app, listening, *, on_start, browser):
        with listening:
            on_start(server.server_url(listening))

    monkeypatch.setattr(server, "run", run)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), str(tmp_path / "no"), "--port", "0", "--json"])
    value = json.loads(result.stdout)
    assert value["address"].startswith("http://127.0.0.1:") and not value["address"].endswith(":0/")
    assert value["runs"] == [str(tmp_path), str(tmp_path / "no")] and value["missing"] == [str(tmp_path / "no")]
