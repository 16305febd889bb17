"""A training shared by two processes of torch.distributed has the numbers of one with ghost batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.helpers.ranks import run_two_ranks
from tests.helpers.two_trainings import numbers, recipe

from equilibria.lab.training import process, train

pytestmark = [
    pytest.mark.slow,  # starting the processes is
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run_two_ranks("tests.helpers.two_trainings", folder, seconds=240)
    assert sorted(path.name for path in folder.iterdir()) == ["0.pt", "1.pt", "resumed", "whole"]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("kind", ["whole", "resumed"])
def test_two_processes_train_as_one(found, kind):
    alone = numbers(train(recipe()))
    for rank in range(2):
        assert found[rank]["covers"] == "ghost batches" and process() == (0, 1)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(found[rank][kind]["weights"][name], weight, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(found[rank][kind]["loss"], alone["loss"], rtol=1e-5)
    np.testing.assert_allclose(found[0][kind]["angles"], alone["angles"], rtol=1e-4)


def test_both_processes_have_equal_weights_also_after_a_stop(found):
    for name, weight in found[0]["whole"]["weights"].items():
        assert all(
            torch.equal(found[rank][kind]["weights"][name], weight)
            for rank in (0, 1)
            for kind in found[0]
            if kind in ("whole", "resumed")
        )


def test_data_that_are_not_shared_raise(found):
    for rank in range(2):
        assert f"got data without the share of process {rank} of 2" in found[rank]["refused"]
