"""Scripts and styles, each at an address that holds its hash: a browser asks for it once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_SOURCES = {
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


@dataclass(frozen=True, slots=True)
class Asset:
    """A file.

    Attributes:
        content: its bytes.
        kind: its media type.
        tag: of its content.
    """

    content: bytes
    kind: str
    tag: str


@cache
def asset(name: str) -> Asset | None:
    """One of the known files, None for another name."""
    if name not in _SOURCES:
        return None
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs  # takes long to import

        text = get_plotlyjs()
    else:
        text = "\n".join(files(package).joinpath(file).read_text(encoding="utf-8") for package, file in _SOURCES[name])
    content = text.encode()
    return Asset(content, _KINDS[name.rpartition(".")[2]], hashlib.sha256(content).hexdigest()[:16])


def address(name: str) -> str:
    """Where it is served."""
    found = asset(name)
    assert found is not None, name
    return f"/asset/{found.tag}/{name}"
