"""A number that the paper read off one draw of the data, beside several of ours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibria.experiments.claim import Claim, Source, near


def among(text: str, source: Source, *, printed: float, values: NDArray[np.float64]) -> Claim:
    """The paper's number is one like ours: within two standard deviations between single draws of their mean.

    Example:
        >>> among("loss", Source("sharp", "fig. 4"), printed=2.5, values=np.array([1.0, 2.0, 3.0])).verdict
        'shown'
    """
    return near(text, source, expected=printed, measured=float(values.mean()), absolute=2 * float(values.std(ddof=1)))
