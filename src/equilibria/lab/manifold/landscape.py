"""A loss as a function on the unit sphere, or in the full space: flat float64 vectors in, named tensors out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equilibria.curvature._hvp import selected
from equilibria.errors import EquilibriaError
from equilibria.lab.manifold._derivatives import Derivatives
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select

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
        params: the reference point, or some tensors of it; default: the parameters as they are now.
        select: the tensors that vary; default: all.
        spherical: whether the loss does not depend on their common scale.

    Raises:
        EquilibriaError: if nothing is selected, the loss is not finite, does not use what is selected, or depends on
            its scale although ``spherical``.
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
        self._shapes = {name: param.shape for name, param in selected(objective, select).items()}
        self.dim = sum(shape.numel() for shape in self._shapes.values())
        self._check_size()
        inner = objective.double()
        self._fixed = inner.params
        self._fixed = {**self._fixed, **self._checked({} if params is None else params)}
        start = self.joined({})
        self.spherical, self.radius = spherical, float(start.norm()) if spherical else 1.0
        loss = Objective(lambda part, _: inner({**self._fixed, **part}, batch), self.named(start))
        self._derivatives = Derivatives(loss)
        if spherical:
            self._check_invariance(start)

    def joined(self, params: Mapping[str, Tensor]) -> Tensor:
        """The selected tensors as one vector; names that are missing stay as they are."""
        given = {**self._fixed, **self._checked(params)}
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
        parts = torch.split(points * scale, sizes, dim=-1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.reshape(*points.shape[:-1], *shape) for (name, shape), part in named}

    def onto_sphere(self, points: Tensor) -> Tensor:
        """Vectors divided by their norms; as they are in the full space."""
        return points / points.norm(dim=-1, keepdim=True) if self.spherical else points

    def losses(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        return self._derivatives.values(self.radius * points)

    def gradients(self, points: Tensor) -> Tensor:
        """Its gradient at every row."""
        return self.radius * self._derivatives.gradients(self.radius * points)

    def hessians(self, points: Tensor) -> Tensor:
        """Its Hessian at every row."""
        return self.radius**2 * self._derivatives.hessians(self.radius * points)

    def bends(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of ``v' H v`` at fixed unit ``v``, for every row of points and directions; and its error."""
        found, error = self._derivatives.bends(self.radius * points, directions)
        return self.radius**3 * found, self.radius**3 * error

    def _checked(self, params: Mapping[str, Tensor]) -> Params:
        """Given tensors in float64 where the loss is."""
        if not isinstance(params, Mapping):
            raise EquilibriaError(f"got params of type {type(params).__name__}; expected a dict of name -> tensor")
        for name, param in params.items():
            if name not in self._fixed:
                raise EquilibriaError(f"got a parameter {name!r}; expected names among: {', '.join(self._fixed)}")
            shape = tuple(self._fixed[name].shape)
            if not isinstance(param, Tensor) or tuple(param.shape) != shape:
                shown = f"shape {tuple(param.shape)}" if isinstance(param, Tensor) else f"a {type(param).__name__}"
                raise EquilibriaError(f"got {shown} for parameter {name!r}; expected a tensor of shape {shape}")
        return {name: param.detach().to(self._fixed[name]) for name, param in params.items()}

    def _check_size(self) -> None:
        if self.dim > LARGEST:
            raise EquilibriaError(
                f"got {self.dim} selected numbers; expected at most {LARGEST}: the manifold of minimisers is found "
                "with dense Hessians. Select fewer tensors, or take a smaller network"
            )

    def _check_invariance(self, start: Tensor) -> None:
        if self.radius == 0:
            raise EquilibriaError("got selected parameters of norm 0; expected a direction, or spherical=False")
        noise = torch.randn(self.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(start)
        beside = start + 0.3 * self.radius * noise / noise.norm()  # at a minimum the loss itself may be zero
        once, twice = self._derivatives.values(torch.stack([beside, 2 * beside])).tolist()
        if not abs(once - twice) <= _INVARIANT * abs(once):
            raise EquilibriaError(
                f"got a loss that changes from {once:.6g} to {twice:.6g} when the selected parameters are doubled; "
                "expected a scale-invariant one: select=eq.symmetries(...).largest_uniform(), or spherical=False"
            )
