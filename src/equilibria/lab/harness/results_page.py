"""RESULTS.md, written from the results alone: no number on it is typed by hand."""

from __future__ import annotations

from pathlib import Path

from equilibria.lab.harness import registry, wording
from equilibria.lab.harness.claim import Claim
from equilibria.lab.harness.experiment import KINDS
from equilibria.lab.harness.results import Place, Result, ResultsFolder
from equilibria.records._files import write_whole
from equilibria.theory.citations import PAPERS

PAGE = "RESULTS.md"
_HEAD = """# Results

Written by `equilibria reproduce` from the `result.json` files beside it: do not edit. Expected is the number of the
paper, or of the theory where the paper prints none or a wrong one; the verdict follows from expected, measured and
tolerance. Behind a mean over seeds stands its 95 % confidence interval: shown if all of it agrees, contradicted if none
of it does, otherwise not shown at this scale, which is no fault of the code. Networks are smaller and trained for less
time than in the papers: a claim that is contradicted there stays here as such.

Titles say what the paper claims or looks at, verdicts what came out here. What a scale is too small to show is not
demanded of it: its verdict is told in brackets, and fails nothing.

An identity is true by algebra or by the settings alone: it checks the code, and is not counted among the claims.
Neither is a comparison with what the paper read off a single draw of its data: it agrees if the paper's number lies in
the brackets, where 95 % of further draws of ours would be (Student, in the logarithm).

Behind each command stands the hash of the settings and the code that its result comes from. The same command does
nothing if they are still the same, and computes again what is not.
"""


def write_results_page(folder: ResultsFolder) -> Path:
    """Write the page beside the results: of every experiment the largest scale that is there."""
    write_whole(folder.path / PAGE, results_page(folder).encode())
    return folder.path / PAGE


def results_page(folder: ResultsFolder) -> str:
    """The text of the page."""
    largest: dict[str, tuple[Place, Result]] = {}
    for place, result in folder.results():
        largest.setdefault(result.id, (place, result))
    results = [result for _, result in largest.values()]
    claims = [claim for result in results for claim in result.claims]
    groups = [_group(folder, kind, list(largest.values())) for kind in KINDS]
    headline = wording.headline(claims)
    parts = [
        f"**{headline[0].upper()}{headline[1:]}.**\n",
        _summary(results),
        *groups,
        _missing(set(largest)),
        _papers(results),
    ]
    return "\n".join([_HEAD, *filter(None, parts)])


def _summary(results: list[Result]) -> str:
    """A line per experiment; nothing if there are none."""
    rows = []
    for result in (result for kind in KINDS for result in results if result.kind == kind):
        counts = wording.counted(result.claims)
        rows.append(f"| [{result.id}](#{result.id}) | {' | '.join(str(count or '') for count in counts)} |")
    head = ["| experiment | claims | shown | not shown | contradicted |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, ""]) if rows else ""


def _group(folder: ResultsFolder, kind: str, found: list[tuple[Place, Result]]) -> str:
    """All results of a kind under its heading; nothing if there are none."""
    sections = [_section(folder, place, result) for place, result in found if result.kind == kind]
    return "\n".join([f"## {KINDS[kind]}", "", *sections]) if sections else ""


def _section(folder: ResultsFolder, place: Place, result: Result) -> str:
    where = place.path.relative_to(folder.path).as_posix()
    seeds = wording.seeds(result.config)
    seed = f", {seeds}" if seeds else ""
    data = f" Data: {result.data}." if result.data else ""
    lines = [
        f"### {result.id}",
        "",
        f"**{_literal(result.title)}.**",
        f"{wording.after(result.source)}. `{result.command}`{seed}, {wording.duration(result.seconds)} of CPU time, "
        f"`{result.fingerprint}`.{data} Settings: `{wording.settings(result.config)}`.",
        "",
        "| claim | source | as printed | expected | measured | verdict |",
        "|---|---|---|---|---|---|",
        *(_row(claim) for claim in result.claims),
        "",
    ]
    corrections = [f"- {claim.source}: {_correction(claim)}" for claim in result.claims if claim.source.corrected]
    if corrections:
        lines += ["Corrections:", "", *dict.fromkeys(corrections), ""]
    lines += [f"![{result.title}]({where}/{name}.png)\n" for name in result.figures]
    return "\n".join(lines)


def _row(claim: Claim) -> str:
    cells = (
        claim.text,
        wording.source(claim),
        wording.printed(claim),
        wording.expected(claim),
        wording.measured(claim),
        wording.verdict(claim),
    )
    return f"| {' | '.join(map(_literal, cells))} |"


def _literal(words: str) -> str:
    """Words that Markdown takes as they are, also in a table."""
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _correction(claim: Claim) -> str:
    derivation = f" (derivation: `equilibria.theory.{claim.source.law}`)" if claim.source.law else ""
    return f"{_literal(claim.source.corrected)}{derivation}"


def _missing(there: set[str]) -> str:
    """The experiments without a result; nothing if all have one."""
    lines = [
        f"- `equilibria reproduce {name}`: {_literal(experiment.title)}"
        for name, experiment in registry.experiments().items()
        if name not in there
    ]
    return "\n".join(["## No results here yet", "", *lines, ""]) if lines else ""


def _papers(results: list[Result]) -> str:
    """What the short names stand for; nothing if there are none."""
    sources = [str(claim.source) for result in results for claim in result.claims] + [each.source for each in results]
    used = {word for source in sources for word in source.split()}
    lines = [f"- {key}: {paper.title}" for key, paper in PAPERS.items() if key in used]
    return "\n".join(["## Papers", "", *lines, ""]) if lines else ""
