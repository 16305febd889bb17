"""Whether a weight that is said to be scale-invariant can be: then its gradient is orthogonal to it.

Only a norm's eps, and rounding, leave a scale-invariant weight a radial gradient: relative to the gradient about eps
over the variance before the norm, 1e-4 or so. The limits here are far above, so that they never stop a training that is
right. They do not find every mistake: `equilibria.symmetries` does, in float64, without eps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.tensors.inner_products import ProductsPass
from equilibria.tensors.invariance import HOW_TO
from equilibria.tensors.layout import is_sharded, matrix

LARGEST_COSINE = 0.05  # of weight and gradient
_BEYOND_CHANCE = 3.0  # times 1/sqrt(entries): noise that is added to gradients, as for privacy, is no mistake
_SHARE_OF_CHANCE = 0.5  # a row that is not invariant alone often has a cosine of no more than chance
_STEPS = 20  # that are looked at: the gradient of a fresh last layer may be orthogonal to it at first
_CANCELS = 0.1  # sum of the rows' radial parts over that of independent ones: zero if rows are invariant together only
_IN_A_ROW = 5  # steps of such a sum: chance, as with noise that is added to gradients, makes 0.08^5 of it


def radial_cosine(weight: Tensor, gradient: Tensor, *, axis: int | None = None) -> float:
    """The cosine of weight and gradient, without sign; with an axis that of its rows, weighted by ||w||^2 ||g||^2.

    Example:
        >>> round(radial_cosine(torch.eye(2), torch.tensor([[3.0, 4.0], [0.0, -3.0]])), 3)
        0.0
        >>> round(radial_cosine(torch.eye(2), torch.tensor([[3.0, 4.0], [0.0, -3.0]]), axis=0), 3)
        0.728
    """
    return _cosine(*_products(weight, gradient, axis))


def _products(weight: Tensor, gradient: Tensor, axis: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """<w, w>, <w, g> and <g, g> of every row."""
    weight = weight.detach()
    rows, slopes = (matrix(each.detach(), axis=axis, like=weight).contiguous() for each in (weight, gradient))
    sums = torch.zeros(len(rows), 6, dtype=torch.float64, device=weight.device)
    one_pass = ProductsPass(sums)
    one_pass.add(0, rows, slopes, None)
    one_pass.run()
    return sums[:, 0], sums[:, 1], sums[:, 2]


def _cosine(ww: Tensor, wg: Tensor, gg: Tensor) -> float:
    size, radial = float(torch.dot(ww, gg)), float(torch.dot(wg, wg))
    return math.sqrt(radial / size) if size > 0 else 0.0


def largest_cosine(weight: Tensor, axis: int | None) -> float:
    """What a scale-invariant weight, or one with invariant rows, stays far below, without noise added to gradients."""
    return LARGEST_COSINE if axis is None else min(LARGEST_COSINE, _SHARE_OF_CHANCE * _chance(weight, axis))


def _chance(weight: Tensor, axis: int | None) -> float:
    """Cosine with a random direction, root mean square: 1/sqrt(entries)."""
    return math.sqrt((1 if axis is None else weight.shape[axis]) / weight.numel())


def require_orthogonal(name: str, cosine: float, *, limit: float, axis: int | None) -> None:
    """Refuse a weight whose gradient has too large a cosine with it."""
    if not cosine > limit:
        return
    if axis is not None:
        raise EquilibriaError(
            f"got granularity='row' for {name}, whose rows have a cosine of {cosine:.2g} with their gradients; "
            "expected 0, as for rows that are scale-invariant one by one: granularity='tensor' is the one to use where "
            "only groups of rows are (GroupNorm, LayerNorm, QK-norm)"
        )
    raise EquilibriaError(
        f"got {name}, whose gradient has a cosine of {cosine:.2g} with it; expected 0, as for a scale-invariant "
        f"weight: is the model in training mode? {HOW_TO}"
    )


class InvarianceWatch:
    """Looks at the first few steps, before they are taken, for weights that cannot be scale-invariant.

    Refused is a cosine of weight and gradient above 0.05 that is also three times as large as chance, 1/sqrt(entries).
    Measured in BatchNorm networks on digits over 300 steps: 9e-4 at most for convolutions, 0.3 soon for the last layer.

    Rows that are invariant only together (GroupNorm, LayerNorm) have cosines of chance or less. But these cancel in the
    sum over the tensor, which noise does not: five such steps in succession are refused, too.
    """

    def __init__(self) -> None:
        self._left = _STEPS
        self._cancelled: dict[str, int] = {}

    def look(self, weights: Mapping[str, Tensor], axes: Mapping[Tensor, int | None] | None = None) -> None:
        """Refuse weights whose gradients say that they are not invariant; those without gradient say nothing."""
        if self._left > 0:
            for name, weight in weights.items():
                self._look_at(name, weight, None if axes is None else axes[weight])
            self._left -= 1

    def _look_at(self, name: str, weight: Tensor, axis: int | None) -> None:
        gradient = weight.grad
        if gradient is None or gradient.layout != torch.strided or is_sharded(weight) or is_sharded(gradient):
            return
        products = _products(weight, gradient, axis)
        cosine, least = _cosine(*products), largest_cosine(weight, axis)
        together = axis is not None and cosine > least and _cancel(products[1])
        self._cancelled[name] = self._cancelled.get(name, 0) + 1 if together else 0
        limit = max(LARGEST_COSINE, _BEYOND_CHANCE * _chance(weight, axis))
        sure = self._cancelled[name] >= _IN_A_ROW
        require_orthogonal(name, cosine, limit=least if sure else limit, axis=axis)


def _cancel(radial: Tensor) -> bool:
    return len(radial) > 1 and float(radial.sum().abs()) < _CANCELS * float(torch.linalg.vector_norm(radial))
