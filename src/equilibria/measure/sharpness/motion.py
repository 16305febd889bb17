"""What consecutive steps of training tell for nothing: whether they turn back, and the curvature along them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_WINDOW = 10  # steps
_VISIBLE = 1e-5  # of the norm: shorter steps may be rounding, which turns back too


class Motion:
    """Follows the weights, or their direction, from step to step.

    At the edge of stability every step turns back on the one before, and the change of the gradient along a step over
    its length is the largest curvature, up to a few per cent. Before the edge that ratio says nothing about it.

    Args:
        spherical: whether to follow the direction of the weights, with the gradient at unit norm.
    """

    def __init__(self, *, spherical: bool) -> None:
        self._spherical = spherical
        self._turns: deque[bool] = deque(maxlen=_WINDOW)
        self.forget()

    def forget(self) -> None:
        """Begin anew: the next point does not follow the last."""
        self._point: Tensor | None = None
        self._step: Tensor | None = None
        self._gradient: Tensor | None = None
        self._turns.clear()
        self.secant: float | None = None

    @property
    def turned_back(self) -> float | None:
        """The share of the last ten steps that turned back on the one before; None before there are ten."""
        return sum(self._turns) / _WINDOW if len(self._turns) == _WINDOW else None

    def see(self, point: Tensor, gradient: Tensor | None) -> None:
        """Take the weights before a step, and their gradient if it is of the same loss at every step."""
        if self._spherical:
            norm = torch.linalg.vector_norm(point)
            point, gradient = point / norm, None if gradient is None else gradient * norm
        step = None if self._point is None else point - self._point
        self._compare(step, point, gradient)
        self._point, self._step, self._gradient = point, step, gradient

    def _compare(self, step: Tensor | None, point: Tensor, gradient: Tensor | None) -> None:
        self.secant = None
        if step is None:
            return
        products = [step @ step, point @ point]
        if self._step is not None:
            products.append(step @ self._step)
        if gradient is not None and self._gradient is not None:
            products.append((gradient - self._gradient) @ step)
        length_sq, norm_sq, *others = torch.stack(products).tolist()  # at once: a device is asked only once
        if self._step is not None:
            self._turns.append(others.pop(0) < 0 and length_sq > _VISIBLE**2 * norm_sq)
        if others and length_sq > 0:
            self.secant = others[0] / length_sq
