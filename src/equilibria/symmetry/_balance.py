"""Where to look from: weights at which every tensor that matters can be felt.

In a deep network without normalisation the first layers' share of the gradient falls by a factor with every layer, at
the usual initial weights to 1e-12 and less: rounding hides them. Symmetries are those of the network, not of its
present norms, so the search may look from where its matrices are larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from equilibria.objectives._objective import Objective, Params
from equilibria.symmetry._algebra import silent_among
from equilibria.symmetry._precise import precise
from equilibria.symmetry._probes import row_products
from equilibria.tensors.layout import rows

# Root mean square of a row's product with inputs of size one: sqrt(2) keeps the signal through ReLU, GELU and tanh at
# any depth; a sigmoid's slope of 1/4, and its mean, take 8.
_GAINS = (math.sqrt(2.0), 8.0)
_FAINTEST = 1e-16  # rounding: shares below it are all the same


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """A point to look from.

    Attributes:
        point: the parameters.
        passes: how many backward passes it took to find.
    """

    point: Params
    passes: int


def balanced(twin: Objective, base: Params, batch: Any) -> Balanced:
    """The point itself if every tensor can be felt there, else that with larger matrices where the most are.

    Args:
        twin: the objective in float64.
        base: the point to start from.
        batch: what to try it on.
    """
    shares = _shares(twin, base, batch)
    if shares is not None and not silent_among(shares).any():
        return Balanced(base, 1)
    points = [base, *(_raised(twin, base, gain) for gain in _GAINS)]
    felt = [shares, *(_shares(twin, point, batch) for point in points[1:])]
    return Balanced(points[int(np.argmax([_loudness(each) for each in felt]))], len(points))


def _raised(twin: Objective, base: Params, gain: float) -> Params:
    """Every matrix whose rows are smaller than the gain asks for, scaled up to it."""
    point = dict(base)
    for name, param in base.items():
        if param.ndim >= 2 and param.numel():
            row = float(rows(param, axis=twin.row_axis[name]).norm(dim=1).square().mean().sqrt())
            point[name] = param * max(1.0, gain / row)
    return point


def _shares(twin: Objective, point: Params, batch: Any) -> np.ndarray | None:
    """The size of every tensor, as in `Probe`; None where these are not finite."""
    with precise():
        _, grads = twin.value_and_grad(batch, params=point)
    axes = twin.row_axis
    sizes = [row_products(point[name], grad, axis=axes[name]).norm() for name, grad in grads.items()]
    found = torch.stack(sizes).cpu().numpy()
    return found if np.isfinite(found).all() and found.any() else None


def _loudness(shares: np.ndarray | None) -> float:
    return -math.inf if shares is None else float(np.log(np.maximum(shares / shares.max(), _FAINTEST)).mean())
