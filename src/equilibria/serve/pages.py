"""The HTML of the pages (navigation, status, and an empty place that a script fills), and their scripts and styles.

The address of a script or style holds the hash of its content, so that a browser fetches each version once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from equilibria._version import __version__
from equilibria.views.document import still_document

_PAGES = {"/": "Runs", "/compare": "Compare", "/plan": "Planner", "/gallery": "Reproduction"}
_MEDIA_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
}
_SOURCES = {  # the files that make up each asset, by package and name; plotly.js comes from plotly
    "plotly.js": (),
    "shared.js": (("equilibria.views", "shared.js"),),
    "report.js": (("equilibria.views.run", "page.js"),),
    "plan-charts.js": (("equilibria.views.plan", "page.js"),),
    "forecast-charts.js": (("equilibria.views.forecast", "page.js"),),
    **{
        name: (("equilibria.serve", name),)
        for name in ("live.js", "runs.js", "run.js", "compare.js", "plan.js", "forecast.js")
    },
    "report.css": (("equilibria.views.run", "page.css"),),
    "plan.css": (("equilibria.views.plan", "page.css"),),
    "forecast.css": (("equilibria.views.forecast", "page.css"),),
    "shared.css": (("equilibria.views", "shared.css"), ("equilibria.serve", "serving.css")),
}


# ---- scripts and styles


@dataclass(frozen=True, slots=True)
class Asset:
    """A file for the browser.

    Attributes:
        content: its bytes.
        media_type: for the header.
        tag: hash of its content.
    """

    content: bytes
    media_type: str
    tag: str


def _make_asset(text: str, kind: str) -> Asset:
    content = text.encode()
    return Asset(content, _MEDIA_TYPES[kind], hashlib.sha256(content).hexdigest()[:16])


@cache
def asset(name: str) -> Asset | None:
    """One of the known files, None for any other name."""
    if name not in _SOURCES:
        return None
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs  # slow to import

        text = get_plotlyjs()
    else:
        text = "\n".join(_read(package, file) for package, file in _SOURCES[name])
    return _make_asset(text, name.rpartition(".")[2])


def asset_path(name: str) -> str:
    """The path of a known file on this server."""
    known = asset(name)
    assert known is not None, name
    return f"/asset/{known.tag}/{name}"


def _read(package: str, file: str) -> str:
    return files(package).joinpath(file).read_text(encoding="utf-8")


# ---- pages


def page(title: str, *, here: str, body: str, styles: Sequence[str], scripts: Sequence[str]) -> str:
    """One page.

    Args:
        title: plain text.
        here: the path of the entry of the navigation to mark as current.
        body: HTML of ``<main>`` and the elements around it.
        styles: names of assets, after those of all pages.
        scripts: names of assets, in order; a script loads plotly, if it is among them, when it needs it.
    """
    return _template("frame.html").substitute(
        title=escape(title),
        navigation=_navigation(here),
        version=escape(__version__),
        styles="\n".join(f'<link rel="stylesheet" href="{asset_path(name)}">' for name in ("shared.css", *styles)),
        scripts="\n".join(map(_script, scripts)),
        body=body,
    )


def body(file: str, /, **parts: str) -> str:
    """The HTML of a page's body from its file; ``parts`` is HTML."""
    return _template(file).substitute(parts)


def _template(name: str) -> Template:
    return Template(_read("equilibria.serve", name))


def _navigation(here: str) -> str:
    links = (
        f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>' for path, name in _PAGES.items()
    )
    return f'<nav class="site" aria-label="Pages"><strong>equilibria</strong> {" ".join(links)}</nav>'


def _script(name: str) -> str:
    if name == "plotly.js":
        return f'<link rel="preload" as="script" id="chart-library" href="{asset_path(name)}">'
    return f'<script src="{asset_path(name)}" defer></script>'


# ---- the gallery of the reproduction

_NO_RESULTS = """<p class="deck">$found</p>
</header>
<p class="notice"><code>equilibria reproduce synthetic --scale desk</code> runs the papers' synthetic experiments (half
an hour) and writes them into <code>results</code>; <code>equilibria serve --results FOLDER</code> shows another
folder.</p>
</main>
"""


def gallery(folder: Path) -> Asset:
    """The page of a results folder; computed again only when a result is new."""
    results = tuple(sorted((str(path), path.stat().st_mtime_ns) for path in folder.glob("*/*/result.json")))
    return _gallery(folder, results)


@lru_cache(1)
def _gallery(folder: Path, results: tuple[tuple[str, int], ...]) -> Asset:
    if results:
        from equilibria.lab.harness.pages import gallery_html
        from equilibria.lab.harness.results import ResultsFolder

        html = gallery_html(ResultsFolder(folder), judge_age=False)
    else:
        html = still_document(
            _NO_RESULTS,
            title="equilibria: the papers, re-run",
            style="",
            headline="No results yet",
            found="The results folder of this server holds no results of experiments.",
        )
    style = f"<style>{_read('equilibria.serve', 'serving.css')}</style></head>"
    html = html.replace("</head>", style, 1).replace("<body>", f"<body>{_navigation('/gallery')}", 1)
    return _make_asset(html, "html")
