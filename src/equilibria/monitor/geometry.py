"""Norms and angles that survive float32 and tiny steps, from a handful of inner products.

A step moves a weight by ``w' - w = e - s w``, where s is the share that weight decay removes, known exactly from the
settings. The remainder e is as small as the turn itself, so that

    ||e_tangent||^2 = ||e||^2 - <w, e>^2 / ||w||^2,      tan(angle) = ||e_tangent|| ||w|| / ((1 - s) ||w||^2 + <w, e>)

loses no digits; arccos of a float32 cosine has none left below 3e-4 rad.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.tensors.layout import as_real

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of many weights, as inner products; w is the weight before the step and g its gradient.

    Attributes:
        ww: <w, w>.
        wg: <w, g>.
        gg: <g, g>.
        we: <w, e>, where the step moves the weight by e - shrink w.
        ee: <e, e>.
        vg: <v, g> with the momentum buffer v before the step; NaN where there is none.
        shrink: share of the weight that decay removes in this step.
    """

    ww: Array
    wg: Array
    gg: Array
    we: Array
    ee: Array
    vg: Array
    shrink: Array

    @property
    def norm(self) -> Array:
        """||w|| before the step."""
        return np.sqrt(self.ww)

    @property
    def norm_sq_after(self) -> Array:
        """||w'||^2."""
        kept = 1 - self.shrink
        with np.errstate(invalid="ignore", over="ignore"):
            return kept * kept * self.ww + 2 * kept * self.we + self.ee

    @property
    def moved(self) -> Array:
        """||w' - w||."""
        s = self.shrink
        with np.errstate(invalid="ignore", over="ignore"):
            return np.sqrt(np.maximum(self.ee - 2 * s * self.we + s * s * self.ww, 0.0))

    @property
    def angle(self) -> Array:
        """Radians between w and w'; NaN for a weight that is zero or out of the range of its products."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            tangent_sq = np.maximum(self.ee - self.we * self.we / self.ww, 0.0)
            angle: Array = np.arctan2(np.sqrt(tangent_sq * self.ww), (1 - self.shrink) * self.ww + self.we)
        return np.where((self.ww > 0) & np.isfinite(self.ww) & np.isfinite(self.ee), angle, np.nan)

    @property
    def cosine(self) -> Array:
        """Cosine of weight and gradient; 0 for a scale-invariant weight, NaN if either is zero."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return self.wg / np.sqrt(self.ww * self.gg)


def angle_between(first: Tensor, second: Tensor) -> float:
    """The angle between two tensors in radians, accurate to the last digits however small it is.

    Args:
        first: any tensor, not zero.
        second: a tensor of the same number of entries, not zero.

    Returns:
        Between 0 and pi.

    Example:
        >>> w = torch.ones(1000)
        >>> turned = w + 2**-17 * torch.tensor([1.0, -1.0]).repeat(500)
        >>> angle_between(w, turned) * 2**17
        0.99999999...
    """
    a, b = (as_real(tensor.detach()).double().reshape(-1) for tensor in (first, second))
    if a.numel() != b.numel():
        raise EquilibriaError(f"got tensors of {a.numel()} and {b.numel()} entries; expected the same number")
    lengths = [float(torch.linalg.vector_norm(vector)) for vector in (a, b)]
    if not all(length > 0 and np.isfinite(length) for length in lengths):
        raise EquilibriaError(f"got tensors of norm {lengths[0]:g} and {lengths[1]:g}; expected finite, not zero")
    a, b = a / lengths[0], b / lengths[1]
    apart, together = (float(torch.linalg.vector_norm(vector)) for vector in (a - b, a + b))
    return 2 * float(np.arctan2(apart, together))
