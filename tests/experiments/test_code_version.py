"""The code version changes with the code that runs, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from equilibria.experiments import code_version as module
from equilibria.experiments.code_version import code_version

NAME = "equilibria.experiments.sharp.hamiltonian"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the package whose files the tests may change; returns a function that edits one and gives the hash."""
    root = tmp_path / "equilibria"
    shutil.copytree(Path(module.__file__).parents[1], root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "_ROOT", root)
    forget()

    def version(file: str = "", old: str = "", new: str = "", *, tasks_only: bool = False) -> str:
        if file:
            text = (root / file).read_text()
            assert old in text
            (root / file).write_text(text.replace(old, new, 1))
        forget()
        return code_version(NAME, tasks_only=tasks_only)

    yield version
    forget()


def forget():
    code_version.cache_clear()
    module._read.cache_clear()


def test_the_module_itself_counts(copy):
    assert copy() != copy("experiments/sharp/hamiltonian.py", "eta: float = 0.002", "eta: float = 0.003")


def test_what_it_imports_counts_however_deep(copy):
    before = copy()
    law = copy("theory/hamiltonian.py", "_NEWTON_STEPS = 100", "_NEWTON_STEPS = 101")
    assert law != before
    assert copy("errors.py", "result < low", "result <= low") != law


def test_what_it_does_not_import_does_not(copy):
    before = copy()
    assert copy("demo/recipe.py", "class Recipe", "class Recipes") == before


def test_what_people_see_does_not(copy, monkeypatch):
    """A task that watches a training imports the report, which changes no number."""
    monkeypatch.setitem(globals(), "NAME", "equilibria.watching.run")
    before = copy()
    assert copy("report/page.py", "def write_report", "def wrote_report") == before
    assert copy("measure/tap.py", "def has_grown", "def has_shrunk") != before


def test_what_only_refuses_a_folder_does_not(copy, monkeypatch):
    monkeypatch.setitem(globals(), "NAME", "equilibria.training.run")
    before = copy()
    assert copy("training/made_of.py", "_BLOCK = 50", "_BLOCK = 51") == before
    assert copy("training/training.py", "self.step += 1", "self.step += 2") != before


def test_comments_docstrings_and_layout_do_not_count(copy):
    before = copy()
    assert copy("theory/hamiltonian.py", '"""Potential of the particle', '"""The potential of the particle') == before
    assert copy("theory/hamiltonian.py", "_MAX_NODES = 1 << 16", "_MAX_NODES = (1 << 16)  # many") == before


def test_judging_and_drawing_count_for_results_but_not_for_tasks(copy):
    before, tasks = copy(), copy(tasks_only=True)
    assert copy("experiments/figures.py", '"font.size": 8', '"font.size": 9') != before
    assert copy(tasks_only=True) == tasks


def test_how_a_notebook_shows_a_thing_does_not_count(copy):
    before = copy()
    shown = "    def _repr_html_(self):\n        from equilibria.demo import recipe\n        return str(recipe)\n\n"
    held = "    eta: float = 0.002"
    assert copy("experiments/sharp/hamiltonian.py", held, f"{shown}{held}") == before
    assert copy("experiments/sharp/hamiltonian.py", "_repr_html_", "repr_html") != before
