"""Hessian-vector products of a loss over any part of its parameters.

`HessianProducts` multiplies by autograd, or by differences of gradients where a loss cannot be differentiated twice.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from equilibria.curvature._batches import as_weighted_batches
from equilibria.errors import EquilibriaError, one_of
from equilibria.objectives._objective import ModelObjective, Objective, Params
from equilibria.tensors.layout import densify
from equilibria.tensors.parameters import Select, selection

HvpMethod: TypeAlias = Literal["auto", "autograd", "differences"]

_ROWS_AT_ONCE = 64  # rows of the dense Hessian that one vectorised pass computes


class FlatLayout:
    """Positions of named tensors in one flat vector.

    Args:
        params: the tensors, in the order of the vector. The vector has the widest of their types, at least float32,
            and the device of the first.

    Attributes:
        names: of the tensors, in order.
        size: length of the vector.
        dtype: its type.
        device: its device.
        rounding: relative precision of the coarsest of the tensors' types: vectors are rounded to it before the loss.

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
                raise EquilibriaError(
                    f"got parameter {name!r} of {param.dtype}; expected real numbers: select others", argument="select"
                )
            self.dtype = torch.promote_types(self.dtype, param.dtype)
            self.rounding = max(self.rounding, float(torch.finfo(param.dtype).eps))

    def flat(self, params: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors to one vector.

        Raises:
            EquilibriaError: if names or shapes differ from those of the layout.
        """
        wrong = [name for name in self.names if name not in params or params[name].shape != self._like[name].shape]
        if wrong or len(params) != len(self.names):
            raise EquilibriaError(
                f"got tensors {_shapes(params)}; expected {_shapes(self._like)}: the same names and shapes",
                argument="params",
            )
        pieces = [params[name].to(dtype=self.dtype, device=self.device).reshape(-1) for name in self.names]
        return torch.cat(pieces)

    def named(self, vector: Tensor) -> Params:
        """Split a vector into named tensors with their own shapes, types and devices; differentiable."""
        pieces = torch.split(vector, self._sizes)
        return {
            name: piece.view(like.shape).to(dtype=like.dtype, device=like.device)
            for piece, (name, like) in zip(pieces, self._like.items(), strict=True)
        }


class HessianProducts:
    """Products of the Hessian of a loss with flat vectors.

    The model never changes: BatchNorm in training mode normalises by the batch and leaves its running statistics alone,
    and random numbers, gradients and modes stay. Attention runs on a kernel that can be differentiated twice.

    Args:
        objective: from `equilibria.objective`, or an `equilibria.Objective`.
        data: one batch, or several: a list of batches, or a DataLoader (read once, its generators restored). Of several
            it is the Hessian of the mean of their losses, weighted by their sizes; `covers` says whether this is the
            full-batch loss. The graph of a single batch is kept for the next product; of several, one at a time is in
            memory.
        select: the parameters to differentiate by: names, patterns or a function of name and tensor; default: all.
        params: name -> tensor, the point of the Hessian, which is copied; default: the present parameters.
        method: "autograd" (two backward passes, exact up to rounding), "differences" (of gradients on either side, for
            losses that cannot be differentiated twice), or "auto": autograd wherever it works.

    Attributes:
        layout: of the flat vectors: `layout.flat(params)`, `layout.named(vector)`, names, size, dtype, device.
        point: the point of the Hessian, flat.
        loss: the loss at the point.
        gradient: its gradient at the point, flat.
        covers: "one batch", "full batch" (true mean over all samples) or "ghost batches" (samples are coupled within a
            batch, as by BatchNorm: the mean of the batches' losses, not the loss of all samples together).
        batches: number of batches.
        count: number of products so far.
        asymmetry: norm of the antisymmetric part of the last dense Hessian before symmetrisation: measured rounding.

    Raises:
        EquilibriaError: if the loss cannot be computed on a batch, is not finite, or does not use a parameter.

    Example:
        >>> objective = Objective(lambda params, batch: (batch * params["w"] ** 2).sum() / 2, {"w": torch.ones(3)})
        >>> product = HessianProducts(objective, torch.tensor([1.0, 2.0, 3.0]))
        >>> product(torch.ones(3))
        tensor([1., 2., 3.])
        >>> product.dense().diagonal()
        tensor([1., 2., 3.])
    """

    def __init__(
        self,
        objective: Objective,
        data: Any,
        *,
        select: Select | None = None,
        params: Mapping[str, Tensor] | None = None,
        method: HvpMethod = "auto",
    ) -> None:
        if not isinstance(objective, Objective):
            raise EquilibriaError(
                f"got objective of type {type(objective).__name__}; expected equilibria.objective(model, loss)",
                argument="objective",
            )
        one_of("method", method, ["auto", "autograd", "differences"])
        if torch.is_inference_mode_enabled():
            raise EquilibriaError(
                "got a call inside torch.inference_mode(); expected one outside: it keeps no gradients"
            )
        present = selected_params(objective, select)
        self.layout = FlatLayout(present)
        self.point = self.layout.flat(present if params is None else params)
        self.count, self.asymmetry = 0, 0.0
        self._objective, self._method = objective, method
        self._history_checked = False
        self._data = as_weighted_batches(objective, data)
        self.covers, self.batches = self._data.covers, len(self._data.batches)
        self._kept: _Graph | None = None
        self._differences = self._by_differences() if method == "differences" else None
        if self._differences is None and self.batches == 1:
            try:
                self._kept = self._graph(0)
            except (RuntimeError, NotImplementedError) as error:
                self._fall_back(error)
        if self._kept is None:
            self.loss, self.gradient = self._loss_and_gradient(self.point)
        else:
            self.loss, self.gradient = float(self._kept.loss.detach()), self._kept.gradient.detach()

    @property
    def size(self) -> int:
        """Length of a vector."""
        return self.layout.size

    @property
    def method(self) -> HvpMethod:
        """How products are computed: "autograd" or "differences"; certain after the first one."""
        return "autograd" if self._differences is None else "differences"

    @property
    def relative_error(self) -> float:
        """Error of a product relative to the largest one: rounding, or the estimate of the differences."""
        rounding = self.layout.rounding
        return rounding if self._differences is None else max(rounding, self._differences.relative_error)

    def __call__(self, vector: Tensor) -> Tensor:
        """Multiply the Hessian with a flat vector."""
        self._check_vector(vector)
        self.count += 1
        if self._differences is None:
            try:
                return self._finite(self._mean(partial(_product, vector=vector)))
            except (RuntimeError, NotImplementedError) as error:
                self._fall_back(error)
        assert self._differences is not None
        return self._finite(self._differences(vector))

    def named(self, vector: Tensor) -> Params:
        """Split a flat vector into name -> tensor."""
        return self.layout.named(vector)

    def unit_curvature_gradient(self, direction: Tensor) -> tuple[Tensor, float]:
        """The gradient of v'H(w)v with respect to w, for a fixed unit vector v, and an estimate of its error's norm.

        It is the third derivative along v and v. Derivatives commute, so this is the derivative of H(w)v along v:
        differences of products on either side of w, to fourth order, the step halved until rounding shows. It takes
        about eight products; the relative error is about 1e-11 in float64 and 1e-5 in float32, or 1e-7 and 1e-2 where
        products are differences themselves. A third backward pass would be wrong: torch's derivatives of its fused
        batch, layer and group norms are right up to the second and silently wrong from the third on (by 5 % and 50 % in
        a small example, torch 2.13).
        """
        rounding = float(torch.finfo(self.layout.dtype).eps)
        noise = rounding if self._differences is None else rounding**0.6  # of a product by differences
        first = noise**0.2 * max(float(self.point.norm()), 1e-3)
        gradient, error = derivatives_by_differences(
            lambda step: self._change_of_product(direction, float(step))[None], self.point.new_full((1, 1), first)
        )
        return gradient[0], float(error)

    def _change_of_product(self, vector: Tensor, step: float) -> Tensor:
        ahead, behind = (self._product_at(self.point + sign * step * vector, vector) for sign in (1.0, -1.0))
        return ahead - behind

    def _product_at(self, point: Tensor, vector: Tensor) -> Tensor:
        """Multiply the Hessian at another point with a vector."""
        moved = copy.copy(self)
        moved.point, moved._kept = point, None
        moved._differences = None if self._differences is None else moved._by_differences()
        product = moved(vector)
        self.count = moved.count
        return product

    def loss_at(self, point: Tensor) -> float:
        """The loss at another flat point."""
        return self._loss_and_gradient(point)[0]

    def dense(self) -> Tensor:
        """The whole Hessian, symmetrised, in as many products as there are parameters: for small problems."""
        unit = torch.eye(self.size, dtype=self.layout.dtype, device=self.layout.device)
        rows = [self._block(block) for block in torch.split(unit, _ROWS_AT_ONCE)]
        matrix = torch.cat(rows)
        self.asymmetry = float(torch.linalg.matrix_norm(matrix.double() - matrix.T.double())) / 2
        return (matrix + matrix.T) / 2

    def _block(self, vectors: Tensor) -> Tensor:
        if self._differences is None:
            try:
                with warnings.catch_warnings():  # an operation without a vectorised form is slower, not wrong
                    warnings.simplefilter("ignore")
                    products = self._finite(self._mean(partial(_products, vectors=vectors)))
                self.count += len(vectors)
                return products
            except (RuntimeError, NotImplementedError):
                pass  # an operation that torch cannot vectorise: one product after the other
        return torch.stack([self(vector) for vector in vectors])

    def _mean(self, of_graph: Callable[[_Graph], Tensor]) -> Tensor:
        if self._kept is not None:
            return of_graph(self._kept)
        weights = self._data.weights
        total = of_graph(self._graph(0)).mul_(weights[0])
        for index in range(1, len(weights)):
            total.add_(of_graph(self._graph(index)), alpha=weights[index])
        return total

    def _graph(self, index: int) -> _Graph:
        point = self.point.clone().requires_grad_()
        loss, gradient = self._evaluate(point, index, twice=True)
        return _Graph(point, loss, gradient)

    def _loss_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        """Loss and gradient of the mean over all batches."""
        loss, gradient = 0.0, torch.zeros_like(self.point)
        for index, weight in enumerate(self._data.weights):
            leaf = point.detach().clone().requires_grad_()
            value, grad = self._evaluate(leaf, index, twice=False)
            loss += weight * float(value.detach())
            gradient.add_(grad, alpha=weight)
        return loss, gradient

    def _evaluate(self, point: Tensor, index: int, *, twice: bool) -> tuple[Tensor, Tensor]:
        batch = self._data.batches[index]
        with torch.enable_grad():
            pieces = self.layout.named(point)
            with _naming_batch(batch), sdpa_kernel(SDPBackend.MATH):
                loss = self._objective(pieces, batch)
            _check_loss(loss)
            grads = torch.autograd.grad(loss, list(pieces.values()), create_graph=twice, allow_unused=True)
            _check_used(self.layout.names, grads)
            if twice and not self._history_checked:
                _check_history(loss)
                self._history_checked = True
            return loss, torch.cat([densify(grad).to(point).reshape(-1) for grad in grads if grad is not None])

    def _fall_back(self, error: Exception) -> None:
        if not _NOT_TWICE.search(str(error)):
            raise error
        if self._method == "autograd":
            raise EquilibriaError(
                f"got a loss that cannot be differentiated twice ({error}); expected twice differentiable operations, "
                'such as attention on the math kernel, or method="differences"',
                argument="objective",
            ) from error
        self._kept = None
        self._differences = self._by_differences()

    def _by_differences(self) -> GradientDifferences:
        return GradientDifferences(lambda point: self._loss_and_gradient(point)[1], self.point)

    def _check_vector(self, vector: Tensor) -> None:
        if not isinstance(vector, Tensor) or vector.shape != (self.size,):
            shown = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise EquilibriaError(
                f"got a vector of shape {shown}; expected a tensor of shape {(self.size,)}", argument="vector"
            )

    def _finite(self, product: Tensor) -> Tensor:
        if not bool(torch.isfinite(product).all()):
            raise EquilibriaError(
                f"got a product with the Hessian that is not finite, at loss {self.loss:g}; expected a loss that is "
                "twice differentiable at this point (a norm or square root at zero is not)",
                argument="objective",
            )
        return product


def selected_params(objective: Objective, select: Select | None) -> Params:
    """Parameters of an objective that ``select`` picks; None picks all.

    Raises:
        EquilibriaError: if it picks none, or one that is not trained.
    """
    params = objective.params
    if select is not None:
        wanted = selection(select, list(params))
        params = {name: param for name, param in params.items() if wanted(name, param)}
    if not params:
        raise EquilibriaError(
            f"got select={select!r}, which leaves none of {len(objective.params)} parameters; expected names, patterns "
            "or a function select(name, tensor) that some parameter satisfies",
            argument="select",
        )
    frozen = [name for name in params if isinstance(objective, ModelObjective) and name in objective.frozen]
    if frozen:
        raise EquilibriaError(
            f"got parameter {frozen[0]!r}, which is not trained (requires_grad is False); expected parameters that "
            "training moves: select others, or call requires_grad_(True)",
            argument="select",
        )
    return params


def _shapes(params: Mapping[str, Tensor]) -> str:
    shown = ", ".join(f"{name} {tuple(param.shape)}" for name, param in list(params.items())[:4])
    return shown if len(params) <= 4 else f"{shown}, ... ({len(params)} in all)"


# ---- products by autograd

_NOT_TWICE = re.compile(r"not implemented|not supported|once_differentiable|differentiate twice|double.?backward")
_MARKED = once_differentiable(lambda _: None)  # all functions marked so share the code of this one


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A loss, its gradient and their point, connected by the autograd graph."""

    point: Tensor
    loss: Tensor
    gradient: Tensor


def _product(graph: _Graph, *, vector: Tensor) -> Tensor:
    if not graph.gradient.requires_grad:  # the gradient is constant
        return torch.zeros_like(graph.point)
    (result,) = torch.autograd.grad(
        graph.gradient, graph.point, vector.to(graph.point), retain_graph=True, materialize_grads=True
    )
    return result


def _products(graph: _Graph, *, vectors: Tensor) -> Tensor:
    if not graph.gradient.requires_grad:
        return torch.zeros_like(vectors)
    (result,) = torch.autograd.grad(
        graph.gradient, graph.point, vectors, retain_graph=True, materialize_grads=True, is_grads_batched=True
    )
    return result


def _check_history(loss: Tensor) -> None:
    """Raise if the loss uses a function that can be differentiated only once.

    torch would take the gradient of such a function for a constant: at best it leaves a node in the graph that raises
    when it is visited, and a product need not visit it.
    """
    seen, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(function for function, _ in node.next_functions)
        if isinstance(node, BackwardCFunction) and _is_once_differentiable(node):
            raise RuntimeError("not supported: a function marked once_differentiable")


def _is_once_differentiable(node: BackwardCFunction) -> bool:
    backward = node._forward_cls.backward  # type: ignore[attr-defined]
    return getattr(backward, "__code__", None) is _MARKED.__code__


@contextmanager
def _naming_batch(batch: Any) -> Iterator[None]:
    """Add the shapes of the batch to an error of the network or the loss."""
    try:
        yield
    except EquilibriaError:
        raise
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        raise EquilibriaError(
            f"got a batch on which the loss cannot be computed ({type(error).__name__}: {error}); the shapes in it are "
            f"{', '.join(map(str, shapes[:4])) or 'none'}; expected a batch as the network is trained on",
            argument="batch",
        ) from error


def _check_loss(loss: Tensor) -> None:
    if not bool(torch.isfinite(loss.detach())):
        raise EquilibriaError(
            f"got a loss of {float(loss.detach())}; expected a finite loss: curvature is not defined there",
            argument="objective",
        )
    if not loss.requires_grad:
        raise EquilibriaError(
            "got a loss that does not depend on the selected parameters, or does not require a gradient; expected a "
            "loss that torch computes from them, without .item(), .detach() or no_grad",
            argument="objective",
        )


def _check_used(names: tuple[str, ...], grads: tuple[Tensor | None, ...]) -> None:
    unused = [name for name, grad in zip(names, grads, strict=True) if grad is None]
    if unused:
        raise EquilibriaError(
            f"got a loss that does not depend on parameter {unused[0]!r}"
            f"{f' and {len(unused) - 1} more' if len(unused) > 1 else ''}; expected parameters that it is computed "
            "from: leave the others out with select=",
            argument="select",
        )


# ---- products and derivatives by differences

_STEP_RATIO = 4.0  # between the steps that `GradientDifferences` tries
_MAX_HALVINGS = 12  # close to a singularity the loss changes within a small part of the weights


class GradientDifferences:
    """Central differences of a gradient: ``(g(w + h v) - g(w - h v)) / 2h``.

    The first product chooses the step h: of three steps a factor of 4 apart, the one that agrees best with its
    neighbour. A short step suffers from rounding, a long one from the third derivative; the disagreement estimates
    both.

    Args:
        gradient: the gradient at a flat point.
        point: the point of the Hessian.

    Attributes:
        relative_error: of a product, estimated at the first one; infinite before.
    """

    def __init__(self, gradient: Callable[[Tensor], Tensor], point: Tensor) -> None:
        self._gradient, self._point = gradient, point
        self._step = 0.0  # chosen at the first product
        self.relative_error = float("inf")

    def __call__(self, vector: Tensor) -> Tensor:
        """Multiply the Hessian with a flat vector."""
        norm = float(vector.norm())
        if norm == 0.0:
            return torch.zeros_like(self._point)
        unit = vector.to(self._point) / norm
        if self._step == 0.0:
            return self._choose_step(unit).mul_(norm)
        return self._difference(unit, self._step).mul_(norm)

    def _choose_step(self, unit: Tensor) -> Tensor:
        # Rounding eps/h and truncation h^2 balance at the cube root of eps, at the scale of the weights.
        scale = max(float(self._point.norm()), 1e-3 * self._point.numel() ** 0.5)
        middle = float(torch.finfo(self._point.dtype).eps) ** (1 / 3) * scale
        steps = [middle / _STEP_RATIO, middle, middle * _STEP_RATIO]
        products = [self._difference(unit, step) for step in steps]
        apart = [float((products[index + 1] - products[index]).norm()) for index in (0, 1)]
        best = min((0, 1), key=apart.__getitem__)
        self._step = steps[best + 1]  # the disagreement bounds the error of the longer of the two steps
        size = float(products[best + 1].norm())
        self.relative_error = apart[best] / size if size else 0.0
        return products[best + 1]

    def _difference(self, unit: Tensor, step: float) -> Tensor:
        ahead = self._gradient(self._point + step * unit)
        return ahead.sub_(self._gradient(self._point - step * unit)).div_(2 * step)


def derivatives_by_differences(change: Callable[[Tensor], Tensor], first: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives at 0 of many functions, one per row, from central differences of fourth order in the step.

    The step is halved, for every row by itself, as long as two consecutive estimates then agree better: a long step
    suffers from higher derivatives, a short one from rounding.

    Args:
        change: ``f(h) - f(-h)`` for every row, given a column of steps h.
        first: the longest steps h to try, a column.

    Returns:
        The derivatives, and for every row the smallest disagreement of two estimates: the order of the error.

    Example:
        >>> step = torch.full((1, 1), 1e-3, dtype=torch.float64)
        >>> derivative, error = derivatives_by_differences(lambda h: (2 + h).log() - (2 - h).log(), step)
        >>> bool(abs(float(derivative) - 0.5) <= 10 * float(error) + 1e-15), bool(error < 1e-11)
        (True, True)
    """
    step, wide, near = first, change(2 * first), change(first)
    best = (8 * near - wide) / (12 * step)
    error = torch.full_like(best[:, 0], float("inf"))
    going = torch.ones_like(error, dtype=torch.bool)
    for _ in range(_MAX_HALVINGS):
        step, wide, near = step / 2, near, change(step / 2)
        estimate = (8 * near - wide) / (12 * step)
        apart = torch.where(going, (estimate - best).norm(dim=1), float("inf"))
        stopped, going = going & (apart >= error), apart < error
        best, error = torch.where(going[:, None], estimate, best), torch.where(going, apart, error)
        error = torch.where(stopped, torch.maximum(error, apart / 4), error)  # two estimates may agree well by chance
        if not bool(going.any()):
            break
    return best, error
