"""The library's exception knows the argument it is about, and keeps it wherever it goes."""

from __future__ import annotations

import copy
import pickle

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
