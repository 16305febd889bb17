"""The contents of the documents: what each item names is there, and no experiment is left out."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from equilibria.lab.harness.registry import MODULES, load
from equilibria.lab.papers.contents import ITEMS
from equilibria.lab.papers.items import STATUSES
from equilibria.theory import PAPERS, cite

RESULTS = Path(__file__).parents[3] / "results"
ALL = [item for items in ITEMS.values() for item in items]


def test_laws_and_experiments_are_there():
    assert {law for item in ALL for law in item.laws} <= {citation.law for citation in cite()}
    assert {name for item in ALL for name in item.all_experiments} <= set(MODULES)
    assert set(ITEMS) <= set(PAPERS) and {item.status for item in ALL} <= set(STATUSES)


@pytest.mark.parametrize("name", sorted({name for item in ALL for name in item.names}))
def test_names_are_public(name):
    home, _, last = f"equilibria.{name}".rpartition(".")
    public = getattr(importlib.import_module(home), "__all__", ())
    assert last in public or importlib.import_module(f"equilibria.{name}").__all__


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no committed results here (an installed package)")
def test_figures_are_there():
    figures = {figure for item in ALL for figure in item.figures}
    files = [RESULTS / experiment / "desk" / f"{name}.png" for experiment, name in (f.split("/") for f in figures)]
    assert [file for file in files if not file.is_file()] == []


def test_every_experiment_of_a_paper_is_in_the_contents_of_its_paper():
    for name in MODULES:
        words = load(name).source.split()
        papers = [paper for paper in ITEMS if paper in words]
        shown = {experiment for paper in papers for item in ITEMS[paper] for experiment in item.all_experiments}
        assert not papers or name in shown, f"{name}: add it to the contents of {papers}"


def test_an_item_names_something():
    for item in ALL:
        assert item.names or item.laws or item.all_experiments, item.where


def test_an_item_at_desk_scale_has_an_experiment_with_the_papers_settings():
    for item in ALL:
        if item.status == "at desk scale":
            has_settings = any("paper" in load(name).scales for name in item.all_experiments)
            assert has_settings or "smd-detection" in item.all_experiments, item.where  # its settings are a table
