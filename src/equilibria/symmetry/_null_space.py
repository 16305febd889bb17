"""The null space of the radial derivatives: the exponents of all symmetries.

`null_space` computes it in floating point from the probes. `IntegerSpace` makes it readable: sparse vectors of small
integers, checked exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from scipy.optimize import linprog

from equilibria.symmetry._precise import DOUBLE, Precision
from equilibria.symmetry._probes import Probe, silent_among

_LARGEST_DENOMINATOR = 12
_LARGEST_EXACT = 1000  # denominator of a number that is checked exactly afterwards

Vector = tuple[int, ...]

# ---- in floating point


@dataclass(frozen=True, slots=True, eq=False)
class NullSpace:
    """The null space of the radial derivatives, and the singular values that set it apart.

    Attributes:
        silent: whether a tensor has no gradient.
        singular_values: of the matrix of relative radial derivatives (probes x tensors that are not silent), largest
            first, divided by the square root of the number of probes.
        rank: number of singular values that are not zero.
        residual: root mean square over the probes of <w, g> relative to `Probe.size`, for every tensor.
        basis: orthonormal columns that span the null space, in exponents; rows are the tensors that are not silent.
        precision: of the computation.
    """

    silent: np.ndarray
    singular_values: np.ndarray
    rank: int
    residual: np.ndarray
    basis: np.ndarray
    precision: Precision

    @property
    def gap(self) -> float:
        """The smallest nonzero singular value (1 if there is none) over the largest zero one (rounding if none)."""
        kept = self.singular_values[self.rank - 1] if self.rank else 1.0
        return float(kept / self._dropped)

    @property
    def zero(self) -> float:
        """A residual below this counts as zero: it lies in the middle of the gap, on a logarithmic scale."""
        return float(self._dropped * min(self.gap, 1e12) ** 0.5)

    @property
    def _dropped(self) -> float:
        """The largest singular value that is zero; rounding if that is larger, or there is none."""
        noise = self.precision.noise
        return max(float(self.singular_values[self.rank]), noise) if self.rank < len(self.singular_values) else noise


def null_space(probes: Sequence[Probe]) -> NullSpace:
    """Compute the null space of the radial derivatives of all probes."""
    precision = probes[0].precision
    matrix, typical, silent = _relative(probes)
    _, values, right = np.linalg.svd(matrix, full_matrices=True)
    values = np.concatenate([values, np.zeros(right.shape[0] - len(values))])
    rank = _rank(values, precision)
    residual = np.zeros(len(silent))
    residual[~silent] = np.sqrt((matrix**2).sum(axis=0))
    exponents = right[rank:].T / typical[:, None]
    basis = np.linalg.qr(exponents / np.abs(exponents).max(axis=0, initial=np.finfo(float).tiny))[0]
    return NullSpace(silent, values, rank, residual, basis, precision)


def rank_of(probes: Sequence[Probe]) -> int:
    """Number of independent scalings that change the loss: `NullSpace.rank` alone, which is cheaper."""
    matrix, _, _ = _relative(probes)
    values = np.linalg.svd(matrix, compute_uv=False)
    return _rank(np.concatenate([values, np.zeros(matrix.shape[1] - len(values))]), probes[0].precision)


def _relative(probes: Sequence[Probe]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relative radial derivatives (probes x tensors that are not silent), their typical sizes, and the silent tensors.

    Rows and columns are scaled to a common size, so that neither a batch with a small loss nor a layer with a small
    gradient is lost.
    """
    size = np.stack([probe.size for probe in probes])
    radial = np.stack([probe.radial for probe in probes])
    per_probe = np.maximum(_rms(size, axis=1), np.finfo(float).tiny)[:, None]
    typical = _rms(size / per_probe, axis=0)
    silent = silent_among(typical, probes[0].precision)
    matrix = (radial / per_probe)[:, ~silent] / typical[~silent] / len(probes) ** 0.5
    return matrix, typical[~silent], silent


def _rank(values: np.ndarray, precision: Precision) -> int:
    """Position of the steepest fall of the singular values onto rounding."""
    clipped = np.maximum(values, precision.noise)
    above = np.concatenate([[1.0], clipped[:-1]])
    ratios = np.where(values <= precision.largest_zero, above / clipped, 0.0)
    return int(np.argmax(ratios)) if ratios.size and ratios.max() > 0 else len(values)


def _rms(values: np.ndarray, *, axis: int) -> np.ndarray:
    result: np.ndarray = np.sqrt((values**2).mean(axis=axis))
    return result


# ---- in integers


class IntegerSpace:
    """A space of exponent vectors with rational entries.

    Args:
        basis: columns that span it, in floating point.
        sizes: number of elements of each tensor: of tensors that can take each other's place in a vector, the largest
            does, and the last of equal ones. That makes the vectors of equal layers alike.
        rounding: distance of an entry from the fraction that it is taken for.

    Attributes:
        rows: its reduced echelon form.
        constraints: integer matrix C with C a = 0 exactly for the vectors of the space.
        left_out: number of dimensions without a vector of small integers. ``rows`` and ``constraints`` are those of the
            rest.
    """

    def __init__(
        self, basis: np.ndarray, *, sizes: Sequence[int] | None = None, rounding: float = DOUBLE.fraction
    ) -> None:
        self.size, columns = basis.shape
        self.sizes = [1] * self.size if sizes is None else list(sizes)
        echelon, pivots = _echelon(basis.T)
        rows = [_fractions(row, rounding=rounding) for row in echelon]
        rational = [row for row in rows if row is not None]
        if len(rational) < len(rows):
            rational, pivots = _rational_part(echelon, pivots, rounding=rounding)
        self.rows = [_primitive(row) for row in rational]
        self.dimension = len(rational)
        self.left_out = columns - self.dimension
        self.constraints = _constraints(rational, pivots, self.size)
        self._partners = _partners(self.constraints)
        self._interchangeable = interchangeable(self.constraints)

    def contains(self, vector: Sequence[int]) -> bool:
        """Whether an integer vector lies in the space, exactly."""
        return not np.any(self.constraints @ np.asarray(vector, dtype=float))

    def smallest_with(self, index: int, *, negative: bool) -> Vector | None:
        """A sparse vector with a nonzero entry at ``index``; None if there is none.

        A pair of tensors if there is one; otherwise the vector with the smallest sum of absolute values, which is
        sparse. ``negative`` says whether entries may be negative.
        """
        pairs = [(other, sign) for other, sign in self._partners.get(index, ()) if negative or sign > 0]
        if pairs:
            other, sign = min(pairs, key=lambda pair: abs(pair[0] - index))
            return _primitive([Fraction((i == index) + sign * (i == other)) for i in range(self.size)])
        vector = _smallest_with(self.constraints, index, negative=negative)
        return self._canonical(vector, index) if vector is not None and self.contains(vector) else None

    def _canonical(self, vector: Vector, index: int) -> Vector:
        """The vector with the exponents of interchangeable tensors gathered in one of them; ``index`` keeps its own."""
        entries = list(vector)
        for members in self._interchangeable:
            others = [member for member in members if member != index]
            total = sum(entries[member] for member in others)
            for member in others:
                entries[member] = 0
            if others:
                entries[max(others, key=lambda member: (self.sizes[member], member))] = total
        return _primitive([Fraction(entry) for entry in entries])

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
    solution = solved.x[:size] - (solved.x[size:] if negative else 0.0)
    entries = _fractions(solution, largest=_LARGEST_EXACT)  # the caller checks exactly that it is in the space
    return None if entries is None else _primitive(entries)


def _rational_part(
    echelon: np.ndarray, pivots: list[int], *, rounding: float
) -> tuple[list[list[Fraction]], list[int]]:
    """Rows that span the rational vectors of a space that also has irrational ones, and the columns of their ones."""
    size = echelon.shape[1]
    free = [column for column in range(size) if column not in pivots]
    constraints = np.zeros((len(free), size))
    constraints[range(len(free)), free] = 1.0
    constraints[:, pivots] = -echelon[:, free].T
    reduced: dict[int, list[Fraction]] = {}
    for part in (part for line in constraints for part in _commensurable(line, rounding=rounding)):
        _reduce_by(reduced, part)
    left = [column for column in range(size) if column not in reduced]
    return [_solution(reduced, column, size) for column in left], left


def _reduce_by(reduced: dict[int, list[Fraction]], line: list[Fraction]) -> None:
    """Add a line to a fully reduced form (leading column -> row), if it is independent of its rows."""
    for column, row in reduced.items():
        line = _minus(line, line[column], row)
    lead = next((column for column, value in enumerate(line) if value), None)
    if lead is None:
        return
    line = [value / line[lead] for value in line]
    for column, row in reduced.items():
        reduced[column] = _minus(row, row[lead], line)
    reduced[lead] = line


def _minus(line: list[Fraction], factor: Fraction, row: list[Fraction]) -> list[Fraction]:
    return [value - factor * other for value, other in zip(line, row, strict=True)] if factor else line


def _solution(reduced: dict[int, list[Fraction]], free: int, size: int) -> list[Fraction]:
    """The solution of a fully reduced form with a one in one free column and zeros in the others."""
    entries = [Fraction(0)] * size
    entries[free] = Fraction(1)
    for column, row in reduced.items():
        entries[column] = -row[free]
    return entries


def _commensurable(line: np.ndarray, *, rounding: float) -> list[list[Fraction]]:
    """Split a constraint into parts whose entries are small fractions of one number.

    Integers that do not solve every part cannot solve the sum, unless the numbers are related. The smallest number is
    tried first: 1, 1/3, 1/9 and 1/27, as cubes of cubes have, are all multiples of it.
    """
    left = np.where(np.abs(line) <= rounding, 0.0, line)
    parts = []
    while left.any():
        unit = _common_unit(left, rounding=rounding)
        near = [_fraction(value / unit, rounding=rounding) for value in left]
        parts.append([entry or Fraction(0) for entry in near])
        left = np.where([entry is not None for entry in near], 0.0, left)
    return parts


def _common_unit(line: np.ndarray, *, rounding: float) -> float:
    """The entry that most others are multiples of; of several, the smallest."""
    sizes = sorted(np.abs(line[line != 0]))

    def multiples(unit: float) -> int:
        return sum(_fraction(value / unit, rounding=rounding) is not None for value in sizes)

    return float(max(sizes, key=multiples))


def interchangeable(constraints: np.ndarray) -> list[list[int]]:
    """Tensors that can take each other's place in every symmetry, in sets: their columns of the constraints are equal.

    Example:
        >>> interchangeable(np.array([[1.0, 1.0, 0.0, -1.0]]))
        [[0, 1]]
    """
    by_column: dict[tuple[float, ...], list[int]] = {}
    for index, column in enumerate(constraints.T):
        by_column.setdefault(tuple((column + 0.0).tolist()), []).append(index)
    return [members for members in by_column.values() if len(members) > 1]


def _partners(constraints: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """For every tensor, the others that form a vector (1, 1) or (1, -1) with it: opposite or equal columns."""
    by_column: dict[tuple[float, ...], list[int]] = {}
    for index, column in enumerate(constraints.T):
        by_column.setdefault(tuple((column + 0.0).tolist()), []).append(index)
    partners: dict[int, list[tuple[int, int]]] = {}
    for column, members in by_column.items():
        opposite = by_column.get(tuple(-value + 0.0 for value in column), [])
        for index in members:
            pairs = [(other, 1) for other in opposite] + [(other, -1) for other in members]
            partners[index] = [(other, sign) for other, sign in pairs if other != index]
    return partners


def _primitive(entries: Sequence[Fraction]) -> Vector:
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
    """Add a vector to an echelon form (leading column -> row); False if it depends on its rows."""
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
    """Reduced echelon form with complete pivoting, and the columns of the pivots."""
    reduced = matrix.astype(float).copy()
    pivots: list[int] = []
    for row in range(len(reduced)):
        below = np.abs(reduced[row:])
        below[:, pivots] = 0.0
        offset, column = np.unravel_index(int(np.argmax(below)), below.shape)
        reduced[[row, row + int(offset)]] = reduced[[row + int(offset), row]]
        reduced[row] /= reduced[row, column]
        others = np.arange(len(reduced)) != row
        reduced[others] -= np.outer(reduced[others, column], reduced[row])
        pivots.append(int(column))
    return reduced, pivots


def _constraints(rows: list[list[Fraction]], pivots: list[int], size: int) -> np.ndarray:
    """For every column without a pivot: a_column - sum over pivots of entry * a_pivot = 0, in integers."""
    lines = []
    for column in (index for index in range(size) if index not in pivots):
        scale = lcm(*(row[column].denominator for row in rows)) if rows else 1
        line = np.zeros(size)
        line[column] = scale
        for row, pivot in zip(rows, pivots, strict=True):
            line[pivot] = -float(row[column] * scale)
        lines.append(line)
    return np.array(lines).reshape(len(lines), size)


def _fractions(
    values: np.ndarray, *, largest: int = _LARGEST_DENOMINATOR, rounding: float = DOUBLE.fraction
) -> list[Fraction] | None:
    """The numbers as small fractions; None if one of them is not close to any."""
    entries = [_fraction(value, largest=largest, rounding=rounding) for value in values]
    return None if any(entry is None for entry in entries) else [entry or Fraction(0) for entry in entries]


def _fraction(value: float, *, rounding: float, largest: int = _LARGEST_DENOMINATOR) -> Fraction | None:
    near = Fraction(float(value)).limit_denominator(largest)
    return near if abs(float(near) - value) <= rounding else None
