"""A training equals a bare loop, is not disturbed by watching and measuring, and resumes bit for bit after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from tests.helpers.training_cases import DROP, STEPS, StoppedError, invariant, recipe, stop_at
from torch.nn import functional

from equilibria.control._folded_weight_decay import FoldedWeightDecay
from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.errors import EquilibriaError
from equilibria.lab.data import load_digits
from equilibria.lab.training import Trained, Training, by_layer, train
from equilibria.lab.training.training import read_checkpoint
from equilibria.records import read_record


def assert_same(one: Trained, two: Trained) -> None:
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, two.model.state_dict()[name]), name
    assert one.curves.keys() == two.curves.keys()
    for name, values in one.curves.items():
        np.testing.assert_array_equal(values, two.curves[name], err_msg=name)
    assert one.samples.equals(two.samples)
    flat = [torch.utils._pytree.tree_leaves(each.state["optimizer"]) for each in (one, two)]
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*flat, strict=True) if a is not None)


def bare_loop(kind: str) -> torch.nn.Module:
    """By hand: the same seed, batches and drop, without watching or measuring."""
    settings = recipe(kind)
    torch.manual_seed(settings.seed)
    model = settings.model()
    rule = settings.optimizer(model)
    for step, (images, labels) in enumerate(islice(settings.data, STEPS)):
        if step == DROP:
            for group in rule.param_groups:
                group["lr"] /= 5
        rule.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        rule.step()
    return model


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_weights_are_those_of_a_bare_loop(kind):
    trained, by_hand = train(recipe(kind)), bare_loop(kind)
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], value, rtol=0, atol=0)


def test_a_record_is_a_run_directory_with_the_same_samples(tmp_path):
    recorded = train(recipe(), record=tmp_path / "run")
    assert recorded.samples.equals(read_record(tmp_path / "run").samples())
    assert_same(recorded, train(recipe(), folder=tmp_path / "training"))
    with pytest.raises(EquilibriaError, match="expected one of the two"):
        train(recipe(), folder=tmp_path / "a", record=tmp_path / "b")


def test_training_twice_gives_the_same_whatever_else_draws_random_numbers():
    one = train(recipe())
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    two = train(recipe())
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(one, two)


def test_what_was_measured():
    trained = train(recipe())
    assert trained.curves["step"].tolist() == [0, 5, 10, 15, 20, 24]
    assert {"loss", "test_loss", "test_accuracy"} < trained.curves.keys()
    assert np.isnan(trained.curves["loss"][0]) and np.isfinite(trained.curves["loss"][1:]).all()
    layers = by_layer(trained.samples)
    assert layers.step.tolist() == list(range(0, STEPS, 3)) and len(layers.names) == 3
    assert trained.covers == "one batch"


def test_the_loss_is_the_mean_over_the_steps_since_the_last_measurement():
    given = recipe(measures={}, watch_every=None)
    training = Training(given)
    losses = []
    for batch in islice(training.batches(), 5):
        state = torch.get_rng_state()  # for dropout
        with torch.no_grad():
            losses.append(float(given.loss(training.model(batch[0]), batch[1])))
        torch.set_rng_state(state)
        training.advance(batch)
    assert train(given).curves["loss"][1] == pytest.approx(np.mean(losses), rel=1e-6)  # float32 forward passes


def test_killed_and_resumed_is_bit_for_bit_the_same(tmp_path):
    """kill -9 between two checkpoints, the first of which is right before the drop."""
    whole = train(recipe(rescale=True), folder=tmp_path / "whole")
    command = [sys.executable, "-m", "tests.helpers.killed", str(tmp_path / "cut"), "sgd", "14"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert read_checkpoint(tmp_path / "cut" / "checkpoint.pt")["step"] == DROP
    told: list[int] = []
    cut = train(recipe(rescale=True), folder=tmp_path / "cut", progress=told.append)
    assert told == list(range(DROP + 1, STEPS + 1))
    assert_same(whole, cut)
    assert_same(whole, train(recipe(rescale=True)))  # and in memory


@pytest.mark.parametrize(("kind", "last"), [("sgd", 3), ("sgd", 18), ("adam", 14)])
def test_interrupted_and_resumed_is_bit_for_bit_the_same(kind, last, tmp_path):
    """Before the first checkpoint, beyond the drop, and right after it."""
    with pytest.raises(StoppedError):
        train(recipe(kind, rescale=True), folder=tmp_path, checkpoint_steps=4, progress=stop_at(last))
    held = read_checkpoint(tmp_path / "checkpoint.pt")
    assert (held is None) == (last < 4) and (held is None or held["step"] == last // 4 * 4)
    assert_same(train(recipe(kind, rescale=True), folder=tmp_path), train(recipe(kind, rescale=True)))


def folded(scheduler, model):
    example = load_digits().train_images[:32]
    return FoldedWeightDecay(scheduler, model=model, invariant=invariant(model), example=example)


def test_weight_decay_that_is_folded_resumes_too(tmp_path):
    with pytest.raises(StoppedError):
        train(recipe(control=folded), folder=tmp_path, checkpoint_steps=4, progress=stop_at(14))
    assert_same(train(recipe(control=folded), folder=tmp_path), train(recipe(control=folded)))


def test_what_has_ended_is_read_not_trained(tmp_path):
    first = train(recipe(), folder=tmp_path)
    told: list[int] = []
    assert_same(first, train(recipe(), folder=tmp_path, progress=told.append))
    assert told == []


def test_a_damaged_checkpoint_counts_as_none(tmp_path):
    first = train(recipe(), folder=tmp_path)
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:1000])
    assert_same(first, train(recipe(), folder=tmp_path))


def test_branches_share_start_and_data_and_one_is_rescaled_at_the_drop():
    stem = train(replace(recipe(), steps=DROP))
    plain, rescaled = (train(recipe(rescale=rescale), start=stem.state) for rescale in (False, True))
    uncut = train(recipe())
    for name, value in uncut.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
    assert plain.curves["step"].tolist() == [15, 20, 24]
    norms = {name: by_layer(each.samples, ["norm"]) for name, each in (("plain", plain), ("rescaled", rescaled))}
    assert norms["plain"].step[0] == norms["rescaled"].step[0] == DROP
    ratio = norms["rescaled"].columns["norm"][0] / norms["plain"].columns["norm"][0]
    np.testing.assert_allclose(ratio, 5**-0.25, rtol=2e-3)  # up to the exact fixed point's terms of order lr wd


def test_a_branch_leaves_its_start_as_it_was():
    stem = train(replace(recipe(), steps=DROP))
    held = {name: value.clone() for name, value in stem.state["model"].items()}
    buffers = [value["momentum_buffer"].clone() for value in stem.state["optimizer"]["state"].values()]
    train(recipe(rescale=True), start=stem.state)
    assert all(torch.equal(stem.state["model"][name], value) for name, value in held.items())
    now = [value["momentum_buffer"] for value in stem.state["optimizer"]["state"].values()]
    assert all(torch.equal(one, two) for one, two in zip(buffers, now, strict=True))


def test_a_start_beyond_the_end_raises():
    stem = train(replace(recipe(), steps=DROP))
    with pytest.raises(EquilibriaError, match="got a start with 12 steps; expected the state of a training with fewer"):
        train(replace(recipe(), steps=DROP), start=stem.state)


def test_the_control_is_the_one_that_was_asked_for():
    assert isinstance(Training(recipe(rescale=True)).scheduler, RescaleOnDecay)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "got steps=0; expected 1 <= steps"),
        ({"measure_every": 0}, "measure_every"),
        ({"chunk": 0}, "chunk"),
        ({"watch_every": 0.5}, "watch_every"),
    ],
)
def test_an_impossible_recipe_raises(changes, message):
    with pytest.raises(EquilibriaError, match=message):
        recipe(**changes)


def test_a_watched_branch_off_an_unwatched_stem_counts_the_steps_of_the_training(tmp_path):
    stem = train(replace(recipe(watch_every=None), steps=DROP + 1))
    step = by_layer(train(recipe(), start=stem.state, folder=tmp_path).samples).step
    assert step.tolist() == [step for step in range(DROP + 1, STEPS) if step % 3 == 0]
    whole = by_layer(train(recipe()).samples, ["norm"])
    branch = by_layer(train(recipe(), start=stem.state).samples, ["norm"])
    np.testing.assert_array_equal(branch.columns["norm"], whole.columns["norm"][-len(branch.step) :])


class Counts:
    """A measure that remembers."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, training):
        self._count += 1
        return {"count": self._count}

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count = state["count"]


def test_measures_of_a_branch_go_on_with_what_those_of_the_same_name_remembered():
    stem = train(replace(recipe(measures={"one": Counts()}), steps=DROP))
    assert stem.curves["count"].tolist() == [1, 2, 3, 4]
    assert train(recipe(measures={"one": Counts()}), start=stem.state).curves["count"].tolist() == [5, 6, 7]
    assert train(recipe(measures={"another": Counts()}), start=stem.state).curves["count"].tolist() == [1, 2, 3]
