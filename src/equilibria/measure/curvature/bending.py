"""How a Hessian changes along a direction, by differences whose step is chosen, with an estimate of their error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_HALVINGS = 12  # at most: close to a singularity the loss changes within a small part of the weights


def bends_by_differences(change: Callable[[Tensor], Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative at 0 of rows of functions that are known by their central changes, to fourth order in the step.

    The step is halved, for every row by itself, as long as this makes two neighbours agree better: a long step suffers
    from higher derivatives, a short one from rounding.

    Args:
        change: ``f(h) - f(-h)`` for every row, given a column of steps h.
        first: the longest steps h to try, a column.

    Returns:
        The derivatives, and for every row the disagreement of the two that agreed best: the order of the error.

    Example:
        >>> step = torch.full((1, 1), 1e-3, dtype=torch.float64)
        >>> found, error = bends_by_differences(lambda h: (2 + h).log() - (2 - h).log(), step)
        >>> bool(abs(float(found) - 0.5) <= 10 * float(error) + 1e-15), bool(error < 1e-11)
        (True, True)
    """
    step, wide, near = first, change(2 * first), change(first)
    best = (8 * near - wide) / (12 * step)
    error = torch.full_like(best[:, 0], float("inf"))
    going = torch.ones_like(error, dtype=torch.bool)
    for _ in range(_HALVINGS):
        step, wide, near = step / 2, near, change(step / 2)
        found = (8 * near - wide) / (12 * step)
        apart = torch.where(going, (found - best).norm(dim=1), float("inf"))
        stopped, going = going & (apart >= error), apart < error
        best, error = torch.where(going[:, None], found, best), torch.where(going, apart, error)
        error = torch.where(stopped, torch.maximum(error, apart / 4), error)  # two may agree well by chance
        if not bool(going.any()):
            break
    return best, error
