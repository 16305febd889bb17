"""The sharpness of a loss: the largest eigenvalue of its Hessian, with a bound on its error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria._display import renderer
from equilibria.curvature._batches import GHOST_BATCHES
from equilibria.curvature._eigenpairs import BESIDE, Eigenpairs, Memory, relative
from equilibria.curvature._hvp import HessianProducts
from equilibria.curvature._invariance import check_invariant
from equilibria.curvature._lanczos import EXHAUSTED, Product, check_request, eigenpairs
from equilibria.curvature._thresholds import Limits, is_adam, limits_of, ratio_of
from equilibria.curvature._warm_start import follow
from equilibria.errors import EquilibriaError, whole
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select, unwrap_optimizer
from equilibria.theory.thresholds import momentum_threshold, nesterov_threshold


def dense_eigenpairs(
    matrix: Tensor, *, k: int, end: str, tol: float, noise: float, asymmetry: float = 0.0
) -> Eigenpairs:
    """The k largest or smallest eigenvalues of a symmetric matrix, exact up to the rounding of its entries.

    Rounding inside the loss counts as far as it makes the matrix asymmetric; what it does symmetrically is not seen.

    Args:
        matrix: symmetric; every row counts as one product.
        k: how many.
        end: "top" or "bottom".
        tol: what the bounds of the relative errors must be within to call it converged.
        noise: relative error of a row.
        asymmetry: norm of what was not symmetric in the rows as they were computed: what rounding really did.

    Example:
        >>> dense_eigenpairs(torch.diag(torch.tensor([1.0, 3.0, 2.0])), k=2, end="top", tol=1e-2, noise=1e-7).values
        (3.0, 2.0)
    """
    wide = matrix.double()
    values, vectors = torch.linalg.eigh(wide if end == "top" else -wide)
    sign = 1.0 if end == "top" else -1.0
    values, rows = values.flip(0), vectors.flip(1).T
    residuals = torch.linalg.vector_norm(rows @ wide - sign * values[:, None] * rows, dim=1)
    rounding = noise * len(matrix) * float(values.abs().max()) + asymmetry
    age = np.zeros((min(k + BESIDE, len(matrix)),) * 2)
    bound = tuple(relative(rounding, value) for value in values[:k].tolist())
    return Eigenpairs(
        values=tuple(sign * value for value in values[:k].tolist()),
        vectors=rows[:k].to(matrix.dtype),
        residuals=tuple(residuals[:k].tolist()),
        bound=bound,
        hvps=len(matrix),
        converged=max(bound) <= tol,
        reason=EXHAUSTED,
        certified=True,
        followed=0,
        memory=Memory(rows[: k + BESIDE].to(matrix.dtype), np.diag(values[: k + BESIDE].numpy(force=True)), age),
    )


_SMALL = 64  # parameters up to which the whole Hessian is computed


@dataclass(frozen=True, slots=True, eq=False)
class Sharpness:
    """Eigenvalues at one end of a Hessian's spectrum.

    Attributes:
        values: the largest first (or the smallest first); multiplied by ``norm_sq`` if ``spherical``.
        vectors: unit eigenvectors, name -> tensor; of the preconditioned Hessian if there is a preconditioner.
        residuals: ``|H v - value v|``, in the units of the values: an eigenvalue lies within this distance.
        bound: of the relative error of each value. If ``certified``, it holds with 99.9 % probability over the random
            start, whatever the Hessian; it knows of rounding inside the loss only as far as products show it (inputs
            far from zero in float32 can spoil more: use float64). If not, it is an estimate: a few products along
            remembered directions cannot rule out an eigenvalue that has come up in none of them.
        hvps: Hessian-vector products taken.
        converged: whether every bound is within the tolerance.
        reason: why the search stopped.
        certified: whether the search began at random, so that nothing beyond can have been missed but by bad luck.
        covers: what the Hessian is of: "one batch", "full batch" or "ghost batches"; see `HessianProducts`.
        end: "top" or "bottom".
        spherical: whether the values are those on the unit sphere, ``|w|^2`` times those of the Hessian at ``w``.
        preconditioned: whether they are those of a preconditioned Hessian.
        norm_sq: ``|w|^2`` of the selected parameters.
        loss: the loss on the data.
        names: of the selected parameters.
        pairs: what the next search begins with, if this is given to it as ``warm``.
        batches: how many the loss is the mean of.

    Example:
        >>> objective = Objective(lambda params, batch: (batch * params["w"] ** 2).sum() / 2, {"w": torch.ones(3)})
        >>> print(sharpness(objective, torch.tensor([1.0, 2.0, 4.0])))
        sharpness 4 (error at most ... with 99.9 % probability) after 3 Hessian-vector products
    """

    values: tuple[float, ...]
    vectors: tuple[Params, ...] = field(repr=False)
    residuals: tuple[float, ...]
    bound: tuple[float, ...]
    hvps: int
    converged: bool
    reason: str
    certified: bool
    covers: str
    end: str
    spherical: bool
    preconditioned: bool
    norm_sq: float
    loss: float
    names: tuple[str, ...] = field(repr=False)
    pairs: Eigenpairs = field(repr=False)
    batches: int = 1

    @property
    def value(self) -> float:
        """The first of the values."""
        return self.values[0]

    def stability_ratio(
        self,
        lr: float | torch.optim.Optimizer,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> float:
        """R: the first value over the one at which an optimizer becomes unstable.

        Below 1 stable, above 1 the top direction grows. If spherical, the threshold is that of a scale-invariant loss:
        R is then the effective learning rate times the sharpness, over 2. It is infinite where weight decay alone is
        unstable.

        Args:
            lr: an optimizer (SGD, Adam or AdamW), whose settings of the moment count; or the learning rate of an SGD.
            weight_decay: of that SGD.
            momentum: of that SGD.
            nesterov: whether its momentum is Nesterov's.

        Raises:
            EquilibriaError: if the values are the smallest ones, or preconditioned where the optimizer is not or the
                other way round, or a setting is out of range.
        """
        if self.end != "top":
            raise EquilibriaError(f"got a result with end={self.end!r}; expected the largest eigenvalues: end='top'")
        raw = self.value / self.norm_sq if self.spherical else self.value
        if hasattr(lr, "param_groups"):
            if weight_decay or momentum or nesterov:
                raise EquilibriaError("got an optimizer and settings of SGD; expected stability_ratio(optimizer) alone")
            return self._limits_of(unwrap_optimizer(lr)).ratio(raw)
        self._refuse_preconditioned("SGD")
        law = nesterov_threshold if nesterov else momentum_threshold
        threshold = float(law(lr, weight_decay, momentum=momentum, scale_invariant=self.spherical))
        return ratio_of(raw, threshold)

    def _limits_of(self, optimizer: torch.optim.Optimizer) -> Limits:
        if is_adam(optimizer) and not self.preconditioned:
            raise EquilibriaError(
                f"got {type(optimizer).__name__} for a result without its preconditioner; expected "
                "sharpness(..., preconditioner=equilibria.curvature.adam_preconditioner(objective, optimizer))"
            )
        if not is_adam(optimizer):
            self._refuse_preconditioned(type(optimizer).__name__)
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        return limits_of(optimizer, trained, scale_invariant=self.spherical)

    def _refuse_preconditioned(self, optimizer: str) -> None:
        if self.preconditioned:
            raise EquilibriaError(
                f"got a result with a preconditioner, which {optimizer} has not; expected one without, or Adam's "
                "optimizer: stability_ratio(optimizer)"
            )

    def _repr_html_(self) -> str:
        shown: str = renderer("sharpness.sharpness_card")(self)
        return shown

    def __str__(self) -> str:
        kind = "spherical " if self.spherical else "preconditioned " if self.preconditioned else ""
        shown = ", ".join(f"{value:.6g}" for value in self.values)
        sure = "at most {:.1%} with 99.9 % probability" if self.certified else "about {:.1%} or less, an estimate"
        of = (
            f" of the mean of {self.batches} batches, each normalised by itself" if self.covers == GHOST_BATCHES else ""
        )
        stopped = "" if self.converged else f"; not converged: {self.reason}"
        error = sure.format(max(self.bound))
        return f"{kind}sharpness {shown}{of} (error {error}) after {self.hvps} Hessian-vector products{stopped}"


def sharpness(
    objective: Objective,
    batch: Any,
    *,
    select: Select | None = None,
    k: int = 1,
    end: str = "top",
    spherical: bool = False,
    preconditioner: Mapping[str, Tensor] | None = None,
    tol: float = 1e-2,
    budget: int = 100,
    warm: Sharpness | None = None,
    recheck: int = 100,
    method: str = "auto",
    seed: int = 0,
) -> Sharpness:
    """The largest eigenvalues of the Hessian of a loss, by Lanczos, and how far they can be wrong.

    BatchNorm normalises by the batch, as in training, and its running statistics stay; so do weights, gradients, modes
    and random numbers. Compare the result with `equilibria.theory.stability.raw_threshold` (or, if spherical, with two
    over `effective_lr`), or with the thresholds of momentum and Adam in `equilibria.theory.thresholds`.

    Args:
        objective: of `equilibria.objective` or `equilibria.Objective`.
        batch: what the loss is evaluated on; or several batches, a list or a DataLoader, see `HessianProducts`.
        select: the parameters: names, patterns or a function of name and tensor; default: all of the objective.
        k: how many eigenvalues.
        end: "top" for the largest, "bottom" for the smallest (most negative).
        spherical: multiply by ``|w|^2``: the sharpness at the direction w/|w|, which scaling does not change. The loss
            must be scale-invariant in the selected parameters together; one product is spent to check this.
        preconditioner: name -> positive tensor P: eigenvalues of ``P^(-1/2) H P^(-1/2)``; see `adam_preconditioner`.
        tol: stop when the relative errors are at most this. The errors themselves are far smaller as a rule.
        budget: the most products to take. Up to 64 parameters the whole Hessian is computed, whatever the budget.
        warm: the result of an earlier call with the same settings, nearby in training: two products may be enough then,
            five to ten where eigenvectors turn fast; 8 + k vectors are kept in it. With another preconditioner than
            then, as long as it has changed as little as the weights. Not used up to 64 parameters.
        recheck: after this many warm starts in a row, begin at random again.
        method: "auto", "autograd" or "differences", see `HessianProducts`.
        seed: of the random start.

    Returns:
        The eigenvalues with vectors, residuals and bounds.

    Raises:
        EquilibriaError: if the loss cannot be evaluated or differentiated, a parameter is not used or not trained, k is
            larger than the number of parameters, or the loss is not scale-invariant where it must be.

    Example:
        >>> from torch import nn
        >>> from torch.nn import functional
        >>> from equilibria.objectives._objective import objective
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch = torch.randn(32, 4), torch.randint(3, (32,))
        >>> found = sharpness(objective(net, functional.cross_entropy), batch, select=["0.weight"], spherical=True)
        >>> found.converged, found.certified, found.covers
        (True, True, 'one batch')
    """
    if spherical and preconditioner is not None:
        raise EquilibriaError(
            "got spherical=True and a preconditioner; expected one of them: Adam's sphere is no sphere"
        )
    products = HessianProducts(objective, batch, select=select, method=method)
    return sharpness_of(
        products,
        k=k,
        end=end,
        spherical=spherical,
        preconditioner=preconditioner,
        tol=tol,
        budget=budget,
        warm=warm,
        recheck=recheck,
        seed=seed,
    )


def sharpness_of(
    products: HessianProducts,
    *,
    k: int = 1,
    end: str = "top",
    spherical: bool = False,
    preconditioner: Mapping[str, Tensor] | None = None,
    tol: float = 1e-2,
    budget: int = 100,
    warm: Sharpness | None = None,
    recheck: int = 100,
    seed: int = 0,
) -> Sharpness:
    """As `sharpness`, of a Hessian whose products are there already."""
    count, limit = check_request(products.size, k=k, end=end, tol=tol, budget=budget)
    scale = None if preconditioner is None else _inverse_root(products, preconditioner)
    if warm is not None:
        _check_same(warm, products, count=count, end=end, spherical=spherical, preconditioned=scale is not None)
    again = warm is not None and warm.pairs.followed < whole("recheck", recheck, low=1)
    if products.size <= _SMALL:
        matrix, widest = products.dense(), 1.0 if scale is None else float(scale.max()) ** 2
        pairs = dense_eigenpairs(
            _scaled_matrix(matrix, scale),
            k=count,
            end=end,
            tol=tol,
            noise=products.relative_error,
            asymmetry=widest * products.asymmetry,
        )
    elif warm is not None and again:
        pairs = follow(
            _scaled(products, scale), warm.pairs, end=end, tol=tol, budget=limit, noise=lambda: products.relative_error
        )
    else:
        pairs = eigenpairs(
            _scaled(products, scale),
            products.size,
            k=count,
            end=end,
            tol=tol,
            budget=limit,
            seed=seed,
            noise=lambda: products.relative_error,
            dtype=products.layout.dtype,
            device=products.layout.device,
        )
    if spherical and warm is None:
        check_invariant(products, max(map(abs, pairs.values)))
    return _result(products, pairs, end=end, spherical=spherical, preconditioned=scale is not None)


def _inverse_root(products: HessianProducts, preconditioner: Mapping[str, Tensor]) -> Tensor:
    missing = [name for name in products.layout.names if name not in preconditioner]
    if missing:
        raise EquilibriaError(
            f"got a preconditioner without parameter {missing[0]!r}; expected one for every selected parameter, or "
            "select= those that the optimizer trains"
        )
    flat = products.layout.flat({name: preconditioner[name] for name in products.layout.names})
    if not bool(((flat > 0) & torch.isfinite(flat)).all()):
        raise EquilibriaError(
            f"got a preconditioner with entries down to {float(flat.min()):g}; expected positive ones"
        )
    return flat.rsqrt()


def _scaled(products: HessianProducts, scale: Tensor | None) -> Product:
    return products if scale is None else lambda vector: scale * products(scale * vector)


def _scaled_matrix(matrix: Tensor, scale: Tensor | None) -> Tensor:
    return matrix if scale is None else scale[:, None] * matrix * scale


def _check_same(
    warm: Sharpness, products: HessianProducts, *, count: int, end: str, spherical: bool, preconditioned: bool
) -> None:
    if not isinstance(warm, Sharpness):
        raise EquilibriaError(
            f"got warm of type {type(warm).__name__}; expected the result of an earlier sharpness(...)"
        )
    now = products.layout.names, count, end, spherical, preconditioned
    then = warm.names, len(warm.values), warm.end, warm.spherical, warm.preconditioned
    if now != then or warm.pairs.vectors.shape[1] != products.size:
        raise EquilibriaError(
            f"got warm= a result for {len(warm.names)} parameters, k={then[1]}, end={then[2]!r}, "
            f"spherical={then[3]}, {_kind(then[4])}; expected one with the settings of this call: {len(now[0])} "
            f"parameters, k={count}, end={end!r}, spherical={spherical}, {_kind(preconditioned)}"
        )


def _kind(preconditioned: bool) -> str:
    return f"with{'' if preconditioned else 'out'} a preconditioner"


def _result(
    products: HessianProducts, pairs: Eigenpairs, *, end: str, spherical: bool, preconditioned: bool
) -> Sharpness:
    norm_sq = float(torch.sum(products.point.double().square()))
    unit = norm_sq if spherical else 1.0
    return Sharpness(
        values=tuple(unit * value for value in pairs.values),
        vectors=tuple(products.named(vector) for vector in pairs.vectors),
        residuals=tuple(unit * residual for residual in pairs.residuals),
        bound=pairs.bound,
        hvps=products.count,
        converged=pairs.converged,
        reason=pairs.reason,
        certified=pairs.certified,
        covers=products.covers,
        end=end,
        spherical=spherical,
        preconditioned=preconditioned,
        norm_sq=norm_sq,
        loss=products.loss,
        names=products.layout.names,
        pairs=pairs,
        batches=products.batches,
    )


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
