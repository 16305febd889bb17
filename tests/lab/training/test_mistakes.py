"""What a training refuses: other trainings' checkpoints, data that end, states that cannot be read, bare mistakes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.helpers.training_cases import DROP, STEPS, StoppedError, optimizer, recipe, stop_at
from torch import nn
from torch.nn.functional import cross_entropy

from equilibria.errors import EquilibriaError
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.nets import BasicBlockResNet
from equilibria.lab.training import Evaluation, FullBatch, Recipe, Training, decay_groups, drops, train
from equilibria.lab.training.training import Checkpoint, read_checkpoint


def plain(**changes) -> Recipe:
    """Without measures and watching."""
    return recipe(**{"measures": {}, "watch_every": None, **changes})


def some_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [batch for batch, _ in zip(plain().data, range(count), strict=False)]


def perceptron(**changes) -> Recipe:
    inputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    base = Recipe(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=FullBatch(inputs, torch.arange(9) % 2),
        steps=4,
    )
    return replace(base, **changes)


# ---- data


@pytest.mark.parametrize("loader", [list, lambda found: torch.utils.data.DataLoader(found, batch_size=None)])
def test_data_that_end_early_are_an_error_after_a_checkpoint(loader, tmp_path):
    data = loader(some_batches(5))
    with pytest.raises(EquilibriaError, match="got data that end after 5 batches; expected 20, one for each step"):
        train(plain(data=data, steps=20), folder=tmp_path)
    assert read_checkpoint(tmp_path / "checkpoint.pt")["step"] == 5
    whole, cut = train(plain(steps=20)), train(plain(data=some_batches(20), steps=20), folder=tmp_path)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, cut.model.state_dict()[name]), name


def test_data_that_can_be_iterated_once_raise():
    with pytest.raises(EquilibriaError, match="got data of type list_iterator, which can be gone through only once"):
        train(plain(data=iter(some_batches(STEPS))))
    with pytest.raises(EquilibriaError, match="got data without a batch; expected 24"):
        train(plain(data=[]))


# ---- checkpoints that cannot be read


def test_a_schedule_of_numpy_is_a_plain_number_in_the_checkpoint(tmp_path):
    numpy_schedule = plain(schedule=lambda step: np.float64(0.5) if step >= 3 else np.float64(1))
    with pytest.raises(StoppedError):
        train(numpy_schedule, folder=tmp_path, checkpoint_steps=4, progress=stop_at(6))
    told: list[int] = []
    train(numpy_schedule, folder=tmp_path, progress=told.append)
    assert told[0] == 5


def test_a_state_that_could_not_be_read_is_not_written(tmp_path):
    def rule(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=np.float64(0.1))

    with pytest.raises(EquilibriaError, match=r"got a state with an object of numpy\S*, which could not be read again"):
        train(plain(optimizer=rule), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_is_read_once_only(tmp_path, monkeypatch):
    reads: list[int] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **more: (reads.append(1), load(*args, **more))[1])
    checkpoint = Checkpoint(tmp_path / "c.pt")
    for step in range(3):
        checkpoint.write({"step": step})
    assert len(reads) == 1


def test_a_checkpoint_with_foreign_objects_is_no_damage(tmp_path):
    train(recipe(), folder=tmp_path)
    torch.save({"lr": np.float64(1)}, tmp_path / "checkpoint.pt")
    with pytest.raises(EquilibriaError, match=r"got the checkpoint .*checkpoint\.pt, which holds an object of numpy"):
        train(recipe(), folder=tmp_path)
    assert (tmp_path / "record").is_dir()


def test_a_checkpoint_that_cannot_be_had_is_not_taken_for_none(tmp_path, monkeypatch):
    train(recipe(), folder=tmp_path)

    def fail(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(PermissionError):
        train(recipe(), folder=tmp_path)
    assert (tmp_path / "record").is_dir()


def test_what_a_kill_in_the_middle_of_a_write_left_is_removed(tmp_path):
    for _ in range(2):  # before the first checkpoint, and beside it
        (tmp_path / ".checkpoint.pt-0123abcd.tmp").write_bytes(b"half")
        train(perceptron(), folder=tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


# ---- folders that are no training's


def names(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("foreign", ["notes.txt", "mine.tmp", "deep/x", "record/mine.csv", "record/deep/x", "record"])
@pytest.mark.parametrize("watched", [None, 1])
def test_a_folder_with_other_things_raises_and_left_as_it_was(foreign, watched, tmp_path):
    (tmp_path / foreign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / foreign).write_text("mine")
    before = names(tmp_path)
    expected = "expected a folder that is new, empty or of an earlier training: choose another"
    with pytest.raises(EquilibriaError, match=rf"got folder='{tmp_path}', which holds other things \(.+\); {expected}"):
        train(perceptron(watch_every=watched), folder=tmp_path)
    assert names(tmp_path) == before and (tmp_path / foreign).read_text() == "mine"


def test_other_things_beside_a_checkpoint_are_kept(tmp_path):
    train(perceptron(), folder=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:-100])
    train(perceptron(steps=6), folder=tmp_path)
    assert names(tmp_path) == ["checkpoint.pt", "notes.txt"]


def test_a_record_of_others_is_not_removed_with_a_damaged_checkpoint(tmp_path):
    train(perceptron(), folder=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:-100])
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "mine.csv").write_text("mine")
    with pytest.raises(EquilibriaError, match=r"which holds other things \(record\)"):
        train(perceptron(), folder=tmp_path)
    assert (tmp_path / "record" / "mine.csv").read_text() == "mine"


LEFT = {  # by a kill before the first checkpoint: while the record was begun, was written, or was removed again
    "nothing": [],
    "a record that was just begun": ["record/writer.lock"],
    "half a description": ["record/writer.lock", "record/run.json.tmp"],
    "rows without their description": ["record/samples-000.arrows", "record/writer.lock"],
    "half a checkpoint": [".checkpoint.pt-0123abcd.tmp", "record/writer.lock"],
    "the lock of a task": ["writer.lock"],
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_kill_left_before_the_first_checkpoint_is_no_hindrance(what, tmp_path):
    (tmp_path / "record").mkdir()
    for name in LEFT[what]:
        (tmp_path / name).write_bytes(b"")
    again, whole = train(recipe(steps=6), folder=tmp_path), train(recipe(steps=6))
    assert again.samples.equals(whole.samples)


def test_a_record_without_a_checkpoint_is_begun_anew(tmp_path):
    with pytest.raises(StoppedError):
        train(recipe(), folder=tmp_path, progress=stop_at(7))
    assert (tmp_path / "record" / "run.json").exists() and not (tmp_path / "checkpoint.pt").exists()
    again, whole = train(recipe(), folder=tmp_path), train(recipe())
    assert again.samples.equals(whole.samples)


# ---- other trainings' checkpoints


class Wider(BasicBlockResNet):
    def __init__(self) -> None:
        super().__init__(6, (1,))


def same_data(**changes) -> Batches:
    digits, settings = load_digits(), {"batch_size": 32, "seed": 5, "crop": 1, "label_noise": 0.1, **changes}
    return Batches(digits.train_images, digits.train_labels, **settings)


def other_rule(name: str, value: float):
    def made(model: nn.Module) -> torch.optim.Optimizer:
        rule = optimizer("sgd", model)
        rule.param_groups[0][name] = value
        return rule

    return made


OTHERS = {
    "seed is 3 there and 4 here": {"seed": 4},
    "first batch is [0-9a-f]{16} there and [0-9a-f]{16} here": {"data": same_data(seed=6)},
    "lr of group 0 is 0.1 there and 0.2 here": {"optimizer": other_rule("lr", 0.2)},
    "weight_decay of group 0 is 0.005 there and 0.1 here": {"optimizer": other_rule("weight_decay", 0.1)},
    "momentum of group 0 is 0.9 there and 0.5 here": {"optimizer": other_rule("momentum", 0.5)},
    r"shape of \S+ is \[.*\] there and none here": {"model": Wider},
}


def smoothed(amount: float):
    return lambda outputs, targets: cross_entropy(outputs, targets, label_smoothing=amount)


# A branch may differ from its stem in these.
OF_STEPS = {
    r"loss is \S+\.cross_entropy\(.*\) there and \S+<lambda>\(.*amount=0.1.*\) here": {"loss": smoothed(0.1)},
    r"loss is .* there and \S+\.cross_entropy\(.*\)\(label_smoothing=0.1\) here": {
        "loss": partial(cross_entropy, label_smoothing=0.1)
    },
    r"loss is .* there and \S+\.CrossEntropyLoss\(.*label_smoothing=0.1.*\) here": {
        "loss": nn.CrossEntropyLoss(label_smoothing=0.1)
    },
    "control is none there and .*rescaled.* here": {"control": recipe(rescale=True).control},
    "chunk is None there and 16 here": {"chunk": 16},
    "data's label_noise is 0.1 there and 0.2 here": {"data": same_data(label_noise=0.2)},
    "data's crop is 1 there and 0 here": {"data": same_data(crop=0)},
}


@pytest.mark.parametrize("what", [*OTHERS, *OF_STEPS])
def test_a_folder_with_another_training_raises(what, tmp_path):
    train(plain(steps=4), folder=tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(EquilibriaError, match=rf"got the folder {tmp_path}, of another training: {what}; expected the"):
        train(plain(**(OTHERS | OF_STEPS)[what]), folder=tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_missing_control_raises(tmp_path):
    train(plain(rescale=True, steps=4), folder=tmp_path)
    with pytest.raises(EquilibriaError, match=r"control is \S*rescaled\(.*\) there and none here"):
        train(plain(), folder=tmp_path)


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (drops([70], 5), r"50 to 99 is 1.0 to 0.2 \([0-9a-f]{8}\) there and 1.0 to 0.2 \([0-9a-f]{8}\) here"),
        (lambda step: 1 - step / 200, r"0 to 49 is 1.0 there and 1.0 to 0.755 \([0-9a-f]{8}\) here"),
    ],
)
def test_another_schedule_raises(schedule, what, tmp_path):
    base = perceptron(steps=120, schedule=drops([60], 5))
    with pytest.raises(StoppedError):
        train(base, folder=tmp_path, checkpoint_steps=1, progress=stop_at(3))
    with pytest.raises(EquilibriaError, match=f"schedule in steps {what}"):
        train(replace(base, schedule=schedule), folder=tmp_path)
    train(replace(base, schedule=lambda step: 1.0 if step < 60 else 0.2), folder=tmp_path)  # the same in other words


def test_a_schedule_that_changes_after_the_old_end_resumes(tmp_path):
    train(perceptron(steps=100), folder=tmp_path)
    train(perceptron(steps=150, schedule=drops([100], 5)), folder=tmp_path)


@pytest.mark.parametrize("what", OF_STEPS)
def test_a_branch_may_go_on_otherwise(what):
    train(plain(steps=6, **OF_STEPS[what]), start=train(plain(steps=4)).state)


def test_fewer_steps_than_were_done_raise_and_more_are_done(tmp_path):
    train(plain(steps=6), folder=tmp_path)
    with pytest.raises(EquilibriaError, match="whose training has done 6 steps; expected at most the 5 steps"):
        train(plain(steps=5), folder=tmp_path)
    further, whole = train(plain(steps=9), folder=tmp_path), train(plain(steps=9))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, further.model.state_dict()[name]), name


@pytest.mark.parametrize("what", [what for what, changes in OTHERS.items() if not changes.keys() & {"seed", "data"}])
def test_a_branch_with_another_network_or_optimizer_raises(what):
    stem = train(plain(steps=4))
    with pytest.raises(EquilibriaError, match=rf"got a start, of another training: {what}; expected the same network"):
        train(plain(**OTHERS[what]), start=stem.state)


def test_a_branch_beyond_a_drop_has_the_optimizer_of_its_stem():
    """What is compared are the settings as they were first made, not those of the schedule."""
    stem = train(plain(steps=DROP + 2))
    assert stem.state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.02)
    train(plain(), start=stem.state)


def test_a_start_that_is_not_a_training_raises():
    with pytest.raises(EquilibriaError, match=r"got a start without model, optimizer, .*; expected the state of a"):
        train(plain(), start={"step": 3})


@pytest.mark.parametrize("start", [3, "state.pt"])
def test_a_start_that_is_not_a_state_raises(start):
    with pytest.raises(
        EquilibriaError, match=f"got start of type {type(start).__name__}; expected the state of another"
    ):
        train(plain(), start=start)


def test_a_training_itself_is_no_start():
    stem = train(perceptron(steps=2))
    with pytest.raises(EquilibriaError, match=r"got start of type Trained; expected .*: start=trained\.state"):
        train(perceptron(), start=stem)
    train(perceptron(), start=stem.state)


# ---- recipes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(3, 2)}, "got model=an object of Linear; expected a function that makes the network"),
        ({"model": None}, r"got model=an object of NoneType; expected .*: model=lambda: \.\.\."),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)},
            r"got optimizer=an object of SGD; expected a function .*: optimizer=lambda model: torch\.optim\.SGD\(model",
        ),
        ({"optimizer": torch.optim.SGD}, "got optimizer=the class SGD; expected a function that makes it for the"),
        ({"optimizer": "sgd"}, "got optimizer=an object of str; expected a function"),
    ],
)
def test_a_ready_made_model_or_optimizer_raises(changes, message):
    with pytest.raises(EquilibriaError, match=message):
        perceptron(**changes)


def test_whole_numbers_of_a_recipe_may_be_floats():
    floats, ints = (
        {"steps": kind(4), "chunk": kind(3), "measure_every": kind(2), "seed": kind(1)} for kind in (float, int)
    )
    one, two = (train(perceptron(model=lambda: nn.Linear(3, 2), **each)) for each in (floats, ints))
    assert one.state["made_of"] == two.state["made_of"]
    assert torch.equal(one.model.weight, two.model.weight)


# ---- pixels


PIXELS = torch.arange(9 * 16).to(torch.uint8).view(9, 1, 4, 4)
LABELS = torch.arange(9) % 2


def on_pixels(**changes) -> Recipe:
    base = {"model": lambda: BasicBlockResNet(4, (1,)), "data": FullBatch((PIXELS - 70) / 40, LABELS), "steps": 1}
    return perceptron(**{**base, **changes})


@pytest.mark.parametrize("chunk", [None, 3])
def test_pixels_to_train_on_are_named(chunk):
    expected = r"expected floats: images\.standardised\(\), or Batches\(\.\.\., transform=images\.standardiser\(\)\)"
    with pytest.raises(EquilibriaError, match=rf"got inputs of uint8 \(\d, 1, 4, 4\), pixels as files .*; {expected}"):
        train(on_pixels(data=FullBatch(PIXELS, LABELS), chunk=chunk))


@pytest.mark.parametrize("statistics", [[], [PIXELS]])
def test_pixels_to_evaluate_on_are_named(statistics):
    floats = next(iter(on_pixels().data))
    given = Evaluation(statistics, test=floats if statistics else (PIXELS, LABELS))
    with pytest.raises(
        EquilibriaError, match=r"got inputs of uint8 .*: standardise these images as those of the train"
    ):
        train(on_pixels(measures={"test": given}))


class OnPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

    def forward(self, images):
        return self.body(images / 255)


def test_a_network_may_take_pixels():
    measures = {"test": Evaluation([PIXELS], test=(PIXELS, LABELS))}
    train(on_pixels(model=OnPixels, data=FullBatch(PIXELS, LABELS), measures=measures))


def test_other_failures_of_networks_are_not_laid_on_pixels():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(perceptron(data=FullBatch(torch.zeros(4, 5), torch.zeros(4).long())))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(perceptron(measures={"test": Evaluation(test=(torch.zeros(4, 5), torch.zeros(4).long()))}))


# ---- other mistakes


def test_statistics_that_are_not_a_list_of_batches_raise():
    inputs, labels = torch.zeros(4, 3), torch.zeros(4).long()
    with pytest.raises(EquilibriaError, match=r"got statistics as one tensor of \(4, 3\); expected a list of batches"):
        Evaluation(inputs, test=(inputs, labels))
    with pytest.raises(EquilibriaError, match=r"got a tuple among the statistics; expected .* without labels"):
        Evaluation([inputs, (inputs, labels)], test=(inputs, labels))


def test_one_name_of_invariant_weights_is_no_list():
    settings = {"lr": 0.1, "weight_decay": 0.1, "other_lr": 0.1}
    with pytest.raises(EquilibriaError, match=r"got invariant='weight'; expected a list of names: \['weight'\]"):
        decay_groups(nn.Linear(2, 2), "weight", **settings)
    groups = decay_groups(nn.Linear(2, 2), (name for name in ["weight"]), **settings)
    assert [len(group["params"]) for group in groups] == [1, 1]


@pytest.mark.parametrize("name", ["step", "loss", "test_loss"])
def test_two_measures_with_one_name_raise(name):
    digits = load_digits()
    measures = {
        "sets": Evaluation(test=(digits.test_images, digits.test_labels)),
        "twice": lambda training: {name: 1.0},
    }
    with pytest.raises(EquilibriaError, match=f"got a measure 'twice' that gives '{name}', which is there already"):
        train(plain(measures=measures))


def test_a_network_without_parameters_raises():
    with pytest.raises(EquilibriaError, match="got a ReLU without parameters; expected a network to train"):
        train(perceptron(model=nn.ReLU))


@pytest.mark.parametrize("below", ["", "further"])
def test_a_folder_that_is_a_file_raises(below, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EquilibriaError, match="where a file is; expected a folder, or nothing"):
        train(perceptron(), folder=tmp_path / "file" / below)


def test_a_set_without_samples_raises():
    with pytest.raises(EquilibriaError, match="got test with 0 inputs and 0 labels; expected one label per input"):
        Evaluation(test=(torch.zeros(0, 3), torch.zeros(0)))
    with pytest.raises(EquilibriaError, match="got test with 2 inputs and 3 labels"):
        Evaluation(test=(torch.zeros(2, 3), torch.zeros(3)))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "other_lr"])
def test_negative_settings_raise(name):
    settings = {"lr": 0.1, "weight_decay": 0.1, "other_lr": 0.1, name: -0.5}
    with pytest.raises(EquilibriaError, match=f"got {name}=-0.5; expected 0 <= {name}"):
        decay_groups(nn.Linear(2, 2), ["weight"], **settings)


def test_a_schedule_that_falls_below_zero_raises():
    with pytest.raises(EquilibriaError, match=r"got schedule\(2\)=-1; expected 0 <= schedule\(2\)"):
        train(perceptron(schedule=lambda step: 1.0 - step))


def test_a_last_chunk_of_one_sample_raises_where_it_cannot_be_normalised():
    with pytest.raises(EquilibriaError, match="got a single sample to train on, of a batch of 9 with chunk=8"):
        train(perceptron(chunk=8))
    train(perceptron(chunk=8, model=lambda: nn.Linear(3, 2)))
    with pytest.raises(EquilibriaError, match="got a batch of one sample for BatchNorm's statistics"):
        Evaluation([torch.zeros(1, 3)], test=(torch.zeros(2, 3), torch.zeros(2).long()))(Training(perceptron()))
