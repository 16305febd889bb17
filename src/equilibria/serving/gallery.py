"""The reproduction of the papers, as `equilibria reproduce` left it."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from equilibria.pages.document import still_document
from equilibria.serving.assets import Asset
from equilibria.serving.frame import navigation

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
        from equilibria.experiments.gallery import gallery_html
        from equilibria.experiments.results import ResultsFolder

        page = gallery_html(ResultsFolder(folder), judge_age=False)
    else:
        page = still_document(
            _NONE,
            title="equilibria: the papers, re-run",
            style="",
            headline="No results yet",
            found="There are no results of experiments in the folder that this server was given.",
        )
    style = f"<style>{files('equilibria.serving').joinpath('serving.css').read_text(encoding='utf-8')}</style></head>"
    page = page.replace("</head>", style, 1).replace("<body>", f"<body>{navigation('/gallery')}", 1)
    content = page.encode()
    return Asset(content, _KIND, hashlib.sha256(content).hexdigest()[:16])
