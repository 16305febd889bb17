"""The directive `public-names`: an entry for everything in a package's `__all__`, and the modules below it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

ROOT = "equilibria"


def public_modules() -> Iterator[ModuleType]:
    """Every package and module below `equilibria` that says what is public in it, the package itself first."""
    root = importlib.import_module(ROOT)
    yield root
    for found in pkgutil.walk_packages(root.__path__, f"{ROOT}."):
        if not any(part.startswith("_") for part in found.name.split(".")) and _has_all(found.name):
            yield importlib.import_module(found.name)


def _has_all(name: str) -> bool:
    """Read, not imported: most modules have none."""
    spec = importlib.util.find_spec(name)
    return bool(spec and spec.origin and "\n__all__ = " in Path(spec.origin).read_text(encoding="utf-8"))


def kind_of(value: object) -> str:
    """The kind of entry for an object."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isroutine(value) else "data"


def entries(module: ModuleType, *, modules: bool) -> list[str]:
    """One entry for each public name; a module that is public itself has a page of its own."""
    values = {name: getattr(module, name) for name in module.__all__}
    lines: list[str] = []
    for name, value in values.items():
        if not inspect.ismodule(value):
            lines += ["", *_entry(module, name, value, modules=modules)]
    return lines


def _entry(module: ModuleType, name: str, value: object, *, modules: bool) -> list[str]:
    kind = kind_of(value)
    home = "" if kind == "data" else _described_at(module, name, value, modules=modules)
    if kind != "data" and not home:
        return [f".. auto{kind}:: {module.__name__}.{name}"]
    words = f"The same as :py:obj:`{home}`." if home else _words_about(module, name)
    return [f".. py:{kind}:: {name}", f"   :module: {module.__name__}", "", f"   {words}"]


def _described_at(module: ModuleType, name: str, value: Any, *, modules: bool) -> str:
    """Where the object has its full entry if not here: among the verbs of `equilibria`, or with its own module."""
    root = importlib.import_module(ROOT)
    if module is not root and name in root.__all__ and getattr(root, name) is value:
        return f"{ROOT}.{name}"
    return f"{value.__module__}.{value.__qualname__}" if modules and value.__module__ != module.__name__ else ""


def _words_about(module: ModuleType, name: str) -> str:
    """What is written below a constant in the module that makes it, and the values of a choice of strings."""
    value = getattr(module, name)
    choice = _choice(value)
    for home in [module.__name__, *submodules(module, private=True)]:
        lines = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name))
        if lines:
            return " ".join([*(line.strip() for line in lines if line.strip()), *choice])
    return " ".join(choice) or _words_for(value)


def _choice(value: object) -> list[str]:
    """The values of a ``Literal``, in a sentence; nothing for anything else."""
    if get_origin(value) is not Literal:
        return []
    return ["One of " + ", ".join(f"``{argument!r}``" for argument in get_args(value)) + "."]


def _words_for(value: object) -> str:
    """What can be said of a constant that says nothing itself."""
    if isinstance(value, Mapping):
        return "A mapping with the keys " + ", ".join(f"``{key}``" for key in value) + "."
    if get_origin(value) in (Union, UnionType):
        return "One of " + ", ".join(f"``{_type_name(argument)}``" for argument in get_args(value)) + "."
    return f"``{value}``" if isinstance(value, str | int | float | tuple) else f"A ``{type(value).__name__}``."


def _type_name(value: Any) -> str:
    plain = isinstance(value, type) and not get_args(value)
    return value.__qualname__ if plain else re.sub(r"\b(?:[a-z_]+\.)+", "", str(value))


def submodules(module: ModuleType, *, private: bool = False) -> list[str]:
    """The modules of a package by full name, the public ones or all."""
    names = [info.name for info in pkgutil.iter_modules(getattr(module, "__path__", []))]
    return [f"{module.__name__}.{name}" for name in names if private or name[0] != "_"]


class PublicNames(SphinxDirective):
    """Document a package; with `:modules:` also every module in it, under its name as a heading."""

    required_arguments = 1
    has_content = False
    option_spec: ClassVar = {"modules": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Parse the directives as if they had been written here."""
        module, modules = importlib.import_module(self.arguments[0]), "modules" in self.options
        lines = [f".. automodule:: {module.__name__}", "   :no-members:", *entries(module, modules=modules), ""]
        for name in submodules(module) if modules else []:
            title = name.removeprefix(f"{module.__name__}.")
            lines += [title, "-" * len(title), "", f".. automodule:: {name}", ""]
        holder = nodes.Element()
        self.state.nested_parse(StringList(lines, source=__file__), self.content_offset, holder, match_titles=True)
        return holder.children


def public_home(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Node | None:
    """A reference to the module that defines a public name leads to where it is public."""
    if node.get("refdomain") != "py":
        return None
    objects, target = env.get_domain("py").objects, str(node.get("reftarget", ""))
    name = target.rsplit(".", 1)[-1]
    found = [full for full in objects if full.endswith(f".{name}") and full.startswith(target.rsplit(".", 2)[0])]
    if not target.startswith(f"{ROOT}.") or not found:
        return None
    node["reftarget"] = min(found, key=len)
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", node["reftarget"], node, contnode)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the way back from a name's home to its public place."""
    app.add_directive("public-names", PublicNames)
    app.connect("missing-reference", public_home)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
