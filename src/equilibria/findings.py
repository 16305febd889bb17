"""A finding: something worth knowing, with its evidence, a remedy and the law behind it; and how it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing about a plan or a run.

    Attributes:
        severity: "warning" (costs something) or "note".
        subject: what it is about.
        evidence: the numbers.
        remedy: what to do.
        law: the law of `equilibria.theory` it rests on; ask `equilibria.cite`.
    """

    severity: str
    subject: str
    evidence: str
    remedy: str
    law: str


def counted(count: int, what: str) -> str:
    """A number of things in words.

    Example:
        >>> counted(1, "step"), counted(2000, "step")
        ('1 step', '2,000 steps')
    """
    return f"{count:,} {what}{'s' if count != 1 else ''}"
