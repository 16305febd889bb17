"""Named tensors as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.measure.objective import ModelObjective, Objective, Params
from equilibria.measure.parameters import Select, selection


class FlatLayout:
    """Where each named tensor lies in one flat vector.

    Args:
        params: the tensors, in the order of the vector. The vector has the widest of their types, float32 at least,
            and the device of the first.

    Attributes:
        names: of the tensors, in order.
        size: how many numbers the vector has.
        dtype: its type.
        device: its device.
        rounding: relative, of the coarsest of the tensors' types: they are rounded to these on the way to the loss.

    Example:
        >>> layout = FlatLayout({"w": torch.ones(2, 2), "b": torch.zeros(1)})
        >>> layout.named(torch.arange(5.0))["w"]
        tensor([[0., 1.],
                [2., 3.]])
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._like = dict(params)
        self._sizes = [param.numel() for param in params.values()]
        self.names = tuple(params)
        self.size = sum(self._sizes)
        self.device = next(iter(params.values())).device
        self.dtype, self.rounding = torch.float32, 0.0
        for name, param in params.items():
            if param.is_complex():
                raise EquilibriaError(f"got parameter {name!r} of {param.dtype}; expected real numbers: select others")
            self.dtype = torch.promote_types(self.dtype, param.dtype)
            self.rounding = max(self.rounding, float(torch.finfo(param.dtype).eps))

    def flat(self, params: Mapping[str, Tensor]) -> Tensor:
        """One vector of all tensors.

        Raises:
            EquilibriaError: if names or shapes are not those of the layout.
        """
        wrong = [name for name in self.names if name not in params or params[name].shape != self._like[name].shape]
        if wrong or len(params) != len(self.names):
            raise EquilibriaError(
                f"got tensors {_shapes(params)}; expected {_shapes(self._like)}: the same names and shapes"
            )
        pieces = [params[name].to(dtype=self.dtype, device=self.device).reshape(-1) for name in self.names]
        return torch.cat(pieces)

    def named(self, vector: Tensor) -> Params:
        """The tensors in a vector, in their own shapes, types and devices; differentiable."""
        pieces = torch.split(vector, self._sizes)
        return {
            name: piece.view(like.shape).to(dtype=like.dtype, device=like.device)
            for piece, (name, like) in zip(pieces, self._like.items(), strict=True)
        }


def selected(objective: Objective, select: Select | None) -> Params:
    """The parameters of an objective that ``select`` stands for; None for all.

    Raises:
        EquilibriaError: if there are none, or some are not trained.
    """
    params = objective.params
    if select is not None:
        wanted = selection(select, list(params))
        params = {name: param for name, param in params.items() if wanted(name, param)}
    if not params:
        raise EquilibriaError(
            f"got select={select!r}, which leaves none of {len(objective.params)} parameters; expected names, patterns "
            "or a function select(name, tensor) that some parameter satisfies"
        )
    frozen = [name for name in params if isinstance(objective, ModelObjective) and name in objective.frozen]
    if frozen:
        raise EquilibriaError(
            f"got parameter {frozen[0]!r}, which is not trained (requires_grad is False); expected parameters that "
            "training moves: select others, or call requires_grad_(True)"
        )
    return params


def _shapes(params: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} {tuple(param.shape)}" for name, param in list(params.items())[:4])
    return shown if len(params) <= 4 else f"{shown}, ... ({len(params)} in all)"
