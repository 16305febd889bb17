"""What a result depends on: the source of a module and of every module of this package that it imports."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = "equilibria"
_ROOT = Path(__file__).parents[1]
_AFTER_THE_TASKS = {"equilibria.experiments.claim", "equilibria.experiments.figures"}
# What people see changes no number: hours of training are not repeated for a word on a page.
_FOR_PEOPLE = (
    "equilibria._notebook.",
    "equilibria.pages.",
    "equilibria.planning.",
    "equilibria.report.",
    "equilibria.findings",
    "equilibria.measure.diagnose.",
    "equilibria.measure.sharpness_findings.",
)
_SHOWN_BY = "_repr_html_"
# What only compares a training with the one in its folder, and refuses it, changes no number either.
_FOR_REFUSING = ("equilibria.training.made_of.",)


@cache
def code_version(*modules: str, tasks_only: bool = False) -> str:
    """A hash of the code that the modules run; comments, docstrings and layout do not change it.

    Args:
        modules: dotted names of imported modules.
        tasks_only: leave out what judges and draws when the tasks are done.

    Returns:
        Sixteen hexadecimal digits.
    """
    waiting, sources = set(modules), dict[str, str]()
    left_out = _AFTER_THE_TASKS if tasks_only else set()
    while waiting:
        module = waiting.pop()
        sources[module], found = _read(module, _file(module))
        waiting |= found - sources.keys() - left_out
    joined = "\0".join(f"{module}\0{sources[module]}" for module in sorted(sources))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


@cache  # experiments share most of their modules
def _read(module: str, path: Path) -> tuple[str, frozenset[str]]:
    """What of a module counts, and what it imports of this package that changes numbers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    source = ast.unparse(_without_docstrings(_without_pictures(tree)))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = (name for name in _imported(tree, package) if not f"{name}.".startswith(_FOR_PEOPLE + _FOR_REFUSING))
    return source, frozenset(found)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules of this package that are imported anywhere in the tree; `from a import b` is a.b where that is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _source(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:
                found = next((name for name in (f"{base}.{alias.name}", base) if _source(name)), None)
                if found:
                    yield found


def _source(module: str) -> Path | None:
    """The file of a module of this package; None for what is not one, and for the package itself, which is lazy."""
    first, *below = module.split(".")
    if first != _PACKAGE or not below:
        return None
    path = _ROOT.joinpath(*below)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _file(module: str) -> Path:
    return _source(module) or Path(str(sys.modules[module].__file__))


def _without_pictures(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [each for each in node.body if getattr(each, "name", "") != _SHOWN_BY] or [ast.Pass()]
    return tree


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return tree
