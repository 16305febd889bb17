"""Eigenpairs of a matrix that has changed a little: from the previous ones, in a few products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.measure.curvature.basis import Basis
from equilibria.measure.curvature.eigenpairs import Eigenpairs, kato_temple, relative, unit
from equilibria.measure.curvature.lanczos import EXHAUSTED, WITHIN_TOLERANCE, Product, check_request

_FRESH = 0.03  # part of random directions in the extra vector: the block must not be blind to anything for long
_REST = 0.3  # where the eigenvalues outside of the block are on average, in terms of those inside


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

    The Rayleigh-Ritz method in the space of a block: the previous vectors, corrected to first order by their residuals,
    and one more, stirred with a random direction, in which an eigenvalue shows up that overtakes the others. This takes
    one product for each; more, along the residuals, only if the bounds are not within the tolerance.

    The bounds are estimates, never below the tolerance. They take for granted that no eigenvalue beyond those followed
    has come up elsewhere, and that the next one below the block has grown as the last inside. Repeat the search from a
    random start (`eigenpairs`) now and then.

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
    space = _RitzSpace(lambda vector: sign * product(vector).double(), previous.vectors[0])
    for vector in _stirred(previous.block, seed=previous.followed)[:limit]:
        space.extend(vector)
    rounding = float(torch.finfo(previous.vectors.dtype).eps) if noise is None else noise()
    below = sign * previous.next_value / (sign * previous.values[-1] or 1.0)
    while True:
        space.solve(count + 1)
        bound = _bounds(space, count, below=below, noise=rounding)
        done = max(bound) <= tol
        if done or space.hvps >= limit or not space.extend(space.residual_vectors[int(np.argmax(bound))]):
            break
    used_up = EXHAUSTED if space.full else f"the budget of {limit} products is used up"
    return Eigenpairs(
        values=tuple(sign * value for value in space.values[:count].tolist()),
        vectors=space.vectors[:count].to(previous.vectors.dtype),
        residuals=tuple(space.residuals[:count]),
        bound=tuple(max(each, tol) for each in bound),
        hvps=space.hvps,
        converged=done,
        reason=WITHIN_TOLERANCE if done else used_up,
        certified=False,
        followed=previous.followed + 1,
        next_value=sign * below * float(space.values[count - 1]),
        block=_corrected(space).to(previous.vectors.dtype),
    )


class _RitzSpace:
    """A space of vectors with their images, and the Ritz pairs in it, largest first."""

    def __init__(self, product: Product, like: Tensor) -> None:
        self._product, self._size = product, len(like)
        self._basis = Basis(len(like), dtype=like.dtype, device=like.device)
        self._images: list[Tensor] = []
        self._small: NDArray[np.float64] = np.zeros((0, 0))
        self.hvps = 0

    @property
    def full(self) -> bool:
        return len(self._basis) == self._size

    def extend(self, direction: Tensor) -> bool:
        """Take in a direction; False if it lies in the space already."""
        wide = direction.double()
        left, _ = self._basis.remainder(wide)
        length = float(torch.linalg.vector_norm(left))
        if self.full or length <= 1e-12 * float(torch.linalg.vector_norm(wide)):
            return False
        self._images.append(self._product(self._basis.append(left / length)))
        self.hvps += 1
        inside = self._basis.coefficients(self._images[-1]).cpu().numpy()
        small = np.zeros((len(inside), len(inside)))
        small[:-1, :-1] = self._small
        small[-1, :] = small[:, -1] = inside
        self._small = small
        return True

    def solve(self, count: int) -> None:
        """The largest Ritz pairs of the space as it is now, with their residuals."""
        values, weights = np.linalg.eigh(self._small)
        self.values: NDArray[np.float64] = values[::-1][:count]
        chosen = [torch.tensor(row.copy(), device=self._images[0].device) for row in weights.T[::-1][:count]]
        self.vectors = torch.stack([self._basis.combined(row) for row in chosen])
        images = torch.stack([_combined(row, self._images) for row in chosen])
        self.residual_vectors = images - torch.tensor(self.values.copy()).to(images)[:, None] * self.vectors
        self.residuals: list[float] = torch.linalg.vector_norm(self.residual_vectors, dim=1).tolist()


def _bounds(space: _RitzSpace, count: int, *, below: float, noise: float) -> list[float]:
    """Relative errors at most, if everything outside of the space is below ``below`` times the last value."""
    values, rounding = space.values[:count].tolist(), noise * float(np.abs(space.values).max())
    outside = below * values[-1]
    distances = [kato_temple(space.residuals[at], value - outside) + rounding for at, value in enumerate(values)]
    return [relative(distance, value) for distance, value in zip(distances, values, strict=True)]


def _stirred(block: Tensor, *, seed: int) -> list[Tensor]:
    """The vectors of a block, the last with a random part."""
    drawn = torch.randn(block.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fresh = unit(block[-1].double()) + _FRESH * unit(drawn).to(block.device)
    return [*(row.double() for row in block[:-1]), fresh]


def _corrected(space: _RitzSpace) -> Tensor:
    """The Ritz vectors, corrected to first order: exact if everything outside had one eigenvalue."""
    largest = max(float(np.abs(space.values).max()), np.finfo(np.float64).tiny)
    return space.vectors + space.residual_vectors / ((1 - _REST) * largest)


def _combined(weights: Tensor, vectors: list[Tensor]) -> Tensor:
    found = torch.zeros_like(vectors[0])
    for weight, vector in zip(weights.tolist(), vectors, strict=True):
        found.add_(vector, alpha=weight)
    return found
