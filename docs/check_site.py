"""Checks the built site: it needs nothing from elsewhere, and every public name has an entry.

`make docs` runs it: `python docs/check_site.py build/docs`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sphinx.util.inventory import InventoryFile

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
from public_names import public_modules

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\b(?:src|srcset)\s*=\s*["'](?:https?:)?//[^"']+"""
    r"""|<link\b(?=[^>]*\brel\s*=\s*["'](?:stylesheet|preload|icon|preconnect|modulepreload)\b)[^>]*?\bhref\s*=\s*["'](?:https?:)?//[^"']+""",
    flags=re.IGNORECASE,
)
IMPORTED = re.compile(r"""@import\s+(?:url\()?["']?(?:https?:)?//[^"')]+|url\(\s*["']?(?:https?:)?//[^"')]+""")


def loaded_from_elsewhere(text: str, *, style: bool = False) -> list[str]:
    """What a page or a style sheet would fetch from another host; links that a reader may follow do not count."""
    return IMPORTED.findall(text) if style else LOADED.findall(text) + IMPORTED.findall(text)


def foreign(site: Path) -> Iterator[str]:
    """Every request of the site to another host."""
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        for found in loaded_from_elsewhere(path.read_text(encoding="utf-8"), style=path.suffix == ".css"):
            yield f"{path.relative_to(site)}: {found}"


def public_names() -> list[str]:
    """Every name that a package or module says is public, in full; modules are pages, not names."""
    return [
        f"{module.__name__}.{name}"
        for module in public_modules()
        for name in module.__all__
        if not isinstance(getattr(module, name), type(sys))
    ]


def missing(site: Path) -> Iterator[str]:
    """Public names without an entry in the reference."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    entries = {name for kind in inventory.data if kind.startswith("py:") for name in inventory.data[kind]}
    yield from sorted(set(public_names()) - entries)


def main(site: Path) -> int:
    """Say what is wrong; 1 if anything is."""
    faults = [f"from elsewhere: {found}" for found in foreign(site)]
    faults += [
        f"not in the reference: {name} (add `public-names` or `automodule` of its home to docs/api)"
        for name in missing(site)
    ]
    print("\n".join(faults) or f"{site}: complete, and nothing from elsewhere")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
