"""The library's exception knows the argument it is about, and keeps it wherever it goes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from equilibria.errors import EquilibriaError, number, one_of, positive, whole, within


@pytest.mark.parametrize(
    "check",
    [
        lambda: number("lr", "0.1"),
        lambda: number("lr", float("inf")),
        lambda: within("lr", 2, low=0, below=1),
        lambda: positive("lr", 0),
        lambda: whole("lr", 1.5),
        lambda: whole("lr", True),
        lambda: one_of("lr", "high", ["low"]),
    ],
)
def test_checks_name_their_argument(check):
    with pytest.raises(EquilibriaError, match="got lr=") as raised:
        check()
    assert raised.value.argument == "lr"


@pytest.mark.parametrize("argument", ["lr", None])
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_keep_message_and_argument(again, argument):
    error = again(EquilibriaError("got lr=0; expected 0 < lr", argument=argument))
    assert (str(error), error.argument) == ("got lr=0; expected 0 < lr", argument)
    assert isinstance(error, ValueError)


_TRAINING = """
import torch, equilibria as eq
model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
class Broken:
    def append(self, columns): raise OSError("disk full")
    def close(self): pass
monitor = eq.watch(model, optimizer, every=1, sinks=[Broken()])
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
monitor.close()
print("trained", len(monitor.samples()))
"""


def test_no_warning_becomes_an_exception_in_training():
    """With ``-W error`` the sentence goes to stderr."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", _TRAINING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained") and not done.stdout.startswith("trained 0")
    assert "WatchWarning: Broken takes no more samples" in done.stderr
