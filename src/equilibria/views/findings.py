"""Findings as sentences in the terminal, and as a card in notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from equilibria._display import Printable
from equilibria.findings import Finding, counted
from equilibria.views._rich import Console, collected_text, marked, text_console
from equilibria.views.notebook import card

MARKS = {"warning": "!", "note": "-"}
_NONE = "no findings"


def findings_view(findings: Sequence[Finding]) -> Printable:
    """Every finding with its remedy, as the table of a run shows them.

    Example:
        >>> findings_view(())
        no findings
    """
    if not findings:
        return Printable(_NONE, card(_NONE.capitalize()))
    out = text_console()
    print_findings(findings, out)
    rows = [[finding.severity, f"{finding.subject}: {finding.evidence}", finding.remedy] for finding in findings]
    title = counted(len(findings), "finding")
    return Printable(collected_text(out), card(title, headings=["", "finding", "what to do"], rows=rows))


def print_findings(findings: Sequence[Finding], out: Console) -> None:
    """Print subject and evidence behind a mark, and the remedy below."""
    for finding in findings:
        out.print(marked(MARKS[finding.severity], f"{finding.subject}: {finding.evidence}"))
        if finding.remedy:
            out.print(marked(" ", finding.remedy))
