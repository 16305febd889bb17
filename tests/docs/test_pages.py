"""The examples of every page run and print what the page shows (the format: page_runner.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runner import Page

DOCS = Path(__file__).parents[2] / "docs"
ELSEWHERE = {
    "forecast", "sharpness", "symmetries", "minimiser-manifold", "folded-weight-decay", "rotational",
    "angular-schedule", "start-in-equilibrium", "sphere-optimizers", "lion", "weight-decay-scheduler",
    "rescale-on-decay",
}  # fmt: skip
"""Pages that have a test of their own, which shortens a training or checks more than the words."""


def pages() -> list[object]:
    """Every page with an example, the slow ones marked."""
    found = [Page(path) for path in sorted(DOCS.rglob("*.md")) if path.stem not in ELSEWHERE]
    return [
        pytest.param(page, id=str(page.path.relative_to(DOCS)), marks=[pytest.mark.slow] if page.slow else [])
        for page in found
        if page.executes
    ]


@pytest.mark.parametrize("page", pages())
def test_the_examples_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    page.run()
