"""`equilibria report` as a user types it: the table, strict JSON, the page, exit codes, errors of one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from tests.helpers.report_helpers import layer_names, run

from equilibria.cli import app
from equilibria.diagnosis import diagnose
from equilibria.diagnosis.summary import summarise
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter

SAMPLES, METADATA = run(5, steps=3000, outlier=2, lawless=4)
FINDINGS = diagnose(SAMPLES, metadata=METADATA)


@pytest.fixture(autouse=True)
def _fixed_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "night-3"
    with RecordWriter(path, metadata=METADATA) as writer:
        writer.append({name: SAMPLES[name].combine_chunks() for name in SAMPLES.column_names})
    return path


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "empty"
    RecordWriter(path, metadata=METADATA).close()
    return path


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "equilibria.cli", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def strict(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_table_has_every_layer_in_the_order_of_the_model(recorded):
    result = report(recorded)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    head = next(place for place, words in enumerate(lines) if words[:2] == ["layer", "rad/step"])
    shown, layers = lines[head + 1 : head + 6], summarise(SAMPLES, metadata=METADATA)
    assert [f"{row[0]}.weight" for row in shown] == [layer.name for layer in layers] == layer_names(5)
    first = layers[0]
    assert shown[0][1:3] == [f"{first.angle:.3g}", f"{first.angle_predicted:.3g}"]
    assert shown[0][3] == f"{first.angle_vs_predicted:.2f}"
    assert "4 of 5 layers have a prediction; 3 agree, 1 is 64 % fast." in result.output


def test_the_findings_follow_the_table(recorded):
    told = " ".join(report(recorded).output.split())
    assert FINDINGS
    for finding in FINDINGS:
        assert " ".join(finding.evidence.split())[1:] in told
        assert " ".join(finding.remedy.split())[1:] in told


def test_json_is_one_strict_value_with_layers_and_findings(recorded):
    result = report(recorded, "--json")
    assert result.exit_code == 0
    value = strict(result.output)
    assert list(value) == ["layers", "metrics", "noise", "findings", "notes"]
    assert value["metrics"] == []
    layers = summarise(SAMPLES, metadata=METADATA)
    assert [layer["name"] for layer in value["layers"]] == [layer.name for layer in layers]
    assert value["layers"][0]["angle_vs_predicted"] == layers[0].angle_vs_predicted
    assert value["layers"][0]["sentence"] == layers[0].sentence
    assert value["layers"][-1]["how_wrong"] is None
    assert [finding["subject"] for finding in value["findings"]] == [
        f.subject for f in diagnose(SAMPLES, metadata=METADATA)
    ]
    assert set(value["findings"][0]) == {"severity", "subject", "evidence", "remedy", "law", "kind"}


def test_logged_numbers_are_in_table_json_and_page(recorded, tmp_path):
    copy = shutil.copytree(recorded, tmp_path / "run")
    with RecordWriter(copy, metadata={}, resume=True) as writer:
        writer.append({"step": [0, 1, 2], "name": ["loss"] * 3, "value": [2.0, 1.0, float("nan")]}, table="metrics")
    (loss,) = strict(report(copy, "--json").output)["metrics"]
    assert (loss["name"], loss["count"], loss["lowest"], loss["last"]) == ("loss", 3, 1.0, None)
    told = report(copy, "--html", str(tmp_path / "page.html")).output
    assert "loss nan at step 2" in told
    assert '"name":"loss"' in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_is_named_after_the_run(recorded, tmp_path):
    page = tmp_path / "out.html"
    result = report(recorded, "--html", page)
    assert result.exit_code == 0
    assert f"Page: {page}" in result.output
    assert "<title>night-3</title>" in page.read_text(encoding="utf-8")
    assert strict(report(recorded, "--html", page, "--json").output)["layers"]


def test_a_run_without_samples_is_reported_and_not_an_error(empty, tmp_path):
    result = report(empty, "--html", tmp_path / "out.html")
    assert result.exit_code == 0
    assert "Nothing was measured yet" in result.output
    value = strict(report(empty, "--json").output)
    assert value.pop("noise")["layers"] == []
    assert value == {"layers": [], "metrics": [], "findings": [], "notes": []}
    assert (tmp_path / "out.html").stat().st_size > 1_000_000


def test_what_the_reader_noticed_is_passed_on(recorded, tmp_path):
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in recorded.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    stream = next(torn.glob("samples-*"))
    stream.write_bytes(stream.read_bytes()[:-1000])
    (note,) = strict(report(torn, "--json").output)["notes"]
    assert " ".join(note.split())[1:] in " ".join(report(torn).output.split())


def test_long_tables_are_cut(tmp_path):
    samples, metadata = run(60, steps=300)
    names = dict(zip(layer_names(60), (f"unit{place}x.weight" for place in range(60)), strict=True))  # no siblings
    renamed = pa.array([names[name] for name in samples["param"].to_pylist()]).dictionary_encode()
    samples = samples.set_column(samples.column_names.index("param"), "param", renamed.cast(samples["param"].type))
    for entry in metadata["params"]:
        entry["name"] = names[entry["name"]]
    with RecordWriter(tmp_path / "run", metadata=metadata) as writer:
        writer.append({name: samples[name].combine_chunks() for name in samples.column_names})
    output = report(tmp_path / "run").output
    assert len(re.findall(r"^unit\d+x ", output, flags=re.MULTILINE)) == 40
    assert "20 more layers are in --json" in " ".join(output.split())


def test_errors_say_what_is_wrong(recorded, tmp_path):
    (tmp_path / "file").write_text("x")
    cases = {
        (tmp_path / "missing",): "there is no directory",
        (tmp_path,): "is not a run",
        (tmp_path / "file",): "file",
        (recorded, "--html", tmp_path / "missing" / "x.html"): "is not a folder; expected one that exists",
        (recorded, "--html", tmp_path): "--html",
    }
    for arguments, message in cases.items():
        with pytest.raises((EquilibriaError, click.UsageError), match=message):
            app.main(["report", *map(str, arguments)], standalone_mode=False)


def test_an_error_is_one_line_and_exit_code_2(tmp_path):
    for arguments, message in (((tmp_path / "missing",), "there is no directory"), ((), "RUN")):
        done = shell(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert message in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(recorded, tmp_path):
    tmp_path.chmod(0o500)
    done = shell(recorded, "--html", tmp_path / "x.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Permission denied" in done.stderr


def test_a_report_needs_no_torch(recorded):
    code = (
        "import sys\nfrom equilibria.cli import app\n"
        f"app.main(['report', {str(recorded)!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
