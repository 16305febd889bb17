"""Spherical sharpness group by group: each scale-invariant tensor on its own sphere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import Objective
from equilibria.measure.sharpness.measurement import Sharpness, sharpness


def sharpness_by_group(
    objective: Objective,
    batch: Any,
    *,
    groups: Iterable[str] | Mapping[str, Iterable[str]],
    tol: float = 1e-2,
    budget: int = 100,
    warm: Mapping[str, Sharpness] | None = None,
    seed: int = 0,
) -> dict[str, Sharpness]:
    """The spherical sharpness of every group of parameters by itself, the others held fixed.

    Unlike the joint one, it does not change if one layer is scaled against another.

    Args:
        objective: of `equilibria.objective` or `equilibria.Objective`.
        batch: as for `sharpness`.
        groups: names of tensors that are invariant alone, such as ``symmetries(...).alone``; or label -> names that are
            invariant together.
        tol: as for `sharpness`.
        budget: the most products for each group.
        warm: an earlier result of this function.
        seed: of the random starts.

    Returns:
        Label -> result.

    Raises:
        EquilibriaError: as for `sharpness`, or if there are no groups.
    """
    if isinstance(groups, str):
        raise EquilibriaError(f"got groups={groups!r}; expected a list of names, or a dict of label -> names")
    named = dict(groups) if isinstance(groups, Mapping) else {name: [name] for name in groups}
    if not named:
        raise EquilibriaError("got no groups; expected names, such as symmetries(objective, batches).alone")
    return {
        label: sharpness(
            objective,
            batch,
            select=list(names),
            spherical=True,
            tol=tol,
            budget=budget,
            warm=(warm or {}).get(label),
            seed=seed,
        )
        for label, names in named.items()
    }
