"""The whole demo, shortened: all processes, what they leave on disk, and the numbers against a slow measurement."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from tests.helpers.slow_monitor import SlowMonitor

from equilibria.errors import EquilibriaError
from equilibria.lab.demo import DemoError, DemoSettings, run_demo, runner
from equilibria.lab.demo.training import ARMS, arm_recipe
from equilibria.lab.processes import JobError
from equilibria.lab.training import Training
from equilibria.records import read_record

SHORT = DemoSettings(steps_before=40, steps_after=30, steady_window=20, drop_window=10, width=4)


def measured_slowly(arm: str) -> SlowMonitor:
    training = Training(arm_recipe(SHORT, arm))
    with SlowMonitor(training.model, training.optimizer) as monitor:
        for batch in islice(training.batches(), SHORT.steps):
            training.advance(batch)
    return monitor


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder, result and progress of a short demo."""
    folder, progress = tmp_path_factory.mktemp("results") / "demo", dict[str, int]()
    return folder, run_demo(folder, settings=SHORT, progress=progress.__setitem__), progress


@pytest.mark.slow
def test_all_arms_are_watched_recorded_reported_and_as_a_slow_monitor_sees_them(demo):
    folder, result, progress = demo
    assert progress == dict.fromkeys(ARMS, 70)
    for name in ARMS:
        arm, slow = getattr(result, name), measured_slowly(name)
        assert [layer.layer for layer in arm.layers] == list(slow.angles)
        windows = {"before": (20, 40), "after": (40, 50), "end": (50, 70)}
        for when, window in windows.items():
            found = [getattr(layer, when).measured for layer in arm.layers]
            assert found == pytest.approx(slow.rms_angles(*window), rel=1e-4)
        rules = (SHORT.rule_before, SHORT.rule_after(name), SHORT.rule_after(name))
        for when, rule in zip(windows, rules, strict=True):
            expected = float(rule.equilibrium().angle)
            assert [getattr(layer, when).equilibrium for layer in arm.layers] == pytest.approx([expected] * 6)
        assert read_record(arm.run).notes == ()
        assert arm.report.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    on_disk = json.loads((folder / "demo.json").read_text())
    assert on_disk["complete"] is True
    assert on_disk["plain"] == json.loads(json.dumps(result.as_dict()["plain"]))


def test_on_one_core_one_runs_after_the_other(tmp_path, monkeypatch):
    counts: list[int] = []

    def run_nothing(jobs, *, at_once, progress):
        counts.append(at_once)
        raise JobError("enough was seen")

    monkeypatch.setattr(runner, "run_jobs", run_nothing)
    for cores in (1, 2, 8):
        monkeypatch.setattr(runner, "usable_cores", lambda cores=cores: cores)
        with pytest.raises(DemoError, match="enough was seen"):
            run_demo(tmp_path, settings=SHORT)  # in the folder of an earlier demo
    assert counts == [1, 2, 2]


@pytest.mark.slow
def test_a_failed_training_is_reported_with_its_reason(tmp_path):
    with pytest.raises(DemoError, match=r"(?s)did not reach its end.*got blocks=\(\)"):
        run_demo(tmp_path, settings=DemoSettings(blocks=()))
    assert json.loads((tmp_path / "demo.json").read_text())["complete"] is False


def test_a_foreign_folder_raises_before_anything_starts(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(EquilibriaError, match="holds other things"):
        run_demo(tmp_path, settings=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
