"""A null space in readable form: sparse vectors of small integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from scipy.optimize import linprog

_LARGEST_DENOMINATOR = 12
_ROUNDING = 1e-5  # how far a number may be from the fraction it is taken for

Vector = tuple[int, ...]


class IntegerSpace:
    """A space of exponent vectors with rational entries.

    Args:
        null: columns that span it, in floating point.

    Attributes:
        rows: its reduced echelon form.
        constraints: integer matrix C with C a = 0 exactly for the vectors of the space.
        exact: whether every number was close to a small fraction; otherwise the space is not that of any small
            integers, and ``rows`` and ``constraints`` are empty.
    """

    def __init__(self, null: np.ndarray) -> None:
        self.size, self.dimension = null.shape
        echelon, pivots = _echelon(null.T)
        fractions = [[_fraction(value) for value in row] for row in echelon]
        self.exact = all(entry is not None for row in fractions for entry in row)
        self.rows: list[Vector] = []
        self.constraints = np.zeros((0, self.size))
        if self.exact:
            known = [[entry or Fraction(0) for entry in row] for row in fractions]
            self.rows = [primitive(row) for row in known]
            self.constraints = _constraints(known, pivots, self.size)

    def contains(self, vector: Sequence[int]) -> bool:
        """Whether an integer vector lies in the space, exactly."""
        return not np.any(self.constraints @ np.asarray(vector, dtype=float))

    def smallest_with(self, index: int, *, negative: bool) -> Vector | None:
        """A vector with few entries that are not zero, one of them at ``index``; None if there is none.

        It minimises the sum of absolute values, which gives few entries; ``negative`` says whether entries may be
        negative.
        """
        if not self.exact:
            return None
        columns = [self.constraints, -self.constraints] if negative else [self.constraints]
        matrix = np.hstack(columns)
        fixed = np.zeros((1, matrix.shape[1]))
        fixed[0, index] = 1.0
        if negative:
            fixed[0, self.size + index] = -1.0
        solved = linprog(
            np.ones(matrix.shape[1]),
            A_eq=np.vstack([matrix, fixed]),
            b_eq=np.concatenate([np.zeros(len(matrix)), [1.0]]),
            method="highs-ds",  # a vertex, not a point inside a face
        )
        if not solved.success or solved.x is None:
            return None
        values = solved.x[: self.size] - (solved.x[self.size :] if negative else 0.0)
        entries = [_fraction(value) for value in values]
        found = primitive([entry or Fraction(0) for entry in entries])
        return found if all(entry is not None for entry in entries) and self.contains(found) else None

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


def _fraction(value: float) -> Fraction | None:
    near = Fraction(float(value)).limit_denominator(_LARGEST_DENOMINATOR)
    return near if abs(float(near) - value) <= _ROUNDING * max(1.0, abs(value)) else None
