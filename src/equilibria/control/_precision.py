"""Which number types can hold a weight that turns by a small, exact angle."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError

_FINE = (torch.float32, torch.float64)


def require_fine(params: Iterable[Tensor], *, by: str) -> None:
    """Refuse weights whose type rounds away more than a step turns them.

    Raises:
        EquilibriaError: naming the type and what to do.
    """
    for param in params:
        if param.dtype not in _FINE:
            raise EquilibriaError(
                f"got a parameter of {param.dtype}; {by} needs float32 or float64, for a step turns a weight by less "
                "than coarser types can tell apart: keep the weights in float32 and run the network under "
                "torch.autocast"
            )
