"""What is said where a network is given pixels as files have them."""

from __future__ import annotations

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError


def refuse_pixels(inputs: Tensor, error: RuntimeError, *, mend: str) -> None:
    """Name the cause if inputs on which a network failed are uint8; one that makes floats of them itself never fails.

    Args:
        inputs: what it was given.
        error: what it said.
        mend: what to do.

    Raises:
        EquilibriaError: they are.
    """
    if inputs.dtype == torch.uint8:
        raise EquilibriaError(
            f"got inputs of uint8 {tuple(inputs.shape)}, pixels as files have them, which the network does not take "
            f"({error}); expected floats: {mend}"
        ) from error
