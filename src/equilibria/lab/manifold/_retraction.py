"""Back on the manifold of minimisers from close by, with Newton's method in the normal space."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.lab.manifold.landscape import Landscape
from equilibria.lab.manifold.slope import Slopes, slopes_at

_ROUNDS, _STEPS = 4, 8  # Hessians, and steps with each of them
_CLOSE = 1e-11  # relative to the norm: a last step of this size


class LeftManifoldError(Exception):
    """Newton's method found no minimum close by."""


class Manifold:
    """The minimisers around a point, and the slope of the logarithm of the sharpness on them.

    Args:
        landscape: the loss.
        rank: number of positive eigenvalues of its Hessian on the manifold. Beside the manifold the others are not
            quite zero, so that a threshold could not tell which they are.
    """

    def __init__(self, landscape: Landscape, *, rank: int) -> None:
        self._landscape, self._rank = landscape, rank
        self._last: tuple[Tensor, Slopes] | None = None

    def onto(self, point: Tensor) -> Tensor:
        """The minimum that Newton's method finds from a point.

        Raises:
            LeftManifoldError: if it finds none.
        """
        rows = self._landscape.onto_sphere(point[None])
        close = _CLOSE * max(float(rows.norm()), torch.finfo(rows.dtype).tiny)
        for _ in range(_ROUNDS):
            stiff, across = self._normal_space(rows)
            for _ in range(_STEPS):
                move = across @ ((self._landscape.gradients(rows)[0] @ across) / stiff)
                rows = self._landscape.onto_sphere(rows - move)
                if float(move.norm()) <= close:
                    return rows[0]
        raise LeftManifoldError

    def _normal_space(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positive eigenvalues and their eigenvectors."""
        if not bool(torch.isfinite(rows).all()):
            raise LeftManifoldError
        try:
            values, vectors = torch.linalg.eigh(self._landscape.hessians(rows))
        except EquilibriaError as error:  # the loss is not finite there
            raise LeftManifoldError from error
        if not bool(values[0, -self._rank] > 0):
            raise LeftManifoldError
        return values[0, -self._rank :], vectors[0, :, -self._rank :]

    def slope(self, point: Tensor) -> Slopes:
        """The slope at the minimum next to a point; the last one is remembered.

        Raises:
            LeftManifoldError: if there is none.
        """
        if self._last is None or not torch.equal(self._last[0], point):
            self._last = point, slopes_at(self._landscape, self.onto(point)[None])
        return self._last[1]
