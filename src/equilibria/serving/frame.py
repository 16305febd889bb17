"""The HTML around every page: where one can go, what is happening, and an empty place that a script fills."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from equilibria._version import __version__
from equilibria.serving.assets import address

PLACES = {"/": "Runs", "/compare": "Compare", "/plan": "Planner", "/gallery": "Reproduction"}


def navigation(here: str) -> str:
    """Links to the pages, the present one marked."""
    links = (
        f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>' for path, name in PLACES.items()
    )
    return f'<nav class="site" aria-label="Pages"><strong>equilibria</strong> {" ".join(links)}</nav>'


def frame(title: str, *, here: str, body: str, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """One page.

    Args:
        title: plain text.
        here: the path of the entry of the navigation that is marked.
        body: HTML of ``<main>`` and what belongs around it.
        styles: names of assets, after what all pages share.
        scripts: names of assets, in order; the library of the charts, if it is among them, waits until it is needed.
    """
    return _template("frame.html").substitute(
        title=escape(title),
        navigation=navigation(here),
        version=escape(__version__),
        styles="\n".join(f'<link rel="stylesheet" href="{address(name)}">' for name in ("shared.css", *styles)),
        scripts="\n".join(map(_script, scripts)),
        body=body,
    )


def _script(name: str) -> str:
    if name == "plotly.js":
        return f'<link rel="preload" as="script" id="chart-library" href="{address(name)}">'
    return f'<script src="{address(name)}" defer></script>'


def body(file: str, /, **parts: str) -> str:
    """The HTML of a page, from its file; ``parts`` is HTML."""
    return _template(file).substitute(parts)


def _template(name: str) -> Template:
    return Template(files("equilibria.serving").joinpath(name).read_text(encoding="utf-8"))
