"""The null space of the radial derivatives: which directions of log-scales leave the loss as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equilibria.symmetry._probes import Probe

_NOISE = 1e-16  # a singular value below this says no more than this: rounding of float64
_LARGEST_ZERO = 1e-6  # of the products of norms: what is larger is a reaction of the loss, whatever the gap
_SILENT = 1e-9  # a gradient this much smaller than the largest, times the weight, is none


@dataclass(frozen=True, slots=True, eq=False)
class Algebra:
    """What the probes say about the scaling of every tensor.

    Attributes:
        silent: whether a tensor has no gradient.
        singular_values: of the matrix of relative radial derivatives (probes x tensors that are not silent), largest
            first, divided by the square root of the number of probes.
        rank: how many of them are not zero.
        residual: root mean square over the probes of <w, g> relative to `Probe.size`.
        null: orthonormal columns that span the null space, in exponents; rows are the tensors that are not silent.
    """

    silent: np.ndarray
    singular_values: np.ndarray
    rank: int
    residual: np.ndarray
    null: np.ndarray

    @property
    def gap(self) -> float:
        """The smallest singular value that is not zero over the largest that is; 1 and rounding where there is none."""
        kept = self.singular_values[self.rank - 1] if self.rank else 1.0
        dropped = self.singular_values[self.rank] if self.rank < len(self.singular_values) else _NOISE
        return float(kept / max(dropped, _NOISE))

    @property
    def zero(self) -> float:
        """A residual below this is rounding: in the middle of the gap."""
        dropped = self.singular_values[self.rank] if self.rank < len(self.singular_values) else _NOISE
        return float(max(dropped, _NOISE) * min(self.gap, 1e12) ** 0.5)


def solve(probes: Sequence[Probe]) -> Algebra:
    """The algebra from the probes taken so far."""
    matrix, typical, silent = _relative(probes)
    _, values, right = np.linalg.svd(matrix, full_matrices=True)
    values = np.concatenate([values, np.zeros(right.shape[0] - len(values))])
    rank = _rank(values)
    residual = np.zeros(len(silent))
    residual[~silent] = np.sqrt((matrix**2).sum(axis=0))
    exponents = right[rank:].T / typical[:, None]
    null = np.linalg.qr(exponents / np.abs(exponents).max(axis=0, initial=np.finfo(float).tiny))[0]
    return Algebra(silent, values, rank, residual, null)


def rank_of(probes: Sequence[Probe]) -> int:
    """How many scalings the loss reacts to, as far as the probes tell: `Algebra.rank` alone, which is cheaper."""
    matrix, _, _ = _relative(probes)
    values = np.linalg.svd(matrix, compute_uv=False)
    return _rank(np.concatenate([values, np.zeros(matrix.shape[1] - len(values))]))


def _relative(probes: Sequence[Probe]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Relative radial derivatives (probes x tensors that are not silent), typical sizes of these, and who is silent.

    Rows and columns are put to a common size, so that neither a batch with a small loss nor a layer with a small
    gradient is lost.
    """
    size = np.stack([probe.size for probe in probes])
    radial = np.stack([probe.radial for probe in probes])
    per_probe = np.maximum(_rms(size, axis=1), np.finfo(float).tiny)[:, None]
    typical = _rms(size / per_probe, axis=0)
    silent = silent_among(typical)
    matrix = (radial / per_probe)[:, ~silent] / typical[~silent] / len(probes) ** 0.5
    return matrix, typical[~silent], silent


def silent_among(sizes: np.ndarray) -> np.ndarray:
    """Which tensors have no gradient, from the sizes of their radial derivatives."""
    result: np.ndarray = sizes <= _SILENT * sizes.max()
    return result


def _rank(values: np.ndarray) -> int:
    """Where the singular values fall off the most, onto rounding."""
    clipped = np.maximum(values, _NOISE)
    above = np.concatenate([[1.0], clipped[:-1]])
    ratios = np.where(values <= _LARGEST_ZERO, above / clipped, 0.0)
    return int(np.argmax(ratios)) if ratios.size and ratios.max() > 0 else len(values)


def _rms(values: np.ndarray, *, axis: int) -> np.ndarray:
    result: np.ndarray = np.sqrt((values**2).mean(axis=axis))
    return result
