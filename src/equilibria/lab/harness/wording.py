"""A claim's numbers in words, the same on the terminal, in the gallery and on the results page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from equilibria.findings import number
from equilibria.lab.harness.claim import CLAIM, COMPARISON, CONTRADICTED, IDENTITY, NOT_SHOWN, SHOWN, Claim

BEYOND = "beyond the papers"
"""Where no paper makes the claim, or has the figure."""
_DIGITS, _MOST_DIGITS = 4, 8
_VERDICTS = (SHOWN, CONTRADICTED, NOT_SHOWN)
_ROLE_WORDS = {
    IDENTITY: ("identity", "identities", "holds", "hold"),
    COMPARISON: ("comparison", "comparisons", "agrees", "agree"),
}


def expected(claim: Claim) -> str:
    """What is expected and how far off it may be.

    Example:
        >>> from equilibria.lab.harness.claim import Source, at_most, near, to_rounding
        >>> source = Source("sharp", "fig. 5")
        >>> expected(near("", source, expected=4.4429, measured=4.44, relative=0.01, unit="steps"))
        '4.443 steps ± 1 %'
        >>> expected(at_most("", source, bound=0.05, measured=0.01))
        '≤ 0.05'
        >>> expected(near("", source, expected=4.442883, measured=4.44, relative=1e-5))
        '4.442883 ± 0.001 %'
    """
    amount = _amount(claim.expected, claim)
    if claim.kind == "among":
        return amount
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
    low, high = (_shown(end, claim) for end in claim.interval)
    return f"{amount} [{low}, {high}]" + (f", {claim.seeds} seeds" if claim.seeds else "")


def printed(claim: Claim) -> str:
    """What the paper prints, where that is not what is expected; else nothing."""
    return "" if claim.printed is None else _amount(claim.printed, claim)


def verdict(claim: Claim) -> str:
    """The verdict, and whether this scale was to show it."""
    if claim.role == COMPARISON:
        return f"{'agrees' if claim.verdict == SHOWN else 'does not agree'} (comparison)"
    if claim.role == IDENTITY and claim.verdict == SHOWN:
        return "holds (identity)"
    if not claim.demanded:
        return f"{claim.verdict} (not demanded at this scale)"
    return f"{NOT_SHOWN} at this scale" if claim.seeds and claim.verdict == NOT_SHOWN else claim.verdict


def source(claim: Claim) -> str:
    """Who claims it."""
    return BEYOND if str(claim.source) == "beyond" else str(claim.source)


def after(source: str) -> str:
    """What an experiment reproduces, as a sentence without its stop.

    Example:
        >>> after("smd fig. 4"), after("beyond the papers")
        ('After smd fig. 4', 'Beyond the papers')
    """
    return f"After {source}" if source != BEYOND else BEYOND.capitalize()


def seeds(config: Mapping[str, Any]) -> str:
    """Those of the settings, also of parts of them; "" if there are none.

    Example:
        >>> seeds({"seeds": [3, 4], "rules": [{"seeds": [4, 5]}]}), seeds({"seed": 7}), seeds({"lr": 0.1})
        ('seeds 3, 4, 5', 'seed 7', '')
    """
    found = sorted(set(_seeds(config)))
    return f"{'seed' if len(found) == 1 else 'seeds'} {', '.join(map(str, found))}" if found else ""


def _seeds(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        yield from [value["seed"]] if "seed" in value else []
        named = value.get("seeds", [])
        yield from named if isinstance(named, list) else []  # else how many there are
        for part in value.values():
            yield from _seeds(part)
    elif isinstance(value, list):
        for part in value:
            yield from _seeds(part)


def settings(config: Mapping[str, Any]) -> str:
    """All settings but the seeds in one line.

    Example:
        >>> settings({"lr": 0.1, "seed": 3, "net": {"width": 8, "blocks": [1, 1]}, "rules": [{"lr": 1}, {"lr": 2}]})
        'lr=0.1, net(width=8, blocks=1 1), rules((lr=1), (lr=2))'
    """
    return ", ".join(_setting(name, value) for name, value in config.items() if name not in ("seed", "seeds"))


def _setting(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name}({settings(value)})"
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return f"{name}({', '.join(f'({settings(part)})' for part in value)})"
    return f"{name}={' '.join(map(str, value)) or 'none' if isinstance(value, list) else value}"


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


def mark(claims: Sequence[Claim]) -> str:
    """How good the verdicts are together: "bad" if one fails, "open" if one is only told not to agree, else "good"."""
    if any(claim.fails for claim in claims):
        return "bad"
    return "good" if all(claim.verdict == SHOWN for claim in claims) else "open"


def headline(claims: Sequence[Claim]) -> str:
    """All verdicts in a sentence; identities and comparisons are not counted among the claims.

    Example:
        >>> from equilibria.lab.harness.claim import Source, at_most, identity, not_demanded
        >>> claim = at_most("", Source("", "ours"), bound=1, measured=0.5)
        >>> headline([claim])
        '1 of 1 claim shown'
        >>> headline([claim, claim, identity(claim)])
        '2 of 2 claims shown; 1 of 1 identity holds'
        >>> headline([claim, not_demanded(claim)])
        '1 of 1 claim shown; 1 more not demanded at its scale (1 shown)'
    """
    if not claims:
        return "no results yet"
    asserted = [claim for claim in claims if claim.role == CLAIM]
    words = [_verdicts([claim for claim in asserted if claim.demanded])]
    left = [claim for claim in asserted if not claim.demanded]
    if left:
        counts = Counter(claim.verdict for claim in left)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
        more, whose = " more" if any(words) else "", "its" if len(left) == 1 else "their"
        words.append(f"{len(left)}{more} not demanded at {whose} scale ({told})")
    return "; ".join(filter(None, [*words, _also(claims, IDENTITY), _also(claims, COMPARISON)]))


def counted(claims: Sequence[Claim]) -> tuple[int, int, int, int]:
    """How many claims there are, demanded or not, and how many of them are shown, not shown and contradicted."""
    counts = Counter(claim.verdict for claim in claims if claim.role == CLAIM)
    return counts.total(), counts[SHOWN], counts[NOT_SHOWN], counts[CONTRADICTED]


def _verdicts(claims: Sequence[Claim]) -> str:
    """Nothing if there are no claims."""
    counts = Counter(claim.verdict for claim in claims)
    shown = f"{counts.pop(SHOWN, 0)} of {_count(claims, 'claim', 'claims')} shown"
    words = [shown, *(f"{count} {verdict}" for verdict, count in sorted(counts.items()))]
    return ", ".join(words) if claims else ""


def _also(claims: Sequence[Claim], role: str) -> str:
    found = [claim for claim in claims if claim.role == role]
    if not found:
        return ""
    good = sum(claim.verdict == SHOWN for claim in found)
    one, many, holds, hold = _ROLE_WORDS[role]
    return f"{good} of {_count(found, one, many)} {holds if len(found) == 1 else hold}"


def _count(claims: Sequence[Claim], one: str, many: str) -> str:
    return f"{len(claims)} {one if len(claims) == 1 else many}"


def _amount(value: float, claim: Claim) -> str:
    return f"{_shown(value, claim)} {claim.unit}".strip()


def _shown(value: float, claim: Claim) -> str:
    digits = _digits(claim)
    if not 1e3 <= abs(value) < 1e7:
        return number(value, digits=digits)
    decimals = 0 if float(value).is_integer() else max(0, digits - len(str(int(abs(value)))))
    return f"{value:,.{decimals}f}"


def _digits(claim: Claim) -> int:
    """As many as it takes to see the tolerance, and how far off the paper is; not more than people read."""
    low, high = claim.allowed
    gaps = [high - claim.expected, claim.expected - low]
    if claim.printed is not None:
        gaps.append(abs(claim.printed - claim.expected))
    finite = [gap for gap in gaps if 0 < gap < math.inf and claim.expected]
    if not finite:
        return _DIGITS
    needed = 1 + math.ceil(math.log10(abs(claim.expected) / min(finite)))
    return min(max(needed, _DIGITS), _MOST_DIGITS)
