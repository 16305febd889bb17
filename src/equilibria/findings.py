"""`Finding`, `Findings`, and the words and numbers of every sentence for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from equilibria._display import Printable, renderer

Severity: TypeAlias = Literal["warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a plan or a run that is worth knowing.

    Attributes:
        severity: "warning" (it costs something) or "note".
        subject: the fact.
        evidence: the numbers behind it.
        remedy: what to do.
        law: the law of `equilibria.theory` it rests on, for `equilibria.cite`; "" for none.
        kind: the check that made it, with the step of a single event, which stay the same as the numbers and layers in
            the words change; "" if unknown.
    """

    severity: Severity
    subject: str
    evidence: str
    remedy: str
    law: str
    kind: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.severity}: {self.subject}: {self.evidence}; {self.remedy}"


class Findings(tuple[Finding, ...]):
    """A tuple of findings that prints as sentences, in a terminal and in a notebook.

    Example:
        >>> Findings([Finding("note", "lr moves", "0.1 to 0.01 over steps 0-99", "nothing needs doing", "")])
        - lr moves: 0.1 to 0.01 over steps 0-99
          nothing needs doing
    """

    __slots__ = ()

    def __repr__(self) -> str:
        shown: Printable = renderer("findings.findings_view")(self)
        return shown.text

    def _repr_html_(self) -> str:
        shown: Printable = renderer("findings.findings_view")(self)
        return shown.html


def warnings_first(findings: Iterable[Finding]) -> Findings:
    """The findings, warnings first, otherwise in their order."""
    return Findings(sorted(findings, key=lambda finding: finding.severity != "warning"))


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number of things; ``plural`` where it is not the noun with an s.

    Example:
        >>> counted(1, "step"), counted(2000, "step"), counted(2, "query", "queries")
        ('1 step', '2,000 steps', '2 queries')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def joined(names: Sequence[str], *, most: int = 4) -> str:
    """Names separated by commas; where there are more than ``most``, the first of them and the number of the others.

    Example:
        >>> joined(["conv1", "conv2"]), joined(["conv1", "conv2", "conv3", "fc"], most=3)
        ('conv1, conv2', 'conv1, conv2 and 2 more')
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1:,} more"


def percent(share: float) -> str:
    """A share of 1 in per cent, without decimals from 1 % on.

    Example:
        >>> percent(0.453), percent(0.05), percent(0.00123)
        ('45 %', '5 %', '0.12 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def rounded(value: float, *, digits: int = 3, all_digits: bool = False) -> str:
    """A number with so many significant digits; a dash where it is not finite.

    Args:
        value: the number.
        digits: significant digits.
        all_digits: whether to keep zeros at the end.

    Example:
        >>> rounded(0.00725), rounded(5e-7), rounded(0.029, all_digits=True), rounded(705.0, all_digits=True)
        ('0.00725', '5e-7', '0.0290', '705')
    """
    if not math.isfinite(value):
        return "–"
    text = f"{value:{'#' if all_digits else ''}.{digits}g}".rstrip(".")
    return re.sub(r"e([+-])0*", lambda exponent: "e-" if exponent[1] == "-" else "e", text)


def plain(value: float, *, digits: int = 2) -> str:
    """A factor or a level: so many significant digits, whole numbers up to a million, never 1.2e+02.

    Example:
        >>> plain(2.345), plain(99.99), plain(123.4), plain(12345.6), plain(1.2e7), plain(-0.00012)
        ('2.3', '100', '123', '12,346', '1.2e7', '-0.00012')
    """
    is_whole = 10**digits <= abs(float(f"{value:.{digits}g}")) < 1e6
    return f"{value:,.0f}" if is_whole else rounded(value, digits=digits)
