"""A valley in the plane whose walls grow steeper along it: not scale-invariant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Array, Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Valley(Problem):
    """``L = (1 + y^2) x^2/2``: minima x = 0 of sharpness ``1 + y^2``.

    For scalar RMSprop in full space; its flow: `theory.flow_examples.rmsprop_valley_position`.

    Example:
        >>> Valley().gradient(np.array([[1.0, 2.0]])).tolist()
        [[5.0, 2.0]]
    """

    kind: ClassVar[int | None] = _loops.VALLEY

    @property
    def invariant(self) -> bool:
        """No."""
        return False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w = (x, y)``."""
        return {"w": (2,)}

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The loss."""
        x, y = weights.T
        loss: Array = 0.5 * (1 + y * y) * x * x
        return loss

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``((1 + y^2) x, y x^2)``."""
        x, y = weights.T
        return np.stack([(1 + y * y) * x, y * x * x], axis=1)

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """The Hessian ``[[1 + y^2, 2xy], [2xy, x^2]]`` times a vector."""
        (x, y), (p, q) = weights.T, vectors.T
        return np.stack([(1 + y * y) * p + 2 * x * y * q, 2 * x * y * p + x * x * q], axis=1)

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch."""
        x, y = params["w"].unbind()
        return (1 + y * y) * x * x / 2
