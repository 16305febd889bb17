"""Short trainings with Lightning's own trainer, watched by the callback."""

from __future__ import annotations

import copy
import csv
import pickle
import subprocess
import sys
import types
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from tests.helpers.logged import assert_logged, expected, sgd, snippet
from tests.helpers.watched_worlds import make_net, same_bits
from torch.utils.data import DataLoader, TensorDataset

from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.integrations.lightning import EquilibriaCallback, _packages
from equilibria.records import RecordWarning, read_record
from equilibria.records._metrics import metric_series

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's advice about speed
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

OTHER_OPTIONS = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")  # Lightning's

STEPS = 8


class Classifier(pl.LightningModule):
    """One optimizer, which the trainer steps."""

    def __init__(self, *, fails_at=None):
        super().__init__()
        self.net, self.fails_at = make_net(), fails_at

    def loss(self, batch):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), targets)

    def training_step(self, batch, batch_idx):
        if self.fails_at == self.trainer.global_step:
            raise RuntimeError("the data are gone")
        return self.loss(batch)

    def configure_optimizers(self):
        return sgd(self)


class Validated(Classifier):
    """Its weights are swapped for validation, as averaging callbacks do."""

    def on_validation_start(self):
        self.held = copy.deepcopy(self.net.state_dict())
        self.net.load_state_dict({name: 3 * value for name, value in self.held.items()})

    def validation_step(self, batch, batch_idx):
        assert not torch.equal(self.net[0].weight, self.held["0.weight"])
        self.loss(batch)

    def on_validation_end(self):
        self.net.load_state_dict(self.held)


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self, *, logs=False):
        super().__init__()
        self.logs = logs
        self.automatic_optimization = False
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(self.net(inputs), targets))
            optimizer.step()
        if self.logs:
            self.log("loss", 1.0)

    def configure_optimizers(self):
        return [sgd(self.net[:4]), sgd(self.net[4:])]


class Kept(Logger):
    """A logger that keeps what it is given."""

    def __init__(self, *, breaks=False):
        super().__init__()
        self.breaks, self.found, self.finalized = breaks, {}, False

    name, version = "kept", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        if self.breaks:
            raise OSError("no connection")
        for tag, value in metrics.items():
            assert step not in self.found.setdefault(tag, {}), "logged twice"
            self.found[tag][step] = value

    def finalize(self, status):
        self.finalized = True

    def ours(self):
        return {tag: values for tag, values in self.found.items() if tag.startswith("equilibria/")}


def data(batches=STEPS):
    draw = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(
            torch.randn(16 * batches, 6, generator=draw), torch.randint(0, 3, (16 * batches,), generator=draw)
        ),
        batch_size=16,
    )


def make_trainer(folder, *callbacks, logger=False, **more):
    options = {"max_epochs": 1, "enable_checkpointing": False, **more}
    return pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=logger,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def no_hooks(trainer):
    return not any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in trainer.optimizers)


def test_a_training_is_watched_logged_and_told_and_not_changed(tmp_path, capsys):
    callback, logger, model = EquilibriaCallback(tmp_path / "run", every=1), Kept(), Classifier()
    trainer = make_trainer(tmp_path, callback, logger=logger)
    trainer.fit(model, data())
    alone = Classifier()
    make_trainer(tmp_path).fit(alone, data())
    assert same_bits(model.net, alone.net)
    samples = callback.monitor.samples()
    assert samples["step"].to_pylist() == [step for step in range(STEPS) for _ in range(3)]
    assert set(samples["note"].to_pylist()) == {None}
    assert_logged(logger.ours(), expected(samples))
    assert read_record(tmp_path / "run").samples().num_rows == 3 * STEPS
    assert read_record(tmp_path / "run").metadata["steps_per_epoch"] == STEPS
    assert no_hooks(trainer)
    assert logger.finalized
    said = capsys.readouterr().out
    assert said.startswith("equilibria: ")
    assert f"equilibria report {tmp_path / 'run'}" in said.replace("\n", "")
    assert len(said.splitlines()) < 20


def test_validation_is_not_sampled(tmp_path):
    with_validation, without = (EquilibriaCallback(every=1, summary=False) for _ in range(2))
    make_trainer(tmp_path, with_validation, val_check_interval=0.5).fit(Validated(), data(), data(2))
    make_trainer(tmp_path, without).fit(Classifier(), data())
    names = ["step", "param", "norm", "angle", "update_norm"]
    assert with_validation.monitor.samples().select(names) == without.monitor.samples().select(names)


def test_accumulated_batches_count_once_and_the_file_logger_takes_the_rows(tmp_path):
    callback, logger = EquilibriaCallback(every=1, summary=False), CSVLogger(tmp_path)
    make_trainer(tmp_path, callback, logger=logger, accumulate_grad_batches=2, max_epochs=2).fit(Classifier(), data())
    assert callback.monitor.step == STEPS
    assert callback.monitor.metadata["steps_per_epoch"] == STEPS // 2
    assert callback.monitor.metadata["batch_size"] == 2 * 16
    with Path(logger.log_dir, "metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["equilibria/norm/net.0.weight"]]
    norms = callback.monitor.samples()["norm"].to_numpy()[::3]
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    np.testing.assert_allclose([float(row["equilibria/norm/net.0.weight"]) for row in rows], norms, rtol=1e-12)


class Measured(Classifier):
    """Logs a loss of its own in validation, and keeps those of training."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_loss_of_every_step_and_the_validation_are_recorded(tmp_path, accumulated):
    callback, model = EquilibriaCallback(tmp_path / "run", every=1, summary=False), Measured()
    trainer = make_trainer(tmp_path, callback, accumulate_grad_batches=accumulated, val_check_interval=0.5)
    trainer.fit(model, data(), data(2))
    series = metric_series(read_record(tmp_path / "run").metrics())
    steps, losses = series["loss"]
    assert steps.tolist() == list(range(STEPS // accumulated))
    np.testing.assert_allclose(losses, np.reshape(model.losses, (-1, accumulated)).mean(axis=1), rtol=1e-6)
    assert series["val_loss"][0].tolist() == [STEPS // accumulated // 2 - 1, STEPS // accumulated - 1]
    assert set(series) == {"loss", "val_loss"}
    trainer.validate(model, data(2), verbose=False)  # which is no training: without a warning


class Broken(Classifier):
    def training_step(self, batch, batch_idx):
        return torch.nan * self.loss(batch)


def test_findings_are_lines_in_the_log_or_go_to_a_function(tmp_path, caplog):
    seen = []
    with caplog.at_level("INFO"):
        make_trainer(tmp_path, EquilibriaCallback(every=1, summary=False)).fit(Broken(), data())
        lines = [record for record in caplog.records if record.message.startswith("equilibria: ")]
        other = EquilibriaCallback(every=1, summary=False, on_finding=seen.append)
        make_trainer(tmp_path, other).fit(Broken(), data())
    assert "not_finite" in {finding.kind for finding in seen}
    assert [record.message for record in lines] == [f"equilibria: {finding}" for finding in seen]
    assert {record.name for record in lines} == {f"{_packages()[0]}.equilibria"}
    assert len([record for record in caplog.records if record.message.startswith("equilibria: ")]) == len(lines)


def test_several_optimizers_stepped_by_hand(tmp_path):
    callback, logger = EquilibriaCallback(every=1, summary=False), Kept()
    make_trainer(tmp_path, callback, logger=logger).fit(Adversaries(), data())
    assert callback.monitor.step == STEPS
    assert len(callback.monitor.metadata["params"]) == 3
    assert callback.monitor.metadata["steps_per_epoch"] is None
    assert_logged(logger.ours(), expected(callback.monitor.samples()))


def test_a_checkpoint_resumes_the_record(tmp_path):
    first = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    trainer = make_trainer(tmp_path, first)
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    second, logger = EquilibriaCallback(tmp_path / "run", every=1, summary=False), Kept()
    trainer = make_trainer(tmp_path, second, logger=logger, max_epochs=2)
    trainer.fit(Classifier(), data(), ckpt_path=tmp_path / "saved.ckpt")
    assert second.monitor.step == 2 * STEPS
    run = read_record(tmp_path / "run")
    assert len(run.sessions) == 2
    assert run.samples(params=["net.0.weight"])["step"].to_pylist() == list(range(2 * STEPS))
    assert list(logger.ours()["equilibria/norm/median"]) == list(range(STEPS, 2 * STEPS))
    whole = EquilibriaCallback(every=1, summary=False)
    make_trainer(tmp_path, whole, max_epochs=2).fit(Classifier(), data())
    predicted = [table["angle_predicted"].to_pylist() for table in (whole.monitor.samples(), run.samples())]
    assert predicted[0] == predicted[1]  # as if it had not stopped, to the last bit


def steps_in(folder):
    return read_record(folder).samples(params=["net.0.weight"])["step"].to_pylist()


def fit_and_save(folder, log_dir, *, epochs=1):
    """A training of its own; the second with a ``log_dir`` goes beside the first."""
    trainer = make_trainer(folder, EquilibriaCallback(log_dir, every=1, summary=False), max_epochs=epochs)
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(folder / "saved.ckpt")


def resume(folder, log_dir, *, epochs=2):
    callback = EquilibriaCallback(log_dir, every=1, summary=False)
    make_trainer(folder, callback, max_epochs=epochs).fit(Classifier(), data(), ckpt_path=folder / "saved.ckpt")
    return callback.monitor


@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoint_goes_on_in_its_own_run_and_not_in_another_of_that_name(tmp_path, moved):
    fit_and_save(tmp_path, tmp_path / "runs" / "a", epochs=2)
    with pytest.warns(RecordWarning, match="holds a run already; this one is recorded into .*a-2"):
        fit_and_save(tmp_path, tmp_path / "runs" / "a")
    folder = (tmp_path / "runs").rename(tmp_path / "moved") if moved else tmp_path / "runs"
    monitor = resume(tmp_path, folder / "a")
    assert monitor.log_dir == folder / "a-2"
    assert steps_in(folder / "a-2") == list(range(2 * STEPS))
    assert len(read_record(folder / "a-2").sessions) == 2
    assert len(read_record(folder / "a").sessions) == 1
    assert not read_record(folder / "a").notes


def test_a_second_fit_is_resumed_in_its_own_run(tmp_path):
    trainer = make_trainer(tmp_path, EquilibriaCallback(tmp_path / "a", every=1, summary=False))
    model = Classifier()
    trainer.fit(model, data())
    trainer.fit_loop.max_epochs = 2
    with pytest.warns(RecordWarning, match="this one is recorded into .*a-2"):
        trainer.fit(model, data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert resume(tmp_path, tmp_path / "a", epochs=3).log_dir == tmp_path / "a-2"
    assert steps_in(tmp_path / "a") == list(range(STEPS))
    assert steps_in(tmp_path / "a-2") == list(range(2 * STEPS))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_checkpoint_whose_record_is_not_there_begins_beside_what_is(tmp_path, recorded):
    fit_and_save(tmp_path, tmp_path / "a")
    fit_and_save(tmp_path, tmp_path / "b" if recorded else None)
    whose = "of the run in .*b" if recorded else "of a run that was not recorded"
    with pytest.warns(RecordWarning, match=f"a holds a run already; .* into .*a-2. The checkpoint .* is {whose}"):
        assert resume(tmp_path, tmp_path / "a").log_dir == tmp_path / "a-2"
    assert steps_in(tmp_path / "a") == list(range(STEPS))
    assert steps_in(tmp_path / "a-2") == list(range(STEPS, 2 * STEPS))
    assert resume(tmp_path, tmp_path / "c").log_dir == tmp_path / "c"  # nothing is there: no warning


def test_a_checkpoint_that_was_loaded_for_validation_does_not_shift_the_next_training(tmp_path):
    fit_and_save(tmp_path, None)
    callback, logger = EquilibriaCallback(tmp_path / "run", every=1, summary=False), Kept()
    trainer, model = make_trainer(tmp_path, callback, logger=logger), Validated()
    trainer.validate(model, data(2), ckpt_path=tmp_path / "saved.ckpt", verbose=False)
    trainer.fit(model, data(), data(2))
    assert steps_in(tmp_path / "run") == list(range(STEPS))
    assert list(logger.ours()["equilibria/norm/median"]) == list(range(STEPS))


def test_the_axis_of_the_curves_is_the_trainers_also_after_a_second_fit_and_a_checkpoint(tmp_path):
    callback, logger, model = EquilibriaCallback(every=1, summary=False), Kept(), Adversaries(logs=True)
    trainer = make_trainer(tmp_path, callback, logger=logger)
    trainer.fit(model, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data())
    assert trainer.global_step == 4 * STEPS  # of both optimizers
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    callback, resumed = EquilibriaCallback(every=1, summary=False), Kept()
    trainer = make_trainer(tmp_path, callback, logger=resumed, max_epochs=3)
    trainer.fit(Adversaries(logs=True), data(), ckpt_path=tmp_path / "saved.ckpt")
    assert callback.monitor.step == 2 * STEPS  # since the second fit
    for kept, steps in ((logger, range(2 * STEPS)), (resumed, range(2 * STEPS, 3 * STEPS))):
        assert list(kept.found["loss"]) == list(kept.ours()["equilibria/norm/median"]) == list(steps)


def by_name(name, tensor):
    return name == "net.0.weight"


def test_several_callbacks_in_one_trainer(tmp_path):
    def callbacks():
        given = ({}, {"select": by_name}, {"select": ["net.4.weight"]}, {"granularity": "row"})
        return [
            EquilibriaCallback(tmp_path / str(at), every=1, to_loggers=False, summary=False, **each)
            for at, each in enumerate(given)
        ]

    trainer = make_trainer(tmp_path, *callbacks())
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again = callbacks()
    make_trainer(tmp_path, *again, max_epochs=2).fit(Classifier(), data(), ckpt_path=tmp_path / "saved.ckpt")
    assert [each.monitor.step for each in again] == [2 * STEPS] * 4
    assert [len(read_record(tmp_path / str(at)).sessions) for at in range(4)] == [2] * 4
    assert "0x" not in again[1].state_key  # no address: the next process has another


def test_two_callbacks_with_one_directory_do_not_stop_each_other(tmp_path):
    first, second = (EquilibriaCallback(tmp_path / "run", every=every, summary=False) for every in (1, 2))
    with pytest.warns(WatchWarning, match="this training is not watched: .*run"):
        make_trainer(tmp_path, first, second).fit(Classifier(), data())
    assert steps_in(tmp_path / "run") == list(range(STEPS))
    assert first.monitor.step == STEPS
    assert second.monitor is None


@OTHER_OPTIONS
def test_a_resumed_training_may_have_other_options(tmp_path):
    fit_and_save(tmp_path, tmp_path / "run")
    callback = EquilibriaCallback(tmp_path / "run", every=2, summary=False)
    make_trainer(tmp_path, callback, max_epochs=2).fit(Classifier(), data(), ckpt_path=tmp_path / "saved.ckpt")
    assert steps_in(tmp_path / "run") == [*range(STEPS), *range(STEPS, 2 * STEPS, 2)]


@OTHER_OPTIONS
def test_a_checkpoint_of_another_model_is_told_and_training_goes_on(tmp_path):
    first = EquilibriaCallback(every=1, summary=False)
    trainer = make_trainer(tmp_path, first)
    trainer.fit(Classifier(), data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    second, logger = EquilibriaCallback(every=1, select="net.0.weight", summary=False), Kept()
    trainer = make_trainer(tmp_path, second, logger=logger, max_epochs=2)
    with pytest.warns(
        WatchWarning, match="the record of this run starts again at step 0: got the state of a monitor that watches"
    ):
        trainer.fit(Classifier(), data(), ckpt_path=tmp_path / "saved.ckpt")
    assert second.monitor.step == STEPS
    assert list(logger.ours()["equilibria/norm/median"]) == list(range(STEPS, 2 * STEPS))  # the trainer's steps


def test_an_exception_leaves_no_hooks_and_a_record_that_can_be_read(tmp_path):
    callback = EquilibriaCallback(tmp_path / "run", every=1)
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(RuntimeError, match="the data are gone"):
        trainer.fit(Classifier(fails_at=5), data())
    assert no_hooks(trainer)
    assert read_record(tmp_path / "run").metadata["steps"] == 5
    assert read_record(tmp_path / "run").samples().num_rows == 15
    again = EquilibriaCallback(every=1, summary=False)
    make_trainer(tmp_path, again).fit(Classifier(), data())
    assert again.monitor.step == STEPS


def test_a_logger_that_fails_breaks_nothing(tmp_path):
    callback, loggers = EquilibriaCallback(every=1, summary=False), [Kept(breaks=True), Kept()]
    trainer = make_trainer(tmp_path, callback, logger=loggers)
    with pytest.warns(WatchWarning, match="takes no more samples: OSError: no connection; watching goes on"):
        trainer.fit(Classifier(), data())
    assert_logged(loggers[1].ours(), expected(callback.monitor.samples()))


@pytest.mark.parametrize("given", [{"select": "no.such.weight"}, {"log_dir": __file__}], ids=["select", "log_dir"])
def test_what_cannot_be_watched_is_told_and_training_goes_on(tmp_path, given):
    callback, model = EquilibriaCallback(**given), Classifier()
    trainer = make_trainer(tmp_path, callback)
    with pytest.warns(WatchWarning, match="this training is not watched: got .*; training goes on"):
        trainer.fit(model, data())
    assert trainer.global_step == STEPS
    assert callback.monitor is None
    assert callback.state_dict() == {}


@pytest.mark.parametrize("given", [{"every": 0}, {"granularity": "rows"}, {"metrics": ["angel"]}, {"layers": -1}])
def test_bad_options_are_refused_at_once(given):
    with pytest.raises(EquilibriaError, match="got "):
        EquilibriaCallback(**given)


def test_it_can_be_sent_to_other_processes_and_copied():
    callback = EquilibriaCallback("run", every=3)
    assert pickle.loads(pickle.dumps(callback))._training.options == copy.deepcopy(callback)._training.options


def test_the_package_that_the_script_uses_is_taken(monkeypatch):
    assert _packages()[0] == "lightning.pytorch"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", types.ModuleType("pytorch_lightning"))
    assert _packages() == ["lightning.pytorch", "pytorch_lightning"]
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert _packages() == ["pytorch_lightning"]


@pytest.mark.filterwarnings("ignore:The number of training batches")  # so short that nothing else would be logged
def test_the_lines_on_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(snippet("Lightning"), {"module": Classifier(), "data": data()})
    assert read_record("runs/a").metadata["steps"] == 2 * STEPS
    assert "equilibria report runs/a" in capsys.readouterr().out


@pytest.mark.slow  # another import of another package
def test_pytorch_lightning_alone_will_do(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['lightning'] = None  # as if it were not installed\n"
        "import pytorch_lightning as pl, torch\n"
        "from equilibria.integrations.lightning import EquilibriaCallback\n"
        "class Module(pl.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(4, 4)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self.layer(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "callback = EquilibriaCallback('run', every=1, summary=False)\n"
        "trainer = pl.Trainer(accelerator='cpu', max_epochs=1, callbacks=[callback], logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False)\n"
        "trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))\n"
        "assert callback.monitor.step == 3\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_record(tmp_path / "run").metadata["steps"] == 3
