"""Claims, verdicts and settings as text, the same on the terminal, in the gallery and in RESULTS.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from equilibria.findings import rounded
from equilibria.lab.harness.claim import (
    CLAIM,
    COMPARISON,
    DIAGNOSTIC,
    EXCLUDED,
    IDENTITY,
    NOT_SHOWN,
    SHOWN,
    VERDICTS,
    Claim,
)

BEYOND = "beyond the papers"
"""The source of claims and figures that no paper has."""
_DIGITS, _MOST_DIGITS = 4, 8
_IN_COUNTS = {EXCLUDED: "within tolerance with the law excluded"}  # without the comma, in a list of counts
_ROLE_WORDS = {
    IDENTITY: ("identity", "identities", "holds", "hold"),
    DIAGNOSTIC: ("diagnostic", "diagnostics", "agrees", "agree"),
    COMPARISON: ("comparison", "comparisons", "agrees", "agree"),
}


def expected_text(claim: Claim) -> str:
    """The expected number and its tolerance.

    Example:
        >>> from equilibria.lab.harness.claim import Source
        >>> period = Source("sharp", "fig. 5").says("the period")
        >>> expected_text(period.near(4.4429, 4.44, relative=0.01, unit="steps"))
        '4.443 steps ± 1 %'
        >>> expected_text(period.at_most(0.05, 0.01))
        '≤ 0.05'
        >>> expected_text(period.near(4.442883, 4.44, relative=1e-5))
        '4.442883 ± 0.001 %'
    """
    amount = _amount(claim.expected, claim)
    if claim.kind == "among":
        return amount
    if claim.kind == "interval":
        return f"{amount}, in the interval"
    if claim.kind in ("at most", "at least"):
        return f"{'≤' if claim.kind == 'at most' else '≥'} {amount}"
    if claim.kind == "rounding":
        return f"0 to rounding (≤ {rounded(claim.tolerance, digits=2)})"
    room = f"{rounded(100 * claim.tolerance)} %" if claim.kind == "relative" else rounded(claim.tolerance)
    return f"{amount} ± {room}"


def measured_text(claim: Claim) -> str:
    """The measured number with its interval and the number of seeds."""
    amount = _amount(claim.measured, claim)
    if claim.interval is None:
        return amount
    low, high = (_shown(end, claim) for end in claim.interval)
    return f"{amount} [{low}, {high}]" + (f", {claim.seeds} seeds" if claim.seeds else "")


def printed_text(claim: Claim) -> str:
    """The number in the paper if it differs from the expected one, else ""."""
    return "" if claim.printed is None else _amount(claim.printed, claim)


def verdict_text(claim: Claim) -> str:
    """The verdict, with the reason if it does not count as one."""
    if claim.role == COMPARISON:
        return f"{'agrees' if claim.verdict == SHOWN else 'does not agree'} (comparison)"
    if claim.role == DIAGNOSTIC:
        return f"{claim.verdict} (diagnostic)"
    if claim.role == IDENTITY and claim.verdict in (SHOWN, EXCLUDED):
        return "holds (identity)"
    if not claim.demanded:
        return f"{claim.verdict} (not demanded at this scale)"
    return f"{NOT_SHOWN} at this scale" if claim.seeds and claim.verdict == NOT_SHOWN else claim.verdict


def source_text(claim: Claim) -> str:
    """The paper and the place in it."""
    return BEYOND if str(claim.source) == "beyond" else str(claim.source)


def source_sentence(source: str) -> str:
    """The source of an experiment as a sentence without its full stop.

    Example:
        >>> source_sentence("smd fig. 4"), source_sentence("beyond the papers")
        ('After smd fig. 4', 'Beyond the papers')
    """
    return f"After {source}" if source != BEYOND else BEYOND.capitalize()


def seeds_text(config: Mapping[str, Any]) -> str:
    """All seeds in the settings, also in nested ones; "" if there are none.

    Example:
        >>> seeds_text({"seeds": [3, 4], "rules": [{"seeds": [4, 5]}]}), seeds_text({"seed": 7})
        ('seeds 3, 4, 5', 'seed 7')
    """
    numbers = sorted(set(_seeds(config)))
    return f"{'seed' if len(numbers) == 1 else 'seeds'} {', '.join(map(str, numbers))}" if numbers else ""


def _seeds(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        yield from [value["seed"]] if "seed" in value else []
        named = value.get("seeds", [])
        yield from named if isinstance(named, list) else []  # else their number
        for part in value.values():
            yield from _seeds(part)
    elif isinstance(value, list):
        for part in value:
            yield from _seeds(part)


def config_text(config: Mapping[str, Any]) -> str:
    """All settings but the seeds in one line.

    Example:
        >>> config = {"lr": 0.1, "seed": 3, "net": {"width": 8, "blocks": [1, 1]}, "rules": [{"lr": 1}, {"lr": 2}]}
        >>> config_text(config)
        'lr=0.1, net(width=8, blocks=1 1), rules((lr=1), (lr=2))'
    """
    return ", ".join(_setting(name, value) for name, value in config.items() if name not in ("seed", "seeds"))


def _setting(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name}({config_text(value)})"
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return f"{name}({', '.join(f'({config_text(part)})' for part in value)})"
    return f"{name}={' '.join(map(str, value)) or 'none' if isinstance(value, list) else value}"


def duration_text(seconds: float) -> str:
    """CPU time, rounded to seconds.

    Example:
        >>> duration_text(0.03), duration_text(42.1), duration_text(605)
        ('< 1 s', '42 s', '10 min 5 s')
    """
    if seconds < 1:
        return "< 1 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def verdict_class(claims: Sequence[Claim]) -> str:
    """CSS class of these verdicts: "bad" if one fails, "open" if one is not shown but does not fail, else "good"."""
    if any(claim.fails for claim in claims):
        return "bad"
    return "good" if all(claim.verdict == SHOWN for claim in claims) else "open"


def claims_headline(claims: Sequence[Claim]) -> str:
    """All verdicts in a sentence; identities and comparisons are counted separately.

    Example:
        >>> from equilibria.lab.harness.claim import Source, identity, not_demanded
        >>> claim = Source("", "ours").says("").at_most(1, 0.5)
        >>> claims_headline([claim])
        '1 of 1 claim shown'
        >>> claims_headline([claim, claim, identity(claim)])
        '2 of 2 claims shown; 1 of 1 identity holds'
        >>> claims_headline([claim, not_demanded(claim)])
        '1 of 1 claim shown; 1 more not demanded at its scale (1 shown)'
    """
    if not claims:
        return "no results yet"
    asserted = [claim for claim in claims if claim.role == CLAIM]
    words = [_verdicts([claim for claim in asserted if claim.demanded])]
    left = [claim.verdict for claim in asserted if not claim.demanded]
    if left:
        more, whose = " more" if any(words) else "", "its" if len(left) == 1 else "their"
        words.append(f"{len(left)}{more} not demanded at {whose} scale ({_counts(left, VERDICTS)})")
    return "; ".join(filter(None, [*words, *(_others(claims, role) for role in _ROLE_WORDS)]))


def shown_counts(groups: Mapping[str, Sequence[Claim]]) -> str:
    """How many claims of several groups are shown, demanded or not, in a line; groups without claims are left out.

    Example:
        >>> from equilibria.lab.harness.claim import Source
        >>> claim = Source("", "ours").says("").at_most(1, 0.5)
        >>> shown_counts({"papers": [claim, claim], "ours": []})
        'Claims shown: papers 2 of 2'
    """
    counts = {name: verdict_counts(claims) for name, claims in groups.items()}
    words = [f"{name} {count[1]} of {count[0]}" for name, count in counts.items() if count[0]]
    return f"Claims shown: {'; '.join(words)}" if words else "No results yet"


def verdict_counts(claims: Sequence[Claim]) -> tuple[int, ...]:
    """Number of claims, demanded or not, and how many of them have each of the `VERDICTS`."""
    counts = Counter(claim.verdict for claim in claims if claim.role == CLAIM)
    return counts.total(), *(counts[verdict] for verdict in VERDICTS)


def _verdicts(claims: Sequence[Claim]) -> str:
    """How many claims have each verdict; "" without claims."""
    if not claims:
        return ""
    verdicts = [claim.verdict for claim in claims]
    shown = f"{verdicts.count(SHOWN)} of {_count(claims, 'claim', 'claims')} shown"
    return ", ".join(filter(None, [shown, _counts(verdicts, VERDICTS[1:])]))


def _counts(verdicts: Sequence[str], names: Sequence[str]) -> str:
    """How many of these verdicts there are, as "2 not shown, 1 contradicted"."""
    there = [(verdicts.count(name), _IN_COUNTS.get(name, name)) for name in names]
    return ", ".join(f"{count} {words}" for count, words in there if count)


def _others(claims: Sequence[Claim], role: str) -> str:
    chosen = [claim for claim in claims if claim.role == role]
    if not chosen:
        return ""
    good = sum(claim.verdict in (SHOWN, EXCLUDED) for claim in chosen)
    one, many, holds, hold = _ROLE_WORDS[role]
    return f"{good} of {_count(chosen, one, many)} {holds if len(chosen) == 1 else hold}"


def _count(claims: Sequence[Claim], one: str, many: str) -> str:
    return f"{len(claims)} {one if len(claims) == 1 else many}"


def _amount(value: float, claim: Claim) -> str:
    return f"{_shown(value, claim)} {claim.unit}".strip()


def _shown(value: float, claim: Claim) -> str:
    digits = _digits(claim)
    if not 1e3 <= abs(value) < 1e7:
        return rounded(value, digits=digits)
    decimals = 0 if float(value).is_integer() else max(0, digits - len(str(int(abs(value)))))
    return f"{value:,.{decimals}f}"


def _digits(claim: Claim) -> int:
    """As many digits as the tolerance and the difference from the paper need, within limits."""
    low, high = claim.allowed
    gaps = [high - claim.expected, claim.expected - low]
    if claim.printed is not None:
        gaps.append(abs(claim.printed - claim.expected))
    finite = [gap for gap in gaps if 0 < gap < math.inf and claim.expected]
    if not finite:
        return _DIGITS
    needed = 1 + math.ceil(math.log10(abs(claim.expected) / min(finite)))
    return min(max(needed, _DIGITS), _MOST_DIGITS)
