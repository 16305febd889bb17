"""A null space in readable form: sparse vectors of small integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from scipy.optimize import linprog

_LARGEST_DENOMINATOR = 12
_ROUNDING = 1e-5  # how far a number may be from the fraction it is taken for
_LARGEST_EXACT = 1000  # denominator of a number that is checked exactly afterwards

Vector = tuple[int, ...]


class IntegerSpace:
    """A space of exponent vectors with rational entries.

    Args:
        null: columns that span it, in floating point.

    Attributes:
        rows: its reduced echelon form.
        constraints: integer matrix C with C a = 0 exactly for the vectors of the space.
        left_out: how many dimensions of what was given hold no vector of small integers. ``rows`` and ``constraints``
            are those of the rest.
    """

    def __init__(self, null: np.ndarray) -> None:
        self.size, given = null.shape
        echelon, pivots = _echelon(null.T)
        rows = [_fractions(row) for row in echelon]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            known, pivots = _rational_part(echelon, pivots)
        self.rows = [primitive(row) for row in known]
        self.dimension = len(known)
        self.left_out = given - self.dimension
        self.constraints = _constraints(known, pivots, self.size)
        self._partners = _partners(self.constraints)

    def contains(self, vector: Sequence[int]) -> bool:
        """Whether an integer vector lies in the space, exactly."""
        return not np.any(self.constraints @ np.asarray(vector, dtype=float))

    def smallest_with(self, index: int, *, negative: bool) -> Vector | None:
        """A vector with few entries that are not zero, one of them at ``index``; None if there is none.

        It is a pair if there is one, and else minimises the sum of absolute values, which gives few entries;
        ``negative`` says whether entries may be negative.
        """
        pairs = [(other, sign) for other, sign in self._partners.get(index, ()) if negative or sign > 0]
        if pairs:
            other, sign = min(pairs, key=lambda pair: abs(pair[0] - index))
            return primitive([Fraction((at == index) + sign * (at == other)) for at in range(self.size)])
        found = _smallest_with(self.constraints, index, negative=negative)
        return found if found is not None and self.contains(found) else None

    def sparse_basis(self, candidates: Iterable[Vector]) -> list[Vector]:
        """Independent vectors that span the space, the simplest of the candidates first."""
        chosen: list[Vector] = []
        reduced: dict[int, list[Fraction]] = {}
        for vector in [*sorted(set(candidates), key=_complexity), *self.rows]:
            if len(chosen) == self.dimension:
                break
            if _extends(reduced, vector):
                chosen.append(vector)
        return chosen


def _smallest_with(constraints: np.ndarray, index: int, *, negative: bool) -> Vector | None:
    """The vector with C a = 0 and an entry at ``index`` whose absolute values have the smallest sum."""
    size = constraints.shape[1]
    matrix = np.hstack([constraints, -constraints] if negative else [constraints])
    fixed = np.zeros((1, matrix.shape[1]))
    fixed[0, index] = 1.0
    if negative:
        fixed[0, size + index] = -1.0
    solved = linprog(
        np.ones(matrix.shape[1]),
        A_eq=np.vstack([matrix, fixed]),
        b_eq=np.concatenate([np.zeros(len(matrix)), [1.0]]),
        method="highs-ds",  # a vertex, not a point inside a face
    )
    if not solved.success or solved.x is None:
        return None
    found = solved.x[:size] - (solved.x[size:] if negative else 0.0)
    entries = _fractions(found, largest=_LARGEST_EXACT)  # the caller asks whether it is in the space
    return None if entries is None else primitive(entries)


def _rational_part(echelon: np.ndarray, pivots: list[int]) -> tuple[list[list[Fraction]], list[int]]:
    """Rows that span the vectors of rational numbers in a space that has others as well, and columns of their ones."""
    size = echelon.shape[1]
    free = [column for column in range(size) if column not in pivots]
    constraints = np.zeros((len(free), size))
    constraints[range(len(free)), free] = 1.0
    constraints[:, pivots] = -echelon[:, free].T
    reduced: dict[int, list[Fraction]] = {}
    for part in (part for line in constraints for part in _commensurable(line)):
        _reduce_by(reduced, part)
    left = [column for column in range(size) if column not in reduced]
    return [_solution(reduced, column, size) for column in left], left


def _reduce_by(reduced: dict[int, list[Fraction]], line: list[Fraction]) -> None:
    """Add a line to a fully reduced form (leading column -> row), if it is independent of what is there."""
    for column, row in reduced.items():
        line = _minus(line, line[column], row)
    lead = next((at for at, value in enumerate(line) if value), None)
    if lead is None:
        return
    line = [value / line[lead] for value in line]
    for column, row in reduced.items():
        reduced[column] = _minus(row, row[lead], line)
    reduced[lead] = line


def _minus(line: list[Fraction], factor: Fraction, row: list[Fraction]) -> list[Fraction]:
    return [value - factor * other for value, other in zip(line, row, strict=True)] if factor else line


def _solution(reduced: dict[int, list[Fraction]], free: int, size: int) -> list[Fraction]:
    """What all lines of a fully reduced form are zero for, with a one in one free column and zeros in the others."""
    entries = [Fraction(0)] * size
    entries[free] = Fraction(1)
    for column, row in reduced.items():
        entries[column] = -row[free]
    return entries


def _commensurable(line: np.ndarray) -> list[list[Fraction]]:
    """A constraint in parts, each in multiples of one number by small fractions.

    Whole numbers that are no solution of the parts cannot be one of the sum, unless the numbers are related. The
    smallest number is tried first: of 1, 1/3, 1/9 and 1/27, as cubes of cubes have, all are multiples of it.
    """
    left = np.where(np.abs(line) <= _ROUNDING, 0.0, line)
    parts = []
    while left.any():
        unit = _unit(left)
        near = [_fraction(value / unit) for value in left]
        parts.append([entry or Fraction(0) for entry in near])
        left = np.where([entry is not None for entry in near], 0.0, left)
    return parts


def _unit(line: np.ndarray) -> float:
    """The number that the most others are multiples of, the smallest of these."""
    sizes = sorted(np.abs(line[line != 0]))
    return float(max(sizes, key=lambda unit: sum(_fraction(value / unit) is not None for value in sizes)))


def _partners(constraints: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """For every tensor the others that it forms a vector (1, 1) or (1, -1) with: opposite or equal columns."""
    by_column: dict[tuple[float, ...], list[int]] = {}
    for index, column in enumerate(constraints.T):
        by_column.setdefault(tuple((column + 0.0).tolist()), []).append(index)
    found: dict[int, list[tuple[int, int]]] = {}
    for column, members in by_column.items():
        opposite = by_column.get(tuple(-value + 0.0 for value in column), [])
        for index in members:
            pairs = [(other, 1) for other in opposite] + [(other, -1) for other in members]
            found[index] = [(other, sign) for other, sign in pairs if other != index]
    return found


def primitive(entries: Sequence[Fraction]) -> Vector:
    """The shortest integer vector in the direction of a rational one, its first entry positive."""
    scale = lcm(*(entry.denominator for entry in entries))
    whole = [int(entry * scale) for entry in entries]
    divisor = gcd(*whole) or 1
    leading = next((value for value in whole if value), 1)
    sign = -1 if leading < 0 else 1
    return tuple(sign * value // divisor for value in whole)


def _complexity(vector: Vector) -> tuple[int, int, int, Vector]:
    support = sum(value != 0 for value in vector)
    return support, sum(value < 0 for value in vector), sum(abs(value) for value in vector), tuple(-v for v in vector)


def _extends(reduced: dict[int, list[Fraction]], vector: Vector) -> bool:
    """Add a vector to an echelon form (leading column -> row) if it is independent of what is there."""
    rest = [Fraction(value) for value in vector]
    for column in range(len(rest)):
        if not rest[column]:
            continue
        if column not in reduced:
            lead = rest[column]
            reduced[column] = [value / lead for value in rest]
            return True
        factor = rest[column]
        rest = [value - factor * other if other else value for value, other in zip(rest, reduced[column], strict=True)]
    return False


def _echelon(matrix: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Reduced echelon form with the largest pivot that is left, and the pivots' columns."""
    reduced = matrix.astype(float).copy()
    pivots: list[int] = []
    for row in range(len(reduced)):
        below = np.abs(reduced[row:])
        below[:, pivots] = 0.0
        at, column = np.unravel_index(int(np.argmax(below)), below.shape)
        reduced[[row, row + int(at)]] = reduced[[row + int(at), row]]
        reduced[row] /= reduced[row, column]
        others = np.arange(len(reduced)) != row
        reduced[others] -= np.outer(reduced[others, column], reduced[row])
        pivots.append(int(column))
    return reduced, pivots


def _constraints(rows: list[list[Fraction]], pivots: list[int], size: int) -> np.ndarray:
    """For every column that is no pivot: a_column - sum over pivots of entry * a_pivot = 0, in integers."""
    made = []
    for column in (each for each in range(size) if each not in pivots):
        scale = lcm(*(row[column].denominator for row in rows)) if rows else 1
        line = np.zeros(size)
        line[column] = scale
        for row, pivot in zip(rows, pivots, strict=True):
            line[pivot] = -float(row[column] * scale)
        made.append(line)
    return np.array(made).reshape(len(made), size)


def _fractions(values: np.ndarray, *, largest: int = _LARGEST_DENOMINATOR) -> list[Fraction] | None:
    """The numbers as small fractions; None if one of them is none."""
    found = [_fraction(value, largest=largest) for value in values]
    return None if any(entry is None for entry in found) else [entry or Fraction(0) for entry in found]


def _fraction(value: float, *, largest: int = _LARGEST_DENOMINATOR) -> Fraction | None:
    near = Fraction(float(value)).limit_denominator(largest)
    return near if abs(float(near) - value) <= _ROUNDING else None
