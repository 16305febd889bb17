"""The whole demo, shortened: both processes, what they leave on disk, and the numbers against a slow measurement."""

from __future__ import annotations

import json

import pytest
from tests.helpers.slow_monitor import SlowMonitor

from equilibria.errors import EquilibriaError
from equilibria.lab.demo import DemoError, Recipe, run_demo, runner
from equilibria.lab.demo.training import prepare, train
from equilibria.lab.processes import JobError
from equilibria.records import read_run

SHORT = Recipe(steps_before=40, steps_after=30, steady_window=20, drop_window=10, width=4)


def measured_slowly(*, rescale: bool) -> SlowMonitor:
    training = prepare(SHORT)
    monitor = SlowMonitor(training.model, training.optimizer)
    train(training, monitor, rescale=rescale, progress=lambda steps: None, finish=lambda monitor: None)
    return monitor


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Where a short demo ran, what it returned, and the progress it told."""
    folder, told = tmp_path_factory.mktemp("results") / "demo", dict[str, int]()
    return folder, run_demo(folder, recipe=SHORT, progress=told.__setitem__), told


@pytest.mark.slow
def test_both_branches_are_watched_recorded_reported_and_as_a_slow_monitor_sees_them(demo):
    folder, result, told = demo
    assert told == {"plain": 70, "rescaled": 70}
    for branch, rescale in ((result.plain, False), (result.rescaled, True)):
        slow = measured_slowly(rescale=rescale)
        assert [layer.layer for layer in branch.layers] == list(slow.angles)
        windows = {"before": (20, 40), "after": (40, 50), "end": (50, 70)}
        for when, window in windows.items():
            found = [getattr(layer, when).measured for layer in branch.layers]
            assert found == pytest.approx(slow.rms_angles(*window), rel=1e-4)
        rules = (SHORT.rule_before, SHORT.rule_after, SHORT.rule_after)
        for when, rule in zip(windows, rules, strict=True):
            expected = float(rule.equilibrium().angle)
            assert [getattr(layer, when).equilibrium for layer in branch.layers] == pytest.approx([expected] * 6)
        assert read_run(branch.run).notes == ()
        assert branch.report.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    told_on_disk = json.loads((folder / "demo.json").read_text())
    assert told_on_disk["complete"] is True
    assert told_on_disk["plain"] == json.loads(json.dumps(result.as_dict()["plain"]))


def test_on_one_core_one_runs_after_the_other(tmp_path, monkeypatch):
    asked: list[int] = []

    def run_nothing(jobs, *, at_once, progress):
        asked.append(at_once)
        raise JobError("enough was seen")

    monkeypatch.setattr(runner, "run_jobs", run_nothing)
    for cores in (1, 2, 8):
        monkeypatch.setattr(runner, "usable_cores", lambda cores=cores: cores)
        with pytest.raises(DemoError, match="enough was seen"):
            run_demo(tmp_path, recipe=SHORT)  # in the folder of an earlier demo
    assert asked == [1, 2, 2]


@pytest.mark.slow
def test_a_failed_training_is_reported_with_its_reason(tmp_path):
    with pytest.raises(DemoError, match=r"(?s)did not reach its end.*got blocks=\(\)"):
        run_demo(tmp_path, recipe=Recipe(blocks=()))
    assert json.loads((tmp_path / "demo.json").read_text())["complete"] is False


def test_a_foreign_folder_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(EquilibriaError, match="holds other things"):
        run_demo(tmp_path, recipe=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
