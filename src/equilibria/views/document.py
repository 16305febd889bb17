"""HTML pages in one file that load nothing from the network and run only their own scripts; pieces they share."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
from numpy.typing import ArrayLike

from equilibria._version import __version__
from equilibria.errors import EquilibriaError
from equilibria.findings import Finding
from equilibria.records._files import check_outside_runs, write_whole
from equilibria.theory.citations import PAPERS, Citation, cite
from equilibria.views.words import full_stop, sentence_case, text

MOST_CHOICES = 12  # for which the shared style has rules
_GENERATOR, _HEAD_BYTES = b'<meta name="generator" content="equilibria ', 4096


# ---- pages


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page: for one complete file, or for a live page that fetches what has changed.

    Attributes:
        package: the dotted name of the package with ``page.html`` (a `string.Template`), ``page.css`` and ``page.js``;
            the shared HTML goes around the first, the shared style and script before the others.
        title: plain text.
        data: what the script of the page draws; JSON without NaN.
        parts: HTML for the other placeholders: ``headline``, ``deck``, ``settings``, ``made`` (what was done, for the
            footer) and those of ``page.html``.
    """

    package: str
    title: str
    data: dict[str, object]
    parts: Mapping[str, str]

    def document(self) -> str:
        """The text of one HTML file with its scripts, styles and data inside."""
        from plotly.offline import get_plotlyjs  # slow to import, and only pages need it

        # The policy names each script by its hash, and browsers hash scripts after unifying their line ends.
        plotly, script = (_one_line_end(source) for source in (get_plotlyjs(), _shared_and_own(self.package, "js")))
        return Template(_template(self.package)).substitute(
            self.parts,
            policy=_policy(plotly, script),
            version=escape(__version__),
            title=escape(self.title),
            style=_shared_and_own(self.package, "css"),
            data=as_json(self.data),
            plotly=plotly,
            script=script,
        )

    def inside(self) -> str:
        """The content of ``<main>``, without scripts and data."""
        content = _template(self.package).partition("<main>")[2].partition("</main>")[0]
        return Template(content).substitute(self.parts, title=escape(self.title))

    def write(self, path: str | Path) -> Path:
        """Write the page as one offline HTML file, which appears complete or not at all; see `write_document`."""
        return write_document(path, self.document())


def still_document(body: str, *, title: str, style: str, **parts: str) -> str:
    """Build one HTML page without scripts and data, with the head that all pages share.

    Args:
        body: a `string.Template`, from below the headline to the footer.
        title: plain text.
        style: CSS, after the shared style.
        parts: HTML for the other placeholders of the template, ``headline`` among them.

    Returns:
        HTML.
    """
    head, _, _ = _asset("equilibria.views", "shared.html").partition('<p class="deck">')
    return Template(f"{head}{body}</body>\n</html>\n").substitute(
        parts,
        policy=_policy(),
        version=escape(__version__),
        title=escape(title),
        style=_asset("equilibria.views", "shared.css") + style,
    )


def as_json(data: dict[str, object]) -> str:
    r"""JSON that cannot end the script element it stands in.

    Example:
        >>> as_json({"name": "</script>"})
        '{"name":"\\u003c/script>"}'
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def _template(package: str) -> str:
    return _asset("equilibria.views", "shared.html").replace("$body", _asset(package, "page.html"))


def _shared_and_own(package: str, kind: str) -> str:
    return _asset("equilibria.views", f"shared.{kind}") + _asset(package, f"page.{kind}")


def _asset(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _one_line_end(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _policy(*scripts: str) -> str:
    """The content security policy: no requests, and no scripts but these."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def write_document(path: str | Path, text: str) -> Path:
    """Write a page, which appears complete or not at all.

    Args:
        path: the file to write, in a folder that exists and is not that of a run; replaces an earlier page or an empty
            file, and nothing else.
        text: the page.

    Returns:
        The path.

    Raises:
        EquilibriaError: if the folder does not exist or holds a run, the path is a file that this library has not
            written, or it cannot be written.
    """
    try:
        target = _checked_target(Path(path))
        write_whole(target, text.encode("utf-8", errors="backslashreplace"))  # a path in the text need not be UTF-8
    except EquilibriaError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EquilibriaError(f"got path={str(path)!r}, which cannot be written: {reason}", argument="path") from error
    return Path(path)


def _checked_target(path: Path) -> Path:
    target = path.resolve()  # a link keeps pointing where it did
    if not target.parent.is_dir():
        raise EquilibriaError(
            f"got path={str(path)!r}, but {target.parent} is not a folder; expected one that exists", argument="path"
        )
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "not a regular file"
        raise EquilibriaError(
            f"got path={str(path)!r}, which is {kind}; expected the name of an HTML file", argument="path"
        )
    check_outside_runs(path)
    if target.exists() and target.stat().st_size and not _is_own_page(target):
        raise EquilibriaError(
            f"got path={str(path)!r}, a file that equilibria has not written; expected a new name, or a page to "
            "replace",
            argument="path",
        )
    return target


def _is_own_page(path: Path) -> bool:
    """Whether the beginning of a file names this library as its generator, as the head of every page does."""
    with path.open("rb") as file:
        return _GENERATOR in file.read(_HEAD_BYTES)


# ---- pieces that pages share

Column = list[float | None]


def column(values: ArrayLike, *, digits: int = 12) -> Column:
    """A JSON column with ``digits`` significant digits; JSON has no NaN and no infinity, so they become None."""
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in numbers]


def log_column(values: ArrayLike, *, digits: int = 6) -> Column:
    """A JSON column for a logarithmic axis, on which only positive numbers have a place; six digits fill a screen."""
    numbers = np.asarray(values, dtype=np.float64)
    return column(np.where(numbers > 0, numbers, np.nan), digits=digits)


def legend_entry(kind: str, words: str, *, area: bool = False) -> str:
    """An entry of a chart's legend: a line or an area of the CSS class ``kind``, and HTML behind it."""
    height, path = (12, "M0 0h34v12H0z") if area else (8, "M0 4h34")
    key = f'<svg viewBox="0 0 34 {height}" aria-hidden="true"><path d="{path}" class="{kind}"/></svg>'
    return f"<li>{key}{words}</li>\n"


def html_section(
    heading: str, head: Sequence[str], rows: Sequence[str], *, name: str, after: str = "", kind: str = ""
) -> str:
    """A table with a heading above it and HTML ``after`` it; ``name`` is the id of the heading."""
    shown = html_table(head, rows, name=name, kind=kind)
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{text(heading)}</h2>\n{shown}\n{after}</section>\n'


def html_table(head: Sequence[str], rows: Sequence[str], *, name: str, kind: str = "") -> str:
    """A table that scrolls sideways on a narrow screen; ``name`` is the id of the heading above it.

    The last column holds words, and numbers in a table of the ``kind`` "numeric".
    """
    cells = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    return scrolling_table(f"<tr>{cells}</tr>", rows, name=name, kind=kind)


def scrolling_table(head: str, rows: Sequence[str], *, name: str, kind: str = "") -> str:
    """`html_table` with the HTML of its head, and the CSS class ``kind`` if there is one."""
    opening, body = f'<table class="{kind}">' if kind else "<table>", "\n".join(rows)
    return (
        f'<div class="scroll" role="region" aria-labelledby="{name}" tabindex="0">\n{opening}\n'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def html_row(first: str, cells: Sequence[str]) -> str:
    """One row; a cell that begins with <td is taken as HTML."""
    shown = "".join(cell if cell.startswith("<td") else f"<td>{text(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{text(first)}</th>{shown}</tr>'


def toggles(legend: str, choices: Mapping[str, str]) -> str:
    """Buttons of which one is chosen and, below them, a sentence about the choice.

    Args:
        legend: what is chosen.
        choices: a sentence by name; the first one is chosen when the page opens.

    Returns:
        HTML; nothing if there is nothing to choose.

    Example:
        >>> toggles("Plan", {"as typed": "Only one."})
        ''
    """
    if len(choices) < 2:
        return ""
    buttons = "\n".join(_button(place, name) for place, name in enumerate(choices))
    sentences = per_choice([f"<p>{text(sentence)}</p>" for sentence in choices.values()])
    return (
        f'<fieldset class="toggles">\n<legend>{text(legend)}</legend>\n{buttons}\n</fieldset>\n'
        f'<div class="caption" aria-live="polite">\n{sentences}\n</div>'
    )


def per_choice(parts: Sequence[str]) -> str:
    """HTML that shows the part of the chosen button; a single part is always shown."""
    if len(parts) == 1:
        return parts[0]
    return "\n".join(f'<div class="choice choice-{place}">\n{part}\n</div>' for place, part in enumerate(parts))


def _button(place: int, name: str) -> str:
    checked = " checked" if place == 0 else ""
    return (
        f'<label><input type="radio" name="choice" id="choice-{place}" value="{place}" autocomplete="off"{checked}>'
        f"<span>{text(name)}</span></label>"
    )


def finding_cards(findings: Sequence[Finding], *, otherwise: tuple[str, str]) -> str:
    """All findings as HTML, or one card with a title and a sentence where there are none."""
    title, sentence = otherwise
    nothing = f'<article class="finding"><h3>{text(title)}</h3><p>{text(sentence)}</p></article>'
    return "\n".join(finding_card(finding) for finding in findings) or nothing


def finding_card(finding: Finding) -> str:
    """One finding as HTML: badge and subject, evidence, remedy, law."""
    warning = finding.severity == "warning"
    badge = f"{'⚠' if warning else 'ℹ'}\ufe0e {finding.severity}"
    return (
        f'<article class="finding{" warning" if warning else ""}">'
        f'<h3><span class="badge">{escape(badge)}</span>{text(sentence_case(finding.subject))}</h3>'
        f"<p>{text(full_stop(finding.evidence))}</p>"
        f"<p><strong>What to do:</strong> {text(full_stop(finding.remedy))}</p>"
        f"{_law(finding.law)}</article>"
    )


def _law(law: str) -> str:
    return f'<p class="law">Law: <code>{escape(law)}</code>{_source(law)}</p>' if law else ""


def _source(law: str) -> str:
    try:
        citation = cite(law)
    except EquilibriaError:
        return ""
    if not isinstance(citation, Citation) or not citation.paper:
        return ""
    return f", after <cite>{escape(PAPERS[citation.paper].title)}</cite>, {escape(citation.where)} ({citation.status})"
