"""The HTML around every page: where one can go, what is happening, and an empty place that a script fills."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from equilibria._version import __version__
from equilibria.serve.assets import Asset, address
from equilibria.views.document import still_document

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
    return Template(files("equilibria.serve").joinpath(name).read_text(encoding="utf-8"))


_KIND = "text/html; charset=utf-8"
_NONE = """<p class="deck">$found</p>
</header>
<p class="notice"><code>equilibria reproduce synthetic --scale desk</code> runs the papers' synthetic experiments (half
an hour) and writes them into <code>results</code>; <code>equilibria serve --results FOLDER</code> shows another
folder.</p>
</main>
"""


def gallery(folder: Path) -> Asset:
    """The page; made again when a result is new."""
    found = tuple(sorted((str(path), path.stat().st_mtime_ns) for path in folder.glob("*/*/result.json")))
    return _page(folder, found)


@lru_cache(1)
def _page(folder: Path, found: tuple[tuple[str, int], ...]) -> Asset:
    if found:
        from equilibria.lab.harness.pages import gallery_html
        from equilibria.lab.harness.results import ResultsFolder

        page = gallery_html(ResultsFolder(folder), judge_age=False)
    else:
        page = still_document(
            _NONE,
            title="equilibria: the papers, re-run",
            style="",
            headline="No results yet",
            found="There are no results of experiments in the folder that this server was given.",
        )
    style = f"<style>{files('equilibria.serve').joinpath('serving.css').read_text(encoding='utf-8')}</style></head>"
    page = page.replace("</head>", style, 1).replace("<body>", f"<body>{navigation('/gallery')}", 1)
    content = page.encode()
    return Asset(content, _KIND, hashlib.sha256(content).hexdigest()[:16])
