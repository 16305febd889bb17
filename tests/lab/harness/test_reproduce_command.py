"""`equilibria reproduce` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.helpers.small_experiments import experiment, replace_registry

from equilibria.cli import app, main
from equilibria.errors import EquilibriaError
from equilibria.lab.harness import registry


@pytest.fixture(autouse=True)
def known(monkeypatch, tmp_path):
    """Two small experiments in place of the registry's; returns them, to be replaced."""
    names = {"small-one": experiment("small-one", count=2), "small-two": experiment("small-two", count=2)}
    replace_registry(monkeypatch, names)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return names


def run(line: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", *line.split()])


def test_the_list_as_json_has_what_other_programs_rely_on():
    rows = json.loads(run("--list --json").stdout)
    assert [row["id"] for row in rows] == ["small-one", "small-two"]
    assert all({"id", "source", "scales"} <= row.keys() for row in rows)
    assert rows[0]["scales"] == ["smoke", "desk"]


def test_the_list_for_people():
    lines = run("--list").stdout.splitlines()
    assert lines[0].split() == ["id", "kind", "source", "scales", "title"]
    assert lines[1].split()[:2] == ["small-one", "synthetic"]


def test_the_list_explains_its_kinds_and_short_names(known):
    known["small-one"] = replace(known["small-one"], source="smd fig. 4; smd+ fig. 3", kind="networks", needs=lacking)
    listed, legend = (" ".join(part.split()) for part in run("--list").stdout.split("\n\n"))
    assert "small-one networks* smd" in listed and "small-two synthetic ours" in listed
    assert "*: needs images: CIFAR-10" in legend and "EQUILIBRIA_DATA=FOLDER" in legend
    assert "smd: Spherical Motion" in legend and "smd+: Spherical Motion" in legend and "nrq" not in legend


def test_claims_verdicts_and_where_the_gallery_is():
    result = run("all --workers 1 --results out")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "✓ the mean measured" in text and "expected 0 ± 0.5 (ours)" in text
    assert "2 of 2 claims shown (scale: desk). Gallery: out/index.html (all scales)" in text
    assert "out/RESULTS.md (of each experiment the largest scale computed)" in text
    assert result.stderr.startswith("  2 experiments begin: small-one, small-two (4 tasks to do)\n")
    assert "small-two: 1 of 1 claim shown" in result.stderr
    assert Path("out/index.html").is_file() and Path("out/RESULTS.md").is_file()
    again = run("small-one --workers 1 --results out")
    assert "reused" in again.stderr and "begin" not in again.stderr
    text = " ".join(again.stdout.split())
    assert f"This result was computed earlier ({datetime.now(UTC).date()}) and reused: --force recomputes" in text
    assert "computed earlier" not in " ".join(result.stdout.split())


def test_json_is_one_value_and_nothing_else_anywhere():
    result = run("small-one --workers 1 --json --scale smoke")
    (found,) = json.loads(result.stdout)
    assert (found["id"], found["good"], found["claims"][0]["verdict"]) == ("small-one", True, "shown")
    assert result.stderr == ""


def test_a_failed_claim_is_exit_code_one(known):
    known["small-one"] = experiment("small-one", count=2, expected=9.0)
    result = run("all --workers 1")
    assert result.exit_code == 1
    assert "✗ the mean" in result.stdout and "-> contradicted" in result.stdout


def test_a_failed_task_is_exit_code_one_with_its_reason(known):
    known["small-one"] = experiment("small-one", count=2, fails="raise 1")
    result = run("all --workers 1")
    assert result.exit_code == 1
    assert "KeyError: 'no such draw'" in result.stdout and "1 of 2 experiments failed" in result.stdout
    assert "small-two" in result.stdout


def lacking(config):
    raise EquilibriaError("CIFAR-10 was not found in /data; get it from its page")


def test_what_lacks_its_data_is_left_out_with_one_line_and_fails_only_if_it_was_named(known):
    known["small-one"] = replace(known["small-one"], kind="networks", needs=lacking)
    result = run("all --workers 1")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert text.count("left out: CIFAR-10 was not found in /data; get it from its page") == 1
    assert "1 of 1 claim shown; 1 of 2 experiments left out" in text and "Traceback" not in text
    assert "EQUILIBRIA_DATA=FOLDER to where" in text
    assert run("networks --workers 1").exit_code == 0
    assert run("small-one --workers 1").exit_code == 1
    (found,) = json.loads(run("networks --workers 1 --json").stdout)
    assert found["good"] and found["lacks"].startswith("CIFAR-10 was not found")


def test_groups_of_experiments(known):
    known["small-one"] = replace(known["small-one"], kind="networks")
    for word, ids in (("networks", ["small-one"]), ("synthetic", ["small-two"]), ("all", ["small-one", "small-two"])):
        assert [row["id"] for row in json.loads(run(f"{word} --list --json").stdout)] == ids
    assert json.loads(run("networks --list --json").stdout)[0]["kind"] == "networks"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "Missing argument"),
        ("small-tow", "did you mean small-two?"),
        ("small-one --scale paper", "got small-one at --scale='paper'; expected one of: smoke, desk"),
        ("small-one --scale big", "got --scale='big'; expected one of: smoke, desk, paper"),
        ("small-one --workers 0", "got --workers=0"),
        ("small-one --workers 2 --cluster tcp://127.0.0.1:1", "expected one of the two"),
        ("small-one --device gpu", "got --device='gpu'; expected 'cpu', 'cuda'"),
        ("small-one --device cuda:99", "expected one that is there, or 'cpu'"),
        ("small-one --device cuda:99 --cluster tcp://127.0.0.1:1", "where no Dask scheduler answers"),
        ("small-one --workers 1 --results thesis", "got --results='thesis', which holds other things"),
    ],
)
def test_bad_usage(line, message):
    Path("thesis").mkdir()
    Path("thesis/thesis.tex").touch()
    result = run(line)
    assert message in result.stderr + str(result.exception)
    assert result.exit_code != 0 and result.stdout == ""


def test_without_matplotlib_the_message_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "equilibria[lab]"' in str(run("small-one --workers 1").exception)


def test_without_dask_the_message_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert 'pip install "equilibria[lab]"' in str(run("small-one --cluster tcp://127.0.0.1:1").exception)


@pytest.mark.parametrize("address", ["foo", "tcp://", "http://127.0.0.1:8786", "tcp://host", "''"])
def test_a_cluster_without_an_address_raises_before_anything_is_tried(address, monkeypatch):
    monkeypatch.setattr("distributed.Client", None)
    result = run(f"small-one --cluster {address}") if address != "''" else run_words("small-one", "--cluster", "")
    assert "expected the address that `dask scheduler` prints, such as tcp://host:8786" in str(result.exception)


def run_words(*words: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", *words])


def test_the_device_is_handed_on(monkeypatch):
    monkeypatch.setattr("equilibria.lab.training.recipe.present_device", lambda name: None)
    run("small-one --workers 1 --device cuda --results out")
    (found,) = json.loads(run("small-one --workers 1 --results out --json").stdout)
    assert found["reused"] and found["command"] == "equilibria reproduce small-one --scale desk --device cuda"


def test_ctrl_c_before_any_work_is_told(monkeypatch, capsys):
    def interrupt(ids, scale):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "find", interrupt)
    monkeypatch.setattr(sys, "argv", ["equilibria", "reproduce", "small-one"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and "equilibria: interrupted" in capsys.readouterr().err


def test_ctrl_c_leaves_a_state_that_goes_on_and_says_how(tmp_path):
    command = [
        sys.executable,
        "-P",
        "-m",
        "tests.helpers.reproduce_small",
        "reproduce",
        "small",
        "--workers",
        "2",
        "--results",
        "out",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 60
    while len(kept := list(tmp_path.glob("out/small/desk/records-*/*.npz"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the children too
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; finished tasks and checkpoints are kept in out: the same command resumes from there" in stderr
    assert "Traceback" not in stderr and stdout == ""
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/small/desk/records-*/*.npz")}
    assert 2 <= len(kept) < 40
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("out/small/desk/records-*/*.npz")}
    assert len(after) == 40 and {name: after[name] for name in kept} == kept


def test_networks_at_the_papers_scale_on_a_cpu_are_begun_with_a_warning(known):
    small = known["small-one"]
    known["small-one"] = replace(small, scales={"paper": small.scales["desk"]}, kind="networks")
    assert "take weeks on a CPU; see --device" in run("small-one --scale paper --workers 1").stderr
