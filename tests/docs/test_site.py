"""The site: the reference is complete, generated pages are up to date, figures are kept with their scripts."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import equilibria
from equilibria.lab.harness.pages import results_headline
from equilibria.lab.papers import contents

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS), str(DOCS / "_ext")]

import check_site  # noqa: E402
import corrections  # noqa: E402
import paper_items  # noqa: E402
import transformer  # noqa: E402
import which_optimizers  # noqa: E402


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


WITHOUT_PUBLIC_NAMES = {"cli", "integrations", "lab", "monitor", "optimizers", "serve", "tensors", "views"}
"""Packages that hold nothing public themselves, or whose public names are those of the modules in them."""


def test_a_package_says_what_is_public_in_it():
    silent = [path for path in (ROOT / "src" / "equilibria").rglob("__init__.py") if not exported(path)]
    assert {path.relative_to(ROOT / "src" / "equilibria").parts[0] for path in silent} <= WITHOUT_PUBLIC_NAMES


def exported(path: Path) -> list[str]:
    """What is in the `__all__` of a file, which is not imported: some need lightning."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def source_of(module: str) -> Path:
    path = ROOT.joinpath("src", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def members(module: str) -> set[str]:
    """What autodoc describes of a module: its `__all__`, or what is defined there."""
    path = source_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = [each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return {f"{module}.{name}" for name in exported(path) or defined}


def described(text: str) -> set[str]:
    """The names that a page of the reference has an entry for."""
    found = set(re.findall(r"auto(?:class|function|exception|data):: (\S+)", text))
    for directive, module, options in re.findall(r"(public-names|automodule):: (\S+)\n((?:   :.*\n)*)", text):
        below = source_of(module).parent.glob("[!_]*.py") if ":modules:" in options else []
        found |= set() if ":no-members:" in options else members(module)
        found |= {name for path in below for name in members(f"{module}.{path.stem}")}
        assert directive == "automodule" or exported(source_of(module))
    return found


def imported(text: str) -> set[str]:
    """The names that examples take from modules of ours, without the modules among them."""
    found = re.findall(r"^[ >]*from (equilibria[\w.]*) import (\([^)]*\)|[^\n#]+)", text, flags=re.MULTILINE)
    names = {f"{module}.{name}" for module, several in found for name in re.findall(r"\w+", several)}
    return {name for name in names if not source_of(name).is_file()}


def test_imports_and_entries_are_found():
    text = "from equilibria.theory import SGD\n>>> from equilibria.lab.data import (\n    Batches,\n)\n"
    assert imported(f"{text}from equilibria import theory") == {"equilibria.theory.SGD", "equilibria.lab.data.Batches"}
    reference = described(".. public-names:: equilibria.theory\n   :modules:\n")
    assert {"equilibria.theory.SGD", "equilibria.theory.angles.linear_scaling_ratio"} <= reference
    assert "equilibria.theory.linear_scaling_ratio" not in reference


def test_everything_that_an_example_imports_is_in_the_reference():
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").glob("*.*"))]
    used = {name for page in pages for name in imported(page.read_text(encoding="utf-8"))}
    reference = {name for page in (DOCS / "api").glob("*.md") for name in described(page.read_text(encoding="utf-8"))}
    assert sorted(used - reference) == [], "add an entry to docs/api, or import it from where it is public"


def test_the_page_of_optimizers_is_what_the_registry_and_the_benchmark_say_now():
    assert which_optimizers.PAGE.read_text(encoding="utf-8") == which_optimizers.page(), "run `make docs-generated`"


def test_the_page_of_corrections_is_what_the_laws_say_now():
    assert corrections.PAGE.read_text(encoding="utf-8") == corrections.page(), "run `make docs-generated`"


@pytest.mark.parametrize("paper", paper_items.PAGES)
def test_the_pages_of_items_are_what_the_papers_contents_and_results_say_now(paper):
    file = paper_items.FOLDER / f"{paper_items.PAGES[paper]}.md"
    assert file.read_text(encoding="utf-8") == paper_items.page(paper), "run `make docs-generated`"


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "papers" / "index.md"], ids=["README", "index"])
def test_counts_of_items_and_verdicts_are_those_of_the_papers_contents_and_results(page):
    words = " ".join(page.read_text(encoding="utf-8").split())
    assert f"({contents.counts()})" in words
    assert results_headline(list(paper_items.results().values())) in words


def test_the_page_of_the_transformer_is_what_its_result_says_now():
    assert transformer.PAGE.read_text(encoding="utf-8") == transformer.page(), "run `make docs-generated`"


def test_a_merged_row_names_all_its_laws_and_an_extension_corrects_nothing():
    table = corrections.corrections("nrq")
    (row,) = (line for line in table.splitlines() if "`rayleigh.equilibrium_norm_sq`" in line)
    assert "`rayleigh.norm_sq_along`" in row and "`rayleigh.norm_sq_at`" in row
    assert "targets.targets" not in corrections.corrections("smd")
    assert "`targets.targets`" in corrections.extensions()


def test_a_test_is_found_only_if_it_uses_the_law():
    assert corrections.tests_of("states.rescale_factors")[0] == "tests/theory/test_states.py"
    assert corrections.tests_of("nothing.no_such_law") == []


def listed(page: Path) -> set[Path]:
    """The pages that the tables of contents of a page name, patterns filled in."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    names = [page.parent / re.sub(r"^.*<(.*)>$", r"\1", line) for line in lines]  # also of "A title <name>"
    return {found.resolve() for name in names for found in name.parent.glob(f"{name.name}.md")}


def reached(page: Path) -> set[Path]:
    """A page, and all that can be reached from it by tables of contents."""
    found, new = set(), {page}
    while new:
        found |= new
        new = {below for above in new for below in listed(above)} - found
    return found


def test_every_page_is_in_a_table_of_contents(tmp_path):
    pages = {page.resolve() for page in DOCS.rglob("*.md")}
    assert sorted(pages - reached(DOCS.resolve() / "index.md")) == [], "add it to a toctree"
    (tmp_path / "index.md").write_text("```{toctree}\n:hidden:\n\nA title <one>\n```\n")
    (tmp_path / "one.md").write_text("# One\n")
    (tmp_path / "lost.md").write_text("# Lost\n")
    assert {page.name for page in reached(tmp_path / "index.md")} == {"index.md", "one.md"}


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
