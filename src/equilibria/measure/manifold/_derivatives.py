"""Loss, gradient, Hessian and one third derivative of a flat vector, for many points at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

_AT_ONCE = 2**20  # numbers in the Hessians of one pass, which bounds the memory


class Derivatives:
    """Derivatives of ``value``, a function of a flat vector, at the rows of a matrix.

    All rows go through torch together where torch can do that, else one by one (BatchNorm that keeps running
    statistics cannot).

    Args:
        value: the loss, one number, of a vector.
        example: a point at which it can be evaluated.
    """

    def __init__(self, value: Callable[[Tensor], Tensor], example: Tensor) -> None:
        def quadratic_form(point: Tensor, direction: Tensor) -> Tensor:
            return grad(lambda at: grad(value)(at) @ direction)(point) @ direction

        self._functions = {
            "values": value,
            "gradients": grad(value),
            "hessians": jacrev(grad(value)),
            "bends": grad(quadratic_form),
        }
        self._rows_at_once = max(1, _AT_ONCE // len(example) ** 2)
        self._together = self._can_go_together(example)

    def values(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        return self._rows("values", points)

    def gradients(self, points: Tensor) -> Tensor:
        """Its gradient at every row."""
        if self._together and len(points) > 1:
            return self._rows("gradients", points)
        return torch.stack([self._gradient(point) for point in points])  # twice as fast as torch.func for one row

    def hessians(self, points: Tensor) -> Tensor:
        """Its Hessian at every row, symmetric to the last bit."""
        raw = self._rows("hessians", points)
        return (raw + raw.mT) / 2

    def bends(self, points: Tensor, directions: Tensor) -> Tensor:
        """Gradient of ``v' H(w) v`` in ``w`` at fixed ``v``, for every row of points and directions."""
        return self._rows("bends", points, directions)

    def _gradient(self, point: Tensor) -> Tensor:
        leaf = point.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self._functions["values"](leaf), leaf)
        return found

    def _can_go_together(self, example: Tensor) -> bool:
        try:
            with _differentiable_attention():
                vmap(self._functions["gradients"])(example.repeat(2, 1))
        except Exception:
            return False  # torch has no one exception for it; the loss itself was evaluated before, and is good
        return True

    def _rows(self, which: str, *rows: Tensor) -> Tensor:
        function: Any = self._functions[which]
        with _differentiable_attention():
            if self._together and len(rows[0]) > 1:  # one row alone is faster without vmap
                found = vmap(function, chunk_size=self._rows_at_once)(*rows)
            else:
                found = torch.stack([function(*row) for row in zip(*rows, strict=True)])
        return found.detach()


def _differentiable_attention() -> Any:
    """Only this kernel can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)
