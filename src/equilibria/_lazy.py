"""Names of a package that are imported on first use, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: its ``__name__``.
        homes: the module that defines each name, relative to the package; a module under its own name is itself.

    Example:
        >>> get, names = lazy_names("equilibria", {"cite": "theory.citations", "theory": "theory"})
        >>> get("cite").__name__, names()
        ('cite', ['cite', 'theory'])
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        return module if name == homes[name] else getattr(module, name)

    return get, lambda: sorted(homes)
