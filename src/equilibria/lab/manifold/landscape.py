"""A loss as a function on the unit sphere, or in the full space: flat float64 vectors in, named tensors out.

`Landscape` handles the sphere and the names; `Derivatives` evaluates many points at once where torch can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from equilibria.curvature import HessianProducts
from equilibria.curvature._hvp import derivatives_by_differences, selected_params
from equilibria.errors import EquilibriaError
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select

_LARGEST = 4096  # a Hessian of this many rows is 134 MB, and its eigenvectors take a minute
_INVARIANT = 1e-3  # relative change of the loss when the weights are doubled that eps of a normalisation may cause
_NUMBERS_AT_ONCE = 2**20  # in the Hessians of one pass: 8 MB, and a few times that in the graph
_STEP = torch.finfo(torch.float64).eps ** 0.2  # of differences of fourth order, relative to the norm of the point
_SAME = 1e-8  # relative difference of two Hessians that rounding may explain


class Landscape:
    """The loss as a function of the selected tensors, concatenated to one vector, the other tensors fixed.

    On the sphere a point is a direction ``x``, evaluated at ``w = radius * x``. If the loss is scale-invariant,
    derivatives with respect to ``x`` are those on the unit sphere whatever the radius, and eps of a normalisation
    matters no more than at the reference weights. In the full space the radius is 1.

    Args:
        objective: the loss; it is evaluated in float64, on copies.
        batch: the data.
        params: the reference point, or some tensors of it; default: the present parameters.
        select: the tensors that vary; default: all.
        spherical: whether the loss does not depend on their common scale.

    Raises:
        EquilibriaError: if nothing is selected, the loss is not finite, does not use the selected tensors, or depends
            on their scale although ``spherical``.
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
        self._shapes = {name: param.shape for name, param in selected_params(objective, select).items()}
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
        """Concatenate the selected tensors; names that are missing keep their reference values."""
        tensors = {**self._fixed, **self._checked(params)}
        vector = torch.cat([tensors[name].reshape(-1) for name in self._shapes])
        if not bool(torch.isfinite(vector).all()):
            raise EquilibriaError("got parameters that are not finite; expected finite numbers")
        return vector

    @property
    def reference(self) -> Tensor:
        """The reference point as a vector, of unit norm on the sphere."""
        return self.onto_sphere(self.joined({}))

    def named(self, points: Tensor, *, scale: float = 1.0) -> Params:
        """Split a vector, or the rows of a matrix, into named tensors (with the rows along their first axis)."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = torch.split(points * scale, sizes, dim=-1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.reshape(*points.shape[:-1], *shape) for (name, shape), part in named}

    def onto_sphere(self, points: Tensor) -> Tensor:
        """Divide vectors by their norms; in the full space leave them as they are."""
        return points / points.norm(dim=-1, keepdim=True) if self.spherical else points

    def losses(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        return self._derivatives.values(self.radius * points)

    def gradients(self, points: Tensor) -> Tensor:
        """The gradient at every row."""
        return self.radius * self._derivatives.gradients(self.radius * points)

    def hessians(self, points: Tensor) -> Tensor:
        """The Hessian at every row."""
        return self.radius**2 * self._derivatives.hessians(self.radius * points)

    def curvature_gradients(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of ``v' H v`` at fixed unit ``v``, for every row of points and directions; and its error."""
        gradients, errors = self._derivatives.curvature_gradients(self.radius * points, directions)
        return self.radius**3 * gradients, self.radius**3 * errors

    def _checked(self, params: Mapping[str, Tensor]) -> Params:
        """Check names and shapes; convert to float64 on the device of the loss."""
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
        if self.dim > _LARGEST:
            raise EquilibriaError(
                f"got {self.dim} selected numbers; expected at most {_LARGEST}: the manifold of minimisers needs "
                "dense Hessians. Select fewer tensors, or take a smaller network"
            )

    def _check_invariance(self, start: Tensor) -> None:
        if self.radius == 0:
            raise EquilibriaError("got selected parameters of norm 0; expected a direction, or spherical=False")
        noise = torch.randn(self.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(start)
        nearby = start + 0.3 * self.radius * noise / noise.norm()  # at a minimum the loss itself may be zero
        once, twice = self._derivatives.values(torch.stack([nearby, 2 * nearby])).tolist()
        if not abs(once - twice) <= _INVARIANT * abs(once):
            raise EquilibriaError(
                f"got a loss that changes from {once:.6g} to {twice:.6g} when the selected parameters are doubled; "
                "expected a scale-invariant one: select=eq.symmetries(...).largest_uniform(), or spherical=False"
            )


class Derivatives:
    """Loss, gradient, Hessian and one third derivative of a float64 loss at many flat points, the rows of a matrix.

    ``torch.func.vmap`` evaluates all rows together, if the loss allows it (BatchNorm that keeps running statistics does
    not) and one of its Hessians agrees with `HessianProducts`. Otherwise, and for a single row, `HessianProducts`
    evaluates one row after the other.

    Args:
        objective: the loss; it takes no batch.

    Raises:
        EquilibriaError: if the loss cannot be computed, is not finite or does not use a parameter.
    """

    def __init__(self, objective: Objective) -> None:
        example = HessianProducts(objective, None)
        self._objective, self._named = objective, example.named
        self._values = vmap(self._value)
        self._gradients = vmap(grad(self._value))
        self._hessians = vmap(jacrev(grad(self._value)), chunk_size=max(1, _NUMBERS_AT_ONCE // example.size**2))
        self._products = vmap(self._product)
        self._vmap_works = self._check_vmap(example.point.repeat(2, 1))

    def values(self, points: Tensor) -> Tensor:
        """The loss at every row."""
        if self._stacked(points):
            return self._run(self._values, points)
        return torch.stack([self._value(point).detach() for point in points])

    def gradients(self, points: Tensor) -> Tensor:
        """The gradient at every row."""
        if self._stacked(points):
            return self._run(self._gradients, points)
        return torch.stack([self._gradient(point) for point in points])

    def hessians(self, points: Tensor) -> Tensor:
        """The Hessian at every row, symmetric to the last bit."""
        if self._stacked(points):
            hessians = self._run(self._hessians, points)
            return (hessians + hessians.mT) / 2
        return torch.stack([self._products_at(point).dense() for point in points])

    def curvature_gradients(self, points: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of ``v' H(w) v`` in ``w`` at fixed unit ``v``, for every row of points and directions; its error.

        By differences of ``H v`` along ``v``, as in `HessianProducts.unit_curvature_gradient`: the third derivatives of
        torch's fused normalisations are wrong.
        """
        if not self._stacked(points):
            rows = zip(points, directions, strict=True)
            pairs = [self._products_at(point).unit_curvature_gradient(direction) for point, direction in rows]
            return torch.stack([gradient for gradient, _ in pairs]), points.new_tensor([error for _, error in pairs])

        def change(steps: Tensor) -> Tensor:
            ahead, behind = (points + sign * steps * directions for sign in (1.0, -1.0))
            return self._run(self._products, ahead, directions) - self._run(self._products, behind, directions)

        return derivatives_by_differences(change, _STEP * points.norm(dim=-1, keepdim=True).clamp_min(1e-3))

    def _value(self, point: Tensor) -> Tensor:
        return self._objective(self._named(point), None)

    def _gradient(self, point: Tensor) -> Tensor:
        leaf = point.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self._value(leaf), leaf)
        return gradient

    def _product(self, point: Tensor, direction: Tensor) -> Tensor:
        product: Tensor = grad(lambda moved: grad(self._value)(moved) @ direction)(point)
        return product

    def _products_at(self, point: Tensor) -> HessianProducts:
        return HessianProducts(self._objective, None, params=self._named(point))

    def _stacked(self, points: Tensor) -> bool:
        return self._vmap_works and len(points) > 1

    def _check_vmap(self, examples: Tensor) -> bool:
        try:
            stacked = self._run(self._hessians, examples)[0]
        except Exception:  # torch raises no specific exception for this; the loss itself was evaluated before
            return False
        single = self._products_at(examples[0]).dense()  # torch.func gave wrong derivatives of fused operations before
        return bool((stacked - single).norm() <= _SAME * single.norm())

    def _run(self, function: Callable[..., Tensor], *rows: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only kernel that can be differentiated twice
            return function(*rows).detach()
