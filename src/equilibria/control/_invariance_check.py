"""Tests during training that weights declared scale-invariant are: their gradients are orthogonal to them.

A norm's eps and rounding leave a scale-invariant weight a small radial gradient: relative to the whole gradient about
eps over the variance before the norm, 1e-4 or so. The limits here are far above that, so that they never stop a correct
training run. They do not catch every mistake: `equilibria.symmetries` does, in float64 and without eps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from equilibria.control._units import unit_products
from equilibria.errors import EquilibriaError
from equilibria.findings import joined
from equilibria.tensors.invariance import HOW_TO
from equilibria.tensors.layout import is_sharded, matrix

LARGEST_COSINE = 0.05  # of weight and gradient
_BEYOND_CHANCE = 3.0  # times 1/sqrt(entries): noise added to gradients on purpose, as for privacy, must pass
_DOUBTFUL = 0.01  # of weights that no normalisation seems to follow; ten times what eps leaves
_SHARE_OF_CHANCE = 0.5  # rows that are not invariant one by one often have a cosine no larger than chance
_STEPS = 20  # steps checked: the gradient of a fresh last layer may be orthogonal to it at first
_CANCELS = 0.1  # sum of the rows' radial parts over that of independent ones: zero if rows are invariant only together
_SUCCESSIVE = 5  # steps with such a sum; noise added to gradients does this with probability 0.08^5
_REMAINS = 0.1  # sum of the radial parts of a joint set over the largest of them: zero if the set is invariant


class InvarianceCheck:
    """Checks in the first 20 steps, before each is taken, that weights can be scale-invariant.

    Raises for a cosine of weight and gradient above 0.05 that is also three times as large as chance, 1/sqrt(entries).
    Measured in BatchNorm networks on digits over 300 steps: at most 9e-4 for convolutions, soon 0.3 for the last layer.

    Rows that are invariant only together (GroupNorm, LayerNorm) have cosines of chance or less, but these cancel in the
    sum over the tensor, as noise does not: five such steps in succession raise, too.

    A tensor that is invariant jointly with others may have any cosine. Raises if the radial parts of its set leave more
    than a tenth of the largest of them, and three times as much as chance.

    Args:
        jointly: sets of names that are invariant only together.
    """

    def __init__(self, jointly: Sequence[Collection[str]] = ()) -> None:
        self._steps_left = _STEPS
        self._jointly = [list(names) for names in jointly]
        self._in_joint_set = {name for names in jointly for name in names}
        self._cancelled: dict[str, int] = {}

    def check(
        self,
        weights: Mapping[str, Tensor],
        axes: Mapping[Tensor, int | None] | None = None,
        *,
        doubtful: Collection[str] = (),
    ) -> None:
        """Raise if a gradient shows that its weight is not scale-invariant; weights without gradient are skipped.

        Args:
            weights: by name.
            axes: that number the rows of weights whose rows are checked one by one.
            doubtful: names of weights for which a cosine of chance is too much, above 0.01.

        Raises:
            EquilibriaError: with the weight's name and the cosine.
        """
        if self._steps_left > 0:
            for name, weight in weights.items():
                if name not in self._in_joint_set:
                    axis = None if axes is None else axes[weight]
                    self._check_one(name, weight, axis, is_doubtful=name in doubtful)
            for names in self._jointly:
                _check_set({name: weights[name] for name in names})
            self._steps_left -= 1

    def _check_one(self, name: str, weight: Tensor, axis: int | None, *, is_doubtful: bool) -> None:
        gradient = weight.grad
        if gradient is None or not _is_readable(weight):
            return
        products = _row_products(weight, gradient, axis)
        cosine, low_limit = _cosine(*products), largest_cosine(weight, axis)
        cancelled = axis is not None and cosine > low_limit and _cancel(products[1])
        self._cancelled[name] = self._cancelled.get(name, 0) + 1 if cancelled else 0
        high_limit = max(LARGEST_COSINE, _BEYOND_CHANCE * _chance(weight, axis))
        high_limit = _DOUBTFUL if is_doubtful else high_limit
        is_certain = self._cancelled[name] >= _SUCCESSIVE
        require_orthogonal(name, cosine, limit=low_limit if is_certain else high_limit, axis=axis)


def _check_set(weights: Mapping[str, Tensor]) -> None:
    """Raise EquilibriaError if the radial parts of the gradients of a jointly invariant set do not cancel."""
    if not all(_is_readable(weight) for weight in weights.values()):
        return
    products = [_row_products(weight, weight.grad, None) for weight in weights.values()]  # type: ignore[arg-type]
    radial = torch.tensor([float(wg) for _, wg, _ in products], dtype=torch.float64)
    size = torch.tensor([math.sqrt(float(ww * gg)) for ww, _, gg in products], dtype=torch.float64)
    chance = torch.tensor([_chance(weight, None) for weight in weights.values()], dtype=torch.float64)
    cosines = radial.abs() / size.clamp_min(1e-300)
    left, largest = float(radial.sum().abs()), float(radial.abs().max())
    is_radial = bool((cosines > (_BEYOND_CHANCE * chance).clamp_min(LARGEST_COSINE)).any())
    if is_radial and left > max(_REMAINS * largest, _BEYOND_CHANCE * float((size * chance).norm())):
        names, worst = list(weights), int(cosines.argmax())
        raise EquilibriaError(
            f"got {joined(names, most=3)} as a jointly scale-invariant set, but the radial parts of its gradients do "
            f"not cancel: their sum is {left / largest:.2g} of the largest (cosine {float(cosines[worst]):.2g} for "
            f"{names[worst]}); expected 0: is the model in training mode, and is the set complete? {HOW_TO}",
            argument="invariant",
        )


def _is_readable(weight: Tensor) -> bool:
    """Whether weight and gradient are whole, strided tensors."""
    gradient = weight.grad
    if gradient is None or gradient.layout != torch.strided:
        return False
    return not is_sharded(weight) and not is_sharded(gradient)


def radial_cosine(weight: Tensor, gradient: Tensor, *, axis: int | None = None) -> float:
    """The absolute cosine of weight and gradient; with an axis that of its rows, weighted by ||w||^2 ||g||^2.

    Example:
        >>> round(radial_cosine(torch.eye(2), torch.tensor([[3.0, 4.0], [0.0, -3.0]])), 3)
        0.0
        >>> round(radial_cosine(torch.eye(2), torch.tensor([[3.0, 4.0], [0.0, -3.0]]), axis=0), 3)
        0.728
    """
    return _cosine(*_row_products(weight, gradient, axis))


def largest_cosine(weight: Tensor, axis: int | None) -> float:
    """A limit that a scale-invariant weight, or one with invariant rows, stays far below if no noise is added."""
    return LARGEST_COSINE if axis is None else min(LARGEST_COSINE, _SHARE_OF_CHANCE * _chance(weight, axis))


def require_orthogonal(name: str, cosine: float, *, limit: float, axis: int | None) -> None:
    """Raise EquilibriaError if the cosine of a weight with its gradient exceeds the limit."""
    if not cosine > limit:
        return
    if axis is not None:
        raise EquilibriaError(
            f"got granularity='row' for {name}, whose rows have a cosine of {cosine:.2g} with their gradients; "
            "expected 0, as for rows that are scale-invariant one by one: use granularity='tensor' where only groups "
            "of rows are (GroupNorm, LayerNorm, QK-norm)",
            argument="granularity",
        )
    raise EquilibriaError(
        f"got {name}, whose gradient has a cosine of {cosine:.2g} with it; expected 0, as for a scale-invariant "
        f"weight: is the model in training mode? {HOW_TO}",
        argument="invariant",
    )


def _row_products(weight: Tensor, gradient: Tensor, axis: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """<w, w>, <w, g> and <g, g> of every row."""
    weight = weight.detach()
    rows, slopes = (matrix(tensor.detach(), axis=axis, like=weight).contiguous() for tensor in (weight, gradient))
    return unit_products(rows, slopes)


def _cosine(ww: Tensor, wg: Tensor, gg: Tensor) -> float:
    size, radial = float(torch.dot(ww, gg)), float(torch.dot(wg, wg))
    return math.sqrt(radial / size) if size > 0 else 0.0


def _chance(weight: Tensor, axis: int | None) -> float:
    """Root mean square cosine with a random direction: 1/sqrt(entries)."""
    return math.sqrt((1 if axis is None else weight.shape[axis]) / weight.numel())


def _cancel(radial: Tensor) -> bool:
    return len(radial) > 1 and float(radial.sum().abs()) < _CANCELS * float(torch.linalg.vector_norm(radial))
