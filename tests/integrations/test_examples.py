"""Every example runs, from another folder, and leaves a run that can be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equilibria.records import read_record

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = {  # enough to see it work; what is shown takes longer
    "tensorboard_digits": ["--epochs", "2"],
    "wandb_offline": ["--epochs", "2"],
    "mlflow_local": ["--epochs", "2"],
    "lightning_digits": ["--epochs", "2"],
    "transformers_gpt": ["--steps", "12"],
}


@pytest.mark.slow  # each imports a whole framework in a process of its own
@pytest.mark.parametrize("name", SHORT)
def test_an_example_runs_and_leaves_a_run(name, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *SHORT[name]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr.replace("FutureWarning: `isinstance(treespec", ""), done.stderr
    run = read_record(tmp_path / "runs" / name / "run")
    assert run.metadata["steps"] == (12 if name == "transformers_gpt" else 22)
    assert run.samples().num_rows
    assert re.search(r"rad(/| per )step", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_every_example_is_tested_and_described():
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(SHORT)
    described = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.py`" in described for name in scripts)
