"""The noisy Rayleigh quotient, the random walk that is left of it without a loss, and the noisy quadratic model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Array, Problem, curvature_of_cosine, lengths, rows_dot, slope_of_cosine
from equilibria.lab.problems.state import directions
from equilibria.theory._reals import positive_reals, reals

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RayleighQuotient(Problem):
    """``L(w) = w'Aw/(2 w'w)``, A diagonal, with isotropic Gaussian gradient noise tangent to the sphere.

    The loss of one step is ``L(w) + noise e.w/|w|`` with ``e`` its standard normal draws; its gradient is
    ``(A x + noise e)/|w|`` without its part along ``x = w/|w|``. Laws of it: `theory.rayleigh`.

    Attributes:
        spectrum: eigenvalues ``a_1 < a_2 <= ...`` of A, ascending.
        noise: standard deviation of the gradient noise per coordinate, at unit norm.

    Example:
        >>> problem = RayleighQuotient([1.0, 2.0])
        >>> problem.value(np.array([[3.0, 4.0]])).round(12).tolist()  # (9 + 2*16)/(2*25)
        [0.82]
    """

    spectrum: Sequence[float]
    _: KW_ONLY
    noise: float = 0.0

    kind: ClassVar[int | None] = _loops.QUOTIENT

    def __post_init__(self) -> None:
        values = reals("spectrum", self.spectrum)
        if values.ndim != 1 or values.size < 2 or np.any(np.diff(values) < 0):
            raise EquilibriaError(f"got spectrum={self.spectrum!r}; expected two or more ascending eigenvalues")
        object.__setattr__(self, "spectrum", tuple(values.tolist()))
        object.__setattr__(self, "noise", within("noise", self.noise, low=0))

    @classmethod
    def two_level(cls, gap: float, dim: int, *, noise: float = 0.0) -> RayleighQuotient:
        """One eigenvalue 1 and ``dim - 1`` eigenvalues ``1 + gap``: the paper's experiments."""
        return cls((1.0, *[1 + positive("gap", gap)] * (whole("dim", dim, low=2) - 1)), noise=noise)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w``."""
        return {"w": (len(self.spectrum),)}

    @property
    def draws(self) -> int:
        """One number per coordinate, if there is noise."""
        return len(self.spectrum) if self.noise else 0

    def data(self) -> Array:
        """Noise and eigenvalues."""
        return np.array([[self.noise, *self.spectrum]])

    def start(self, trials: int, *, norm_sq: float, risk: float | None = None, seed: int = 0) -> Array:
        """Weights to start from: random directions, of given risk if that is asked for.

        Args:
            trials: how many.
            norm_sq: ``|w|^2`` of each.
            risk: ``1 - (e_1.x)^2`` of each; None leaves it to chance.
            seed: of the directions.

        Returns:
            (trials, size).
        """
        weights = directions(whole("trials", trials, low=1), self.size, seed=seed)
        if risk is not None:
            share = within("risk", risk, low=0, high=1)
            weights[:, 1:] *= np.sqrt(share) / lengths(weights[:, 1:])
            weights[:, 0] = np.copysign(np.sqrt(1 - share), weights[:, 0])
        weights *= np.sqrt(positive("norm_sq", norm_sq))
        return weights

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """Half the Rayleigh quotient, and the noise along the weight."""
        unit = weights / lengths(weights)
        quotient: Array = 0.5 * (unit * unit) @ np.array(self.spectrum)
        return quotient if draws is None else quotient + self.noise * rows_dot(draws, unit)[:, 0]

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``(A x - (x'Ax) x)/|w|`` and the tangent noise."""
        norm = lengths(weights)
        unit = weights / norm
        pushed = unit * np.array(self.spectrum)
        slope: Array = (pushed - rows_dot(pushed, unit) * unit) / norm
        return slope if draws is None else slope + self.noise * slope_of_cosine(draws, weights)

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``(A v - (x'Ax) v - 2 (g.v) w - 2 (w.v) g)/|w|^2`` and the curvature of the noise."""
        spectrum, norm = np.array(self.spectrum), lengths(weights)
        quotient = rows_dot(weights * spectrum, weights) / norm**2
        slope = self.gradient(weights)
        bent = rows_dot(slope, vectors) * weights + rows_dot(weights, vectors) * slope
        curved: Array = ((spectrum - quotient) * vectors - 2 * bent) / norm**2
        if draws is None:
            return curved
        return curved + self.noise * curvature_of_cosine(draws, weights, vectors)

    def risk(self, weights: Array) -> Array:
        """``1 - (e_1.x)^2``: the share of the weight outside the lowest eigenvector."""
        unit = weights / lengths(weights)
        share: Array = np.einsum("ti,ti->t", unit[:, 1:], unit[:, 1:])
        return share

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch."""
        w = params["w"]
        unit = w / w.square().sum().sqrt()
        loss = (unit.square() * w.new_tensor(self.spectrum)).sum() / 2
        return loss if draws is None else loss + self.noise * (draws * unit).sum()


class RandomWalk(RayleighQuotient):
    """No loss, only noise: isotropic Gaussian gradients orthogonal to the weight, of size sqrt(L)/|w|.

    The smallest world in which the laws of scale-invariant weights hold (theory: `SGD.equilibrium`, `evolve`).

    Args:
        dim: numbers per weight.
        unit_grad_sq: ``L = E[|g|^2 |w|^2]``.

    Example:
        >>> RandomWalk(10, unit_grad_sq=9.0).noise
        1.0
    """

    def __init__(self, dim: int, *, unit_grad_sq: float = 1.0) -> None:
        size = whole("dim", dim, low=2)
        noise = np.sqrt(positive("unit_grad_sq", unit_grad_sq) / (size - 1))
        super().__init__((0.0,) * size, noise=float(noise))

    def risk(self, weights: Array) -> Array:
        """A random walk has no aim."""
        return Problem.risk(self, weights)


@dataclass(frozen=True)
class NoisyQuadratic(Problem):
    """``L(w) = w'Aw/2``, A diagonal, with isotropic Gaussian gradient noise: convex, unlike the Rayleigh quotient.

    Not scale-invariant: the loss of one step is ``L(w) + noise e.w``. Its law: `theory.rayleigh.noisy_quadratic_loss`.

    Attributes:
        spectrum: positive eigenvalues of A.
        noise: standard deviation of the gradient noise per coordinate.

    Example:
        >>> NoisyQuadratic([1.0, 2.0]).gradient(np.array([[3.0, 4.0]])).tolist()
        [[3.0, 8.0]]
    """

    spectrum: Sequence[float]
    _: KW_ONLY
    noise: float = 0.0

    def __post_init__(self) -> None:
        values = positive_reals("spectrum", self.spectrum)
        if values.ndim != 1 or not values.size:
            raise EquilibriaError(f"got spectrum={self.spectrum!r}; expected one or more positive eigenvalues")
        object.__setattr__(self, "spectrum", tuple(values.tolist()))
        object.__setattr__(self, "noise", within("noise", self.noise, low=0))

    @property
    def invariant(self) -> bool:
        """No."""
        return False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w``."""
        return {"w": (len(self.spectrum),)}

    @property
    def draws(self) -> int:
        """One number per coordinate, if there is noise."""
        return len(self.spectrum) if self.noise else 0

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """The loss, and the noise along the weight."""
        loss: Array = 0.5 * (weights * weights) @ np.array(self.spectrum)
        return loss if draws is None else loss + self.noise * rows_dot(draws, weights)[:, 0]

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """``A w`` and the noise."""
        slope: Array = weights * np.array(self.spectrum)
        return slope if draws is None else slope + self.noise * draws

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """``A v``."""
        curved: Array = vectors * np.array(self.spectrum)
        return curved

    def risk(self, weights: Array) -> Array:
        """The loss without noise."""
        return self.value(weights)

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch."""
        w = params["w"]
        loss = (w.square() * w.new_tensor(self.spectrum)).sum() / 2
        return loss if draws is None else loss + self.noise * (draws * w).sum()
