"""The two pages over all results: RESULTS.md, and a gallery in one offline HTML file.

Every number on them comes from the result files.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from equilibria.lab.harness import claim_text, registry
from equilibria.lab.harness.claim import VERDICTS, Claim
from equilibria.lab.harness.experiment import KINDS, NETWORKS
from equilibria.lab.harness.results import Result, ResultsFolder, ScaleFolder
from equilibria.records._files import write_whole
from equilibria.theory.citations import PAPERS, Citation, cite
from equilibria.views.document import still_document
from equilibria.views.words import settings_list, text

RESULTS_PAGE, GALLERY_PAGE = "RESULTS.md", "index.html"
_STALE = "<p class='notice bad'>Stale: the experiment's version or settings have changed since; run it again.</p>"
_HEAD = """# Results

Written by `equilibria reproduce` from the `result.json` files in this folder: do not edit. Expected is the number of
the paper, or of the theory if the paper prints none or a wrong one; the verdict follows from expected, measured and
tolerance. After a mean over seeds comes its 95 % confidence interval (Student; ratios are averaged in logarithms).

- **shown**: the whole interval lies within the tolerance and contains the expected number.
- **within tolerance, law excluded**: it lies within the tolerance, and the expected number outside it. The law is a
  good approximation there, and not exact. Of true laws one interval in twenty says so by chance.
- **not shown**: the interval lies partly within the tolerance, which is not an error of the code.
- **contradicted**: it lies outside.

A number without scatter is shown wherever it lies within the tolerance, which comes from an error analysis of that
number. Where nobody has bounded the law's error on a network there is no tolerance: the claim is shown if the interval
contains the number, and contradicted if not. Networks are smaller and trained for less time than in the papers: a claim
that is contradicted there stays here as such.

Titles say what the paper claims or examines, verdicts what was measured here. A claim that a scale is too small to show
is not demanded at that scale: its verdict is followed by brackets, and fails nothing.

Three more kinds of lines are not counted among the claims. An identity is true by algebra or by the settings alone: it
checks the code. A diagnostic is divided by another measurement of the same steps, such as the unit gradient: it says
where a deviation comes from. A comparison is with a number that the paper read off a single draw of its data: it agrees
if the paper's number lies in the brackets, which hold 95 % of further draws of ours (Student, in the logarithm).

Each command is followed by the hash of the experiment's version and settings. The same command reuses the result while
they are unchanged, and computes it again otherwise.
"""


# ---- RESULTS.md


def write_results_page(folder: ResultsFolder) -> Path:
    """Write RESULTS.md: the largest scale of every experiment that has a result."""
    write_whole(folder.path / RESULTS_PAGE, results_page(folder).encode())
    return folder.path / RESULTS_PAGE


def results_page(folder: ResultsFolder) -> str:
    """The text of RESULTS.md."""
    largest: dict[str, tuple[ScaleFolder, Result]] = {}
    for scale_folder, result in folder.results():
        largest.setdefault(result.id, (scale_folder, result))
    results = [result for _, result in largest.values()]
    groups = [_group(folder, kind, list(largest.values())) for kind in KINDS]
    parts = [
        f"**{results_headline(results)}.**\n",
        _summary(results),
        *groups,
        _missing(set(largest)),
        _papers(results),
    ]
    return "\n".join([_HEAD, *filter(None, parts)])


def results_headline(results: Sequence[Result]) -> str:
    """How many claims are shown, in a line: the papers' on exact problems, theirs on networks, and ours."""
    return claim_text.shown_counts(_claims_by_kind(results))


def _claims_by_kind(results: Sequence[Result]) -> dict[str, list[Claim]]:
    groups: dict[str, list[Claim]] = {"papers, exact": [], "papers, networks": [], "ours": []}
    for result in results:
        papers = groups["papers, networks" if result.kind == NETWORKS else "papers, exact"]
        for claim in result.claims:
            (papers if claim.source.paper else groups["ours"]).append(claim)
    return groups


def _summary(results: list[Result]) -> str:
    """A line per kind of claims and per experiment; nothing if there are none."""
    rows = {f"**{name}**": claims for name, claims in _claims_by_kind(results).items() if claims}
    for result in (result for kind in KINDS for result in results if result.kind == kind):
        rows[f"[{result.id}](#{result.id})"] = list(result.claims)
    head = [f"| | claims | {' | '.join(VERDICTS)} |", "|---" * (2 + len(VERDICTS)) + "|"]
    lines = [
        f"| {name} | {' | '.join(str(count or '') for count in claim_text.verdict_counts(claims))} |"
        for name, claims in rows.items()
    ]
    return "\n".join([*head, *lines, ""]) if lines else ""


def _group(folder: ResultsFolder, kind: str, results: list[tuple[ScaleFolder, Result]]) -> str:
    """All results of a kind under its heading; nothing if there are none."""
    sections = [_md_section(folder, scale_folder, result) for scale_folder, result in results if result.kind == kind]
    return "\n".join([f"## {KINDS[kind]}", "", *sections]) if sections else ""


def _md_section(folder: ResultsFolder, scale_folder: ScaleFolder, result: Result) -> str:
    where = scale_folder.path.relative_to(folder.path).as_posix()
    seeds = claim_text.seeds_text(result.config)
    facts = [
        f"`{result.command}`",
        *([seeds] if seeds else []),
        f"{claim_text.duration_text(result.seconds)} of CPU time",
    ]
    data = f" Data: {result.data}." if result.data else ""
    lines = [
        f"### {result.id}",
        "",
        f"**{_literal(result.title)}.**",
        f"{claim_text.source_sentence(result.source)}. {', '.join(facts)}, `{result.fingerprint}`.{data} "
        f"Settings: `{claim_text.config_text(result.config)}`.",
        "",
        "| claim | source | as printed | expected | measured | verdict |",
        "|---|---|---|---|---|---|",
        *(_md_row(claim) for claim in result.claims),
        "",
    ]
    corrections = [f"- {claim.source}: {_correction(claim)}" for claim in result.claims if claim.source.corrected]
    if corrections:
        lines += ["Corrections:", "", *dict.fromkeys(corrections), ""]
    if result.not_judged:
        reasons = [f"- {_literal(name)}: {_literal(reason)}" for name, reason in result.not_judged.items()]
        lines += ["Measured and not judged:", "", *reasons, ""]
    lines += [f"![{result.title}]({where}/{name}.png)\n" for name in result.figures]
    return "\n".join(lines)


def _md_row(claim: Claim) -> str:
    cells = (
        claim.text,
        claim_text.source_text(claim),
        claim_text.printed_text(claim),
        claim_text.expected_text(claim),
        claim_text.measured_text(claim),
        claim_text.verdict_text(claim),
    )
    return f"| {' | '.join(map(_literal, cells))} |"


def _literal(words: str) -> str:
    """Escape text for Markdown, also in a table."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _correction(claim: Claim) -> str:
    derivation = f" (derivation: `{_derivation(claim)}`)" if claim.source.law else ""
    return f"{_literal(claim.source.corrected)}{derivation}"


def _derivation(claim: Claim) -> str:
    """Where the law of a claim is now: a result may be older than its module."""
    citation = cite(claim.source.law)
    assert isinstance(citation, Citation)
    return f"equilibria.theory.{citation.law}"


def _missing(there: set[str]) -> str:
    """The experiments without a result; nothing if all have one."""
    lacking = [name for name in registry.MODULES if name not in there]
    lines = [f"- `equilibria reproduce {name}{' --scale paper' * (name in registry.PRESETS)}`" for name in lacking]
    return "\n".join(["## No results here yet", "", *lines, ""]) if lines else ""


def _papers(results: list[Result]) -> str:
    """Titles of the papers behind the short names; nothing if there are none."""
    sources = [str(claim.source) for result in results for claim in result.claims]
    sources += [result.source for result in results]
    used = {word for source in sources for word in source.split()}
    lines = [f"- {key}: {paper.title}" for key, paper in PAPERS.items() if key in used]
    return "\n".join(["## Papers", "", *lines, ""]) if lines else ""


# ---- the gallery


def write_gallery(folder: ResultsFolder) -> Path:
    """Write the gallery, one HTML file that needs no other."""
    write_whole(folder.path / GALLERY_PAGE, gallery_html(folder).encode())
    return folder.path / GALLERY_PAGE


def gallery_html(folder: ResultsFolder, *, judge_age: bool = True) -> str:
    """The HTML of the gallery.

    Args:
        folder: the results.
        judge_age: whether to mark results of another version or other settings; it imports their experiments.
    """
    results = sorted(folder.results(), key=lambda pair: list(KINDS).index(pair[1].kind))
    largest = {result.id: result for _, result in reversed(results)}  # the largest scale comes first, so it stays
    sections = [
        _html_section(scale_folder, result, stale=judge_age and registry.is_stale(result))
        for scale_folder, result in results
    ]
    return still_document(
        _asset("gallery.html"),
        title="equilibria: the papers, re-run",
        style=_asset("gallery.css"),
        headline=escape(results_headline(list(largest.values()))),
        contents="\n".join(_contents([result for _, result in results])),
        results="\n".join(sections),
    )


def _contents(results: list[Result]) -> Iterator[str]:
    """A list of experiments for each kind."""
    for kind, title in KINDS.items():
        entries = [_entry(result) for result in results if result.kind == kind]
        if entries:
            yield f'<h3>{escape(title)}</h3><ul class="contents">{"".join(entries)}</ul>'


def _entry(result: Result) -> str:
    state = claim_text.claims_headline(result.claims)
    return (
        f'<li><a href="#{_anchor(result)}"><code>{escape(result.id)}</code></a> ({escape(result.scale)}) '
        f"{escape(result.title)} "
        f'<span class="{claim_text.verdict_class(result.claims)}">{escape(state)}</span></li>'
    )


def _html_section(scale_folder: ScaleFolder, result: Result, *, stale: bool) -> str:
    facts = [
        ("seeds", claim_text.seeds_text(result.config) or "none needed", ""),
        *([("data", result.data, "")] if result.data else []),
        ("CPU time", claim_text.duration_text(result.seconds), ""),
        ("settings", result.fingerprint, "hash"),
        ("finished", result.finished.replace("T", " ").replace("+00:00", " UTC"), f"equilibria {result.version}"),
    ]
    return (
        f'<section id="{_anchor(result)}"><h2>{escape(result.title)}</h2>'
        f'<p class="caption"><code>{escape(result.id)}</code> at scale {escape(result.scale)}: '
        f"{escape(claim_text.source_sentence(result.source))}</p>"
        f"{_STALE if stale else ''}"
        f"{''.join(_figure(scale_folder, name, result) for name in result.figures)}"
        f"{_html_table(result)}<dl class='settings'>{settings_list(facts)}</dl>"
        f"<p><code>{escape(result.command)}</code></p>"
        f"<details><summary>settings</summary><p>{text(claim_text.config_text(result.config))}</p></details></section>"
    )


def _anchor(result: Result) -> str:
    return escape(f"{result.id}-{result.scale}")


def _figure(scale_folder: ScaleFolder, name: str, result: Result) -> str:
    try:
        image = base64.b64encode(scale_folder.figure(name, "png").read_bytes()).decode()
    except OSError:
        return f"<p class='notice'>The figure {escape(name)} is not there any more.</p>"
    return f'<img src="data:image/png;base64,{image}" alt="{escape(result.title)}: {escape(name)}">'


def _html_table(result: Result) -> str:
    rows = "".join(_html_row(claim) for claim in result.claims)
    head = "<tr><th>claim</th><th>expected</th><th>measured</th><th>verdict</th></tr>"
    return f"<div class='scroll'><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def _html_row(claim: Claim) -> str:
    remarks = [claim_text.source_text(claim)]
    if claim.source.corrected:
        prints = f" (as printed: {claim_text.printed_text(claim)})" if claim.printed is not None else ""
        remarks.append(f"corrected{prints}: {claim.source.corrected}")
    elif claim.printed is not None:
        remarks.append(f"as printed: {claim_text.printed_text(claim)}")
    if claim.source.law:
        remarks.append(f"derivation: {_derivation(claim)}")
    small = "<br>".join(text(remark) for remark in remarks)
    verdict = f'<td class="{claim_text.verdict_class([claim])}">{escape(claim_text.verdict_text(claim))}</td>'
    return (
        f"<tr><th>{text(claim.text)}<small>{small}</small></th><td>{text(claim_text.expected_text(claim))}</td>"
        f"<td>{text(claim_text.measured_text(claim))}</td>{verdict}</tr>"
    )


def _asset(name: str) -> str:
    return files("equilibria.lab.harness").joinpath(name).read_text(encoding="utf-8")
