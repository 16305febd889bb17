"""Docstrings are written for people at a prompt: a bar, a star or a trailing underscore in them is no markup."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(``.*?``|`[^`]*`)")
MARKUP = re.compile(r"\||(?<!\\)\*|(?<=\w)_(?=\W|$)")


def escaped(line: str) -> str:
    """The line with markup characters escaped, outside backticks; a bullet stays a bullet."""
    bullet = re.match(r"\s*\* ", line)
    start = bullet.end() if bullet else 0
    parts = CODE.split(line[start:])
    return line[:start] + "".join(
        part if index % 2 else MARKUP.sub(lambda found: "\\" + found[0], part) for index, part in enumerate(parts)
    )


def escape(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Escape a docstring in place, up to its examples' lines of code, which begin with a prompt."""
    if what in ("attribute", "data", "property") and lines:
        lines[:0] = ["..", ""]  # an empty comment: else napoleon takes the words before a colon for a type
    example = False
    for index, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            lines[index] = escaped(line)


def setup(app: Sphinx) -> dict[str, bool]:
    """Run before napoleon, which adds markup of its own."""
    app.connect("autodoc-process-docstring", escape, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
