"""A watched run, logged in the form of each tool and imported again: the same norms, angles and predictions."""

from __future__ import annotations

import re
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.importing._history import Course
from equilibria.importing._names import sorted_names
from equilibria.importing._wandb_file import wandb_rows
from equilibria.records import read_record
from equilibria.theory import SGD, AdamW

MATRICES = ["0.weight", "2.weight", "4.weight"]
LEFT_OPEN = 0.16  # of an angle, if an update points half along the weight: 1 / sqrt(1 - 1/4) - 1
SETTINGS = {"optimizer": "adamw", "weight_decay": 0.1}


def columns(run, *names):
    """By parameter and step, numbers with NaN for null."""
    table = run.samples()
    rows = zip(
        table["param"].to_pylist(), table["step"].to_pylist(), *(table[name].to_pylist() for name in names), strict=True
    )
    return {(param, step): [np.nan if value is None else value for value in values] for param, step, *values in rows}


def assert_same_measurement(imported, watched, *, every=1, norms=1e-6, angles=1e-3):
    """Norms and angles of every imported sample are those that were watched."""
    own, expected = columns(imported, "norm", "angle"), columns(watched, "norm", "angle")
    assert set(imported.params) == set(MATRICES)
    assert len(own) == len(MATRICES) * len(range(0, 400, every))
    last = 400 - every  # the norm after the last step was not logged
    pairs = np.array([[*own[key], *expected[key]] for key in own if key[1] < last or every > 1])
    np.testing.assert_allclose(pairs[:, 0], pairs[:, 2], rtol=norms)
    known = np.isfinite(pairs[:, 1])
    assert known.mean() > 0.95
    np.testing.assert_allclose(pairs[known, 1], pairs[known, 3], rtol=angles)


def assert_same_predictions(imported, watched):
    """Where the watched run predicts by the measured gain: the log does not say which weights look invariant."""
    own, expected = (columns(run, "angle_predicted", "norm_predicted", "law") for run in (imported, watched))
    by_gain = [key for key in own if expected[key][2] == own[key][2] == "measured gain"]
    assert len(by_gain) > 0.5 * len(own)
    pairs = np.array([[*own[key][:2], *expected[key][:2]] for key in by_gain])
    known = np.isfinite(pairs).all(axis=1)
    assert known.mean() > 0.9
    np.testing.assert_allclose(pairs[known, 0], pairs[known, 2], rtol=2e-3)
    np.testing.assert_allclose(pairs[known, 1], pairs[known, 3], rtol=1e-4)


@pytest.fixture(scope="session")
def table(training, tmp_path_factory):
    return training.write_csv(tmp_path_factory.mktemp("tables") / "history.csv")


@pytest.fixture(scope="session")
def imported(table, tmp_path_factory):
    return eq.import_run(table, log_dir=tmp_path_factory.mktemp("runs") / "a", **SETTINGS)


def test_a_table_gives_the_norms_angles_and_predictions_of_the_watched_run(imported, training):
    assert_same_measurement(imported, training.watched)
    assert_same_predictions(imported, training.watched)


def errors_of_angles(training, path):
    """Of every sample of the matrices of a log: how far its angle is off, its stated error, whether interpolated."""
    from equilibria.importing._history import history_from_log
    from equilibria.importing._logs import read_log

    log = read_log(path)
    watched = columns(training.watched, "angle")
    for name, metrics in sorted_names(log.series).numbers.items():
        if name in MATRICES:
            history = history_from_log(log, metrics)
            exact = np.array([watched[name, step][0] for step in history.step.tolist()])
            yield np.abs(history.angle - exact) / exact, history.error / exact, history.interpolated


def test_every_angle_between_logged_norms_is_within_its_stated_error(training, table):
    for off, stated, interpolated in errors_of_angles(training, table):
        assert np.all((off <= stated)[~interpolated])
        assert interpolated.sum() == 1  # the last step


@pytest.mark.parametrize("every", [5, 10])
def test_angles_of_sparse_logs_have_a_standard_error_of_their_size(training, tmp_path, every):
    """Two of three are within it, and it is not many times larger than they are off."""
    path = training.write_csv(tmp_path / "log.csv", every=every)
    off, stated, interpolated = map(np.concatenate, zip(*errors_of_angles(training, path), strict=True))
    assert interpolated.all()
    assert np.mean(off <= stated) >= 0.68
    assert np.sqrt(np.mean(stated**2)) < 5 * np.sqrt(np.mean(off**2))


def test_settings_and_losses_come_from_the_log(imported, training):
    lr = columns(imported, "lr", "weight_decay", "momentum")
    assert lr["0.weight", 299] == [3e-3, 0.1, 0.9]
    assert lr["0.weight", 300] == [pytest.approx(9e-4), 0.1, 0.9]
    logged = imported.metrics()
    assert logged.num_rows == 400
    assert set(logged["name"].to_pylist()) == {"train/loss"}
    assert logged["value"].to_pylist()[17] == training.rows[17]["train/loss"]


def test_what_the_log_cannot_tell_is_null_and_said(imported):
    samples = imported.samples()
    for name in ("cosine", "pull", "scaled_grad_sq", "momentum_unit_grad_sq", "note"):
        assert samples[name].null_count == samples.num_rows
    assert samples["grad_norm"].null_count == 0
    (first, *_) = imported.notes
    assert first.startswith("imported from history.csv (table): no directions of gradients were logged")
    assert imported.verify().whole
    assert imported.metadata["imported"]["source"] == "history.csv"


def test_report_findings_table_forecast_and_page_take_it(imported, tmp_path):
    assert "measured gain" in str(imported.table())
    assert "imported from history.csv" in imported.report(tmp_path / "a.html").read_text().replace(
        "Imported", "imported"
    )
    assert not any("failed" in finding.subject for finding in imported.findings())
    assert imported.noise().network.noise_scale is None
    with pytest.raises(EquilibriaError, match="persists from 450 steps later on"):
        eq.forecast(imported, schedule=3e-4, steps=800)


def test_a_long_enough_log_is_forecast_like_the_watched_run(imported, training, tmp_path):
    """The rule that lr must have been steady for 450 steps is met by calling every step two steps."""
    rows = [{**row, "_step": 2 * row["_step"], "lr": 3e-3} for row in training.rows[:300]]
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table, tmp_path / "a.parquet")
    run = eq.import_run(tmp_path / "a.parquet", log_dir=tmp_path / "run", **SETTINGS)
    forecast = eq.forecast(run, schedule=3e-3, steps=1000)
    assert {layer.name for layer in forecast.layers} == set(MATRICES)
    assert all(layer.law == "measured gain" for layer in forecast.layers)


# ---- forms


def renamed(training, pattern, path, kinds=("norm", "update", "grad")):
    """The log as a Parquet file with other names."""
    levanter = dict(zip(("norm", "update", "grad"), ("params/norm/", "updates/norm/", "grad/norm/"), strict=True))
    names = {"_step": "_step", "lr": "optim/learning_rate_group0"}
    for kind in kinds:
        own = [name for name in training.rows[0] if name.startswith(levanter[kind])]
        names |= {name: pattern(kind, name.removeprefix(levanter[kind])) for name in own}
    pq.write_table(pa.table({new: [row[old] for row in training.rows] for old, new in names.items()}), path)
    return path


FAMILIES = {
    "OLMo": lambda kind, name: (
        f"optim/update_norm/{name}" if kind == "update" else f"optim/{'param' if kind == 'norm' else kind}/{name}.norm"
    ),
    "Composer": lambda kind, name: f"l2_norm/{'param' if kind == 'norm' else kind}/model.{name}".replace(
        "model.", "module."
    ),
    "plain": lambda kind, name: f"{'norm' if kind == 'norm' else f'{kind}_norm'}/_orig_mod.{name}",
    "suffix": lambda kind, name: f"train/{name}/{'norm' if kind == 'norm' else f'{kind}_norm'}".removeprefix("train/"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_other_trainers(family, training, tmp_path):
    path = renamed(training, FAMILIES[family], tmp_path / "log.parquet")
    run = eq.import_run(path, log_dir=tmp_path / "run", **SETTINGS)
    assert_same_measurement(run, training.watched)
    assert_same_predictions(run, training.watched)


def test_names_that_nobody_knows_are_given_as_patterns(training, tmp_path):
    path = renamed(training, lambda kind, name: f"stats<{name}>:{kind}", tmp_path / "log.parquet")
    with pytest.raises(
        EquilibriaError, match=r"none of which names the norm of a parameter \(optim/learning_rate_group0, stats<0"
    ):
        eq.import_run(path, log_dir=tmp_path / "run")
    patterns = {"norm": "stats<{param}>:norm", "update_norm": "stats<{param}>:update"}
    run = eq.import_run(path, log_dir=tmp_path / "run", columns=patterns, **SETTINGS)
    assert_same_measurement(run, training.watched)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_watched_runs_own_samples(kind, training, tmp_path):
    """A row per step and parameter, with the angles as they were measured."""
    getattr(training.watched, f"to_{kind}")(tmp_path / f"a.{kind}")
    run = eq.import_run(tmp_path / f"a.{kind}", log_dir=tmp_path / "run", **SETTINGS)
    assert_same_measurement(run, training.watched, norms=1e-12, angles=1e-9)
    assert_same_predictions(run, training.watched)


def test_a_chart_exported_by_wandb(training, tmp_path):
    lines = [
        "Step,"
        + ",".join(
            f"kind-sea-1 - {name}{end}"
            for name in ("norm/a.weight", "update_norm/a.weight")
            for end in ("", "__MIN", "__MAX")
        )
    ]
    for row in training.rows:
        pair = row["params/norm/0.weight"], row["updates/norm/0.weight"]
        lines.append(f"{row['_step']}," + ",".join(f"{value!r}" for value in pair for _ in range(3)))
    (tmp_path / "chart.csv").write_text("\n".join(lines))
    run = eq.import_run(tmp_path / "chart.csv", log_dir=tmp_path / "run")
    own, watched = columns(run, "angle"), columns(training.watched, "angle")
    assert own["a.weight", 123][0] == pytest.approx(watched["0.weight", 123][0], rel=1e-3)


def test_few_digits_give_large_errors_and_hide_small_angles(training, tmp_path):
    """Norms of about 5 with two decimals: no angle below about a thousandth is stated, and no wrong one."""
    path = training.write_csv(tmp_path / "log.csv", form=".2f")
    run = eq.import_run(path, log_dir=tmp_path / "run", lr=3e-3, **SETTINGS)
    own, watched = columns(run, "angle"), columns(training.watched, "angle")
    stated = {key: value for key, (value,) in own.items() if np.isfinite(value)}
    assert 0 < len(stated) < len(own)
    assert any("left out: the error is as large as the angle" in note for note in run.notes)
    assert all(value < 2.5 * watched[key][0] for key, value in stated.items())


def test_sparse_logs_read_the_norm_after_a_step_off_the_next_norms(training, tmp_path):
    path = training.write_csv(tmp_path / "log.csv", every=5)
    run = eq.import_run(path, log_dir=tmp_path / "run", **SETTINGS)
    assert_same_measurement(run, training.watched, every=5, angles=LEFT_OPEN)
    assert any("read off those of later steps" in note for note in run.notes)


def test_norms_alone_give_norms(training, tmp_path):
    path = renamed(training, FAMILIES["plain"], tmp_path / "log.parquet", kinds=("norm",))
    run = eq.import_run(path, log_dir=tmp_path / "run", **SETTINGS)
    assert run.samples()["angle"].null_count == run.samples().num_rows
    assert "No angle is known" in run.notes[0]
    assert "No angle was measured" in str(run.table())


def test_tensorboard(training, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "tb")) as writer:
        for row in training.rows:
            for name, value in row.items():
                if name != "_step":
                    writer.add_scalar(name, value, row["_step"])
    run = eq.import_run(tmp_path / "tb", log_dir=tmp_path / "run", **SETTINGS)
    assert_same_measurement(run, training.watched)
    assert_same_predictions(run, training.watched)


def test_a_resumed_tensorboard_log_continues_in_the_later_file(training, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for number, (first, last, wrong) in enumerate([(0, 250, 7.0), (200, 400, 0.0)]):
        with tensorboard.SummaryWriter(str(tmp_path / "tb"), filename_suffix=f".{number}") as writer:
            for row in training.rows[first:last]:
                shift = wrong if row["_step"] >= 200 else 0.0  # what the resumed run did again
                writer.add_scalar("norm/a.weight", row["params/norm/0.weight"] + shift, row["_step"])
    run = eq.import_run(tmp_path / "tb", log_dir=tmp_path / "run")
    norms = columns(run, "norm")
    assert len(norms) == 400
    assert norms["a.weight", 230][0] == pytest.approx(training.rows[230]["params/norm/0.weight"], rel=1e-6)


def test_wandb(training, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="p", dir=str(tmp_path), config={"weight_decay": 0.1}) as run:
        for row in training.rows:
            run.log({name: value for name, value in row.items() if name != "_step"}, step=row["_step"])
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    end = time.monotonic() + 60
    while sum("_step" in row.numbers for row in wandb_rows(next(folder.glob("*.wandb")))) < len(training.rows):
        assert time.monotonic() < end, "W&B's own process writes the last records a moment after the run has ended"
        time.sleep(0.02)
    imported = eq.import_run(folder, log_dir=tmp_path / "run", optimizer="adamw")  # weight decay from the config
    assert_same_measurement(imported, training.watched)
    assert_same_predictions(imported, training.watched)


def test_mlflow(training, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    run = client.create_run(client.create_experiment("e"))
    client.log_param(run.info.run_id, "weight_decay", 0.1)
    for row in training.rows[::10]:
        metrics = [
            mlflow.entities.Metric(name, value, 0, row["_step"]) for name, value in row.items() if name != "_step"
        ]
        client.log_batch(run.info.run_id, metrics)
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run.info.run_id}")
    imported = eq.import_run(folder, log_dir=tmp_path / "run", optimizer="adamw")
    assert_same_measurement(imported, training.watched, every=10, angles=LEFT_OPEN)


def test_this_packages_own_tags(tmp_path):
    """What `TensorBoardSink` sent: angles, norms and effective lr, from which the lr follows."""
    pytest.importorskip("tensorboard")
    import torch

    from equilibria.integrations.tensorboard import TensorBoardSink

    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.1)
    with eq.watch(net, optimizer, every=1, sinks=[TensorBoardSink(tmp_path / "tb")]) as watched:
        for _ in range(60):
            optimizer.zero_grad()
            net(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
    imported = eq.import_run(tmp_path / "tb", log_dir=tmp_path / "run", optimizer="adamw", weight_decay=0.1)
    own, expected = columns(imported, "norm", "angle", "lr"), columns(watched, "norm", "angle", "lr")
    assert set(own) == set(expected)
    np.testing.assert_allclose([own[key] for key in own], [expected[key] for key in own], rtol=1e-6)


# ---- predictions


def test_invariant_weights_are_predicted_by_their_law(tmp_path):
    """SGD on a BatchNorm network, with gradients logged from the start: the recursion is that of the watched run."""
    import torch
    from tests.helpers.bn_worlds import bn_net, invariant_of, sgd, take_step

    torch.manual_seed(3)
    net = bn_net()
    optimizer = sgd(net, lr=0.1, weight_decay=5e-3, momentum=0.0)
    watched = eq.watch(net, optimizer, every=1, invariant=invariant_of(net))
    for step in range(150):
        take_step(net, optimizer, step)
    watched.close()
    samples = watched.samples()
    pq.write_table(samples.select(["step", "param", "norm", "update_norm", "grad_norm", "lr"]), tmp_path / "a.parquet")
    labels = [entry["name"] for entry in watched.metadata["params"] if entry["invariant"]]
    run = eq.import_run(
        tmp_path / "a.parquet", log_dir=tmp_path / "run", optimizer=SGD(lr=0.1, weight_decay=5e-3), invariant=labels
    )
    names = ("angle_predicted", "norm_predicted", "angle_equilibrium", "norm_equilibrium")
    own, expected = columns(run, *names), columns(watched, *names)
    keys = [key for key in own if key[0] in labels and key[1] < 149]
    assert labels
    np.testing.assert_allclose([own[key] for key in keys], [expected[key] for key in keys], rtol=1e-6)
    assert {row["law"] for row in run.samples().to_pylist() if row["param"] in labels} == {"invariant"}


def test_a_rule_brings_its_betas_and_its_settings(table, tmp_path):
    rule = AdamW(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9))
    run = eq.import_run(table, log_dir=tmp_path / "run", optimizer=rule)
    assert columns(run, "lr", "weight_decay", "momentum")["0.weight", 5] == [3e-3, 0.3, 0.8]  # lr is logged, wd is not


def test_a_metric_holds_a_setting(table, tmp_path):
    run = eq.import_run(table, log_dir=tmp_path / "run", optimizer="lion", lr=1e-4, weight_decay="lr")
    assert columns(run, "lr", "weight_decay")["0.weight", 350] == [1e-4, pytest.approx(9e-4)]


def test_without_an_optimizer_nothing_is_predicted_and_a_finding_says_so(table, tmp_path):
    run = eq.import_run(table, log_dir=tmp_path / "run", select=["*.weight"])
    assert run.samples()["angle_predicted"].null_count == run.samples().num_rows
    (finding,) = run.findings()
    assert finding.subject == "the optimizer is not known"
    assert "eq.import_run(source" in finding.remedy


def test_select_takes_biases_too(table, tmp_path):
    run = eq.import_run(table, log_dir=tmp_path / "run", select=["0.*"])
    assert run.params == ("0.bias", "0.weight")


def test_settings_between_logged_steps_jump_at_the_later_one_and_else_run_straight():
    jump = Course((np.array([0, 10, 20, 30]), np.array([1.0, 1.0, 0.1, 0.1])))
    assert jump.at(np.array([15, 19, 20])).tolist() == [1.0, 1.0, 0.1]
    assert jump.jumps.tolist() == [20]
    ramp = Course((np.array([0, 10, 20]), np.array([1.0, 0.95, 0.9])))
    assert ramp.at(np.array([5])).tolist() == [pytest.approx(0.975)]
    assert not len(ramp.jumps)


# ---- names


def test_totals_and_other_metrics_are_no_parameters():
    named = sorted_names(["norm/a", "params/norm/total", "equilibria/norm/median", "train/loss", "lr", "grad_norm/a"])
    assert dict(named.numbers) == {"a": {"norm": "norm/a", "grad_norm": "grad_norm/a"}}
    assert named.settings["lr"] == ("lr",)
    assert named.others == ("equilibria/norm/median", "params/norm/total", "train/loss")


# ---- bad input


BAD_TABLES = {
    "empty file": ("", "cannot read"),
    "header alone": ("step,norm/a\n", "a table without rows"),
    "no steps": ("epoch,norm/a\n0,1.5\n", "with the columns epoch, norm/a; expected one of steps"),
    "no norms": ("step,loss,lr\n0,1.5,0.1\n", r"none of which names the norm of a parameter \(loss, lr\)"),
    "nothing but NaN": ("step,norm/a\n0,NaN\n1,nan\n", "without a number"),
    "steps that go back": ("step,norm/a\n0,1.5\n5,1.6\n2,1.7\n", "at step 5 and after it at step 2"),
    "a step twice": ("step,norm/a\n0,1.5\n5,1.6\n5,1.7\n", "twice at step 5, 1.6 and 1.7"),
    "broken steps": ("step,norm/a\n0.5,1.5\n", "does not hold whole steps"),
    "words for steps": ("step,norm/a\none,1.5\n", "does not hold whole steps"),
    "steps below 0": ("step,norm/a\n-3,1.5\n", "expected steps from 0 on"),
    "two runs": ("Step,a - norm/w,b - norm/w\n0,1.5,1.6\n", r"a table of several runs \(a, b\)"),
    "lr of two groups": ("step,norm/a,lr/0,lr/1\n0,1.5,0.1,0.2\n", "2 metrics of lr that differ"),
    "biases alone": ("step,norm/a.bias\n0,1.5\n", "a log of biases and scales only"),
    "lines of other lengths": ("step,norm/a\n0,1.5\n1\n", "cannot read"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_is_refused_and_nothing_is_written(case, tmp_path):
    text, message = BAD_TABLES[case]
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(EquilibriaError, match=message):
        eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "log.csv").read_text() == text


def test_nan_rows_and_rows_without_a_step_are_left_out_and_said(tmp_path):
    lines = [f"{step},{5 + step / 100},0.01,{'inf' if step == 3 else 1.0}" for step in range(9)]
    (tmp_path / "log.csv").write_text("\n".join(["step,norm/a,update_norm/a,loss", *lines, "9,NaN,nan,", ",1,1,1"]))
    run = eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert run.samples()["step"].to_pylist() == list(range(9))
    assert any("1 row without a step" in note for note in run.notes)
    assert any("1 NaN or infinite value of loss left out" in note for note in run.notes)


def test_a_value_that_was_logged_twice_alike_counts_once(tmp_path):
    (tmp_path / "log.csv").write_text("step,norm/a\n0,1.5\n0,1.5\n1,1.6\n")
    run = eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert run.samples()["step"].to_pylist() == [0, 1]


def test_a_norm_that_changes_by_more_than_the_update_is_said(tmp_path):
    lines = [f"{step},{5 + step},0.5" for step in range(20)]
    (tmp_path / "log.csv").write_text("\n".join(["step,norm/a,update_norm/a", *lines]))
    run = eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert run.samples()["angle"].null_count >= 19
    assert any("changes by more than the update is long" in note for note in run.notes)


def test_an_update_longer_than_both_norms_has_no_angle(tmp_path):
    lines = [f"{step},{5 + step / 1e4:.6f},{12 if step % 2 else 0.1:.6f}" for step in range(9)]
    (tmp_path / "log.csv").write_text("\n".join(["step,norm/a,update_norm/a", *lines]))
    run = eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert [angle is None for angle in run.samples()["angle"].to_pylist()] == [step % 2 == 1 for step in range(9)]
    assert any("at 4 of 9 samples" in note and "without the learning rate" in note for note in run.notes)


def test_logarithms_are_no_norms(tmp_path):
    (tmp_path / "log.csv").write_text("step,norm/a\n0,1.5\n7,-0.5\n")
    with pytest.raises(EquilibriaError, match=r"got norm/a = -0\.5 at step 7; expected lengths"):
        eq.import_run(tmp_path / "log.csv", log_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_or_files_is_left_alone(table, imported, tmp_path):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in imported.path.iterdir())
    with pytest.raises(EquilibriaError, match="which holds a run; choose a new directory"):
        eq.import_run(table, log_dir=imported.path)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in imported.path.iterdir()) == before
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(EquilibriaError, match="which holds other files"):
        eq.import_run(table, log_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


BAD_ARGUMENTS = {
    "source": ({"source": 3}, "got source=3"),
    "missing": ({"source": "nowhere.csv"}, "does not exist"),
    "log_dir": ({"log_dir": None}, "got log_dir=None"),
    "optimizer": ({"optimizer": "sophia"}, "expected one of: sgd, sgdw, adamw, adam, lion, muon"),
    "rule": ({"optimizer": 3}, "got optimizer=3"),
    "no decay": ({"optimizer": "adamw"}, "without weight_decay, which the source does not log"),
    "lr": ({"lr": -1.0}, "got lr=-1"),
    "metric": ({"lr": "learning"}, "expected a number or a logged metric"),
    "invariant": ({"invariant": ["conv*"]}, "got invariant 'conv.', which matches no parameter; there are: 0.weight"),
    "select": ({"select": ["conv*"]}, "got select 'conv.', which matches no parameter"),
    "number": ({"columns": {"size": "{param}"}}, "expected one of: norm, norm_after"),
    "pattern": ({"columns": {"norm": "abc"}}, "expected a pattern with {param}"),
    "other pattern": ({"columns": {"norm": "abc/{param}"}}, "matches no metric; there are: grad/norm"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(case, table, tmp_path):
    arguments, message = BAD_ARGUMENTS[case]
    arguments = {"source": table, "log_dir": tmp_path / "run"} | arguments
    with pytest.raises(EquilibriaError, match=message):
        eq.import_run(arguments.pop("source"), **arguments)
    assert not (tmp_path / "run").exists()


def test_a_run_is_no_source(imported, tmp_path):
    with pytest.raises(EquilibriaError, match=r"a recorded run already: eq\.read_run"):
        eq.import_run(imported.path, log_dir=tmp_path / "run")


def test_a_folder_of_nothing_names_what_can_be_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EquilibriaError, match=re.escape("expected a .csv, .tsv, .parquet or .wandb file, or a folder")):
        eq.import_run(tmp_path / "empty", log_dir=tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"no such file", b":W&B\xe1\xbe\x00" + b"\x00" * 30])
def test_a_file_that_is_not_wandbs(content, tmp_path):
    (tmp_path / "run-a.wandb").write_bytes(content)
    with pytest.raises(EquilibriaError, match=r"not a run file of W&B|without a number"):
        eq.import_run(tmp_path, log_dir=tmp_path / "run")


def test_a_damaged_mlflow_file(tmp_path):
    (tmp_path / "ml" / "metrics").mkdir(parents=True)
    (tmp_path / "ml" / "metrics" / "norm").write_text("1 2\nabc\n")
    with pytest.raises(EquilibriaError, match="expected time, value and step"):
        eq.import_run(tmp_path / "ml", log_dir=tmp_path / "run")


def test_several_runs_in_a_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"offline-run-{name}").mkdir()
        (tmp_path / f"offline-run-{name}" / "run.wandb").write_bytes(b":W&B")
    with pytest.raises(EquilibriaError, match="which holds 2 runs"):
        eq.import_run(tmp_path, log_dir=tmp_path / "run")


def test_without_tensorboard_the_error_names_the_extra(tmp_path, monkeypatch):
    import sys

    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(EquilibriaError, match=r"equilibria\[tensorboard\]"):
        eq.import_run(tmp_path, log_dir=tmp_path / "run")


def test_it_reads_like_any_run(imported):
    record = read_record(imported.path)
    assert record.params == imported.params
    assert record.samples().schema.names[:3] == ["step", "param", "lr"]
