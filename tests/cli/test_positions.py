"""Where a schedule changes: positions count from the start of the run, and none is changed without a word."""

from __future__ import annotations

import bisect
import csv
import io

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from equilibria.cli import app
from equilibria.errors import EquilibriaError
from equilibria.theory.schedules import Cosine

SGD = "--optimizer sgd --lr 0.1 --wd 5e-4"


def lrs(line: str) -> list[float]:
    result = CliRunner().invoke(app, f"fold {SGD} {line} --csv".split())
    assert result.exit_code == 0, result.exception
    return [float(row["original_lr"]) for row in csv.DictReader(io.StringIO(result.output))]


def refusal(line: str, command: str = "fold") -> str:
    result = CliRunner().invoke(app, f"{command} {SGD} {line}".split())
    assert isinstance(result.exception, EquilibriaError), result.output
    return str(result.exception)


def drops(values: list[float]) -> list[int]:
    """Steps at which lr falls."""
    return [step for step in range(1, len(values)) if values[step] < values[step - 1]]


@pytest.mark.parametrize("warmup", ["", "--warmup 5", "--warmup 45"])
def test_milestones_are_epochs_of_the_run_with_and_without_a_warm_up(warmup):
    values = lrs(f"--schedule step --milestones 60,80 {warmup} --epochs 100 --steps-per-epoch 10")
    assert drops(values) == [600, 800]
    assert values[599:601] == [pytest.approx(0.1), pytest.approx(0.01)]


@pytest.mark.parametrize("warmup", ["", "--warmup 5"])
def test_a_drop_every_so_often_counts_from_the_start_too(warmup):
    values = lrs(f"--schedule step --every 30 {warmup} --epochs 100 --steps-per-epoch 10")
    assert drops(values) == [300, 600, 900]


def test_a_recipe_of_torch_in_epochs_has_the_same_lr_in_every_epoch():
    """Five epochs of warm-up and milestones in epochs of the run, stepped once per epoch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: min(1.0, epoch / 5) * 0.1 ** bisect.bisect_right([30, 60], epoch)
    )
    want = []
    for _ in range(90):
        want.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    got = lrs("--schedule step --milestones 30,60 --warmup 5 --epochs 90 --steps-per-epoch 4 --per-epoch")
    np.testing.assert_allclose(got[::4], want, rtol=1e-12)
    assert all(len(set(got[first : first + 4])) == 1 for first in range(0, 360, 4))


@pytest.mark.parametrize("warmup", [0, 30])
def test_the_final_decay_ends_with_the_run(warmup):
    option = f"--warmup {warmup}" if warmup else ""
    values = lrs(f"--schedule wsd --decay 40 {option} --steps 100")
    assert drops(values) == list(range(61, 100)) and values[60] == 0.1


def test_a_decay_right_after_the_warm_up():
    values = lrs("--schedule wsd --decay 70 --warmup 30 --steps 100")
    assert max(values) == values[30] == 0.1 and drops(values) == list(range(31, 100))


@pytest.mark.parametrize(("steps", "cycles"), [(39_100, 3), (100, 7), (10, 9), (90, 3)])
def test_every_cycle_of_a_cosine_uses_all_its_steps(steps, cycles):
    values = lrs(f"--schedule cosine --cycles {cycles} --steps {steps}")
    tops = [step for step, lr in enumerate(values) if lr == 0.1]
    lengths = np.diff([*tops, steps])
    assert len(tops) == cycles and lengths.max() - lengths.min() <= 1
    assert min(values) > 0


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("--schedule step --milestones 3 --warmup 5 --steps 10", ["--milestones 3", "after the warm-up of 5 steps"]),
        ("--schedule step --milestones 12 --warmup 5 --steps 10", ["--milestones 12", "end of the run at 10 steps"]),
        ("--schedule step --every 10 --steps 10", ["--every 10", "before the end of the run at 10 steps"]),
        ("--schedule wsd --decay 8 --warmup 5 --steps 10", ["--decay 8", "at most 5 steps", "leaves of 10 steps"]),
        ("--warmup 10 --steps 10", ["--warmup 10", "at 10 steps"]),
        ("--warmup 0.1 --steps 10", ["--warmup 0.1", "whole number of steps"]),
        ("--warmup 2.5 --steps 10", ["--warmup 2.5", "whole number of steps"]),
        ("--warmup 0.1 --epochs 10 --steps-per-epoch 3", ["--warmup 0.1", "at least one step"]),
        ("--schedule step --every 0.1 --steps 10", ["--every 0.1", "whole number of steps"]),
        ("--schedule step --milestones 0.5,4 --steps 10", ["--milestones 0.5", "whole number of steps"]),
        ("--epochs 0.01 --steps-per-epoch 10", ["--epochs 0.01", "at least one step"]),
        ("--schedule step --milestones a --steps 10", ["'a'", "such as 60,120,160"]),
        ("--epochs 10 --steps-per-epoch 10 --warmup 1e308", ["--warmup 1e+308", "at 10 epochs"]),
        ("--schedule wsd --decay 1e308 --epochs 10 --steps-per-epoch 10", ["--decay 1e+308", "10 epochs"]),
        ("--epochs 1e308 --steps-per-epoch 1e308", ["--steps-per-epoch=1e+308", "1e+07"]),
        ("--epochs 1e308 --steps-per-epoch 10", ["--epochs 1e+308", "10,000,000 steps"]),
        ("--steps 1e12", ["--steps=1e+12", "<= 1e+07"]),
    ],
)
@pytest.mark.parametrize("command", ["plan", "fold"])
def test_positions_that_would_have_to_be_changed_raise(line, fragments, command):
    message = refusal(line, command)
    for fragment in fragments:
        assert fragment in message


def test_a_file_holds_its_own_warm_up(tmp_path):
    (tmp_path / "lr.txt").write_text("0.1\n" * 10)
    assert "--warmup with --schedule file" in refusal(f"--schedule file --lr-file {tmp_path / 'lr.txt'} --warmup 2")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, "[[1]]", "[1" + "0" * 400 + "]", "[x]"])
def test_a_file_that_is_no_list_of_numbers(text, tmp_path):
    (tmp_path / "lr.json").write_text(text)
    message = refusal(f"--schedule file --lr-file {tmp_path / 'lr.json'}")
    assert "lr.json" in message and "JSON list" in message


def test_holding_lr_during_an_epoch_takes_no_call_per_step(monkeypatch):
    calls, at = [], Cosine._at
    monkeypatch.setattr(Cosine, "_at", lambda self, steps: calls.append(len(steps)) or at(self, steps))
    line = "--schedule cosine --epochs 20 --steps-per-epoch 30"
    stairs = lrs(f"{line} --per-epoch")
    assert len(calls) <= 3
    smooth = lrs(line)
    assert stairs == [smooth[step - step % 30] for step in range(600)]
