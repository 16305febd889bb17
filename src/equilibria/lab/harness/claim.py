"""Claims of the papers with our measurements; the verdict follows from the numbers.

A claim reads ``source.says("the period").near(4.44, measured, relative=0.01)``: where it is from, the sentence, the
comparison and its numbers. The comparisons are the methods of `Statement`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict, TypeVar, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, number, one_of, within
from equilibria.theory.citations import PAPERS

T = TypeVar("T")
Values = Sequence[float] | NDArray[np.float64]

SHOWN, EXCLUDED, NOT_SHOWN, CONTRADICTED = "shown", "within tolerance, law excluded", "not shown", "contradicted"
VERDICTS = (SHOWN, EXCLUDED, NOT_SHOWN, CONTRADICTED)
KINDS = ("relative", "absolute", "interval", "at most", "at least", "rounding", "order", "among")
_CONTAINED = ("interval", "among")  # judged by whether the interval contains the expected number, without a band
CLAIM, IDENTITY, DIAGNOSTIC, COMPARISON = "claim", "identity", "diagnostic", "comparison"
ROLES = (CLAIM, IDENTITY, DIAGNOSTIC, COMPARISON)
FEWEST_SEEDS = 3
_CONFIDENCE = 0.95
_EPSILON = float(np.finfo(np.float64).eps)


class _Details(TypedDict, total=False):
    unit: str
    interval: tuple[float, float] | None
    printed: float | None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a claim comes from.

    Attributes:
        paper: key into `equilibria.theory.PAPERS`; "" if no paper makes the claim.
        where: figure, equation, theorem or section.
        corrected: the paper's misprint or error and the correction used here; "" if there is none.
        law: dotted name below `equilibria.theory` whose docstring has the derivation; "" if there is none.
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

    def says(self, text: str) -> Statement:
        """A sentence of this source; its methods compare it with a measurement."""
        return Statement(text, self)


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper, its number and our measurement. Build it with `Source.says`.

    Attributes:
        text: the sentence.
        source: the paper and the place in it.
        kind: how measured and expected are compared, one of `KINDS`.
        expected: the number of the paper or of the theory; the bound, for "at most" and "at least".
        measured: our number.
        tolerance: largest deviation that agrees: a share of expected if kind is "relative", else in units of expected;
            0 where there is no band ("interval", "among") and for bounds.
        unit: of all these numbers; "" for pure ones.
        interval: ends of the confidence interval of the measured number; None if it has no scatter.
        printed: the number in the paper if it differs from expected, because it is wrong or was measured on another
            network; None if it is the same or the paper prints none.
        demanded: False if this scale is too small to show the claim: the verdict is reported but fails nothing.
        seeds: number of trainings that the measured mean is over; 0 if it is not a mean over seeds.
        role: "claim"; "identity" if algebra or the settings alone decide it, so that it checks the code; "diagnostic"
            if the measurement is divided by another one of the same steps, so that it says where a deviation comes
            from; "comparison" if the paper's number is given for the reader. The last two fail nothing. Only claims
            are counted as claims.
        values: the number of every training; empty if the measured number is not a mean over seeds.
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
    values: tuple[float, ...] = ()

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
        if self.kind == "interval":
            return -math.inf, math.inf
        return -math.inf if self.kind == "at most" else low, math.inf if self.kind == "at least" else high

    @property
    def verdict(self) -> str:
        """The verdict that follows from expected, measured, tolerance and interval.

        - "shown": the whole interval lies in the tolerance and, for an expected number, contains that number.
        - "within tolerance, law excluded": it lies in the tolerance and does not contain the number.
        - "not shown": it lies partly in the tolerance.
        - "contradicted": it lies outside. A measurement that is not finite contradicts every claim.

        A number without scatter is its own interval, and is shown wherever it lies in the tolerance, which is then an
        error analysis of the number. Without a tolerance the interval alone decides: "shown" if it contains the number,
        "contradicted" if not.
        """
        if not math.isfinite(self.measured):
            return CONTRADICTED
        left, right = self.interval or (self.measured, self.measured)
        contains = left <= self.expected <= right
        if self.kind in _CONTAINED:
            return SHOWN if contains else CONTRADICTED
        low, high = self.allowed
        if low <= left and right <= high:
            two_sided = self.interval is not None and math.isfinite(low) and math.isfinite(high)
            return EXCLUDED if two_sided and not contains else SHOWN
        return CONTRADICTED if right < low or left > high else NOT_SHOWN

    @property
    def fails(self) -> bool:
        """Whether this scale should have agreed with the claim within its tolerance and did not.

        A mean over trainings whose interval overlaps the bound does not fail: more seeds or a larger scale would
        decide. An exact computation that scatters too much does fail.
        """
        undecided = self.seeds > 0 and self.verdict == NOT_SHOWN
        agrees = self.verdict in (SHOWN, EXCLUDED)
        return self.demanded and self.role in (CLAIM, IDENTITY) and not agrees and not undecided

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, including the verdict; a measurement that is not finite becomes null."""
        measured, *values = (number if math.isfinite(number) else None for number in (self.measured, *self.values))
        return {**asdict(self), "measured": measured, "values": values, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Claim:
        """The claim that `as_dict` was called on; its verdict follows from its numbers, whatever the file says.

        Raises:
            EquilibriaError: if a value has another type than `as_dict` gives it.
        """
        fields = {name: value for name, value in of_type("a claim", values, dict).items() if name != "verdict"}
        source = of_type("source", fields["source"], dict)
        fields["source"] = Source(**{name: of_type(name, value, str) for name, value in source.items()})
        for name in ("text", "unit", "kind", "role"):
            of_type(name, fields.get(name, ""), str)
        for name in ("measured", "printed"):
            of_type(name, fields.get(name), float, int, type(None))
        of_type("demanded", fields.get("demanded", True), bool)
        of_type("seeds", fields.get("seeds", 0), int)
        fields["measured"] = math.nan if fields["measured"] is None else fields["measured"]
        fields["interval"] = None if fields["interval"] is None else _pair(fields["interval"])
        seeds = of_type("values", fields.get("values", []), list)
        fields["values"] = tuple(math.nan if value is None else number("values", value) for value in seeds)
        return cls(**fields)


def of_type(name: str, value: Any, *types: type) -> Any:
    """Return a value read from JSON; raise EquilibriaError unless it has one of these types."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise EquilibriaError(f"got {name}={value!r}; expected {' or '.join(kind.__name__ for kind in types)}")
    return value


def _pair(ends: Any) -> tuple[float, float]:
    low, high = of_type("interval", ends, list)
    return number("interval", low), number("interval", high)


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence of a source, to be compared with a measurement by one of the methods: each returns the claim.

    ``measured`` is a number, or the numbers of at least three trainings with different seeds: their mean is then
    compared, with its whole confidence interval. Ratios and other positive quantities are averaged in logarithms, as
    soon as the tolerance is relative or with ``ratio=True``; differences of trainings that share a seed are given seed
    by seed. In every method ``unit``, ``interval`` and ``printed`` are those of `Claim`; a mean over seeds has an
    interval of its own.

    Attributes:
        text: the sentence.
        source: the paper and the place in it.

    Example:
        >>> gain = Source("smd", "fig. 1").says("gain")
        >>> gain.at_least(0, 1.0).verdict, gain.at_least(0, [0.8, 1.0, 1.2]).verdict
        ('shown', 'shown')
        >>> gain.at_least(0, [-0.2, 1.0, 1.2]).verdict
        'not shown'
    """

    text: str
    source: Source

    def near(
        self,
        expected: float,
        measured: float | Values,
        *,
        relative: float | None = None,
        absolute: float | None = None,
        **details: Unpack[_Details],
    ) -> Claim:
        """Claim that a measurement equals the expected number within ``relative`` or ``absolute``: give one of the two.

        Example:
            >>> claim = Source("sharp", "fig. 5").says("the period").near(4.44, 4.45, relative=0.01)
            >>> claim.verdict, claim.allowed[1] > 4.48
            ('shown', True)
        """
        if (relative is None) == (absolute is None):
            raise EquilibriaError(f"got relative={relative}, absolute={absolute}; expected one of the two")
        if relative is not None:
            return self._claim("relative", expected, measured, relative, ratio=True, **details)
        return self._claim("absolute", expected, measured, absolute or 0.0, **details)

    def equals(self, expected: float, measured: Values, *, ratio: bool = False, **details: Unpack[_Details]) -> Claim:
        """Claim that the mean over seeds is the expected number: its confidence interval contains it.

        For laws whose error on a network nobody has bounded. The more the seeds scatter, the easier it is shown: the
        interval says how much that is worth.

        Args:
            expected: the law's number.
            measured: one number per seed.
            ratio: whether the numbers are ratios, to be averaged in logarithms.
            details: of `Claim`.

        Example:
            >>> lag = Source("smd", "fig. 3").says("angle over equilibrium")
            >>> lag.equals(0.32, [0.31, 0.32, 0.34]).verdict, lag.equals(0.32, [0.35, 0.36, 0.37]).verdict
            ('shown', 'contradicted')
        """
        return self._claim("interval", expected, measured, 0.0, ratio=ratio, **details)

    def at_most(
        self, bound: float, measured: float | Values, *, ratio: bool = False, **details: Unpack[_Details]
    ) -> Claim:
        """Claim that a measurement does not exceed the bound; ``ratio``: average the seeds in logarithms."""
        return self._claim("at most", bound, measured, 0.0, ratio=ratio, **details)

    def at_least(
        self, bound: float, measured: float | Values, *, ratio: bool = False, **details: Unpack[_Details]
    ) -> Claim:
        """Claim that a measurement reaches the bound; ``ratio``: average the seeds in logarithms."""
        return self._claim("at least", bound, measured, 0.0, ratio=ratio, **details)

    def to_rounding(self, error: float, *, operations: float) -> Claim:
        """Claim that a relative error is at most the rounding of this number of float64 operations.

        Example:
            >>> Source("", "ours").says("P is conserved").to_rounding(3e-16, operations=10).verdict
            'shown'
        """
        return self._claim("rounding", 0.0, error, operations * _EPSILON)

    def of_order(self, expected: float, *, sizes: Sequence[float], errors: Sequence[float], absolute: float) -> Claim:
        """Claim that errors fall as a power of sizes: the slope of the least-squares line through their logarithms.

        Example:
            >>> second_order = Source("", "ours").says("second order")
            >>> claim = second_order.of_order(2, sizes=[1, 0.1], errors=[3, 0.03], absolute=0.1)
            >>> round(claim.measured, 6), claim.verdict
            (2.0, 'shown')
        """
        return self._claim("order", expected, float(np.polyfit(np.log(sizes), np.log(errors), 1)[0]), absolute)

    def among(self, printed: float, values: Values, *, unit: str = "") -> Claim:
        """Compare the paper's number, from one draw of the data, with the interval of one more draw of ours.

        Student's 95 % prediction interval about the geometric mean: of logarithms, because the numbers are positive and
        skewed. The wider ours scatter, the more agrees with them, so this is a comparison and no claim. Draws that are
        not positive, such as the step of an event that a short run lacks, are left out; the text states how many
        remain.

        Args:
            printed: the paper's number.
            values: ours, one per draw of the data.
            unit: of both.

        Example:
            >>> claim = Source("sharp", "fig. 4").says("loss").among(2.5, [1.0, 2.0, 3.0])
            >>> claim.verdict, claim.role, claim.fails
            ('shown', 'comparison', False)
        """
        from scipy.stats import t as student

        draws = np.asarray(values, dtype=np.float64)
        if len(draws) < 2:
            raise EquilibriaError(f"got {len(draws)} draw of the data; expected at least 2, to know how they scatter")
        logs = np.log(draws[draws > 0])
        count = len(logs)
        text = self.text + (f" ({count} of {len(draws)} draws)" if count < len(draws) else "")
        if count < 2:
            return comparison(Claim(text, self.source, "among", float(printed), math.nan, 0.0, unit))
        mean = float(logs.mean())
        half = float(student.ppf((1 + _CONFIDENCE) / 2, count - 1) * logs.std(ddof=1) * math.sqrt(1 + 1 / count))
        ends = (math.exp(mean - half), math.exp(mean + half))
        return comparison(Claim(text, self.source, "among", float(printed), math.exp(mean), 0.0, unit, ends))

    def _claim(
        self,
        kind: str,
        expected: float,
        measured: float | Values,
        tolerance: float,
        *,
        ratio: bool = False,
        **details: Unpack[_Details],
    ) -> Claim:
        values: tuple[float, ...] = ()
        if np.ndim(measured) > 0:
            values = tuple(float(value) for value in cast("Values", measured))
            measured, ends = ratio_interval(values) if ratio else mean_interval(values)
            # If a training diverged there is no interval, and the mean contradicts every claim.
            details["interval"] = ends if np.isfinite(ends).all() else None
        numbers = float(expected), float(cast("float", measured)), float(tolerance)
        return Claim(self.text, self.source, kind, *numbers, **details, seeds=len(values), values=values)


def not_demanded(claim: Claim) -> Claim:
    """The same claim at a scale that is too small to show it."""
    return replace(claim, demanded=False)


def demanded_if(shows: bool, claims: Iterable[Claim]) -> list[Claim]:
    """The claims, demanded only if this scale ``shows`` them."""
    return [claim if shows else not_demanded(claim) for claim in claims]


def identity(claim: Claim) -> Claim:
    """The same sentence as an identity, true by algebra or by the settings: checked, not counted as a claim."""
    return replace(claim, role=IDENTITY)


def diagnostic(claim: Claim) -> Claim:
    """The same sentence as a diagnostic, divided by a measurement of the same steps: reported, fails nothing."""
    return replace(claim, role=DIAGNOSTIC)


def comparison(claim: Claim) -> Claim:
    """The same sentence as a comparison with a number of the paper: reported, fails nothing."""
    return replace(claim, role=COMPARISON)


# ---- means over seeds


def over_seeds(rows: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """Turn the numbers of each seed into a list over seeds for each number.

    Example:
        >>> over_seeds([{"angle": 1.0, "norm": 2.0}, {"angle": 1.1, "norm": 2.2}])
        {'angle': [1.0, 1.1], 'norm': [2.0, 2.2]}
    """
    return {name: [row[name] for row in rows] for name in rows[0]}


def mean_interval(values: Values) -> tuple[float, tuple[float, float]]:
    """The mean over seeds and its 95 % confidence interval (Student).

    To compare two variants that share their seeds (first weights, order of the data), give their differences: the
    scatter that both have in common cancels.

    Args:
        values: one per seed, at least three.

    Example:
        >>> mean, (low, high) = mean_interval([1.0, 2.0, 3.0])
        >>> mean, round(high - mean, 3)  # 4.303 / sqrt(3)
        (2.0, 2.484)
    """
    from scipy.stats import t as student

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < FEWEST_SEEDS:
        raise EquilibriaError(
            f"got values of shape {array.shape}; expected one per seed, of at least {FEWEST_SEEDS} seeds"
        )
    mean = float(array.mean())
    half = float(student.ppf((1 + _CONFIDENCE) / 2, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))
    return mean, (mean - half, mean + half)


def ratio_interval(values: Values) -> tuple[float, tuple[float, float]]:
    """The geometric mean of ratios over seeds and its 95 % confidence interval: `mean_interval` of their logarithms.

    A ratio and its reciprocal give reciprocal intervals. A ratio that is not positive has no logarithm: mean and
    interval are then not finite.

    Args:
        values: one per seed, at least three.

    Example:
        >>> mean, (low, high) = ratio_interval([0.5, 1.0, 2.0])
        >>> mean, round(low * high, 6)
        (1.0, 1.0)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, ends = mean_interval(np.log(np.asarray(values, dtype=np.float64)))
    return float(np.exp(mean)), (float(np.exp(ends[0])), float(np.exp(ends[1])))
