"""Losses on the sphere in three dimensions whose minima form a curve of varying sharpness."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import positive, whole
from equilibria.lab.problems import _loops
from equilibria.lab.problems.problem import Array, Problem
from equilibria.theory._reals import reals

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


def random_rotation(dim: int, *, seed: int) -> Array:
    """A uniformly random orthogonal matrix."""
    gaussian = np.random.default_rng(whole("seed", seed)).standard_normal((dim, dim))
    q, r = np.linalg.qr(gaussian)
    turned: Array = q * np.sign(np.diag(r))
    return turned


class _OnSphere(Problem):
    """A loss F(Uw) of three numbers; U is the identity without a ``rotation_seed``.

    With a symmetric F and without a rotation the distance from the curve of minima may underflow to exactly 0, and the
    edge of stability then never begins.
    """

    rotation_seed: int | None

    def __post_init__(self) -> None:
        if self.rotation_seed is not None:
            object.__setattr__(self, "rotation_seed", whole("rotation_seed", self.rotation_seed))

    @cached_property
    def rotation(self) -> Array:
        """U: w -> the loss's own coordinates x, y, z."""
        return np.eye(3) if self.rotation_seed is None else random_rotation(3, seed=self.rotation_seed)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """One vector ``w``."""
        return {"w": (3,)}

    @property
    def room(self) -> int:
        """Two vectors in the loss's own coordinates."""
        return 6

    def coordinates(self, weights: Array) -> Array:
        """x, y, z of the weights, (trials, 3)."""
        return weights @ self.rotation.T

    def at(self, coordinates: ArrayLike) -> Array:
        """The weights with given x, y, z, (trials, 3)."""
        return np.atleast_2d(reals("coordinates", coordinates)) @ self.rotation

    def gradient(self, weights: Array, draws: Array | None = None) -> Array:
        """That of F, turned back."""
        return self._slope(self.coordinates(weights)) @ self.rotation

    def hessian(self, weights: Array, *, draws: Array | None = None) -> Array:
        """That of F, turned back."""
        return self.rotation.T @ self._curvature(self.coordinates(weights)) @ self.rotation

    def hvp(self, weights: Array, vectors: Array, *, draws: Array | None = None) -> Array:
        """The Hessian times one vector per trial."""
        product: Array = np.einsum("tij,tj->ti", self.hessian(weights), vectors)
        return product

    @abstractmethod
    def _slope(self, u: Array) -> Array:
        """Gradient of F, (trials, 3)."""

    @abstractmethod
    def _curvature(self, u: Array) -> Array:
        """Hessian of F, (trials, 3, 3)."""

    def _turned(self, params: Mapping[str, Tensor]) -> Tensor:
        w = params["w"]
        turned: Tensor = w.new_tensor(self.rotation) @ w
        return turned


@dataclass(frozen=True)
class Sphere3D(_OnSphere):
    """``F = 2 - (x+y)/sqrt(x^2 - xy + y^2)``: minima x = y > 0 of sharpness ``6/(1 - z^2)`` at unit norm.

    The 3-D example of Lyu, Li and Arora (Appendix F); its flow: `theory.flow_examples.sphere3d_angle`.

    Attributes:
        rotation_seed: of the orthogonal matrix U in ``L(w) = F(Uw)``; None for F itself.

    Example:
        >>> problem = Sphere3D(rotation_seed=1)
        >>> problem.sharpness(problem.minimiser([0.6])).round(9).tolist()  # 6/(1 - 0.36)
        [9.375]
    """

    rotation_seed: int | None = None

    kind: ClassVar[int | None] = _loops.SPHERE3D

    def minimiser(self, z: ArrayLike) -> Array:
        """The minimisers of unit norm with given z, (trials, 3)."""
        height = np.atleast_1d(reals("z", z, above=-1, below=1))
        level = np.sqrt((1 - height**2) / 2)
        return self.at(np.stack([level, level, height], axis=1))

    def data(self) -> Array:
        """The rotation."""
        return self.rotation.reshape(1, 9)

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """F, near a minimum as ``3 (x-y)^2/(r (2r + x + y))``, r the root, which does not cancel."""
        x, y, _ = self.coordinates(weights).T
        root = np.sqrt(x * x - x * y + y * y)
        with np.errstate(divide="ignore", invalid="ignore"):
            near: Array = 3 * (x - y) ** 2 / (root * (2 * root + x + y))
        return np.where(x + y > 0, near, 2 - (x + y) / root)

    def _slope(self, u: Array) -> Array:
        x, y, _ = u.T
        q = x * x - x * y + y * y
        pull = (x + y) / (2 * q)
        slope = np.stack([pull * (2 * x - y) - 1, pull * (2 * y - x) - 1, np.zeros_like(x)], axis=1)
        scaled: Array = slope / np.sqrt(q)[:, None]
        return scaled

    def _curvature(self, u: Array) -> Array:
        x, y, _ = u.T
        q, total = x * x - x * y + y * y, x + y
        slopes = np.stack([2 * x - y, 2 * y - x], axis=1)
        crossed = slopes[:, :, None] + slopes[:, None, :]
        bent = 0.5 * crossed + 0.5 * total[:, None, None] * np.array([[2.0, -1.0], [-1.0, 2.0]])
        square = slopes[:, :, None] * slopes[:, None, :] * (0.75 * total / q)[:, None, None]
        curvature = np.zeros((len(u), 3, 3))
        curvature[:, :2, :2] = (bent - square) / (q**1.5)[:, None, None]
        return curvature

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch."""
        x, y, _ = self._turned(params).unbind()
        return 2 - (x + y) / (x * x - x * y + y * y).sqrt()


@dataclass(frozen=True)
class SphereValley(_OnSphere):
    """``F = (x/r)^2 (a + b (y/r)^2)/2``: minima x = 0 of sharpness ``a + b y^2`` at unit norm, a curved valley.

    Attributes:
        a: sharpness of the flattest minimum.
        b: how much the steepest exceeds it.
        rotation_seed: as in `Sphere3D`.

    Example:
        >>> problem = SphereValley(1.0, 8.0)
        >>> problem.sharpness(problem.minimiser([0.5])).round(9).tolist()  # 1 + 8 sin(0.5)^2
        [2.838790777]
    """

    a: float = 1.0
    b: float = 8.0
    _: KW_ONLY
    rotation_seed: int | None = None

    kind: ClassVar[int | None] = _loops.SPHERE_VALLEY

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "a", positive("a", self.a))
        object.__setattr__(self, "b", positive("b", self.b))

    def minimiser(self, angle: ArrayLike) -> Array:
        """The minimisers of unit norm with ``y = sin(angle)``, (trials, 3)."""
        angles = np.atleast_1d(reals("angle", angle))
        return self.at(np.stack([np.zeros_like(angles), np.sin(angles), np.cos(angles)], axis=1))

    def data(self) -> Array:
        """a, b and the rotation."""
        return np.concatenate([[self.a, self.b], self.rotation.ravel()])[None]

    def value(self, weights: Array, draws: Array | None = None) -> Array:
        """F."""
        x, y, _ = _shares(self.coordinates(weights)).T
        loss: Array = 0.5 * x * (self.a + self.b * y)
        return loss

    def _slope(self, u: Array) -> Array:
        shares = _shares(u)
        x, y = shares[:, 0, None], shares[:, 1, None]
        slope: Array = 0.5 * ((self.a + self.b * y) * _share_slope(u, 0) + self.b * x * _share_slope(u, 1))
        return slope

    def _curvature(self, u: Array) -> Array:
        shares = _shares(u)
        x, y = shares[:, 0, None, None], shares[:, 1, None, None]
        crossed = _share_slope(u, 0)[:, :, None] * _share_slope(u, 1)[:, None, :]
        mixed = self.b * (crossed + crossed.transpose(0, 2, 1))
        curvature: Array = (self.a + self.b * y) * _share_curvature(u, 0) + mixed + self.b * x * _share_curvature(u, 1)
        return 0.5 * curvature

    def torch_loss(self, params: Mapping[str, Tensor], draws: Tensor | None = None) -> Tensor:
        """The same in torch."""
        squares = self._turned(params).square()
        x, y, _ = (squares / squares.sum()).unbind()
        return x * (self.a + self.b * y) / 2


def _shares(u: Array) -> Array:
    """``u_i^2/|u|^2``."""
    squares = u * u
    shares: Array = squares / squares.sum(axis=1, keepdims=True)
    return shares


def _share_slope(u: Array, i: int) -> Array:
    """Gradient of ``R = u_i^2/|u|^2``: ``2 (u_i e_i - R u)/|u|^2``."""
    norm_sq = (u * u).sum(axis=1, keepdims=True)
    slope: Array = -(u[:, i, None] ** 2 / norm_sq) * u
    slope[:, i] += u[:, i]
    slope *= 2 / norm_sq
    return slope


def _share_curvature(u: Array, i: int) -> Array:
    """Hessian of the same: ``2 (e_i e_i' - R I - u s' - s u')/|u|^2`` with s its gradient."""
    norm_sq = (u * u).sum(axis=1)[:, None, None]
    bent = u[:, :, None] * _share_slope(u, i)[:, None, :]
    curvature: Array = -(bent + bent.transpose(0, 2, 1)) - u[:, i, None, None] ** 2 / norm_sq * np.eye(3)
    curvature[:, i, i] += 1
    curvature *= 2 / norm_sq
    return curvature


def drift_factor(position: Array, slope: Array, h: Array) -> float:
    """Least-squares factor of h^2 grad log lambda1 in the motion of two steps, with h^2 the mean of both steps.

    Args:
        position: along the minimisers, at every step.
        slope: of log lambda1 there.
        h: displacement across the valley.
    """
    pull = slope[:-2] * (h[:-2] ** 2 + h[1:-1] ** 2) / 2
    return float(pull @ (position[2:] - position[:-2]) / (pull @ pull))
