"""A claim's numbers in words, the same on the terminal, in the gallery and on the results page."""

from __future__ import annotations

from equilibria.experiments.claim import NOT_SHOWN, Claim
from equilibria.pages.words import number

_DIGITS = 4


def expected(claim: Claim) -> str:
    """What is expected and how far off it may be.

    Example:
        >>> from equilibria.experiments.claim import Source, at_most, near, to_rounding
        >>> source = Source("sharp", "fig. 5")
        >>> expected(near("", source, expected=4.4429, measured=4.44, relative=0.01, unit="steps"))
        '4.443 steps ± 1 %'
        >>> expected(at_most("", source, bound=0.05, measured=0.01))
        '≤ 0.05'
    """
    amount = _amount(claim.expected, claim)
    if claim.kind in ("at most", "at least"):
        return f"{'≤' if claim.kind == 'at most' else '≥'} {amount}"
    if claim.kind == "rounding":
        return f"0 to rounding (≤ {number(claim.tolerance, digits=2)})"
    room = f"{number(100 * claim.tolerance)} %" if claim.kind == "relative" else number(claim.tolerance)
    return f"{amount} ± {room}"


def measured(claim: Claim) -> str:
    """What was measured, with its interval and the number of seeds."""
    amount = _amount(claim.measured, claim)
    if claim.interval is None:
        return amount
    low, high = (number(end, digits=_DIGITS) for end in claim.interval)
    return f"{amount} [{low}, {high}]" + (f", {claim.seeds} seeds" if claim.seeds else "")


def printed(claim: Claim) -> str:
    """What the paper prints, where that is not what is expected; else nothing."""
    return "" if claim.printed is None else _amount(claim.printed, claim)


def verdict(claim: Claim) -> str:
    """The verdict, and whether this scale was to show it."""
    if not claim.demanded:
        return f"{claim.verdict} (not demanded at this scale)"
    return f"{NOT_SHOWN} at this scale" if claim.seeds and claim.verdict == NOT_SHOWN else claim.verdict


def duration(seconds: float) -> str:
    """Computing time.

    Example:
        >>> duration(0.03), duration(42.1), duration(605)
        ('< 1 s', '42 s', '10 min 5 s')
    """
    if seconds < 1:
        return "< 1 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _amount(value: float, claim: Claim) -> str:
    shown = f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else number(value, digits=_DIGITS)
    return f"{shown} {claim.unit}".strip()
