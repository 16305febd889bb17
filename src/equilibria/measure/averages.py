"""Running means of noisy samples, one per weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


class RunningMean:
    """An exponential mean that begins as the plain mean; what is not finite is passed over.

    Example:
        >>> mean = RunningMean(1)
        >>> for value in (1.0, np.nan, 3.0):
        ...     mean.add(np.array([value]), window=10.0)
        >>> mean.value
        array([2.])
    """

    def __init__(self, size: int) -> None:
        self.count = np.zeros(size)
        self.value = np.full(size, np.nan)

    def add(self, values: Array, *, window: Array | float) -> None:
        """Take in one sample per weight; ``window`` is the number of samples that the mean reaches back over."""
        good = np.isfinite(values)
        self.count += good
        share = 1 / np.maximum(1.0, np.minimum(self.count, window))
        before = np.where(np.isnan(self.value), 0.0, self.value)
        self.value = np.where(good, before + share * (np.where(good, values, 0.0) - before), self.value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Both arrays, for a checkpoint."""
        return {"count": torch.from_numpy(self.count.copy()), "value": torch.from_numpy(self.value.copy())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self.count, self.value = (state[name].cpu().numpy().copy() for name in ("count", "value"))
