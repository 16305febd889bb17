"""A history of runs: which one left its band, what differs, what is said; odd folders and runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from equilibria.cli import app
from equilibria.comparing import history
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter

LAYERS = tuple(f"h.{block}.mlp.weight" for block in range(6))
STEPS = range(0, 200, 5)


def write(folder, seed, *, factor=1.0, layer=None, lr=0.1, steps=STEPS, metadata=None, layers=LAYERS, losses=None):
    """A run whose angles scatter by 2 % between runs, and times ``factor`` (of one layer, if it is named)."""
    generator = np.random.default_rng(seed)
    metadata = {
        "torch": "2.13.0",
        "optimizers": [{"class": "SGD"}],
        "params": [
            {"name": name, "entries": 64, "shape": [8, 8], "rule": {"kind": "SGD", "lr": lr}} for name in layers
        ],
        **(metadata or {}),
    }
    shift = np.exp(0.02 * generator.standard_normal() + 0.02 * generator.standard_normal(len(layers)))
    with RecordWriter(folder, metadata=metadata) as writer:
        for step in steps:
            scale = [factor if layer in (None, name) else 1.0 for name in layers]
            angle = 0.01 * shift * scale * np.exp(0.1 * generator.standard_normal(len(layers)))
            columns = {"lr": lr, "weight_decay": 1e-3, "momentum": 0.9, "norm": 1.0, "grad_norm": 1.0, "cosine": 0.0}
            row = {name: [value] * len(layers) for name, value in columns.items()}
            writer.append(
                {"step": [step] * len(layers), "param": list(layers), "angle": angle, "relative_update": angle, **row}
            )
        for step, value in losses or ():
            writer.append({"step": [step], "name": ["loss"], "value": [value]}, table="metrics")
    return folder


@pytest.fixture
def nights(tmp_path):
    for night in range(8):
        write(tmp_path / f"night-{night}", night)
    return tmp_path


def test_healthy_runs_are_in_their_band(nights):
    result = history([nights])
    assert [run.name for run in result.runs] == [f"night-{night}" for night in range(8)]
    assert [bool(run.compared_with) for run in result.runs] == [False] * 3 + [True] * 5
    assert not result.findings
    assert not result.regressed
    assert "No run has left its band: 5 of 8 runs judged" in str(result)


def test_a_shift_of_all_layers_is_found_and_its_setting_named(nights):
    write(nights / "night-8", 8, factor=1.6, lr=0.16)
    result = history([nights])
    (finding,) = result.findings
    assert result.regressed
    assert finding.severity == "warning"
    assert finding.subject == "night-8 left the band of 8 earlier runs"
    factor = re.search(r"of all layers is ([0-9.]+)x that of the earlier runs in the median", finding.evidence)
    assert float(factor[1]) == pytest.approx(1.6, abs=0.15)  # 3 % between runs, over 60 samples of 10 %
    assert "settings unlike night-7's: lr x 1.6 (0.1 -> 0.16)" in finding.evidence
    assert f"equilibria explain {nights / 'night-7'} {nights / 'night-8'}" in finding.remedy


def test_a_shift_of_one_layer_without_a_changed_setting(nights):
    write(nights / "night-8", 8, factor=3.0, layer=LAYERS[2])
    (finding,) = history([nights]).findings
    assert f"of {LAYERS[2]} is" in finding.evidence
    assert "no recorded setting differs from night-7's: look at code and data" in finding.evidence


def test_a_faulty_run_is_kept_out_of_later_bands_and_becomes_a_note(nights):
    write(nights / "night-8", 8, factor=1.6)
    write(nights / "night-9", 9)
    result = history([nights])
    assert [(finding.severity, finding.subject.split()[0]) for finding in result.findings] == [("note", "night-8")]
    assert "night-8" not in result.runs[-1].compared_with
    assert not result.regressed


def test_a_new_setting_has_its_own_band_after_three_runs(nights):
    for night in range(8, 13):
        write(nights / f"night-{night}", night, factor=1.6, lr=0.16)
    result = history([nights])
    assert [run.in_band for run in result.runs[8:]] == [False, False, False, True, True]
    assert result.runs[-1].compared_with == ("night-11", "night-10", "night-9", "night-8")


def test_a_setting_without_effect_on_the_angles_is_listed_and_not_a_departure(nights):
    write(nights / "night-8", 8, metadata={"torch": "2.14.0", "batch_size": 128})
    run = history([nights]).runs[-1]
    assert run.in_band
    assert list(map(str, run.changes)) == ["batch size not recorded -> 128", "torch 2.13.0 -> 2.14.0"]


def test_another_version_of_a_library_keeps_the_band(nights):
    write(nights / "night-8", 8, metadata={"torch": "2.14.0"})
    assert len(history([nights]).runs[-1].compared_with) == 8


def test_a_short_run_is_compared_over_its_own_steps(nights):
    write(nights / "night-8", 8, steps=range(0, 60, 5), factor=1.6)
    write(nights / "night-9", 9)
    result = history([nights])
    assert result.runs[8].departures[0].last_step < 60
    assert "night-8" not in result.runs[9].compared_with


def test_a_diverged_loss_is_out_of_the_band(tmp_path):
    for night in range(5):
        losses = [(step, 1.0 + 0.01 * np.sin(step + night)) for step in STEPS]
        write(tmp_path / f"night-{night}", night, losses=losses)
    write(tmp_path / "night-5", 5, losses=[(step, float("nan") if step > 100 else 1.0) for step in STEPS])
    run = history([tmp_path]).runs[-1]
    assert run.too_many_spikes
    assert not run.in_band


def test_a_frozen_layer_is_out_of_the_band(nights):
    write(nights / "night-8", 8, layers=LAYERS[1:])
    (finding,) = history([nights]).findings
    assert f"{LAYERS[0]} no longer turns: frozen, renamed or removed" in finding.evidence


def test_runs_without_common_layers_are_not_compared(nights):
    write(nights / "night-8", 8, layers=("other.weight",))
    run = history([nights]).runs[-1]
    assert not run.departures
    assert run.gone == LAYERS
    (change,) = run.changes
    assert change.name == "layers of one run only"
    assert change.b == "other.weight"


def test_every_run_is_read_once_however_often_it_is_given(nights):
    assert len(history([nights, nights / "night-0"]).runs) == 8


def test_runs_of_one_name_in_several_folders_are_told_apart(nights):
    others = nights.with_name(f"{nights.name}z")
    for night in range(8):
        write(others / f"night-{night}", 10 + night, factor=1.6 if night == 7 else 1.0)
    result = history([nights, others])
    assert len({run.name for run in result.runs}) == 16
    (out,) = [run for run in result.runs if not run.in_band]
    assert out.name == str(others / "night-7")
    assert str(others / "night-7") in result.findings[0].remedy


def test_unreadable_runs_are_named_and_left_out(nights):
    (nights / "night-3" / "run.json").write_text("{")
    (nights / "night-3" / "samples-000.arrows").write_bytes(b"no stream")
    with RecordWriter(nights / "empty", metadata={}):
        pass
    result = history([nights])
    assert set(result.unreadable) == {"night-3", "empty"}
    assert len(result.runs) == 7
    assert "left out: empty: no samples of steps that were taken" in " ".join(str(result).split())


def test_a_latest_run_without_numbers_does_not_pass(nights):
    write(nights / "night-8", 8, factor=np.nan)
    result = history([nights])
    assert result.latest_unreadable == "night-8"
    assert result.regressed
    assert str(result).startswith("The latest run, night-8, has nothing to compare")
    assert run_command(nights)[1] == 1


def test_a_run_of_other_steps_is_not_judged_and_spoils_no_band(nights):
    write(nights / "night-8", 8, steps=range(1000, 1200, 5))
    write(nights / "night-9", 9, factor=2.0)
    result = history([nights])
    assert result.runs[8].compared_with == ()
    assert "night-8" not in result.runs[9].compared_with
    assert result.regressed


def test_a_run_whose_layers_stand_still_is_out_of_the_band(nights):
    write(nights / "night-8", 8, factor=0.0)
    (finding,) = history([nights]).findings
    assert "no longer turn" in finding.evidence


def test_bad_folders(tmp_path):
    with pytest.raises(EquilibriaError, match="which is no folder"):
        history([tmp_path / "missing"])
    with pytest.raises(EquilibriaError, match="without a run that has samples"):
        history([tmp_path])


def run_command(*line):
    result = CliRunner().invoke(app, ["history", *map(str, line)], standalone_mode=False)
    return result, result.return_value


def test_the_command_gates_a_pipeline(nights, tmp_path):
    assert run_command(nights)[1] == 0
    write(nights / "night-8", 8, factor=1.6)
    result, code = run_command(nights, "--json")
    answer = json.loads(result.output)
    assert code == 1
    assert answer["regressed"] is True
    assert [run["in_band"] for run in answer["runs"]] == [True] * 8 + [False]
    assert answer["findings"][0]["kind"] == "left its band: night-8"
    page = tmp_path.parent / f"{tmp_path.name}.html"
    assert run_command(nights, "--html", page)[1] == 1
    html = page.read_text()
    assert "The latest run, night-8, has left its band" in html
    assert html.count("<svg class") == 3
    assert "https://" not in html
    page.unlink()


def test_the_page_is_not_written_into_a_run(nights):
    result, _ = run_command(nights, "--html", nights / "night-0" / "page.html")
    assert "--html" in str(result.exception)
