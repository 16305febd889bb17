"""Short trainings with the trainer of transformers and with plain accelerate, watched."""

from __future__ import annotations

import gc
import logging
import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from tests.helpers.logged import sgd, snippet
from tests.helpers.watched_worlds import backward, batches, make_net, same_bits, train
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import equilibria as eq
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.integrations.scalars import ScalarSink
from equilibria.integrations.transformers import EquilibriaCallback
from equilibria.records import RecordWarning, read_record
from equilibria.records._metrics import metric_series

STEPS = 6


class Classifier(nn.Module):
    """What the trainer expects of a model."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, inputs, labels):
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


def examples(count=16 * STEPS):
    draw = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(count, 6, generator=draw), torch.randint(0, 3, (count,), generator=draw)
    return [{"inputs": inputs[at], "labels": labels[at]} for at in range(count)]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from examples()


class FailsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise RuntimeError("the data are gone")


def make_trainer(folder, *callbacks, model=None, data=None, evaluated=None, **more):
    options = {"max_steps": STEPS, "save_strategy": "no", "logging_strategy": "no", **more}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        learning_rate=0.01,
        weight_decay=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **options,
    )
    return Trainer(
        model=model or Classifier(),
        args=arguments,
        train_dataset=examples() if data is None else data,
        eval_dataset=evaluated,
        callbacks=list(callbacks),
    )


def hooks(optimizer):
    inner = getattr(optimizer, "optimizer", optimizer)
    return len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks)


def test_a_training_is_watched_and_told_and_not_changed(tmp_path, capsys):
    callback, model = EquilibriaCallback(tmp_path / "run", every=1), Classifier()
    trainer = make_trainer(tmp_path / "out", callback, model=model)
    trainer.train()
    assert isinstance(trainer.optimizer, AcceleratedOptimizer)
    assert hooks(trainer.optimizer) == 0
    alone = Classifier()
    make_trainer(tmp_path / "out", model=alone).train()
    assert same_bits(model, alone)
    run = read_record(tmp_path / "run")
    assert run.samples(params=["net.0.weight"])["step"].to_pylist() == list(range(STEPS))
    assert run.metadata["steps"] == STEPS
    assert run.metadata["steps_per_epoch"] == STEPS
    assert run.samples()["weight_decay"].to_pylist() == [0.1] * 3 * STEPS
    said = capsys.readouterr().out
    assert said[said.index("equilibria: ") :].count("\n") < 20
    assert f"equilibria report {tmp_path / 'run'}" in said.replace("\n", "")


def test_accumulated_batches_and_epochs_are_counted_in_optimizer_steps(tmp_path):
    callback = EquilibriaCallback(every=1, summary=False)
    make_trainer(
        tmp_path, callback, max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=4
    ).train()  # 6 batches: a step of four, a step of two
    assert callback.monitor.step == 6
    assert callback.monitor.metadata["steps_per_epoch"] == 2
    assert callback.monitor.metadata["batch_size"] == 4 * 16


def test_the_loss_and_the_evaluation_that_the_trainer_logs_are_recorded(tmp_path):
    callback = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    more = {"logging_strategy": "steps", "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(tmp_path / "out", callback, evaluated=examples(32), **more)
    trainer.train()
    series = metric_series(read_record(tmp_path / "run").metrics())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert series["loss"][0].tolist() == [entry["step"] - 1 for entry in logged] == [1, 3, 5]
    assert series["loss"][1].tolist() == [entry["loss"] for entry in logged]
    assert series["eval_loss"][0].tolist() == [2, 5]
    assert set(series) == {"loss", "eval_loss"}


class Broken(Classifier):
    def forward(self, inputs, labels):
        return {"loss": torch.nan * super().forward(inputs, labels)["loss"]}


def test_findings_are_lines_in_the_log_of_transformers(tmp_path):
    seen, handler = [], logging.Handler()
    handler.emit = lambda record: seen.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("transformers.equilibria")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        callback = EquilibriaCallback(every=1, summary=False)
        make_trainer(tmp_path, callback, model=Broken()).train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    kinds = {(finding.severity, finding.kind) for finding in callback.monitor.findings()}
    assert ("warning", "not_finite") in kinds
    assert len(seen) == len(set(seen)) >= len(kinds)
    assert {(level, line.split(": ")[1]) for level, line in seen} <= {("WARNING", "warning"), ("INFO", "note")}


def test_data_without_a_length_has_no_epochs(tmp_path):
    callback = EquilibriaCallback(every=1, summary=False)
    make_trainer(tmp_path, callback, data=Endless(), max_steps=3).train()
    assert callback.monitor.step == 3
    assert callback.monitor.metadata["steps_per_epoch"] is None


def test_a_checkpoint_resumes_the_record(tmp_path):
    first = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    make_trainer(tmp_path / "out", first, max_steps=4, **saving).train()
    second = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    trainer = make_trainer(tmp_path / "out", second, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))  # steps 2 and 3 are lost
    assert second.monitor.step == STEPS
    run = read_record(tmp_path / "run")
    assert len(run.sessions) == 2
    assert run.samples(params=["net.0.weight"])["step"].to_pylist() == list(range(STEPS))
    whole = EquilibriaCallback(every=1, summary=False)
    make_trainer(tmp_path / "other", whole, lr_scheduler_type="constant").train()
    for name in ("angle", "angle_predicted"):  # as if it had not stopped; a checkpoint keeps all bits
        assert run.samples()[name].to_pylist() == whole.monitor.samples()[name].to_pylist()


def test_a_checkpoint_goes_on_in_its_own_run_and_not_in_another_of_that_name(tmp_path):
    def callback():
        return EquilibriaCallback(tmp_path / "run", every=1, summary=False)

    make_trainer(tmp_path / "first", callback()).train()
    with pytest.warns(RecordWarning, match="this one is recorded into .*run-2"):
        make_trainer(tmp_path / "second", callback(), max_steps=3, save_strategy="steps", save_steps=3).train()
    make_trainer(tmp_path / "second", callback()).train(resume_from_checkpoint=True)
    assert [len(read_record(tmp_path / name).sessions) for name in ("run", "run-2")] == [1, 2]
    assert read_record(tmp_path / "run-2").samples(params=["net.0.weight"])["step"].to_pylist() == list(range(STEPS))


def test_a_checkpoint_without_our_state_is_told_and_one_elsewhere_is_found_by_its_argument(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path / "out", EquilibriaCallback(tmp_path / "run", every=1, summary=False), **saving).train()
    shutil.copytree(tmp_path / "out" / "checkpoint-3", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "out")
    callback = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    trainer = make_trainer(tmp_path / "out", callback)
    with (
        pytest.warns(WatchWarning, match=r"no .*checkpoint-3/equilibria.pt: the record of this run starts again"),
        pytest.warns(RecordWarning, match="holds a run already"),
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "elsewhere"))
    assert callback.monitor.step == STEPS - 3
    named = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    trainer = make_trainer(tmp_path / "out", named, resume_from_checkpoint=str(tmp_path / "elsewhere"))
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    assert named.monitor.step == STEPS
    assert named.monitor.log_dir == tmp_path / "run"


def test_an_exception_leaves_no_hooks_and_a_record_that_can_be_read(tmp_path):
    with EquilibriaCallback(tmp_path / "run", every=1) as callback:
        trainer = make_trainer(tmp_path / "out", callback, FailsAt(4))
        with pytest.raises(RuntimeError, match="the data are gone"):
            trainer.train()
        assert hooks(trainer.optimizer) == 2
    assert hooks(trainer.optimizer) == 0
    assert read_record(tmp_path / "run").metadata["steps"] == 4
    assert read_record(tmp_path / "run").samples().num_rows == 12


def test_the_next_training_closes_what_an_exception_left_open(tmp_path):
    callback = EquilibriaCallback(tmp_path / "run", every=1, summary=False)
    saving = {"save_strategy": "steps", "save_steps": 2}
    broken = make_trainer(tmp_path / "out", callback, FailsAt(3), **saving)
    with pytest.raises(RuntimeError, match="the data are gone"):
        broken.train()
    assert hooks(broken.optimizer) == 2  # the trainer does not tell
    again = EquilibriaCallback(tmp_path / "run", every=1, summary=False)  # as in a notebook whose cell is run once more
    make_trainer(tmp_path / "out", again, **saving).train(resume_from_checkpoint=True)
    assert hooks(broken.optimizer) == 0
    assert read_record(tmp_path / "run").samples(params=["net.0.weight"])["step"].to_pylist() == list(range(STEPS))
    del broken, callback
    gc.collect()


def test_samples_go_to_sinks_and_a_sink_that_fails_breaks_nothing(tmp_path):
    class Kept(ScalarSink):
        steps = ()

        def write(self, scalars, step):
            self.steps = (*self.steps, step)

    class Broken(ScalarSink):
        def write(self, scalars, step):
            raise OSError("no connection")

    kept = Kept()
    trainer = make_trainer(tmp_path, EquilibriaCallback(every=1, sinks=[Broken(), kept], summary=False))
    with pytest.warns(WatchWarning, match="Broken takes no more samples"):
        trainer.train()
    assert kept.steps == tuple(range(STEPS))
    assert trainer.state.global_step == STEPS


def test_what_cannot_be_watched_is_told_and_training_goes_on(tmp_path):
    callback = EquilibriaCallback(select="no.such.weight")
    trainer = make_trainer(tmp_path, callback, save_strategy="steps", save_steps=STEPS)
    with pytest.warns(WatchWarning, match=r"this training is not watched: got .*; training goes on"):
        trainer.train()
    assert trainer.state.global_step == STEPS
    assert callback.monitor is None
    assert not list(tmp_path.rglob("equilibria.pt"))


def test_a_damaged_state_is_told_and_training_goes_on(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, EquilibriaCallback(every=1, summary=False), **saving).train()
    (tmp_path / "checkpoint-3" / "equilibria.pt").write_bytes(b"not a checkpoint")
    callback = EquilibriaCallback(every=1, summary=False)
    trainer = make_trainer(tmp_path, callback)
    with pytest.warns(WatchWarning, match="the record of this run starts again at step 0"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert callback.monitor.step == STEPS - 3


@pytest.mark.parametrize("given", [{"every": 0}, {"granularity": "rows"}])
def test_bad_options_are_refused_at_once(given):
    with pytest.raises(EquilibriaError, match="got "):
        EquilibriaCallback(**given)


def test_the_lines_on_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(snippet("transformers"), {"model": Classifier(), "arguments": make_trainer("out").args, "dataset": examples()})
    assert read_record("runs/a").metadata["steps"] == STEPS


# ---- accelerate by itself


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    yield accelerator
    accelerator.end_training()


def test_an_optimizer_that_accelerate_prepared_is_watched(accelerator):
    plain, given = make_net(), make_net()
    optimizer = sgd(plain)
    with eq.watch(plain, optimizer, every=1) as by_hand:
        for number, batch in enumerate(batches(8)):
            backward(plain, batch, scale=0.5)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    net, prepared = accelerator.prepare(given, sgd(given))
    loader = accelerator.prepare(
        DataLoader(TensorDataset(*map(torch.cat, zip(*batches(8), strict=True))), batch_size=16)
    )
    with eq.watch(net, prepared, every=1) as monitor:
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(inputs).double(), targets))
                prepared.step()
                prepared.zero_grad()
    assert monitor.step == by_hand.step == 4
    for name in ("angle", "norm", "grad_norm"):
        found, wanted = (each.samples()[name].to_numpy() for each in (monitor, by_hand))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)  # float32, losses halved before or after
    assert hooks(prepared) == 0


def test_steps_that_a_scaler_skips_do_not_count(accelerator):
    net = make_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    prepared = AcceleratedOptimizer(sgd(net), device_placement=False, scaler=scaler)
    with eq.watch(net, prepared, every=1) as monitor:
        for number, batch in enumerate(batches(5)):
            prepared.zero_grad()
            scaled = float(scaler.scale(torch.ones(())))
            backward(net, batch, scale=float("inf") if number in (1, 3) else scaled)
            prepared.step()
            assert prepared.step_was_skipped == (number in (1, 3))
    assert monitor.step == 3
    assert np.isfinite(monitor.samples()["grad_norm"].to_numpy()).all()


def test_watching_one_that_was_not_prepared_yet_goes_on_inside_of_it(accelerator):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1) as monitor:
        train(net, accelerator.prepare(optimizer), 3)
    assert monitor.step == 3
