"""Labels as files give them: whole numbers from 0, or an error that names the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from equilibria.errors import EquilibriaError


def label_array(labels: np.ndarray, *, file: Path | str, classes: int) -> np.ndarray:
    """Labels (count,) as int64; nothing is rounded, and a negative one does not count from the end.

    Args:
        labels: as they were read.
        file: where from, for messages.
        classes: how many there are.

    Example:
        >>> label_array(np.array([2, -1]), file="y.npy", classes=10)
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: y.npy has a label of -1; expected labels of 0 to 9
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise EquilibriaError(f"{file} has labels of {labels.dtype} {labels.shape}; expected whole numbers (count,)")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise EquilibriaError(f"{file} has a label of {wrong[0]}; expected labels of 0 to {classes - 1}")
    return labels.astype(np.int64)
