"""A loss as a function on the unit sphere, or in the full space: flat float64 vectors in, named tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.measure.manifold._derivatives import Derivatives
from equilibria.measure.objective import Objective, Params
from equilibria.measure.parameters import Select, selection

LARGEST = 4096  # a Hessian of this many rows is 134 MB, and its eigenvectors take a minute
_INVARIANT = 1e-3  # eps of a normalisation may change the loss that much, relatively, when the weights are doubled


class Landscape:
    """The loss of the selected tensors, joined to one vector, the other tensors fixed.

    On the sphere a point is a direction ``x``, looked at as ``w = radius * x``: derivatives with respect to ``x`` are
    those on the unit sphere whatever the radius, if the loss is scale-invariant, and eps of a normalisation matters
    no more than it does at the weights that were given. In the full space the radius is 1.

    Args:
        objective: the loss; it is evaluated in float64, on copies.
        batch: what it is evaluated on.
        params: the reference point; default: the parameters as they are now. It may hold the selected names only.
        select: the tensors that vary; default: all.
        spherical: whether the loss does not depend on their common scale.

    Raises:
        EquilibriaError: if nothing is selected, the loss is not finite or depends on the scale although ``spherical``.
    """

    def __init__(
        self,
        objective: Objective,
        batch: Any,
        *,
        params: Mapping[str, Tensor] | None = None,
        select: Select | None = None,
        spherical: bool = True,
    ) -> None:
        if not isinstance(objective, Objective):
            raise EquilibriaError(
                f"got objective of type {type(objective).__name__}; expected eq.objective(model, loss) or eq.Objective"
            )
        self.spherical = spherical
        self._objective, self._batch = objective.double(), batch
        held = self._objective.params
        self._fixed = {**held, **_checked(params or {}, held)}
        self._shapes = {name: held[name].shape for name in _names(select, held)}
        start = self.joined({})
        self.dim = len(start)
        self.radius = float(start.norm()) if spherical else 1.0
        self._check_size(start)
        self._check_value(start)
        self.derivatives = Derivatives(self._value, start)

    def joined(self, params: Mapping[str, Tensor]) -> Tensor:
        """The selected tensors as one vector; names that are missing stay as they are."""
        given = {**self._fixed, **_checked(params, self._fixed)}
        vector = torch.cat([given[name].reshape(-1) for name in self._shapes])
        if not bool(torch.isfinite(vector).all()):
            raise EquilibriaError("got parameters that are not finite; expected finite numbers")
        return vector

    @property
    def reference(self) -> Tensor:
        """The reference point as a vector, of unit norm on the sphere."""
        return self.onto_sphere(self.joined({}))

    def named(self, points: Tensor, *, scale: float = 1.0) -> Params:
        """A vector, or the rows of a matrix, as named tensors (the rows along their first axis)."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = (points * scale).split(sizes, dim=-1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.reshape(*points.shape[:-1], *shape) for (name, shape), part in named}

    def onto_sphere(self, points: Tensor) -> Tensor:
        """Vectors divided by their norms; as they are in the full space."""
        return points / points.norm(dim=-1, keepdim=True) if self.spherical else points

    def losses(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        return self.derivatives.values(self.radius * points)

    def gradients(self, points: Tensor) -> Tensor:
        """Its gradient at every row."""
        return self.radius * self.derivatives.gradients(self.radius * points)

    def hessians(self, points: Tensor) -> Tensor:
        """Its Hessian at every row."""
        return self.radius**2 * self.derivatives.hessians(self.radius * points)

    def bends(self, points: Tensor, directions: Tensor) -> Tensor:
        """Gradient of ``v' H v`` at fixed ``v``, for every row of points and directions."""
        return self.radius**3 * self.derivatives.bends(self.radius * points, directions)

    def _value(self, vector: Tensor) -> Tensor:
        return self._objective({**self._fixed, **self.named(vector)}, self._batch)

    def _check_size(self, start: Tensor) -> None:
        if self.dim > LARGEST:
            raise EquilibriaError(
                f"got {self.dim} selected numbers; expected at most {LARGEST}: the manifold of minimisers is found "
                "with dense Hessians. Select fewer tensors, or a smaller network"
            )
        if self.spherical and not 0 < self.radius < float("inf"):
            raise EquilibriaError(f"got selected parameters of norm {float(start.norm()):g}; expected a direction")

    def _check_value(self, start: Tensor) -> None:
        here = float(self._value(start))
        if not abs(here) < float("inf"):
            raise EquilibriaError(f"got a loss of {here} at the given parameters; expected a finite one")
        if not self.spherical:
            return
        noise = torch.randn(self.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(start)
        beside = start + 0.3 * self.radius * noise / noise.norm()  # at a minimum the loss itself may be zero
        once, twice = float(self._value(beside)), float(self._value(2 * beside))
        if not abs(once - twice) <= _INVARIANT * abs(once):
            raise EquilibriaError(
                f"got a loss that changes from {once:.6g} to {twice:.6g} when the selected parameters are doubled; "
                "expected a scale-invariant one: select=eq.symmetries(...).largest_uniform(), or spherical=False"
            )


def _names(select: Select | None, held: Mapping[str, Tensor]) -> list[str]:
    if select is None:
        return list(held)
    wanted = selection(select, list(held))
    chosen = [name for name, param in held.items() if wanted(name, param)]
    if not chosen:
        raise EquilibriaError(f"got select={select!r}, which leaves nothing; expected names among: {', '.join(held)}")
    return chosen


def _checked(params: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(params, Mapping):
        raise EquilibriaError(f"got params of type {type(params).__name__}; expected a dict of name -> tensor")
    for name, param in params.items():
        if name not in held:
            raise EquilibriaError(f"got a parameter {name!r}; expected names among: {', '.join(held)}")
        if not isinstance(param, Tensor) or param.shape != held[name].shape:
            shown = tuple(param.shape) if isinstance(param, Tensor) else type(param).__name__
            raise EquilibriaError(f"got {shown} for parameter {name!r}; expected a tensor {tuple(held[name].shape)}")
    return {name: param.detach().double() for name, param in params.items()}
