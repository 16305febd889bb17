"""Eigenpairs of a matrix that has changed a little: from what is remembered of it, in a few products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equilibria.curvature._eigenpairs import BESIDE, Eigenpairs, Memory, relative, unit
from equilibria.curvature._lanczos import EXHAUSTED, WITHIN_TOLERANCE, Product, check_finite, check_request

# Chosen on the runs of benchmarks/sharpness.py, where every value is checked by eigsh.
_OUTSIDE = 0.4  # where a direction that was never measured is taken to be, relative to the largest eigenvalue
_COUPLED = 1.8  # times as strongly as measured: what a direction adds grows with the square
_RESIDUAL = 2.0  # times the tolerance: with a larger residual another eigenvector may be mixed in
_LEAST_DOUBT, _FORGETS = 1e-3, 0.8
_LOOKS = 6  # searches, while eigenvalues are seen to move little: in one of them the next one is looked at, too
_FRESH = 0.05  # part of a random direction in one that is only looked at


def follow(
    product: Product,
    previous: Eigenpairs,
    *,
    end: str = "top",
    tol: float = 1e-2,
    budget: int = 100,
    noise: Callable[[], float] | None = None,
) -> Eigenpairs:
    """Eigenpairs near previous ones, of a matrix that has changed a little since.

    The Rayleigh-Ritz method in a space of measured directions, which grows by one product at a time. Beside it some
    more directions are remembered, with the matrix as it was when they were last measured; together they predict where
    the eigenvectors have turned to, which is the direction to measure next. The search ends when even an optimist would
    not expect the values to rise by more than the tolerance: he takes what was not measured now for larger by what
    eigenvalues were seen to rise from search to search, and couplings to it for nearly twice as strong as they are.

    So the bounds are estimates, never below the tolerance: products with a few directions cannot rule out an eigenvalue
    that has come up in none of them. Repeat the search from a random start (`eigenpairs`) now and then.

    Args:
        product: the product of the matrix with a vector.
        previous: where to begin; as many pairs are returned.
        end: as for `eigenpairs`.
        tol: as for `eigenpairs`.
        budget: the most products to take.
        noise: as for `eigenpairs`.

    Returns:
        The eigenpairs; ``certified`` is False.
    """
    count, limit = check_request(previous.vectors.shape[1], k=len(previous.values), end=end, tol=tol, budget=budget)
    sign = 1.0 if end == "top" else -1.0
    frame = _Frame(lambda vector: sign * product(vector).double(), previous.memory)
    for _ in range(count):
        frame.measure()
    rounding = float(torch.finfo(previous.vectors.dtype).eps) if noise is None else noise()
    while True:
        frame.solve(count)
        missing = [relative(each + rounding * frame.scale, value) for each, value in zip(*frame.outlook(), strict=True)]
        certain = [relative(each, _RESIDUAL * value) for each, value in zip(frame.residuals, frame.values, strict=True)]
        done = max(*missing, *certain) <= tol
        calm = previous.memory.doubt <= tol / 2 and previous.followed % _LOOKS
        looked = frame.measured > count or calm  # at the next one, too: it may have overtaken
        if (done and looked) or frame.measured >= limit:
            break
        if not frame.turn(count if done else int(np.argmax(np.maximum(missing, certain)))):
            break
        if done:
            frame.stir(seed=previous.followed)
        frame.measure()
    used_up = EXHAUSTED if frame.full else f"the budget of {limit} products is used up"
    return Eigenpairs(
        values=tuple(sign * value for value in frame.values),
        vectors=frame.ritz_vectors(),
        residuals=tuple(frame.residuals),
        bound=tuple(max(pair) for pair in zip(missing, certain, [tol] * count, strict=True)),
        hvps=frame.measured,
        converged=done,
        reason=WITHIN_TOLERANCE if done else used_up,
        certified=False,
        followed=previous.followed + 1,
        memory=frame.remembered(count + BESIDE),
    )


class _Frame:
    """Orthonormal directions, those measured now first; all that the products with these lead to is in their space."""

    def __init__(self, product: Product, memory: Memory) -> None:
        self._product = product
        self._vectors = memory.vectors.clone()
        self._matrix, self._age = memory.matrix.copy(), memory.age + np.eye(len(memory.age))
        self._doubt, self._surprises = memory.doubt, list[float]()
        self.measured = 0
        self.values: list[float] = []

    @property
    def full(self) -> bool:
        """Whether there is no direction left."""
        return self.measured == self._vectors.shape[1]

    @property
    def scale(self) -> float:
        return float(np.abs(np.diag(self._matrix)).max()) or 1.0

    def measure(self) -> None:
        """Take the product with the next direction."""
        at, direction = self.measured, self._vectors[self.measured].double()
        for _ in range(2):
            direction = direction - self._combined(self._coefficients(direction, at), at)
        self._vectors[at] = unit(direction)
        image = check_finite(self._product(self._vectors[at]))
        row = self._coefficients(image)
        left = image - self._combined(row)
        again = self._coefficients(left)
        left -= self._combined(again)
        self._learn(at, row + again)
        self.measured += 1
        self._append(left, at)

    def _learn(self, at: int, row: Tensor) -> None:
        found = row.cpu().numpy()
        if at == 0 and 0.5 < found[0] / (self._matrix[0, 0] or np.inf) < 2:
            self._matrix *= found[0] / self._matrix[0, 0]  # as the weights shrink, all curvatures grow together
        elif self._age[at, at] > 0.5:
            self._surprises.append(float(found[at] - self._matrix[at, at]) / (self.scale * float(self._age[at, at])))
        self._matrix[at, :] = self._matrix[:, at] = found
        self._age[at, :] = self._age[:, at] = 0.0

    def _append(self, left: Tensor, at: int) -> None:
        length = float(torch.linalg.vector_norm(left))
        if length <= 1e-12 * self.scale or len(self._vectors) == self._vectors.shape[1]:
            return
        self._vectors = torch.cat([self._vectors, (left / length)[None].to(self._vectors)])
        self._matrix, self._age = (np.pad(each, (0, 1)) for each in (self._matrix, self._age))
        self._matrix[at, -1] = self._matrix[-1, at] = length
        self._matrix[-1, -1] = float(np.diag(self._matrix)[: self.measured].max()) - (1 - _OUTSIDE) * self.scale

    def solve(self, count: int) -> None:
        """The largest Ritz pairs of what was measured."""
        inside = slice(0, self.measured)
        values, weights = np.linalg.eigh(self._matrix[inside, inside])
        self.values = values[::-1][:count].tolist()
        self._weights = weights[:, ::-1][:, :count]
        coupled = self._matrix[self.measured :, inside] @ self._weights
        self.residuals: list[float] = np.linalg.norm(coupled, axis=0).tolist()

    def outlook(self) -> tuple[list[float], list[float]]:
        """How far an optimist expects the values to rise, and the values."""
        hoped = self._matrix + self._doubt * self.scale * self._age
        hoped[self.measured :, : self.measured] *= _COUPLED
        hoped[: self.measured, self.measured :] *= _COUPLED
        values, self._hopes = np.linalg.eigh(hoped)
        rise = values[::-1][: len(self.values)] - np.array(self.values)
        return np.maximum(rise, 0.0).tolist(), self.values

    def turn(self, worst: int) -> bool:
        """Turn the directions that were not measured: the most promising one comes first. False if there is none."""
        unmeasured = self._hopes[self.measured :, ::-1][:, : worst + 1]
        lengths = np.linalg.norm(unmeasured, axis=0)
        if not lengths.size or lengths.max() <= 1e-12:
            return False
        wanted = unmeasured[:, int(np.argmax(lengths))] / lengths.max()
        mirror = wanted.copy()
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
        """Of what was measured, unit vectors."""
        chosen = [torch.tensor(column.copy(), device=self._vectors.device) for column in self._weights.T]
        return torch.stack([unit(self._combined(each, self.measured)) for each in chosen]).to(self._vectors)

    def stir(self, *, seed: int) -> None:
        """Mix a random direction into the next one: what has come up elsewhere must not stay unseen for ever."""
        generator = torch.Generator().manual_seed(seed)
        drawn = unit(torch.randn(self._vectors.shape[1], generator=generator, dtype=torch.float64)).to(self._vectors)
        inside = self._coefficients(drawn.double())
        self._vectors[self.measured] += _FRESH * (drawn - self._combined(inside).to(drawn))

    def remembered(self, count: int) -> Memory:
        """The largest Ritz pairs of all that is known, measured now or not."""
        values, weights = np.linalg.eigh(self._matrix)
        chosen = weights[:, ::-1][:, :count]
        vectors = torch.tensor(chosen.T.copy()).to(self._vectors) @ self._vectors
        return Memory(
            vectors=vectors,
            matrix=np.diag(values[::-1][:count]),
            age=chosen.T @ self._age @ chosen,
            doubt=max(_LEAST_DOUBT, _FORGETS * self._doubt, *self._surprises) if self._surprises else self._doubt,
        )

    def _coefficients(self, vector: Tensor, count: int | None = None) -> Tensor:
        rows = [row.double() @ vector for row in self._vectors[:count]]
        return torch.stack(rows) if rows else vector.new_zeros(0)

    def _combined(self, weights: Tensor, count: int | None = None) -> Tensor:
        found = torch.zeros(self._vectors.shape[1], dtype=torch.float64, device=self._vectors.device)
        for weight, row in zip(weights.tolist(), self._vectors[:count], strict=True):
            found.add_(row.double(), alpha=weight)
        return found
