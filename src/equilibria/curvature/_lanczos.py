"""The eigenvalues at one end of a spectrum, from a random start, with a bound on what was missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.curvature._eigenpairs import BESIDE, Eigenpairs, Memory, kato_temple, relative, unit
from equilibria.errors import EquilibriaError, one_of, positive, whole

_ROWS = 16  # vectors that are allocated at once, if they are short
_NUMBERS = 1 << 26  # that are allocated at once at most, if one vector is not longer
_COLUMNS = 1 << 15  # of the basis, as many as are converted to float64 at once: they fit into the cache


class Basis:
    """Orthonormal vectors, the rows of a matrix that grows.

    Args:
        size: length of the vectors.
        dtype: in which they are kept. Whatever is summed over their entries is summed in float64.
        device: where they are kept.
    """

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._rows = max(1, min(_ROWS, _NUMBERS // size))
        self._blocks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, vector: Tensor) -> Tensor:
        """Take a vector in, which must be orthonormal to the others; returns it as it is kept."""
        if self._count % self._rows == 0:
            self._blocks.append(torch.empty(self._rows, self._size, dtype=self._dtype, device=self._device))
        row = self._blocks[-1][self._count % self._rows]
        row.copy_(vector)
        self._count += 1
        return row

    def coefficients(self, vector: Tensor) -> Tensor:
        """The inner products with a float64 vector, in float64."""
        found = torch.zeros(self._count, dtype=torch.float64, device=vector.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                found[first : first + len(rows)] += rows[:, columns].double() @ vector[columns]
        return found

    def combined(self, coefficients: Tensor) -> Tensor:
        """The float64 vector with these coefficients."""
        found = torch.zeros(self._size, dtype=torch.float64, device=coefficients.device)
        for first, rows in self._filled():
            for columns in _slices(self._size):
                found[columns] += coefficients[first : first + len(rows)] @ rows[:, columns].double()
        return found

    def remainder(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of a float64 vector outside of the basis, and its coefficients inside."""
        coefficients = self.coefficients(vector)
        left = vector - self.combined(coefficients)
        again = self.coefficients(left)  # once more: rounding of a long vector would leave a short one oblique
        left -= self.combined(again)
        return left, coefficients + again

    def _filled(self) -> list[tuple[int, Tensor]]:
        return [
            (self._rows * index, block[: min(self._rows, self._count - self._rows * index)])
            for index, block in enumerate(self._blocks)
        ]


def _slices(size: int) -> list[slice]:
    return [slice(first, first + _COLUMNS) for first in range(0, size, _COLUMNS)]


# Distances above the Ritz value, relative to the scale of the matrix; rounded up to the next one.
_DISTANCES = np.logspace(-14, 4, 18 * 24 + 1)
_LARGE = 1e100


def distance_to_top(diagonal: NDArray[np.float64], beside: NDArray[np.float64], *, size: int, risk: float) -> float:
    """How far above the largest Ritz value the largest eigenvalue is at most, with probability ``1 - risk``.

    Args:
        diagonal: Lanczos' alphas, m of them.
        beside: its betas, m of them: the last is the norm of the remainder of the last product.
        size: n, the dimension of the matrix.
        risk: the probability, over a start uniform on the sphere, that the bound is wrong.

    Returns:
        The distance, in units of the matrix; 0 if the Krylov space is invariant.

    Example:
        >>> bool(distance_to_top(np.array([1.0, 2.0]), np.array([1.0, 1e-9]), size=10, risk=0.01) < 1e-5)
        True
    """
    tridiagonal = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
    top = float(np.linalg.eigvalsh(tridiagonal)[-1])
    scale = float(np.abs(tridiagonal).max())
    if beside[-1] == 0.0:
        return 0.0
    unlikely = _log_kernel(diagonal, beside, top + scale * _DISTANCES) >= np.log(2 * size / (np.pi * risk**2))
    return scale * float(_DISTANCES[np.argmax(unlikely)]) if unlikely.any() else float("inf")


def _log_kernel(
    diagonal: NDArray[np.float64], beside: NDArray[np.float64], at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """log K at points above the largest Ritz value, by the three-term recurrence, rescaled before it overflows."""
    before, now = np.zeros_like(at), np.ones_like(at)
    total, log_scale, previous = np.ones_like(at), np.zeros_like(at), 0.0
    for alpha, beta in zip(diagonal, beside, strict=True):
        before, now = now, ((at - alpha) * now - previous * before) / beta
        total = total + now * now
        previous = beta
        shrink = np.where(total > _LARGE, np.sqrt(total), 1.0)
        before, now, total = before / shrink, now / shrink, total / shrink**2
        log_scale += 2 * np.log(shrink)
    found: NDArray[np.float64] = np.log(total) + log_scale
    return found


Product: TypeAlias = Callable[[Tensor], Tensor]

RISK = 1e-3  # that a bound is wrong, by bad luck of the random start; ten times less costs two products or so
WITHIN_TOLERANCE = "every bound is within the tolerance"
EXHAUSTED = "nothing is left to search: the products stay in the space that was searched"
AT_ROUNDING = "the rounding of the products does not allow a better bound"
NOT_TOGETHER = "each value was within the tolerance by itself, but they are not together: ask for a smaller tol"


def eigenpairs(
    product: Product,
    size: int,
    *,
    k: int = 1,
    end: str = "top",
    tol: float = 1e-2,
    budget: int = 100,
    seed: int = 0,
    noise: Callable[[], float] | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """The k largest or smallest eigenvalues of a symmetric matrix that is known by its products with vectors.

    Lanczos with full reorthogonalisation from a random vector, one eigenvalue after the other: each next one from a new
    random vector orthogonal to the eigenvectors found, so that eigenvalues that occur several times are found as often.

    Args:
        product: the product of the matrix with a vector.
        size: the dimension n.
        k: how many.
        end: "top" for the largest (not the largest in modulus) or "bottom" for the smallest.
        tol: stop when the bounds of the relative errors are below it. The errors themselves are far smaller as a rule.
        budget: the most products to take.
        seed: of the random start.
        noise: tells the relative error of a product, asked after the first; default: that of rounding in ``dtype``.
        dtype: of the vectors that ``product`` takes; sums are taken in float64 in any case.
        device: of the vectors.

    Returns:
        The eigenpairs, with residuals and bounds; see `Eigenpairs`.

    Raises:
        EquilibriaError: if k is larger than the dimension, or a setting is out of range.

    Example:
        >>> diagonal = torch.cat([torch.linspace(-1, 1, 500).double(), torch.tensor([2.0]).double()])
        >>> found = eigenpairs(lambda vector: diagonal * vector, 501)
        >>> found.converged, abs(found.values[0] - 2.0) < 0.02, found.hvps < 25
        (True, True, True)
    """
    count, limit = check_request(size, k=k, end=end, tol=tol, budget=budget)
    sign = 1.0 if end == "top" else -1.0
    search = _Search(
        lambda vector: sign * product(vector).double(),
        size=size,
        wanted=count,
        tol=tol,
        noise=noise or (lambda: float(torch.finfo(dtype).eps)),
        generator=torch.Generator().manual_seed(whole("seed", seed)),
        dtype=dtype,
        device=torch.device(device),
    )
    while len(search.found) < count and search.hvps < limit and not search.stopped_early:
        search.find_next(limit)
    return search.result(sign)


def check_request(size: int, *, k: int, end: str, tol: float, budget: int) -> tuple[int, int]:
    """k and the budget, if they are possible."""
    one_of("end", end, ["top", "bottom"])
    positive("tol", tol)
    if whole("k", k, low=1) > size:
        raise EquilibriaError(f"got k={k}; expected at most {size}, the number of selected parameters")
    return k, whole("budget", budget, low=k)


def check_finite(image: Tensor) -> Tensor:
    """The product, if it is one of numbers."""
    if not bool(torch.isfinite(image).all()):
        raise EquilibriaError("got a product of the matrix with a unit vector that is not finite; expected numbers")
    return image


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A pair, as it was found in the space orthogonal to the earlier ones."""

    vector: Tensor  # float64
    image: Tensor  # the product with it, float64
    distance: float  # to the top of that space, at most
    others: Tensor  # more Ritz vectors of the same run, float64
    other_values: NDArray[np.float64]
    reason: str


class _Krylov:
    """The tridiagonal matrix of one run, and what can be read off it."""

    def __init__(self) -> None:
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.oblique = 0.0  # largest entry where exact products of a symmetric matrix would leave zeros
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
        """Of the nearest eigenvalue from the largest Ritz value."""
        gap = float(self.values[-1] - self.values[-2]) if len(self.values) > 1 else 0.0
        return kato_temple(self.residual, gap)

    def distance(self, size: int) -> float:
        """Of the largest eigenvalue from the largest Ritz value."""
        by_start = distance_to_top(np.array(self.alphas), np.array(self.betas), size=size, risk=RISK)
        return max(by_start, self.distance_by_residual)


class _Search:
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
        self.found: list[_Found] = []
        self.hvps = 0
        self.stopped_early = False
        self._rounding = 0.0

    def find_next(self, limit: int) -> None:
        """One more pair, from a random start orthogonal to those found; or as good as the budget allows."""
        basis = Basis(self._size, dtype=self._dtype, device=self._device)
        for pair in self.found:
            basis.append(pair.vector)
        known, run, direction = len(basis), _Krylov(), self._random(basis)
        while True:
            image = check_finite(self._product(basis.append(direction)))
            self.hvps += 1
            left, inside = basis.remainder(image)
            beta = float(torch.linalg.vector_norm(left))
            run.extend(inside[known:].cpu().numpy(), beta)
            self._rounding = max(self._rounding, self._noise() * run.scale, run.oblique)
            reason = self._stop(run, free=self._size - known, limit=limit)
            if reason:
                break
            direction = left / beta
        self.stopped_early = reason not in (WITHIN_TOLERANCE, EXHAUSTED, AT_ROUNDING)
        self.found.append(self._read(basis, run, known, left, reason))

    def _stop(self, run: _Krylov, *, free: int, limit: int) -> str:
        if len(run.alphas) == free or run.betas[-1] <= 4 * self._rounding:
            return EXHAUSTED
        allowed = self._tol * abs(float(run.values[-1]))
        if self._wanted > 1:  # half for its own distance, half for the residuals of all together: see `result`
            allowed /= 2
        spilled = self._wanted**0.5 * run.residual if self._wanted > 1 else 0.0
        if max(run.distance_by_residual, spilled) <= max(allowed, self._rounding):  # else the other need not be known
            distance = max(run.distance(free), spilled)
            if distance + self._rounding <= allowed:
                return WITHIN_TOLERANCE
            if distance <= self._rounding:
                return AT_ROUNDING
        return f"the budget of {limit} products is used up" if self.hvps >= limit else ""

    def _read(self, basis: Basis, run: _Krylov, known: int, left: Tensor, reason: str) -> _Found:
        weights = torch.from_numpy(run.weights).to(self._device)
        nothing = weights.new_zeros(known)
        vector = basis.combined(torch.cat([nothing, weights[:, -1]]))
        others = weights.flip(1)[:, 1 : 1 + BESIDE]
        free = self._size - known
        return _Found(
            vector=vector,
            image=float(run.values[-1]) * vector + float(weights[-1, -1]) * left,
            distance=0.0 if len(run.alphas) == free else run.distance(free),
            others=torch.stack([basis.combined(torch.cat([nothing, each])) for each in others.T])
            if len(run.values) > 1
            else vector.new_zeros(0, self._size),
            other_values=run.values[::-1][1 : 1 + BESIDE],
            reason=reason,
        )

    def _random(self, basis: Basis) -> Tensor:
        drawn = torch.randn(self._size, generator=self._generator, dtype=torch.float64).to(self._device)
        return unit(basis.remainder(drawn)[0] if len(basis) < self._size else drawn)

    def result(self, sign: float) -> Eigenpairs:
        """All pairs together, by the Rayleigh-Ritz method in the space of their vectors."""
        vectors = torch.stack([pair.vector for pair in self.found])
        images = torch.stack([pair.image for pair in self.found])
        # Later ones were found orthogonal to the earlier: what leads back to these is known from them, by symmetry.
        images = images + torch.tril(vectors @ images.T, diagonal=-1) @ vectors
        small = vectors @ images.T
        values, mixing = torch.linalg.eigh((small + small.T) / 2)
        values, mixing = values.flip(0), mixing.flip(1).T
        vectors, images = mixing @ vectors, mixing @ images
        residuals = torch.linalg.vector_norm(images - values[:, None] * vectors, dim=1).tolist()
        spilled = float(np.linalg.norm(residuals)) if len(self.found) > 1 else 0.0
        distances = [pair.distance + spilled + self._rounding for pair in self.found]
        bound = tuple(map(relative, distances, values.tolist()))
        converged = len(self.found) == self._wanted and all(each <= self._tol for each in bound)
        reason = self.found[-1].reason
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
            memory=self._memory(values, vectors, images),
        )

    def _memory(self, values: Tensor, vectors: Tensor, images: Tensor) -> Memory:
        """The pairs, and the next Ritz vectors of the last run, with the products that are known of them."""
        last = self.found[-1]
        coupled = (images @ last.others.T).cpu().numpy()
        inner = np.block([[np.diag(values.cpu().numpy()), coupled], [coupled.T, np.diag(last.other_values)]])
        return Memory(torch.cat([vectors, last.others]).to(self._dtype), inner, np.zeros_like(inner))
