"""Eigenpairs of a matrix that has changed a little since the last search, in a few products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equilibria.curvature._eigenpairs import (
    EXHAUSTED,
    EXTRA_DIRECTIONS,
    WITHIN_TOLERANCE,
    Eigenpairs,
    Matrix,
    Product,
    SpectrumEnd,
    WarmStart,
    check_finite,
    check_request,
    relative,
    unit_vector,
)

# Chosen on the runs of benchmarks/sharpness.py, where every value is checked by eigsh.
_UNMEASURED = 0.4  # assumed curvature along a direction that was never measured, relative to the last eigenvalue wanted
_COUPLING = 1.8  # factor on measured couplings to other directions: their effect grows with the square
_RESIDUAL = 2.0  # times the tolerance: with a larger residual another eigenvector may be mixed in
_LEAST_DOUBT, _DOUBT_DECAY = 1e-3, 0.8
_CHECK_EVERY = 6  # searches: while eigenvalues move little, every sixth one also measures the next direction
_RANDOM_PART = 0.05  # of a random direction in the direction that such a check measures


def update_eigenpairs(
    product: Product,
    previous: Eigenpairs,
    *,
    end: SpectrumEnd = "top",
    tol: float = 1e-2,
    budget: int = 100,
    noise: Callable[[], float] | None = None,
) -> Eigenpairs:
    """Find eigenpairs near previous ones, of a matrix that has changed a little since.

    The Rayleigh-Ritz method in a space of measured directions, which grows by one product at a time. Some more
    directions are remembered from earlier searches, with the matrix as it was then; together they predict where the
    eigenvectors have turned, which is the direction to measure next. The search ends when even an optimistic estimate
    expects the values to rise by no more than the tolerance: it raises every direction that was not measured now by the
    largest rise seen between searches, and nearly doubles the couplings to it.

    So the bounds are estimates, never below the tolerance: products with a few directions cannot rule out an eigenvalue
    whose eigenvector is orthogonal to them all. Repeat the search from a random start (`eigenpairs`) now and then.

    Args:
        product: multiplies the matrix with a vector.
        previous: where to begin; the result has as many pairs.
        end: as for `eigenpairs`.
        tol: as for `eigenpairs`.
        budget: the largest number of products.
        noise: as for `eigenpairs`.

    Returns:
        The eigenpairs; ``certified`` is False.
    """
    count, limit = check_request(previous.vectors.shape[1], k=len(previous.values), end=end, tol=tol, budget=budget)
    sign = 1.0 if end == "top" else -1.0
    space = _SearchSpace(lambda vector: sign * product(vector).double(), previous.memory, wanted=count)
    for _ in range(count):
        space.measure()
    rounding = float(torch.finfo(previous.vectors.dtype).eps) if noise is None else noise()
    while True:
        space.solve(count)
        rises = [
            relative(rise + rounding * space.scale, value)
            for rise, value in zip(space.optimistic_rises(), space.values, strict=True)
        ]
        residuals = [
            relative(residual, _RESIDUAL * value) for residual, value in zip(space.residuals, space.values, strict=True)
        ]
        done = max(*rises, *residuals) <= tol
        # The next eigenvalue may have overtaken the wanted ones: measure its direction too, unless all has been calm.
        calm = previous.memory.doubt <= tol / 2 and previous.followed % _CHECK_EVERY
        checked = space.measured > count or calm
        if (done and checked) or space.measured >= limit:
            break
        if not space.turn_to_best(count if done else int(np.argmax(np.maximum(rises, residuals)))):
            break
        if done:
            space.add_random_part(seed=previous.followed)
        space.measure()
    used_up = EXHAUSTED if space.is_full else f"the budget of {limit} products is used up"
    return Eigenpairs(
        values=tuple(sign * value for value in space.values),
        vectors=space.ritz_vectors(),
        residuals=tuple(space.residuals),
        bound=tuple(max(pair) for pair in zip(rises, residuals, [tol] * count, strict=True)),
        hvps=space.measured,
        converged=done,
        reason=WITHIN_TOLERANCE if done else used_up,
        certified=False,
        followed=previous.followed + 1,
        memory=space.warm_start(count + EXTRA_DIRECTIONS),
    )


class _SearchSpace:
    """Orthonormal directions, those measured in this search first; their space holds all products measured so far."""

    def __init__(self, product: Product, start: WarmStart, *, wanted: int) -> None:
        self._product, self._wanted = product, wanted
        self._vectors = start.vectors.clone()
        self._matrix, self._age = start.matrix.copy(), start.age + np.eye(len(start.age))
        self._doubt, self._observed_rises = start.doubt, list[float]()
        self.measured = 0
        self.values: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether no direction is left to measure."""
        return self.measured == self._vectors.shape[1]

    @property
    def scale(self) -> float:
        return float(np.abs(np.diag(self._matrix)).max()) or 1.0

    def measure(self) -> None:
        """Multiply the matrix with the next direction."""
        index, direction = self.measured, self._vectors[self.measured].double()
        for _ in range(2):
            direction = direction - self._combined(self._coefficients(direction, index), index)
        self._vectors[index] = unit_vector(direction)
        image = check_finite(self._product(self._vectors[index]))
        row = self._coefficients(image)
        remainder = image - self._combined(row)
        correction = self._coefficients(remainder)
        remainder -= self._combined(correction)
        self._set_row(index, (row + correction).cpu().numpy())
        self.measured += 1
        self._append(remainder, index)

    def _set_row(self, index: int, row: Matrix) -> None:
        """Replace remembered entries by measured ones, and note how much the diagonal entry has risen since."""
        if index == 0 and 0.5 < row[0] / (self._matrix[0, 0] or np.inf) < 2:
            self._matrix *= row[0] / self._matrix[0, 0]  # as the weights shrink, all curvatures grow together
        elif self._age[index, index] > 0.5:
            rise = float(row[index] - self._matrix[index, index])
            self._observed_rises.append(rise / (self.scale * float(self._age[index, index])))
        self._matrix[index, :] = self._matrix[:, index] = row
        self._age[index, :] = self._age[:, index] = 0.0

    def _append(self, remainder: Tensor, index: int) -> None:
        """Add the part of a product that left the space as a new direction."""
        length = float(torch.linalg.vector_norm(remainder))
        if length <= 1e-12 * self.scale or len(self._vectors) == self._vectors.shape[1]:
            return
        self._vectors = torch.cat([self._vectors, (remainder / length)[None].to(self._vectors)])
        self._matrix, self._age = (np.pad(form, (0, 1)) for form in (self._matrix, self._age))
        self._matrix[index, -1] = self._matrix[-1, index] = length
        lowest = float(np.sort(np.diag(self._matrix)[: self.measured])[-self._wanted :][0])
        self._matrix[-1, -1] = lowest - (1 - _UNMEASURED) * abs(lowest)

    def solve(self, count: int) -> None:
        """Compute the largest Ritz pairs of the measured directions."""
        inside = slice(0, self.measured)
        values, weights = np.linalg.eigh(self._matrix[inside, inside])
        self.values = values[::-1][:count].tolist()
        self._weights = weights[:, ::-1][:, :count]
        coupled = self._matrix[self.measured :, inside] @ self._weights
        self.residuals: list[float] = np.linalg.norm(coupled, axis=0).tolist()

    def optimistic_rises(self) -> list[float]:
        """How far each value would rise if the directions that were not measured are as favourable as they may be."""
        optimistic = self._matrix + self._doubt * self.scale * self._age
        optimistic[self.measured :, : self.measured] *= _COUPLING
        optimistic[: self.measured, self.measured :] *= _COUPLING
        values, self._optimistic_vectors = np.linalg.eigh(optimistic)
        rise = values[::-1][: len(self.values)] - np.array(self.values)
        rises: list[float] = np.maximum(rise, 0.0).tolist()
        return rises

    def turn_to_best(self, worst: int) -> bool:
        """Rotate the unmeasured directions so that the most promising one comes next; False if there is none.

        Args:
            worst: index of the value that is known worst.
        """
        unmeasured = self._optimistic_vectors[self.measured :, ::-1][:, : worst + 1]
        lengths = np.linalg.norm(unmeasured, axis=0)
        if not lengths.size or lengths.max() <= 1e-12:
            return False
        wanted = unmeasured[:, int(np.argmax(lengths))] / lengths.max()
        mirror = wanted.copy()  # a Householder reflection maps the wanted direction to the first unmeasured one
        mirror[0] += 1.0 if wanted[0] >= 0 else -1.0
        mirror /= np.linalg.norm(mirror)
        rest = self._vectors[self.measured :]
        along = torch.tensor(mirror).to(rest)
        rest.addr_(along, along @ rest, alpha=-2.0)
        for form in (self._matrix, self._age):
            form[self.measured :, :] -= 2 * np.outer(mirror, mirror @ form[self.measured :, :])
            form[:, self.measured :] -= 2 * np.outer(form[:, self.measured :] @ mirror, mirror)
        return True

    def ritz_vectors(self) -> Tensor:
        """Unit Ritz vectors of the measured directions."""
        columns = [torch.tensor(column.copy(), device=self._vectors.device) for column in self._weights.T]
        return torch.stack([unit_vector(self._combined(column, self.measured)) for column in columns]).to(self._vectors)

    def add_random_part(self, *, seed: int) -> None:
        """Mix a random direction into the next one, so that no eigenvector stays out of sight for ever."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self._vectors.shape[1], generator=generator, dtype=torch.float64)
        drawn = unit_vector(drawn).to(self._vectors)
        inside = self._coefficients(drawn.double())
        self._vectors[self.measured] += _RANDOM_PART * (drawn - self._combined(inside).to(drawn))

    def warm_start(self, count: int) -> WarmStart:
        """The largest Ritz pairs of the whole space, measured now or remembered."""
        values, weights = np.linalg.eigh(self._matrix)
        chosen = weights[:, ::-1][:, :count]
        vectors = torch.tensor(chosen.T.copy()).to(self._vectors) @ self._vectors
        rises, doubt = self._observed_rises, self._doubt
        return WarmStart(
            vectors=vectors,
            matrix=np.diag(values[::-1][:count]),
            age=chosen.T @ self._age @ chosen,
            doubt=max(_LEAST_DOUBT, _DOUBT_DECAY * doubt, *rises) if rises else doubt,
        )

    def _coefficients(self, vector: Tensor, count: int | None = None) -> Tensor:
        rows = [row.double() @ vector for row in self._vectors[:count]]
        return torch.stack(rows) if rows else vector.new_zeros(0)

    def _combined(self, weights: Tensor, count: int | None = None) -> Tensor:
        total = torch.zeros(self._vectors.shape[1], dtype=torch.float64, device=self._vectors.device)
        for weight, row in zip(weights.tolist(), self._vectors[:count], strict=True):
            total.add_(row.double(), alpha=weight)
        return total
