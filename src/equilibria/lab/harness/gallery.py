"""One offline HTML page over all results: figures, claims with their verdicts, how to repeat them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path

from equilibria.lab.harness import wording
from equilibria.lab.harness.claim import Claim
from equilibria.lab.harness.experiment import KINDS
from equilibria.lab.harness.registry import is_stale
from equilibria.lab.harness.results import Place, Result, ResultsFolder
from equilibria.records._files import write_whole
from equilibria.views.document import still_document
from equilibria.views.words import settings_list, text

PAGE = "index.html"
_STALE = "<p class='notice bad'>Stale: the experiment's version or settings have changed since; run it again.</p>"


def write_gallery(folder: ResultsFolder) -> Path:
    """Write the page beside the results; it needs no other file."""
    write_whole(folder.path / PAGE, gallery_html(folder).encode())
    return folder.path / PAGE


def gallery_html(folder: ResultsFolder, *, judge_age: bool = True) -> str:
    """The text of the page.

    Args:
        folder: the results.
        judge_age: whether to mark results of another version or other settings; it imports all experiments.
    """
    found = sorted(folder.results(), key=lambda each: list(KINDS).index(each[1].kind))
    largest = {result.id: result for _, result in reversed(found)}  # of each experiment the largest scale comes first
    claims = [claim for result in largest.values() for claim in result.claims]
    return still_document(
        _asset("gallery.html"),
        title="equilibria: the papers, re-run",
        style=_asset("gallery.css"),
        headline=escape(wording.headline(claims)),
        contents="\n".join(_contents([result for _, result in found])),
        results="\n".join(_section(place, result, stale=judge_age and is_stale(result)) for place, result in found),
    )


def _contents(results: list[Result]) -> Iterator[str]:
    """A list for each kind."""
    for kind, title in KINDS.items():
        entries = [_entry(result) for result in results if result.kind == kind]
        if entries:
            yield f'<h3>{escape(title)}</h3><ul class="contents">{"".join(entries)}</ul>'


def _entry(result: Result) -> str:
    state = wording.headline(result.claims)
    return (
        f'<li><a href="#{_anchor(result)}"><code>{escape(result.id)}</code></a> ({escape(result.scale)}) '
        f"{escape(result.title)} "
        f'<span class="{wording.mark(result.claims)}">{escape(state)}</span></li>'
    )


def _section(place: Place, result: Result, *, stale: bool) -> str:
    facts = [
        ("seeds", wording.seeds(result.config) or "none needed", ""),
        *([("data", result.data, "")] if result.data else []),
        ("CPU time", wording.duration(result.seconds), ""),
        ("settings", result.fingerprint, "hash"),
        ("finished", result.finished.replace("T", " ").replace("+00:00", " UTC"), f"equilibria {result.version}"),
    ]
    return (
        f'<section id="{_anchor(result)}"><h2>{escape(result.title)}</h2>'
        f'<p class="caption"><code>{escape(result.id)}</code> at scale {escape(result.scale)}: '
        f"{escape(wording.after(result.source))}</p>"
        f"{_STALE if stale else ''}"
        f"{''.join(_figure(place, name, result) for name in result.figures)}"
        f"{_table(result)}<dl class='settings'>{settings_list(facts)}</dl>"
        f"<p><code>{escape(result.command)}</code></p>"
        f"<details><summary>settings</summary><p>{text(wording.settings(result.config))}</p></details></section>"
    )


def _anchor(result: Result) -> str:
    return escape(f"{result.id}-{result.scale}")


def _figure(place: Place, name: str, result: Result) -> str:
    try:
        image = base64.b64encode(place.figure(name, "png").read_bytes()).decode()
    except OSError:
        return f"<p class='notice'>The figure {escape(name)} is not there any more.</p>"
    return f'<img src="data:image/png;base64,{image}" alt="{escape(result.title)}: {escape(name)}">'


def _table(result: Result) -> str:
    rows = "".join(_row(claim) for claim in result.claims)
    head = "<tr><th>claim</th><th>expected</th><th>measured</th><th>verdict</th></tr>"
    return f"<div class='scroll'><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def _row(claim: Claim) -> str:
    remarks = [wording.source(claim)]
    if claim.source.corrected:
        prints = f" (as printed: {wording.printed(claim)})" if claim.printed is not None else ""
        remarks.append(f"corrected{prints}: {claim.source.corrected}")
    elif claim.printed is not None:
        remarks.append(f"as printed: {wording.printed(claim)}")
    if claim.source.law:
        remarks.append(f"derivation: equilibria.theory.{claim.source.law}")
    small = "<br>".join(text(remark) for remark in remarks)
    verdict = f'<td class="{wording.mark([claim])}">{escape(wording.verdict(claim))}</td>'
    return (
        f"<tr><th>{text(claim.text)}<small>{small}</small></th><td>{text(wording.expected(claim))}</td>"
        f"<td>{text(wording.measured(claim))}</td>{verdict}</tr>"
    )


def _asset(name: str) -> str:
    return files("equilibria.lab.harness").joinpath(name).read_text(encoding="utf-8")
