"""FSDP2 on two processes: both measure the same numbers, and every bit of the training stays."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from tests.helpers.ranks import run_two_ranks

pytestmark = pytest.mark.slow  # starting the processes is


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_measure_the_same_and_change_nothing(tmp_path):
    run_two_ranks("tests.scripts.fsdp2", tmp_path, seconds=240)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["same"] and second["same"]
    assert first["failure"] is None and second["failure"] is None
    assert first["angles"] == second["angles"]
    for outcome in (first, second):
        assert "warning" not in outcome["severities"]
        assert not any("invariant" in sentence for sentence in outcome["findings"])
