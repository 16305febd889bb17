"""Two processes train together: both measure, one logs, and every step is logged once."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from tests.helpers.logged import assert_logged, expected
from tests.helpers.ranks import run_two_ranks

from equilibria.records import read_record

pytestmark = [
    pytest.mark.slow,  # starting the processes is
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

SECONDS = 240  # for everything; the work itself takes a few


@pytest.mark.parametrize("kind", ["plain", "lightning", "transformers"])
def test_every_step_is_logged_once(kind, tmp_path):
    from tests.integrations.test_tensorboard import SINGLE, read

    outputs = run_two_ranks("tests.helpers.two_ranks", kind, tmp_path, seconds=SECONDS)
    measured = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert measured == [{"steps": 5, "world": 2}] * 2  # both measure
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == 1
    run = read_record(tmp_path / "run")
    assert run.samples()["step"].to_pylist() == [step for step in range(5) for _ in range(3)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]
    logged = {tag: values for tag, values in read(tmp_path / "tensorboard").items() if tag.startswith("equilibria/")}
    assert_logged(logged, expected(run.samples()), rel=SINGLE)
    assert ["equilibria: " in output for output in outputs] == [kind != "plain", False]
