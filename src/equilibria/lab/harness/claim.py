"""A claim of a paper beside what was measured; its verdict is computed, never typed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from equilibria.errors import EquilibriaError, number, one_of, within
from equilibria.theory.citations import PAPERS

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
KINDS = ("relative", "absolute", "at most", "at least", "rounding", "order", "among")
CLAIM, IDENTITY, COMPARISON = "claim", "identity", "comparison"
ROLES = (CLAIM, IDENTITY, COMPARISON)
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a claim comes from.

    Attributes:
        paper: key into `equilibria.theory.PAPERS`; "" for what no paper states.
        where: figure, equation, theorem or section.
        corrected: what the paper prints wrongly and how it reads here; "" where it is right.
        law: dotted name below `equilibria.theory` whose docstring has the derivation; "" without one.
    """

    paper: str
    where: str
    corrected: str = ""
    law: str = ""

    def __post_init__(self) -> None:
        if self.paper:
            one_of("paper", self.paper, PAPERS)

    def __str__(self) -> str:
        return f"{self.paper} {self.where}".strip()


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, its number and ours. Build it with the functions below.

    Attributes:
        text: what is claimed.
        source: who claims it.
        kind: how measured and expected are compared, one of `KINDS`.
        expected: the number of the paper or of the theory; the bound, for "at most" and "at least".
        measured: our number.
        tolerance: how far off it may be: a share of expected if kind is "relative", else in units of expected.
        unit: of all these numbers; "" for pure ones.
        interval: ends of the confidence interval of the measured number; None where it has no scatter.
        printed: what the paper prints where that is not what is expected here, because it is wrong or was measured on
            another network; None where it is the same or the paper prints no number.
        demanded: False where this scale is too small to show it: the verdict is told, and fails nothing.
        seeds: over how many trainings the measured number is a mean; 0 where it is not one.
        role: "claim"; "identity" where algebra or the settings alone decide, so that it checks the code and not the
            world; "comparison" where a number of the paper stands beside ours for the reader, and fails nothing. Only
            claims are counted as such.
    """

    text: str
    source: Source
    kind: str
    expected: float
    measured: float
    tolerance: float
    unit: str = ""
    interval: tuple[float, float] | None = None
    printed: float | None = None
    demanded: bool = True
    seeds: int = 0
    role: str = CLAIM

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        one_of("role", self.role, ROLES)
        number("expected", self.expected)
        within("tolerance", self.tolerance, low=0)
        if self.interval is not None and not self.interval[0] <= self.measured <= self.interval[1]:
            raise EquilibriaError(f"got interval={self.interval}; expected one around measured={self.measured:g}")

    @property
    def allowed(self) -> tuple[float, float]:
        """The smallest and the largest number that agree with the claim."""
        room = self.tolerance * (abs(self.expected) if self.kind == "relative" else 1)
        low, high = self.expected - room, self.expected + room
        return -math.inf if self.kind == "at most" else low, math.inf if self.kind == "at least" else high

    @property
    def verdict(self) -> str:
        """Shown if the whole interval agrees, contradicted if none of it does, else not shown.

        What is not a finite number contradicts every claim.
        """
        if not math.isfinite(self.measured):
            return CONTRADICTED
        if self.kind == "among":  # a single number of the paper, beside where the next one of ours would be
            low, high = self.interval or (self.measured, self.measured)
            return SHOWN if low <= self.expected <= high else CONTRADICTED
        low, high = self.allowed
        left, right = self.interval or (self.measured, self.measured)
        if low <= left and right <= high:
            return SHOWN
        return CONTRADICTED if right < low or left > high else NOT_SHOWN

    @property
    def fails(self) -> bool:
        """Whether it was to be shown and was not.

        A mean over trainings whose interval leaves it open is honest, no fault: more seeds or a larger scale would
        tell. Where something exact was computed, the scatter is ours to reduce.
        """
        open_to_doubt = self.seeds > 0 and self.verdict == NOT_SHOWN
        return self.demanded and self.role != COMPARISON and self.verdict != SHOWN and not open_to_doubt

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict for other readers; what is not finite becomes null."""
        measured = self.measured if math.isfinite(self.measured) else None
        return {**asdict(self), "measured": measured, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Claim:
        """The claim that `as_dict` was called on.

        Raises:
            EquilibriaError: if something is not of the kind that `as_dict` gives, or the verdict does not follow from
                the numbers, so that somebody typed it.
        """
        fields = {name: value for name, value in of_kind("a claim", values, dict).items() if name != "verdict"}
        source = of_kind("source", fields["source"], dict)
        fields["source"] = Source(**{name: of_kind(name, value, str) for name, value in source.items()})
        for name in ("text", "unit", "kind", "role"):
            of_kind(name, fields.get(name, ""), str)
        for name in ("measured", "printed"):
            of_kind(name, fields.get(name), float, int, type(None))
        of_kind("demanded", fields.get("demanded", True), bool)
        of_kind("seeds", fields.get("seeds", 0), int)
        fields["measured"] = math.nan if fields["measured"] is None else fields["measured"]
        fields["interval"] = None if fields["interval"] is None else _pair(fields["interval"])
        claim = cls(**fields)
        if claim.verdict != values["verdict"]:
            raise EquilibriaError(
                f"got the verdict {values['verdict']!r} for {claim.text!r}; expected {claim.verdict!r}, by its numbers"
            )
        return claim


def of_kind(name: str, value: Any, *kinds: type) -> Any:
    """``value`` if it is of one of these types, as JSON gave it; what is not is damaged, or of another version."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise EquilibriaError(f"got {name}={value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _pair(ends: Any) -> tuple[float, float]:
    low, high = of_kind("interval", ends, list)
    return number("interval", low), number("interval", high)


def near(
    text: str,
    source: Source,
    *,
    expected: float,
    measured: float,
    relative: float | None = None,
    absolute: float | None = None,
    unit: str = "",
    interval: tuple[float, float] | None = None,
    printed: float | None = None,
) -> Claim:
    """The measured number is the expected one, within a share of it or an amount: give one of the two.

    Example:
        >>> claim = near("the period", Source("sharp", "fig. 5"), expected=4.44, measured=4.45, relative=0.01)
        >>> claim.verdict, claim.allowed[1] > 4.48
        ('shown', True)
    """
    if (relative is None) == (absolute is None):
        raise EquilibriaError(f"got relative={relative}, absolute={absolute}; expected one of the two")
    kind = "absolute" if relative is None else "relative"
    tolerance = float(absolute if relative is None else relative)  # type: ignore[arg-type]
    return Claim(text, source, kind, float(expected), float(measured), tolerance, unit, interval, printed)


def at_most(
    text: str,
    source: Source,
    *,
    bound: float,
    measured: float,
    unit: str = "",
    interval: tuple[float, float] | None = None,
    printed: float | None = None,
) -> Claim:
    """The measured number does not exceed the bound."""
    return Claim(text, source, "at most", float(bound), float(measured), 0.0, unit, interval, printed)


def at_least(
    text: str,
    source: Source,
    *,
    bound: float,
    measured: float,
    unit: str = "",
    interval: tuple[float, float] | None = None,
    printed: float | None = None,
) -> Claim:
    """The measured number reaches the bound."""
    return Claim(text, source, "at least", float(bound), float(measured), 0.0, unit, interval, printed)


def to_rounding(text: str, source: Source, *, error: float, operations: float) -> Claim:
    """An identity: the relative error is no more than the roundings of so many float64 operations.

    Example:
        >>> to_rounding("P is conserved", Source("", "ours"), error=3e-16, operations=10).verdict
        'shown'
    """
    return Claim(text, source, "rounding", 0.0, float(error), operations * _EPSILON)


def convergence_order(
    text: str,
    source: Source,
    *,
    expected: float,
    sizes: Sequence[float],
    errors: Sequence[float],
    absolute: float,
) -> Claim:
    """Errors fall as sizes to a power: the slope of the least-squares line through their logarithms.

    Example:
        >>> claim = convergence_order(
        ...     "second order", Source("", "ours"), expected=2, sizes=[1, 0.1], errors=[3, 0.03], absolute=0.1
        ... )
        >>> round(claim.measured, 6), claim.verdict
        (2.0, 'shown')
    """
    slope = float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])
    return Claim(text, source, "order", float(expected), slope, absolute)


def not_demanded(claim: Claim) -> Claim:
    """The same claim at a scale that is too small to show it."""
    return replace(claim, demanded=False)


def identity(claim: Claim) -> Claim:
    """The same sentence, where it cannot be otherwise: it is checked, and not counted among the claims."""
    return replace(claim, role=IDENTITY)


def comparison(claim: Claim) -> Claim:
    """The same sentence beside the paper's number, where agreeing proves little: it is told, and fails nothing."""
    return replace(claim, role=COMPARISON)
