"""The result of a search for symmetries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from equilibria._display import renderer
from equilibria.errors import EquilibriaError
from equilibria.symmetry._null_space import interchangeable
from equilibria.symmetry._rows import Rows


def largest_uniform_set(constraints: np.ndarray, elements: np.ndarray) -> np.ndarray:
    """Find the 0/1 vector x with C x = 0 that maximises the number of elements, by a mixed-integer program.

    Of tensors that can take each other's place the largest are chosen, and the last of equal ones, so that the choice
    is the same in equal layers.

    Args:
        constraints: integer matrix C; the exponent vectors of symmetries are those with C a = 0.
        elements: number of elements of each tensor.

    Returns:
        A boolean array: which tensors are in the set.

    Example:
        >>> C = np.array([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])  # the first two together, the third never
        >>> largest_uniform_set(C, np.array([10, 10, 99])).tolist()
        [True, True, False]
    """
    if len(constraints) == 0:
        return np.ones(len(elements), dtype=bool)
    solved = milp(
        -elements / elements.max(),
        integrality=np.ones(len(elements), dtype=int),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(constraints, 0, 0),
    )
    if not solved.success:
        raise EquilibriaError(f"the mixed-integer program of the largest uniform set was not solved: {solved.message}")
    chosen: np.ndarray = np.round(solved.x).astype(bool)
    for members in interchangeable(constraints):
        preferred = sorted(members, key=lambda member: (elements[member], member), reverse=True)
        count = int(chosen[members].sum())
        chosen[members] = False
        chosen[preferred[:count]] = True
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Symmetries:
    """Every scaling symmetry w_i -> c^(a_i) w_i of a loss.

    Attributes:
        elements: number of elements of each tensor, by name, in the order of the model.
        alone: names of the tensors that are scale-invariant by themselves: their direction matters, their norm does
            not.
        basis: a basis of all symmetries, each a dict of name -> exponent (small integers): ``{"conv.weight": 1}`` is a
            tensor that is invariant alone, ``{"gamma": 1, "beta": 1}`` two that are so together, ``{"up": 1,
            "down": -1}`` a rescaling of one against the other.
        jointly: for tensors that take part in a symmetry but are not invariant alone: the smallest such symmetry, with
            exponents that are not negative if possible.
        no_effect: names of the tensors without any effect, such as a bias before BatchNorm: not even their direction
            matters, so they are not in ``alone``. Scaling them is a symmetry, so they are in ``basis``.
        undecided: names of the tensors with hardly any gradient here that would matter elsewhere (dead units), or
            whose effect is too small to measure (vanishing gradients).
        rows: the finest blocks of rows that are invariant by themselves, of tensors with two axes or more, confirmed by
            scaling each of them by another factor of up to 4, and all by 2, 32 and 65536.
        residual: how far each tensor is from being invariant alone: root mean square of <w, g> over the product of the
            norms, row by row. Rounding (about 1e-14) if it is invariant, typically 1e-3 to 1 if not.
        singular_values: of the matrix of relative radial derivatives, largest first.
        gap: the smallest singular value that is not zero over the largest that is. Above 1000 the answer is clear.
        confirmed: for each vector of ``basis``, how much outputs changed relative to their spread, in float64 with a
            negligible eps, when its tensors were scaled together with others by c = 2, 32 and 65536, up and down.
            Where outputs change but the loss does not (a cosine), the relative change of the loss. Vectors that neither
            confirms are not in ``basis``; ``notes`` lists them.
        broken: how much outputs change relative to their spread, with the real eps and in the real type at the present
            weights, when a tensor (with those it is ``jointly`` invariant with) is scaled by 0.6.
        probes: number of backward passes.
        notes: caveats to read before relying on the result.
    """

    elements: dict[str, int]
    alone: tuple[str, ...]
    basis: tuple[dict[str, int], ...]
    jointly: dict[str, dict[str, int]]
    no_effect: tuple[str, ...]
    undecided: tuple[str, ...]
    rows: dict[str, Rows]
    residual: dict[str, float]
    singular_values: np.ndarray
    gap: float
    confirmed: tuple[float, ...]
    broken: dict[str, float]
    probes: int
    notes: tuple[str, ...]
    _constraints: np.ndarray = field(repr=False)
    _involved: tuple[str, ...] = field(repr=False)
    _uniform: list[frozenset[str]] = field(default_factory=list, init=False, repr=False)  # cache

    def largest_uniform(self) -> frozenset[str]:
        """The largest set of tensors, by elements, that may all be scaled by one common factor.

        Everything in ``alone`` and ``no_effect``, and the best combination of the rest (a mixed-integer program).
        Spherical sharpness is defined on this part of a network.
        """
        if not self._uniform:
            self._uniform.append(self._solve_uniform())
        return self._uniform[0]

    def _solve_uniform(self) -> frozenset[str]:
        free = frozenset(self.alone) | frozenset(self.no_effect)
        if not self._involved:
            return free
        chosen = largest_uniform_set(self._constraints, np.array([self.elements[name] for name in self._involved]))
        return free | {name for name, is_chosen in zip(self._involved, chosen, strict=True) if is_chosen}

    def uniform_sets(self) -> tuple[tuple[str, ...], ...]:
        """The parts of `largest_uniform` that may each be scaled by a factor of its own.

        Every tensor of ``alone`` is one. The others are sets that no symmetry links to each other, such as scale and
        shift of one BatchNorm. ``no_effect`` is left out.
        """
        uniform = self.largest_uniform()
        parts: list[set[str]] = [{name} for name in self.elements if name in uniform and name not in self.no_effect]
        for row in self._constraints:
            linked = {name for name, entry in zip(self._involved, row, strict=True) if entry and name in uniform}
            touched = [part for part in parts if part & linked]
            if len(touched) > 1:
                parts = [part for part in parts if part not in touched] + [set().union(*touched)]
        order = {name: place for place, name in enumerate(self.elements)}
        return tuple(sorted((tuple(sorted(part, key=order.__getitem__)) for part in parts), key=lambda p: order[p[0]]))

    def against(self, name: str) -> dict[str, int] | None:
        """A vector of ``basis`` that scales a tensor against others; None if there is none."""
        with_name = (vector for vector in self.basis if name in vector)
        return next((vector for vector in with_name if min(vector.values()) < 0 < max(vector.values())), None)

    @property
    def how(self) -> dict[str, str]:
        """For every tensor, how it is invariant, in words."""
        return {name: self._how(name) for name in self.elements}

    def _how(self, name: str) -> str:
        if name in self.no_effect:
            return "no effect"
        if name in self.undecided:
            return "undecided"
        if name in self.alone:
            return _granularity(self.rows.get(name))
        if name in self.jointly:
            return self._how_jointly(name, self.jointly[name])
        part = self.rows.get(name)
        return f"{part.covered} of {part.rows} rows" if part else "no"

    def __repr__(self) -> str:
        """Short, for messages; ``print`` shows the table."""
        return f"<Symmetries: {len(self.alone)} of {len(self.elements)} tensors alone: {_some(list(self.alone))}>"

    def _repr_html_(self) -> str:
        html: str = renderer("notebook.symmetries_card")(self)
        return html

    def _how_jointly(self, name: str, vector: Mapping[str, int]) -> str:
        words, mixed = describe_joint(name, vector), self.against(name)
        if mixed is None or min(vector.values()) < 0:
            return words
        return f"{words}; also {describe_joint(name, mixed)}"

    def __str__(self) -> str:
        width = max(len(name) for name in self.elements)
        lines = [f"{name:{width}}  {how}" for name, how in self.how.items()]
        summary = (
            f"{len(self.basis)} independent symmetries of {len(self.elements)} tensors; gap {self.gap:.1e} after "
            f"{self.probes} backward passes"
        )
        return "\n".join([*lines, "", summary if self.basis else f"no scaling symmetry; {summary}", *self.notes])


def _granularity(rows: Rows | None) -> str:
    if rows is None or rows.block == rows.rows:
        return "alone"
    return "rows" if rows.block == 1 else f"groups of {rows.block} rows"


def describe_joint(name: str, vector: Mapping[str, int]) -> str:
    """Describe in words how other tensors scale with a tensor.

    Example:
        >>> describe_joint("bn.weight", {"bn.weight": 1, "bn.bias": 1})
        'jointly with bn.bias'
        >>> describe_joint("up", {"up": 1, "down": -1})
        'against down'
    """
    others = {other: exponent / vector[name] for other, exponent in vector.items() if other != name}
    along = [_powered(other, exponent) for other, exponent in others.items() if exponent > 0]
    against = [_powered(other, -exponent) for other, exponent in others.items() if exponent < 0]
    words = [f"jointly with {_some(along)}"] if along else []
    return " and ".join([*words, *([f"against {_some(against)}"] if against else [])])


def _powered(name: str, exponent: float) -> str:
    return name if exponent == 1 else f"{name}^{exponent:g}"


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
