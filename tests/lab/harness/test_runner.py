"""Tasks run once wherever they run, are kept at once, and are not run again without a reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import small_experiments
from tests.helpers.small_experiments import experiment

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import registry, reproduce, runner
from equilibria.lab.harness.claim import SHOWN
from equilibria.lab.harness.results import Result, ScaleFolder, open_results
from equilibria.lab.harness.workers import Processes, TaskDone
from equilibria.records._lock import RunLock


def started(folder: Path) -> list[int]:
    """The task of every start, in no order that matters."""
    return sorted(int(path.name.split("-")[0]) for path in folder.iterdir())


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def test_a_result_has_claims_numbers_and_figures_and_survives_json(results):
    (report,) = reproduce([experiment()], results=results)
    assert report.good and not report.reused
    again = open_results(results).at_scale("small", "desk").read()
    assert again == report.result
    drawn = np.concatenate([np.random.default_rng([3, index]).standard_normal(50) for index in range(6)])
    assert again.numbers == {"mean": drawn.mean(), "keys": [f"draw-{index}" for index in range(6)], "count": 300}
    assert again.config["seed"] == 3 and again.command == "equilibria reproduce small --scale desk"
    for suffix in ("png", "pdf"):
        assert (results / "small" / "desk" / f"figure.{suffix}").stat().st_size > 1000


def test_processes_and_this_process_give_the_same_numbers(results, tmp_path):
    (here,) = reproduce([experiment()], results=results)
    (there,) = reproduce([experiment()], results=tmp_path / "other", workers=Processes(2))
    assert here.result.numbers == there.result.numbers
    assert here.result.claims == there.result.claims
    name = Path("small", "desk", "figure.png")
    assert (results / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_an_existing_result_is_reused(results, log):
    reproduce([experiment(log=str(log))], results=results)
    (report,) = reproduce([experiment(log=str(log))], results=results)
    assert report.reused and report.good
    assert started(log) == list(range(6))


def test_force_computes_again(results, log):
    for force in (False, True):
        reproduce([experiment(log=str(log))], results=results, force=force)
    assert started(log) == sorted([*range(6)] * 2)


def test_other_settings_or_another_version_are_computed_again(results, log):
    reproduce([experiment(log=str(log))], results=results)
    (other,) = reproduce([experiment(log=str(log), seed=4)], results=results)
    assert not other.reused and len(started(log)) == 12
    (newer,) = reproduce([replace(experiment(log=str(log), seed=4), version=2)], results=results)
    assert not newer.reused and len(started(log)) == 18
    assert len(list((results / "small" / "desk").glob("records-*"))) == 1


def test_an_interrupted_run_goes_on_after_the_last_finished_task(results, log):
    with pytest.raises(KeyboardInterrupt):
        reproduce([experiment(log=str(log), fails="interrupt 4")], results=results)
    assert started(log) == [0, 1, 2, 3, 4]
    folder = open_results(results).at_scale("small", "desk")
    assert folder.read() is None
    (kept,) = folder.path.glob("records-*")
    assert len(list(kept.iterdir())) == 4


def test_an_interrupted_forced_run_does_not_fall_back_to_the_old_result(results, log, monkeypatch):
    small = experiment(log=str(log))
    reproduce([small], results=results)
    monkeypatch.setattr(runner.ScaleFolder, "store_task", interrupted := Interruption())
    with pytest.raises(KeyboardInterrupt):
        reproduce([small], results=results, force=True)
    monkeypatch.undo()
    assert interrupted.called and not (results / "small" / "desk" / "result.json").exists()
    (report,) = reproduce([small], results=results)
    assert report.good and not report.reused


class Interruption:
    """Ctrl-C at the first call."""

    called = False

    def __call__(self, *args):
        self.called = True
        raise KeyboardInterrupt


def test_experiments_that_ended_before_an_interruption_are_on_the_pages(results):
    first, second = experiment("first"), experiment("second", fails="interrupt 0")
    with pytest.raises(KeyboardInterrupt):
        reproduce([first, second], results=results)
    assert "### first" in (results / "RESULTS.md").read_text()
    assert 'id="first-desk"' in (results / "index.html").read_text()


def test_a_removed_figure_is_drawn_again_from_what_is_kept(results, log):
    small = experiment(log=str(log))
    reproduce([small], results=results)
    figure = results / "small" / "desk" / "figure.pdf"
    figure.unlink()
    (report,) = reproduce([small], results=results)
    assert not report.reused and figure.is_file() and started(log) == list(range(6))


def test_going_on_counts_nothing_twice(results, log, monkeypatch):
    """The same settings, interrupted from outside the task, as Ctrl-C does."""
    small = experiment(log=str(log))
    done = []

    def stop(count, total):
        done.append(count)
        if count == 4 and len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce([small], results=results, progress=stop)
    (report,) = reproduce([small], results=results, progress=stop)
    assert report.good and report.result.numbers["count"] == 300
    assert started(log) == list(range(6))
    assert done == [0, 1, 2, 3, 4, 4, 5, 6]


def test_a_damaged_record_is_computed_again(results, log):
    small = experiment(log=str(log))
    reproduce([small], results=results)
    folder = open_results(results).at_scale("small", "desk")
    (folder.path / "result.json").unlink()
    record = next(folder.path.glob("records-*/draw-2.npz"))
    record.write_bytes(record.read_bytes()[:100])
    (report,) = reproduce([small], results=results)
    assert report.good and started(log) == [0, 1, 2, 2, 3, 4, 5]


def test_a_stored_task_with_any_bit_turned_is_read_as_it_was_or_not_at_all(tmp_path):
    folder = ScaleFolder(tmp_path)
    folder.prepare("f", ["draw"], force=False)
    values = np.random.default_rng(0).standard_normal(20)
    folder.store_task("f", "draw", TaskDone({"values": values}, 1.0))
    (file,) = tmp_path.glob("records-f/*.npz")
    content, outcomes = file.read_bytes(), []
    for bit in range(0, 8 * len(content), 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        done = folder.read_task("f", "draw")
        assert done is None or np.array_equal(done.arrays["values"], values), bit
        outcomes.append(done is None)
    assert any(outcomes) and not all(outcomes)


@pytest.mark.parametrize("workers", [None, Processes(2)])
def test_a_task_that_raises_fails_its_experiment_alone(results, workers):
    bad, good = experiment("bad", fails="raise 2"), experiment("good")
    first, second = reproduce([bad, good], results=results, workers=workers)
    assert "task draw-2" in first.failure and "KeyError: 'no such draw'" in first.failure
    assert not first.good and second.good


def test_a_process_that_dies_fails_its_task_and_is_replaced(results):
    (report,) = reproduce([experiment(fails="die 1")], results=results, workers=Processes(1))
    assert "task draw-1: its process ended with exit code 9" in report.failure
    (records,) = (results / "small" / "desk").glob("records-*")
    assert len(list(records.iterdir())) == 5


def test_a_failed_claim_is_reported(results):
    (report,) = reproduce([experiment(expected=5.0)], results=results)
    assert not report.good
    assert report.result.claims[0].verdict != SHOWN


def test_an_error_after_the_tasks_fails_the_experiment_alone(results, monkeypatch):
    def impossible(config, found):
        raise ValueError("no line through one point")

    monkeypatch.setattr(impossible, "__module__", small_experiments.__name__)
    functions = (small_experiments.tasks, small_experiments.run_task, impossible, impossible)
    bad = small_experiments.Experiment("bad", "", "", experiment().scales, functions)
    (report,) = reproduce([bad], results=results)
    assert report.failure.startswith("after all tasks: Traceback")
    assert "ValueError: no line through one point" in report.failure


def test_a_worker_with_another_version_fails(results, monkeypatch):
    monkeypatch.setattr(runner, "__version__", "99.0")
    (report,) = reproduce([experiment()], results=results)
    assert "the one that asks has 99.0" in report.failure


def test_two_runs_at_once_in_one_folder_raise(results):
    folder = results / "small" / "desk"
    open_results(results)
    folder.mkdir(parents=True)
    lock = RunLock(folder)
    with pytest.raises(EquilibriaError, match="is being recorded by process"):
        reproduce([experiment()], results=results)
    lock.release()
    assert reproduce([experiment()], results=results)[0].good


def test_a_folder_that_cannot_be_written_raises(results):
    open_results(results)
    (results / "small").touch()
    with pytest.raises(EquilibriaError, match=r"small/desk', which cannot be written: Not a directory"):
        reproduce([experiment()], results=results)
    (results / "other" / "desk" / "writer.lock").mkdir(parents=True)
    with pytest.raises(EquilibriaError, match=r"other/desk', which cannot be written: Is a directory"):
        reproduce([experiment("other")], results=results)
    with pytest.raises(EquilibriaError, match="got results=''; expected the name of a folder"):
        reproduce([experiment()], results="")


def test_a_folder_that_is_not_ours_raises_and_is_left_alone(results):
    results.mkdir()
    (results / "thesis.tex").touch()
    with pytest.raises(EquilibriaError, match="which holds other things; expected a folder that is new"):
        reproduce([experiment()], results=results)
    assert [path.name for path in results.iterdir()] == ["thesis.tex"]
    with pytest.raises(EquilibriaError, match="which is a file"):
        reproduce([experiment()], results=results / "thesis.tex")


def test_a_scale_that_an_experiment_does_not_have_raises_before_any_work(results):
    with pytest.raises(EquilibriaError, match="got small at scale='paper'; expected one of: smoke, desk"):
        reproduce([experiment()], scale="paper", results=results)
    with pytest.raises(EquilibriaError, match="got scale='big'; expected one of: smoke, desk, paper"):
        reproduce([experiment()], scale="big", results=results)
    assert not results.exists()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sharp-regression", {"steps": -5}, "got steps=-5; expected 1 <= steps"),
        ("sharp-regression", {"data_sets": 2.5}, "got data_sets=2.5; expected a whole number"),
        ("sharp-regression", {"lr": float("nan")}, "got lr=nan; expected a finite number"),
        ("sharp-regression", {"lr": 0.0}, "got lr=0; expected 0 < lr"),
        ("nrq-equilibrium", {"weight_decays": (0.1, -0.1)}, "got weight_decays=-0.1; expected 0 <= weight_decays"),
        ("smd-rescale-law", {"dim": "many"}, "got dim='many'; expected a finite number"),
    ],
)
def test_impossible_settings_raise_before_any_work(results, name, changes, message):
    (known,) = registry.find([name])
    changed = replace(known, scales={"desk": replace(known.config("desk"), **changes)})
    with pytest.raises(EquilibriaError, match=re.escape(message)):
        reproduce([changed], results=results)
    assert not results.exists()


def test_a_result_of_another_version_counts_as_none(results):
    reproduce([experiment()], results=results)
    file = results / "small" / "desk" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"surprise": 1}))
    assert open_results(results).at_scale("small", "desk").read() is None
    assert isinstance(reproduce([experiment()], results=results)[0].result, Result)


WRONG = {
    "claims of words": {"claims": ["x"]},
    "no claims": {"claims": None},
    "no seconds": {"seconds": None},
    "seconds in words": {"seconds": "abc"},
    "no config": {"config": None},
    "no date": {"finished": None},
    "no title": {"title": None},
    "no packages": {"packages": ["numpy"]},
    "figures that are no names": {"figures": [5]},
    "a kind of its own": {"kind": "strange"},
    "text that is none": {"text": 5},
    "a source that is none": {"source": None},
    "a place that is none": {"source": {"paper": "smd", "where": 5}},
    "an interval in words": {"interval": "ab"},
    "a measurement in words": {"measured": "x"},
    "a printed word": {"printed": "x"},
    "seeds in words": {"seeds": "x"},
    "a demand in words": {"demanded": "x"},
    "a role of its own": {"role": "x"},
    "a unit that is none": {"unit": None},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished experiment, and its result as JSON values."""
    results = tmp_path_factory.mktemp("finished") / "results"
    reproduce([experiment()], results=results)
    folder = open_results(results).at_scale("small", "desk")
    return folder, json.loads((folder.path / "result.json").read_text())


@pytest.mark.parametrize("changes", WRONG.values(), ids=list(WRONG))
def test_a_result_of_wrong_shape_counts_as_none(finished, changes):
    folder, values = finished
    changed = values | changes if changes.keys() <= values.keys() - {"source"} else None
    if changed is None:
        changed = values | {"claims": [values["claims"][0] | changes]}
    file = folder.path / "result.json"
    file.write_text(json.dumps(values))
    assert folder.read() is not None
    file.write_text(json.dumps(changed))
    assert folder.read() is None
