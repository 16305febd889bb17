"""The site: the reference is complete, generated pages are up to date, figures are kept with their scripts."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import equilibria

DOCS = Path(__file__).parents[2] / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]

import check_site  # noqa: E402
import corrections  # noqa: E402


def public_packages() -> list[ModuleType]:
    """Packages that say what is public in them."""
    names = [
        "equilibria",
        *(found.name for found in pkgutil.walk_packages(equilibria.__path__, "equilibria.") if found.ispkg),
    ]
    packages = [importlib.import_module(name) for name in names if "._" not in name]
    return [package for package in packages if hasattr(package, "__all__")]


@pytest.mark.parametrize("package", public_packages(), ids=lambda package: package.__name__)
def test_every_public_package_is_in_the_reference(package):
    """`public-names` documents each name of `__all__`; `make docs` checks that against the built site."""
    given = [
        name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"public-names:: (\S+)", page.read_text())
    ]
    assert given.count(package.__name__) == 1, (
        f"write docs/api/{package.__name__.rsplit('.', 1)[-1]}.md, as its neighbours are"
    )


@pytest.mark.parametrize("package", public_packages(), ids=lambda package: package.__name__)
def test_every_public_name_says_what_it_is(package):
    values = {name: getattr(package, name) for name in package.__all__}
    silent = [
        name
        for name, value in values.items()
        if inspect.isroutine(value) or inspect.isclass(value)
        if not value.__doc__
    ]
    assert silent == []


def test_the_page_of_corrections_is_what_the_laws_say_now():
    assert corrections.PAGE.read_text(encoding="utf-8") == corrections.page(), "run `make docs-generated`"


def test_a_test_is_found_only_if_it_uses_the_law():
    assert corrections.tests_of("rescale.rescale_factors")[0] == "tests/theory/test_rescale.py"
    assert corrections.tests_of("nothing.no_such_law") == []


def test_every_concept_has_a_figure_that_a_script_draws():
    pages = {path.stem for path in (DOCS / "concepts").glob("*.md")} - {"index"}
    drawn = {path.stem.replace("_", "-") for path in (DOCS / "figures").glob("[!_]*.py")}
    assert pages <= drawn  # the README has one too
    for name in pages:
        assert f"]({name}.png)" in (DOCS / "concepts" / f"{name}.md").read_text()
        assert (DOCS / "concepts" / f"{name}.png").stat().st_size < 150_000


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/mathjax.js"></script>',
        '<script async\n  src="//cdn.example/x.js"></script>',
        '<link href="https://fonts.example/css" rel="stylesheet">',
        '<link rel="stylesheet" href="http://fonts.example/css">',
        '<img alt="badge" src="https://img.example/x.svg">',
        "<style>@import url(https://fonts.example/css);</style>",
    ],
)
def test_what_a_page_would_fetch_from_elsewhere_is_found(page):
    assert len(check_site.loaded_from_elsewhere(page)) == 1


def test_links_to_follow_and_files_of_the_site_are_no_fault():
    page = '<a href="https://arxiv.org/abs/1">x</a><script src="a.js"></script><link rel="stylesheet" href="a.css">'
    assert check_site.loaded_from_elsewhere(page) == []


def test_docstrings_keep_their_bars_and_stars():
    escaped = pytest.importorskip("plain_docstrings").escaped
    assert escaped("||w||^2 of M* and x_ but not in_side") == r"\|\|w\|\|^2 of M\* and x\_ but not in_side"
    assert escaped("`a|b` and ``c*d_`` stay") == "`a|b` and ``c*d_`` stay"
    assert escaped("* an item, a*b") == r"* an item, a\*b"


def test_a_function_keeps_its_distance_from_a_name_but_not_from_a_bracket():
    converted = pytest.importorskip("mathml").converted
    assert converted(r"\ln\cos x", block=False).count("<mspace") == 2
    assert "<mspace" not in converted(r"\ln(x)", block=False)
