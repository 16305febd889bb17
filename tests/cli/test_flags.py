"""Errors of the library in the words of the command line."""

from __future__ import annotations

import pytest

from equilibria.cli._options import in_flags

FLAGS = {
    "wd": "--wd",
    "weight_decay": "--wd",
    "lr": "--lr",
    "momentum": "--momentum",
    "steps": "--steps",
    "dim": "--dim",
    "shape": "--shape",
    "unit_grad_sq": "--unit-grad-sq",
}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("got momentum=1.2; expected 0 <= momentum < 1", "got --momentum=1.2; expected 0 <= --momentum < 1"),
        ("got lr*weight_decay=5; expected 0 < lr*weight_decay < 2", "got --lr*--wd=5; expected 0 < --lr*--wd < 2"),
        ("got rule.weight_decay=0; expected 0 < rule.weight_decay", "got --wd=0; expected 0 < --wd"),
        ("got unit_grad_sq=None, dim=3; expected both", "got no --unit-grad-sq, --dim=3; expected both"),
        ("got x without dim; dim fixes the norm", "got x without --dim; --dim fixes the norm"),
        ("got init without shape; shape=(1, 2)", "got init without --shape; --shape=(1, 2)"),
        ("expected shape=(rows, columns): its sides", "expected --shape rows,columns: its sides"),
        ("pattern, columns={'norm': 'w/{param}'}", "pattern, --column norm=w/{param}"),
        ("expected momentum > 0 and lr = 1", "expected --momentum > 0 and --lr = 1"),
    ],
)
def test_arguments_become_flags(message, shown):
    assert in_flags(message, FLAGS) == shown
    assert in_flags(shown, FLAGS) == shown  # an error may pass through twice


@pytest.mark.parametrize(
    "message",
    [
        "expected at most 3 steps, with the momentum it has built up",
        "got --lr 0.1; expected one per lr in the file",
        "got momentum_t*alpha_t, max_steps=3 and new_weight_decay=1",
        "got --steps-per-epoch 10, --hold-angle-at-wd=0",
    ],
)
def test_other_words_are_left_alone(message):
    assert in_flags(message, FLAGS) == message
