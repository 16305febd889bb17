"""A finding as a card of a page: what, why, what to do, and the law behind it."""

from __future__ import annotations

from html import escape

from equilibria.errors import EquilibriaError
from equilibria.findings import Finding
from equilibria.pages.words import full_stop, sentence_case, text
from equilibria.theory.citations import PAPERS, Citation, cite


def card(finding: Finding) -> str:
    """One finding as HTML."""
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
