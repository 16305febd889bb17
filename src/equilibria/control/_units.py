"""The units that a controller treats one by one: whole tensors, or each row of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError, one_of
from equilibria.tensors.inner_products import ProductsPass
from equilibria.tensors.invariance import Invariant, require_rows
from equilibria.tensors.layout import matrix
from equilibria.tensors.parameters import row_axes

Granularity: TypeAlias = Literal["tensor", "row"]
"""What a controller treats as one unit: "tensor", each tensor as a whole; "row", each output row of it."""


def unit_axes(
    weights: Mapping[str, Tensor], *, invariant: Invariant, model: nn.Module | None, granularity: Granularity
) -> dict[str, int | None]:
    """The axis that numbers each tensor's units, by name: None for a whole tensor; without a model rows are axis 0.

    Raises:
        EquilibriaError: an unknown granularity, or "row" for weights that `equilibria.symmetries` found to be invariant
            only in groups of rows.
    """
    one_of("granularity", granularity, get_args(Granularity))
    if granularity == "tensor":
        return dict.fromkeys(weights)
    require_rows(invariant, weights)
    numbering = {} if model is None else row_axes(model)
    return {name: numbering.get(id(weight), 0) for name, weight in weights.items()}


def unit_norms(tensor: Tensor, *, axis: int | None, like: Tensor | None = None, centred: bool = False) -> Tensor:
    """The norm of every unit of a tensor, (units,), in float64; ``centred`` without its mean.

    Args:
        tensor: a weight, or its gradient.
        axis: the axis that numbers its units; None for one unit.
        like: the weight whose memory order to read the tensor in.
        centred: whether to subtract each unit's mean first.
    """
    tensor = tensor.detach()
    units = matrix(tensor, axis=axis, like=tensor if like is None else like.detach())
    units = units - units.mean(1, keepdim=True) if centred else units
    norms: Tensor = torch.linalg.vector_norm(units, dim=1, dtype=torch.float64)
    return norms


def require_units(name: str, weight: Tensor, *, axis: int | None, centred: bool = False) -> None:
    """Raise if a tensor has no rows, or a unit of it no direction.

    Raises:
        EquilibriaError: with the tensor's name and the row.
    """
    if axis is not None and weight.ndim < 2:
        raise EquilibriaError(
            f"got granularity='row' for {name} of shape {tuple(weight.shape)}; expected 2 axes or more",
            argument="granularity",
        )
    norms = unit_norms(weight, axis=axis, centred=centred)
    is_direction = (norms > 0) & torch.isfinite(norms)
    if not bool(is_direction.all()):
        row = int((~is_direction).nonzero()[0, 0])
        raise EquilibriaError(
            f"got {name}{'' if axis is None else f', row {row}'} of norm {float(norms[row]):g}"
            f"{' without its mean' if centred else ''}; expected a finite norm above 0: it has no direction",
            argument="invariant",
        )


def unit_products(units: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """<a, a>, <a, b> and <b, b> of corresponding units, the rows of two matrices, in float64."""
    sums = torch.empty(len(units), 6, dtype=torch.float64, device=units.device)
    one_pass = ProductsPass(sums)
    one_pass.add(0, units, others, None)
    one_pass.run()
    return sums[:, 0], sums[:, 1], sums[:, 2]


def write_units(tensor: Tensor, units: Tensor, *, axis: int | None) -> None:
    """Write the ``matrix`` of a tensor back where it had to be a copy; where it is a view, there is nothing to do."""
    if units.data_ptr() != tensor.data_ptr():
        shape = tensor.shape if axis is None else tensor.movedim(axis, 0).shape
        tensor.copy_(units.view(shape) if axis is None else units.view(shape).movedim(0, axis))
