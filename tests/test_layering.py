"""Imports inside the package point only to the left, and the theory never needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "equilibria"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Left to right: what needs numbers and tables only, then what touches models, then what people see. A part may import
# itself and what stands before it. "" is the package's own __init__, which resolves its names lazily: to import from it
# would hide what is needed. `_display` looks up the renderers in `views` by name: the only way to the right.
ORDER = [
    "_version",
    "_compiled",
    "_display",
    "_lazy",
    "errors",
    "findings",
    "theory",
    "records",
    "optimizers",
    "diagnosis",
    "planning",
    "forecasting",
    "comparing",
    "tensors",
    "objectives",
    "symmetry",
    "curvature",
    "control",
    "monitor",
    "doctor",
    "views",
    "watching",
    "integrations",
    "importing",
    "lab",
    "serve",
    "cli",
    "__main__",
    "",
]
IMPORTS_ANYTHING = {"cli", "__main__", ""}
WITHOUT_TORCH = set(ORDER[: ORDER.index("tensors")])


def read_sources() -> dict[str, str]:
    """Dotted module name -> source; a package's ``__init__`` keeps that name, so relative imports resolve."""
    return {
        ".".join([PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imported(module: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything ``source`` imports, anywhere in it; ``from a import b`` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def part_of(name: str, parts: set[str]) -> str:
    """The folder or file below the package that a dotted name belongs to; "" for the package itself."""
    below = name.split(".")[1:]
    return below[0] if below and below[0] in parts else ""


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every import that points to the right, or to torch where torch is not allowed."""
    parts = {module.split(".")[1] for module in sources} - {"__init__"}
    found = [f"{part}: has no place in ORDER" for part in sorted(parts - set(ORDER))]
    for module, source in sources.items():
        here = part_of(module, parts)
        for line, name in imported(module, source):
            root = name.split(".")[0]
            if root == "torch" and here in WITHOUT_TORCH:
                found.append(f"{module}:{line}: imports {name}")
            if root == PACKAGE and points_right(here, part_of(name, parts)):
                found.append(f"{module}:{line}: imports {name}, which is to its right")
    return found


def points_right(here: str, there: str) -> bool:
    known = here in ORDER and there in ORDER  # an unknown part is reported once, by itself
    return known and here not in IMPORTS_ANYTHING and ORDER.index(there) > ORDER.index(here)


def test_imports_point_to_the_left():
    sources = read_sources()
    assert f"{PACKAGE}.theory.citations" in sources  # the walk found the package
    assert violations(sources) == []


# A small package without a violation, into which the tests below plant one.
CLEAN = {
    "equilibria.__init__": "import equilibria.cli\nfrom equilibria import plan",
    "equilibria.errors": "import math",
    "equilibria.theory.__init__": "from equilibria.theory import laws\nfrom . import laws",
    "equilibria.theory.laws": "import numpy\nfrom ..errors import number\nfrom equilibria import theory",
    "equilibria.monitor.__init__": "",
    "equilibria.monitor.monitor": "import torch\nfrom ..theory import laws\nfrom equilibria import theory",
    "equilibria.watching.run": "import equilibria.monitor.monitor",
    "equilibria.cli.__init__": "import equilibria\nfrom equilibria.watching import run",
}

PLANTED = {
    "import": ("equilibria.theory.laws", "import equilibria.monitor.monitor"),
    "from package": ("equilibria.theory.laws", "from equilibria import monitor"),
    "from module": ("equilibria.monitor.monitor", "from equilibria.watching.run import x"),
    "relative, to the right": ("equilibria.monitor.monitor", "from ..watching import run"),
    "relative, from an __init__": ("equilibria.theory.__init__", "from ..monitor import monitor"),
    "inside a function": ("equilibria.theory.laws", "def f():\n    from equilibria.cli import main"),
    "for types only": (
        "equilibria.theory.laws",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import equilibria.watching.run",
    ),
    "by name": ("equilibria.theory.laws", "import importlib\nimportlib.import_module('equilibria.watching.run')"),
    "the whole package": ("equilibria.monitor.monitor", "import equilibria as eq"),
    "a lazy verb": ("equilibria.watching.run", "from equilibria import watch"),
    "the lowest file": ("equilibria.errors", "from equilibria.theory import laws"),
    "torch": ("equilibria.theory.laws", "import torch"),
    "part of torch": ("equilibria.theory.laws", "def f():\n    from torch.nn import functional"),
    "torch by name": ("equilibria.theory.laws", "__import__('torch.optim')"),
    "unknown folder": ("equilibria.misc.helpers", "import math"),
}


def test_the_clean_package_is_clean():
    assert violations(CLEAN) == []


@pytest.mark.parametrize(("module", "line"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_caught(module, line):
    planted = {**CLEAN, module: f"{CLEAN.get(module, '')}\n{line}\n"}
    found = violations(planted)
    assert len(found) == 1
    assert found[0].startswith(module if module in CLEAN else "misc")


def test_the_whole_theory_loads_without_torch():
    code = (
        "import sys, pkgutil, importlib, equilibria.theory as theory\n"
        "for module in pkgutil.walk_packages(theory.__path__, 'equilibria.theory.'):\n"
        "    importlib.import_module(module.name)\n"
        "assert 'equilibria.theory.citations' in sys.modules\n"
        "assert 'torch' not in sys.modules, 'a theory module imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
