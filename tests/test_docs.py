"""Every picture that a page of the documentation shows is there, and counts of claims are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "results" / "RESULTS.md"]


def pictures(text: str) -> list[str]:
    """What is shown, not what a comment keeps for later."""
    shown = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return [link for link in re.findall(r"!\[[^]]*\]\(([^)\s]+)", shown) if "://" not in link]


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_file()], ids=lambda page: page.stem)
def test_every_picture_of_a_page_is_there(page):
    assert [link for link in pictures(page.read_text()) if not (page.parent / link).is_file()] == []


def test_pictures_are_found_and_comments_are_not():
    assert pictures("![a](x.png)\n<!-- ![b](y.png) -->\n![c](https://example.org/z.png) ![d](../w.png)") == [
        "x.png",
        "../w.png",
    ]


def test_the_page_on_pull_back_counts_the_claims_as_the_results_do():
    counts = re.search(
        r"#eq-diffusion\) \| (\d+ of \d+ claims shown.*) \|", (ROOT / "docs/papers/items/smd.md").read_text()
    )
    assert counts and counts[1] in " ".join((ROOT / "docs/concepts/pull-back.md").read_text().split())
