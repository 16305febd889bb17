"""`equilibria demo` as a user types it; the trainings themselves are tested elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import equilibria.lab.demo
from equilibria.cli import app
from equilibria.lab.demo import DemoArm, DemoError, DemoResult, DemoSettings, LayerTurns, Turn


def turn(ratio: float, predicted: float | None) -> Turn:
    return Turn(ratio * 0.0229, 0.0229, None if predicted is None else predicted * 0.0229)


def arm(name: str, before: float, after: float, end: float) -> DemoArm:
    layers = tuple(
        LayerTurns(f"{layer}.conv.weight", turn(before, 1.0), turn(after, None), turn(end, 0.96))
        for layer in ("stem", "blocks.1.shortcut")
    )
    return DemoArm(Path("out", name), Path("out", f"{name}.html"), (0, 4500), (0.1, 0.99), layers)


@pytest.fixture
def demo(monkeypatch):
    """Replaces the trainings; returns the arguments of the call."""
    call: dict[str, object] = {"before": 0.98}

    def fake(out, *, settings: DemoSettings, progress) -> DemoResult:
        call.update(out=out, seed=settings.seed)
        if "error" in call:
            raise DemoError(call["error"])
        progress("plain", 25)
        before = float(str(call["before"]))
        return DemoResult(
            Path("out"),
            settings,
            arm("plain", before, 0.32, 0.97),
            arm("rescaled", before, 0.95, 1.0),
            arm("less_decay", before, 0.98, 0.9),
        )

    monkeypatch.setattr(equilibria.lab.demo, "run_demo", fake)
    monkeypatch.setenv("COLUMNS", "100")
    return call


def run(line: str) -> Result:
    return CliRunner().invoke(app, line.split())


def test_the_table_the_sentences_and_the_files_are_shown(demo):
    output = run("demo").output
    rows = [line.split() for line in output.splitlines() if line.startswith(("  stem", "  blocks"))]
    cells = [
        "0.0229",
        "0.98",
        "(1.00)",
        "0.32",
        "(",
        "-",
        ")",
        "0.97",
        "(0.96)",
        "0.95",
        "(",
        "-",
        ")",
        "1.00",
        "(0.96)",
    ]
    assert rows == [["stem", *cells], ["blocks.1.shortcut", *cells]]
    text = " ".join(output.split())
    assert "✓ Every layer turns within 5% of its equilibrium before the drop (the worst is off by 2.0%)" in text
    assert "leaves the layers at 0.32-0.32 of their new equilibrium (theory: 1/sqrt(10) = 0.32 at once" in text
    assert "weights x 0.562 and momentum x 1.778 at the drop put them at 0.95-0.95 at once" in text
    assert "the equilibrium angle falls by 10 and the equilibrium norm stays: the layers are at 0.98-0.98 of it" in text
    assert "Test accuracy at the end, of one seed: plain 99.0%, rescaled 99.0%, less decay 99.0%." in text
    assert "out/plain.html" in text and "out/rescaled.html" in text and "out/less_decay.html" in text
    assert max(len(line) for line in output.splitlines()) <= 100


def test_a_layer_off_its_prediction_is_reported(demo):
    demo["before"] = 0.9
    assert "! Not every layer turns within 5%" in " ".join(run("demo").output.split())


def test_options_reach_the_demo(demo):
    run("demo --out elsewhere --seed 7")
    assert (demo["out"], demo["seed"]) == ("elsewhere", 7)


def test_json_is_one_value_on_stdout_and_nothing_else_anywhere(demo):
    result = run("demo --json")
    assert json.loads(result.stdout)["rescaled"]["layers"][0]["after"]["ratio"] == pytest.approx(0.95)
    assert result.stderr == ""


def test_a_failed_training_is_exit_code_one_with_its_reason(demo):
    demo["error"] = "plain: no more memory"
    result = run("demo --json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "plain: no more memory" in result.stderr


def test_a_folder_with_other_things_is_bad_usage(tmp_path):
    (tmp_path / "thesis.tex").touch()
    result = run(f"demo --out {tmp_path}")
    assert "which holds other things" in str(result.exception)


def test_a_bad_seed_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("demo --seed 1.5").exit_code == 2
    result = run("demo --seed -1")
    assert "got --seed=-1" in str(result.exception)
