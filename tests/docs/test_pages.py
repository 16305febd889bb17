"""The examples of every page run and print what the page shows (the format: page_runner.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.page_runner import Page

import equilibria as eq

DOCS = Path(__file__).parents[2] / "docs"
SHORTER = {
    "rotational": {"STEPS = 300": "STEPS = 20"},
    "start-in-equilibrium": {"STEPS = 300": "STEPS = 50"},
    "rescale-on-decay": {"DROP, STEPS = 150, 300": "DROP, STEPS = 150, 160"},
}
"""Only the pictures need the later steps: what is printed is about the first ones, or the same at every step."""

OWN_TEST = {"folded-weight-decay", "forecast", "sharpness"}
"""Pages beside this folder's index with a test_NAME_page.py: what they print differs between machines."""


def has_own_test(path: Path) -> bool:
    return path.parent == DOCS and path.stem in OWN_TEST


def pages() -> list[object]:
    """Every page with an example, the slow ones marked."""
    found = [Page(path).replaced(SHORTER.get(path.stem, {})) for path in sorted(DOCS.rglob("*.md"))]
    return [
        pytest.param(page, id=str(page.path.relative_to(DOCS)), marks=[pytest.mark.slow] if page.slow else [])
        for page in found
        if page.executes and not has_own_test(page.path)
    ]


@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    page.run()
    assert all(path.stat().st_size > 1e6 for path in tmp_path.glob("*.html"))  # pages of ours work offline


@pytest.mark.slow
def test_the_script_for_torchrun_records_the_training_of_two_processes(tmp_path):
    page = (DOCS / "how-do-i" / "distributed-amp-compile.md").read_text()
    (tmp_path / "train.py").write_text(page.split("<!-- file: train.py -->\n```python\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=120)
    run = eq.read_run(tmp_path / "runs" / "two")
    assert run.samples()["step"].to_pylist() == [step for step in range(0, 100, 5) for _ in range(2)]
    assert run.metrics().num_rows == 100


@pytest.mark.parametrize("name", sorted(OWN_TEST))
def test_a_page_that_is_left_out_here_has_its_own_test(name):
    assert Path(__file__).with_name(f"test_{name.replace('-', '_')}_page.py").is_file()


def test_every_concept_and_every_answer_has_an_example():
    """An index lists pages; all other pages of these folders show what they say."""
    silent = [
        path.name
        for folder in ("concepts", "laws", "how-do-i")
        for path in (DOCS / folder).glob("*.md")
        if path.name != "index.md" and not Page(path).executes
    ]
    assert silent == []
