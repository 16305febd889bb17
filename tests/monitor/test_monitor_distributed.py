"""Sharded and replicated training in several processes gives the numbers of one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch.distributed as dist
from tests.helpers.ranks import run_ranks, run_two_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
slow = pytest.mark.slow  # starting the processes is

SECONDS = 60  # for everything; the work itself takes a few


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What both processes found, or the reason why they did not finish."""
    folder = tmp_path_factory.mktemp("two")
    run_two_ranks("tests.helpers.two_processes", folder, seconds=SECONDS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder


def assert_same_numbers(found, expected):
    assert [(row["step"], row["param"], row["note"]) for row in found] == [
        (row["step"], row["param"], row["note"]) for row in expected
    ]
    for a, b in zip(found, expected, strict=True):
        for name in ("lr", "weight_decay", "norm", "grad_norm", "update_norm", "angle", "unit_grad_sq"):
            atol = 1e-9 if name == "angle" else 0.0  # rows of one number do not turn at all
            np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=atol, err_msg=f"{name} {a} {b}")
        for name in (
            "momentum_unit_grad_sq",
            "angle_equilibrium",
            "norm_equilibrium",
            "angle_predicted",
            "norm_predicted",
        ):
            assert (a[name] is None) == (b[name] is None), name
            if a[name] is not None:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("ranks", "quick"), [(2, ["quick"]), pytest.param(4, [], marks=slow)])
def test_meshes_give_the_numbers_of_one_process(ranks, quick, tmp_path):
    """Tensors in all placements on a mesh of 2 x 1 or 2 x 2 processes, and FSDP2 over tensor parallelism."""
    run_ranks(ranks, "tests.helpers.meshes", tmp_path, *quick, seconds=4 * SECONDS)
    for rank in range(ranks):
        held = json.loads((tmp_path / f"{rank}.json").read_text())
        for run in ("placed", "transformed")[: 1 if quick else 2]:
            assert held.pop(f"{run} sums") == 8  # along each axis of the mesh, in each of 4 steps
        for name, (found, expected) in held.items():
            assert_same_numbers(found, expected)
            experts = {row["param"] for row in found if row["param"].startswith("experts")}
            assert len(experts) == (11 if name.startswith("placed") else 0)


@slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
def test_the_numbers_of_one_process(results, kind, optimizer, granularity, rank):
    held = results[0][rank]
    assert_same_numbers(held[f"{kind} {optimizer} {granularity}"], held[f"one {optimizer} {granularity}"])


@slow
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_one_sum_over_the_processes_per_sample(results, optimizer, granularity):
    for held in results[0]:
        assert held["sums"][f"FSDP2 {optimizer} {granularity}"] == 6
        assert held["sums"][f"DDP {optimizer} {granularity}"] == 0


@slow
def test_auto_samples_the_same_steps_in_both_processes(results):
    first, second = (held["auto steps"] for held in results[0])
    assert first == second
    assert len(first) >= 2


@slow
def test_only_the_first_process_writes(results):
    held, folder = results
    assert [each["log_dir"] for each in held] == [str(folder / "run"), None]
    assert (folder / "run" / "run.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "1.json", "run"]


@slow
def test_a_failure_in_one_process_stops_the_watch_in_both_and_training_goes_on(results):
    first, second = (held["failure"] for held in results[0])
    assert first == "RuntimeError: watching has stopped in another process"
    assert second == "ZeroDivisionError: only here"
    for held in results[0]:
        np.testing.assert_allclose(held["trained with a failure"], held["trained alone"], rtol=1e-6)
