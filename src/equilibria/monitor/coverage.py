"""Findings about what a monitor covers, which no sample shows: weights unseen, not watched or not trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from equilibria.findings import Finding
from equilibria.tensors.layout import is_sharded


def listed(names: Sequence[Sequence[str]]) -> str:
    """The number of some weights, by optimizer, and the first names."""
    flat = [name for of_optimizer in names for name in of_optimizer]
    return f"{len(flat)} weights ({', '.join(flat[:3])}{', ...' if len(flat) > 3 else ''})"


def bypassed(steps: int) -> Finding:
    """Weights that change while the watched optimizer does not step."""
    return Finding(
        "warning",
        "the weights change, but the watched optimizer does not step",
        f"the last step seen was number {steps}, and the weights have been changed since",
        "the optimizer may have been copied, which drops hooks: call monitor.reattach(optimizer)",
        "",
        kind="bypassed",
    )


def added_later(names: Sequence[str]) -> Finding:
    """Weights that are trained since watching began, and not watched."""
    several = len(names) > 1
    return Finding(
        "warning",
        f"{listed([names]) if several else names[0]} {'are' if several else 'is'} trained but not watched",
        f"{'they were' if several else 'it was'} added to the optimizer, or unfrozen, after equilibria.watch",
        "close this monitor and call equilibria.watch again, after the last add_param_group and unfreezing",
        "",
        kind="added_later",
    )


def sum_of(param: torch.Tensor) -> float:
    """The sum of all entries; NaN if it cannot be formed here. Torch does not count changes through ``.data``."""
    if param.is_meta or is_sharded(param):
        return math.nan
    try:
        return float(param.detach().sum(dtype=torch.float64))
    except Exception:  # lazy parameters, types without a sum
        return math.nan


def in_no_optimizer(names: Sequence[str], steps: int) -> Finding:
    """Parameters that nothing trains."""
    several = len(names) > 1
    which = f"{listed([names]) if several else names[0]} {'are' if several else 'is'}"
    return Finding(
        "note",
        f"{which} in no watched optimizer and {'have' if several else 'has'} not changed in {steps:,} steps",
        f"{'they require' if several else 'it requires'} a gradient",
        "nothing needs doing if no training is intended. To train: optimizer.add_param_group({'params': "
        f"[model.get_parameter({names[0]!r}){', ...' if several else ''}]}})",
        "",
        kind="in_no_optimizer",
    )
