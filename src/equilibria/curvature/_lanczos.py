"""Eigenpairs by Lanczos from a random start, with a bound on the eigenvalues it may have missed.

From top to bottom: the search, one run of it, the bound, and the orthonormal basis that all of it works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.curvature._eigenpairs import (
    AT_ROUNDING,
    EXHAUSTED,
    EXTRA_DIRECTIONS,
    NOT_TOGETHER,
    WITHIN_TOLERANCE,
    Eigenpairs,
    Product,
    SpectrumEnd,
    WarmStart,
    check_finite,
    check_request,
    relative,
    unit_vector,
)
from equilibria.errors import whole

# Probability that a bound is wrong, over the random start. The bound is nearly a constant over the risk, and a start
# that misses the top eigenvector so often exists for some matrix: fewer products mean a larger bound or risk. The
# network of `small_net` in benchmarks/sharpness.py, after 300 steps, takes 15-16 products at 1e-3, 13-14 at 1e-2,
# 11-14 at 5e-2; where the second eigenvalue is 2 % below the first, 4 of 100 bounds are wrong at 5e-2.
# Temple's bound alone, r^2 over the gap to the second Ritz value and its residual, would stop at 6-11 there. It assumes
# that the second Ritz value stands for the second eigenvalue: above a bulk up to 0.4 and with a second eigenvalue of
# 0.8 to 0.98 times the first, it ends 12-66 % of the searches with an error above the tolerance.
RISK = 1e-3


def eigenpairs(
    product: Product,
    size: int,
    *,
    k: int = 1,
    end: SpectrumEnd = "top",
    tol: float = 1e-2,
    budget: int = 100,
    seed: int = 0,
    noise: Callable[[], float] | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """Find the k largest or smallest eigenvalues of a symmetric matrix that is given by its products with vectors.

    Lanczos with full reorthogonalisation from a random vector, one eigenvalue after the other. Each search begins at a
    new random vector orthogonal to the eigenvectors so far, so that it finds eigenvalues of multiplicity m m times.

    Args:
        product: multiplies the matrix with a vector.
        size: the dimension n.
        k: number of eigenvalues.
        end: "top" for the largest (not the largest in modulus) or "bottom" for the smallest.
        tol: stop when the bounds of the relative errors are below it. The errors are usually far smaller.
        budget: the largest number of products.
        seed: of the random start.
        noise: returns the relative error of a product, once there was one; default: the rounding of ``dtype``.
        dtype: of the vectors that ``product`` takes; sums are always taken in float64.
        device: of the vectors.

    Returns:
        The eigenpairs, with residuals and bounds; see `Eigenpairs`.

    Raises:
        EquilibriaError: if k is larger than the dimension, or a setting is out of range.

    Example:
        >>> diagonal = torch.cat([torch.linspace(-1, 1, 500).double(), torch.tensor([2.0]).double()])
        >>> pairs = eigenpairs(lambda vector: diagonal * vector, 501)
        >>> pairs.converged, abs(pairs.values[0] - 2.0) < 0.02, pairs.hvps < 25
        (True, True, True)
    """
    count, limit = check_request(size, k=k, end=end, tol=tol, budget=budget)
    sign = 1.0 if end == "top" else -1.0
    search = _LanczosSearch(
        lambda vector: sign * product(vector).double(),
        size=size,
        wanted=count,
        tol=tol,
        noise=noise or (lambda: float(torch.finfo(dtype).eps)),
        generator=torch.Generator().manual_seed(whole("seed", seed)),
        dtype=dtype,
        device=torch.device(device),
    )
    while len(search.pairs) < count and search.hvps < limit and not search.stopped_early:
        search.find_next(limit)
    return search.result(sign)


@dataclass(frozen=True, slots=True, eq=False)
class _RitzPair:
    """The top Ritz pair of one run, in the space orthogonal to the pairs of earlier runs."""

    vector: Tensor  # float64
    image: Tensor  # the product with it, float64
    distance: float  # to the top of that space, at most
    next_vectors: Tensor  # the next Ritz vectors of the same run, float64
    next_values: NDArray[np.float64]
    reason: str


class _LanczosSearch:
    """Finds one pair after the other and combines them to a result."""

    def __init__(
        self,
        product: Product,
        *,
        size: int,
        wanted: int,
        tol: float,
        noise: Callable[[], float],
        generator: torch.Generator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._product, self._size, self._wanted, self._tol, self._noise = product, size, wanted, tol, noise
        self._generator, self._dtype, self._device = generator, dtype, device
        self.pairs: list[_RitzPair] = []
        self.hvps = 0
        self.stopped_early = False
        self._rounding = 0.0

    def find_next(self, limit: int) -> None:
        """Find one more pair from a random start orthogonal to the others, as well as the budget allows."""
        basis = Basis(self._size, dtype=self._dtype, device=self._device)
        for pair in self.pairs:
            basis.append(pair.vector)
        known, run, direction = len(basis), _Krylov(), self._random(basis)
        while True:
            image = check_finite(self._product(basis.append(direction)))
            self.hvps += 1
            remainder, inside = basis.remainder(image)
            beta = float(torch.linalg.vector_norm(remainder))
            run.extend(inside[known:].cpu().numpy(), beta)
            self._rounding = max(self._rounding, self._noise() * run.scale, run.oblique)
            reason = self._reason_to_stop(run, free=self._size - known, limit=limit)
            if reason:
                break
            direction = remainder / beta
        self.stopped_early = reason not in (WITHIN_TOLERANCE, EXHAUSTED, AT_ROUNDING)
        self.pairs.append(self._top_pair(basis, run, known, remainder, reason))

    def _reason_to_stop(self, run: _Krylov, *, free: int, limit: int) -> str:
        """Empty to go on; ``free`` is the dimension of the space that is searched."""
        if len(run.alphas) == free or run.betas[-1] <= 4 * self._rounding:
            return EXHAUSTED
        allowed = self._tol * abs(float(run.values[-1]))
        if self._wanted > 1:  # half for the pair's own distance, half for the residuals of all: see `result`
            allowed /= 2
        spilled = self._wanted**0.5 * run.residual if self._wanted > 1 else 0.0
        # The distance by the start costs more to compute: only once the residual allows to stop.
        if max(run.distance_by_residual, spilled) <= max(allowed, self._rounding):
            distance = max(run.distance(free), spilled)
            if distance + self._rounding <= allowed:
                return WITHIN_TOLERANCE
            if distance <= self._rounding:
                return AT_ROUNDING
        return f"the budget of {limit} products is used up" if self.hvps >= limit else ""

    def _top_pair(self, basis: Basis, run: _Krylov, known: int, remainder: Tensor, reason: str) -> _RitzPair:
        weights = torch.from_numpy(run.weights).to(self._device)
        zeros = weights.new_zeros(known)
        vector = basis.combined(torch.cat([zeros, weights[:, -1]]))
        others = weights.flip(1)[:, 1 : 1 + EXTRA_DIRECTIONS]
        free = self._size - known
        return _RitzPair(
            vector=vector,
            image=float(run.values[-1]) * vector + float(weights[-1, -1]) * remainder,
            distance=0.0 if len(run.alphas) == free else run.distance(free),
            next_vectors=torch.stack([basis.combined(torch.cat([zeros, column])) for column in others.T])
            if len(run.values) > 1
            else vector.new_zeros(0, self._size),
            next_values=run.values[::-1][1 : 1 + EXTRA_DIRECTIONS],
            reason=reason,
        )

    def _random(self, basis: Basis) -> Tensor:
        drawn = torch.randn(self._size, generator=self._generator, dtype=torch.float64).to(self._device)
        return unit_vector(basis.remainder(drawn)[0] if len(basis) < self._size else drawn)

    def result(self, sign: float) -> Eigenpairs:
        """Combine all pairs by the Rayleigh-Ritz method in the space of their vectors."""
        vectors = torch.stack([pair.vector for pair in self.pairs])
        images = torch.stack([pair.image for pair in self.pairs])
        # Later images lack their part along earlier vectors, which symmetry gives from the earlier images.
        images = images + torch.tril(vectors @ images.T, diagonal=-1) @ vectors
        small = vectors @ images.T
        values, mixing = torch.linalg.eigh((small + small.T) / 2)
        values, mixing = values.flip(0), mixing.flip(1).T
        vectors, images = mixing @ vectors, mixing @ images
        residuals = torch.linalg.vector_norm(images - values[:, None] * vectors, dim=1).tolist()
        spilled = float(np.linalg.norm(residuals)) if len(self.pairs) > 1 else 0.0
        distances = [pair.distance + spilled + self._rounding for pair in self.pairs]
        bound = tuple(map(relative, distances, values.tolist()))
        converged = len(self.pairs) == self._wanted and all(error <= self._tol for error in bound)
        reason = self.pairs[-1].reason
        return Eigenpairs(
            values=tuple(sign * value for value in values.tolist()),
            vectors=vectors.to(self._dtype),
            residuals=tuple(residuals),
            bound=bound,
            hvps=self.hvps,
            converged=converged,
            reason=NOT_TOGETHER if reason == WITHIN_TOLERANCE and not converged else reason,
            certified=True,
            followed=0,
            memory=self._warm_start(values, vectors, images),
        )

    def _warm_start(self, values: Tensor, vectors: Tensor, images: Tensor) -> WarmStart:
        """The pairs and the next Ritz vectors of the last run, with the matrix in their space."""
        last = self.pairs[-1]
        coupled = (images @ last.next_vectors.T).cpu().numpy()
        matrix = np.block([[np.diag(values.cpu().numpy()), coupled], [coupled.T, np.diag(last.next_values)]])
        return WarmStart(torch.cat([vectors, last.next_vectors]).to(self._dtype), matrix, np.zeros_like(matrix))


class _Krylov:
    """The tridiagonal matrix of one Lanczos run and its Ritz values."""

    def __init__(self) -> None:
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.oblique = 0.0  # largest entry that would be zero in exact arithmetic: a measure of rounding
        self.values: NDArray[np.float64] = np.zeros(0)
        self.weights: NDArray[np.float64] = np.zeros((0, 0))

    def extend(self, coefficients: NDArray[np.float64], beta: float) -> None:
        self.alphas.append(float(coefficients[-1]))
        self.oblique = max(self.oblique, float(np.abs(coefficients[:-2]).max(initial=0.0)))
        self.betas.append(beta)
        off = self.betas[:-1]
        self.values, self.weights = np.linalg.eigh(np.diag(self.alphas) + np.diag(off, 1) + np.diag(off, -1))

    @property
    def residual(self) -> float:
        return self.betas[-1] * abs(float(self.weights[-1, -1]))

    @property
    def scale(self) -> float:
        return float(np.abs(self.values).max())

    @property
    def distance_by_residual(self) -> float:
        """Distance of the nearest eigenvalue from the largest Ritz value, at most."""
        gap = float(self.values[-1] - self.values[-2]) if len(self.values) > 1 else 0.0
        return min(self.residual, self.residual**2 / gap) if gap > 0 else self.residual  # Kato-Temple

    def distance(self, size: int) -> float:
        """Distance of the largest eigenvalue from the largest Ritz value, at most."""
        by_start = distance_to_top(np.array(self.alphas), np.array(self.betas), size=size, risk=RISK)
        return max(by_start, self.distance_by_residual)


# ---- the bound on what a random start may have missed

# Distances above the Ritz value, relative to the scale of the matrix; the bound is rounded up to the next one.
_DISTANCES = np.logspace(-14, 4, 18 * 24 + 1)
_LARGE = 1e100


def distance_to_top(alphas: NDArray[np.float64], betas: NDArray[np.float64], *, size: int, risk: float) -> float:
    """Bound the distance of the largest eigenvalue above the largest Ritz value, with probability ``1 - risk``.

    A start uniform on the sphere rarely has a tiny component along the top eigenvector. Without one, an eigenvalue far
    above the Ritz value would have shown in the Krylov space: the kernel K of the Lanczos polynomials bounds how small
    the component must be for each distance.

    Args:
        alphas: Lanczos' diagonal, m numbers.
        betas: its off-diagonal, m numbers: the last is the norm of the remainder of the last product.
        size: n, the dimension of the matrix.
        risk: the probability, over a start uniform on the sphere, that the bound is wrong.

    Returns:
        The distance, in units of the matrix; 0 if the Krylov space is invariant.

    Example:
        >>> bool(distance_to_top(np.array([1.0, 2.0]), np.array([1.0, 1e-9]), size=10, risk=0.01) < 1e-5)
        True
    """
    tridiagonal = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    top = float(np.linalg.eigvalsh(tridiagonal)[-1])
    scale = float(np.abs(tridiagonal).max())
    if betas[-1] == 0.0:
        return 0.0
    unlikely = _log_kernel(alphas, betas, top + scale * _DISTANCES) >= np.log(2 * size / (np.pi * risk**2))
    return scale * float(_DISTANCES[np.argmax(unlikely)]) if unlikely.any() else float("inf")


def _log_kernel(
    alphas: NDArray[np.float64], betas: NDArray[np.float64], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """log K at points above the largest Ritz value, by the three-term recurrence, rescaled before it overflows."""
    before, now = np.zeros_like(points), np.ones_like(points)
    total, log_scale, previous = np.ones_like(points), np.zeros_like(points), 0.0
    for alpha, beta in zip(alphas, betas, strict=True):
        before, now = now, ((points - alpha) * now - previous * before) / beta
        total = total + now * now
        previous = beta
        shrink = np.where(total > _LARGE, np.sqrt(total), 1.0)
        before, now, total = before / shrink, now / shrink, total / shrink**2
        log_scale += 2 * np.log(shrink)
    log_kernel: NDArray[np.float64] = np.log(total) + log_scale
    return log_kernel


# ---- the basis of the Krylov space

_BLOCK_ROWS = 16  # vectors allocated at once, if they are short
_BLOCK_NUMBERS = 1 << 26  # numbers allocated at once at most, unless one vector is longer
_COLUMNS = 1 << 15  # columns of the basis converted to float64 at once: they fit into the cache


class Basis:
    """Orthonormal vectors, the rows of a matrix that grows.

    Args:
        size: length of the vectors.
        dtype: of the stored vectors. Sums over their entries are always taken in float64.
        device: of the stored vectors.
    """

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._rows = max(1, min(_BLOCK_ROWS, _BLOCK_NUMBERS // size))
        self._blocks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: Tensor) -> Tensor:
        """Add a vector, which must be orthonormal to the others; return it as it is stored."""
        if self._count % self._rows == 0:
            self._blocks.append(torch.empty(self._rows, self._size, dtype=self._dtype, device=self._device))
        row = self._blocks[-1][self._count % self._rows]
        row.copy_(vector)
        self._count += 1
        return row

    def coefficients(self, vector: Tensor) -> Tensor:
        """Inner products with a float64 vector, in float64."""
        products = torch.zeros(self._count, dtype=torch.float64, device=vector.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                products[first : first + len(rows)] += rows[:, columns].double() @ vector[columns]
        return products

    def combined(self, coefficients: Tensor) -> Tensor:
        """The float64 vector with these coefficients."""
        total = torch.zeros(self._size, dtype=torch.float64, device=coefficients.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                total[columns] += coefficients[first : first + len(rows)] @ rows[:, columns].double()
        return total

    def remainder(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a float64 vector that is orthogonal to the basis, and its coefficients in the basis."""
        coefficients = self.coefficients(vector)
        remainder = vector - self.combined(coefficients)
        # Twice: after one pass the rounding of a long vector would leave a short remainder oblique.
        correction = self.coefficients(remainder)
        remainder -= self.combined(correction)
        return remainder, coefficients + correction

    def _filled(self) -> list[tuple[int, Tensor]]:
        return [
            (self._rows * index, block[: min(self._rows, self._count - self._rows * index)])
            for index, block in enumerate(self._blocks)
        ]


def _slices(size: int) -> list[slice]:
    return [slice(first, first + _COLUMNS) for first in range(0, size, _COLUMNS)]
