"""The sharpness of a loss: the largest eigenvalue of its Hessian, with a bound on its error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equilibria._display import renderer
from equilibria.curvature._batches import GHOST_BATCHES, Coverage
from equilibria.curvature._eigenpairs import Eigenpairs, Product, SpectrumEnd, check_request, dense_eigenpairs
from equilibria.curvature._hvp import HessianProducts, HvpMethod
from equilibria.curvature._invariance import check_loss_is_scale_invariant
from equilibria.curvature._lanczos import eigenpairs
from equilibria.curvature._thresholds import StabilityLimit, is_adam, ratio_to_threshold, stability_limit
from equilibria.curvature._warm_start import update_eigenpairs
from equilibria.errors import EquilibriaError, whole
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select, unwrap_optimizer
from equilibria.theory.stability import momentum_threshold, nesterov_threshold

_DENSE_UP_TO = 64  # parameters: the whole Hessian is computed


@dataclass(frozen=True, slots=True, eq=False)
class Sharpness:
    """Eigenvalues at one end of a Hessian's spectrum.

    Attributes:
        values: the largest first (or the smallest first); multiplied by ``norm_sq`` if ``spherical``.
        vectors: unit eigenvectors, name -> tensor; of the preconditioned Hessian if there is a preconditioner.
        residuals: ``|H v - value v|``, in the units of the values: an eigenvalue lies within this distance.
        bound: of the relative error of each value. If ``certified``, it holds with 99.9 % probability over the random
            start, whatever the Hessian; it includes rounding inside the loss only as far as products show it (inputs
            far from zero in float32 can spoil more: use float64). If not, it is an estimate: a few products along
            remembered directions cannot rule out an eigenvalue whose eigenvector is orthogonal to them all.
        hvps: number of Hessian-vector products.
        converged: whether every bound is within the tolerance.
        reason: why the search stopped.
        certified: whether the search began at random, so that it misses an eigenvalue beyond only by bad luck.
        covers: data of the Hessian: "one batch", "full batch" or "ghost batches"; see `HessianProducts`.
        end: "top" or "bottom".
        spherical: whether the values are those on the unit sphere, ``|w|^2`` times those of the Hessian at ``w``.
        preconditioned: whether they are those of a preconditioned Hessian.
        norm_sq: ``|w|^2`` of the selected parameters.
        loss: the loss on the data.
        names: of the selected parameters.
        pairs: where the next search begins, if this result is passed to it as ``warm``.
        batches: number of batches whose mean loss it is.

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
    covers: Coverage
    end: SpectrumEnd
    spherical: bool
    preconditioned: bool
    norm_sq: float
    loss: float
    names: tuple[str, ...] = field(repr=False)
    pairs: Eigenpairs = field(repr=False)
    batches: int = 1

    @property
    def value(self) -> float:
        """The first value: the sharpness if ``end`` is "top"."""
        return self.values[0]

    def stability_ratio(
        self,
        lr: float | torch.optim.Optimizer,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> float:
        """R: the first value over the value at which an optimizer becomes unstable.

        Below 1 training is stable, above 1 it diverges along the top direction. If spherical, the threshold is that of
        a scale-invariant loss: R is then half the effective learning rate times the sharpness. R is infinite where
        weight decay alone is unstable.

        Args:
            lr: an optimizer (SGD, Adam or AdamW), whose present settings count; or the learning rate of SGD.
            weight_decay: of SGD.
            momentum: of SGD.
            nesterov: whether the momentum is Nesterov's.

        Raises:
            EquilibriaError: if the values are the smallest ones, if only one of result and optimizer is
                preconditioned, or if a setting is out of range.
        """
        if self.end != "top":
            raise EquilibriaError(f"got a result with end={self.end!r}; expected the largest eigenvalues: end='top'")
        raw = self.value / self.norm_sq if self.spherical else self.value
        if hasattr(lr, "param_groups"):
            if weight_decay or momentum or nesterov:
                raise EquilibriaError("got an optimizer and settings of SGD; expected stability_ratio(optimizer) alone")
            return self._limit_of(unwrap_optimizer(lr)).ratio(raw)
        self._check_not_preconditioned("SGD")
        law = nesterov_threshold if nesterov else momentum_threshold
        threshold = float(law(lr, weight_decay, momentum=momentum, scale_invariant=self.spherical))
        return ratio_to_threshold(raw, threshold)

    def _limit_of(self, optimizer: torch.optim.Optimizer) -> StabilityLimit:
        if is_adam(optimizer) and not self.preconditioned:
            raise EquilibriaError(
                f"got {type(optimizer).__name__} for a result without its preconditioner; expected one with it: "
                "sharpness(..., preconditioner=equilibria.curvature.adam_preconditioner(objective, optimizer))",
                argument="optimizer",
            )
        if not is_adam(optimizer):
            self._check_not_preconditioned(type(optimizer).__name__)
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        return stability_limit(optimizer, trained, scale_invariant=self.spherical)

    def _check_not_preconditioned(self, optimizer: str) -> None:
        if self.preconditioned:
            raise EquilibriaError(
                f"got a preconditioned result, but {optimizer} is not preconditioned; expected a result without: "
                "recompute without preconditioner=, or pass Adam's optimizer to stability_ratio"
            )

    def _repr_html_(self) -> str:
        html: str = renderer("notebook.sharpness_card")(self)
        return html

    def __str__(self) -> str:
        kind = "spherical " if self.spherical else "preconditioned " if self.preconditioned else ""
        values = ", ".join(f"{value:.6g}" for value in self.values)
        ghost = self.covers == GHOST_BATCHES
        data = f" of the mean of {self.batches} batches, each normalised by itself" if ghost else ""
        error = f"{max(self.bound):.1%}"
        error = f"at most {error} with 99.9 % probability" if self.certified else f"about {error} or less, an estimate"
        stopped = "" if self.converged else f"; not converged: {self.reason}"
        return f"{kind}sharpness {values}{data} (error {error}) after {self.hvps} Hessian-vector products{stopped}"


def sharpness(
    objective: Objective,
    batch: Any,
    *,
    select: Select | None = None,
    k: int = 1,
    end: SpectrumEnd = "top",
    spherical: bool = False,
    preconditioner: Mapping[str, Tensor] | None = None,
    tol: float = 1e-2,
    budget: int = 100,
    warm: Sharpness | None = None,
    recheck: int = 100,
    method: HvpMethod = "auto",
    seed: int = 0,
) -> Sharpness:
    """Compute the largest eigenvalues of the Hessian of a loss by Lanczos, with a bound on their errors.

    BatchNorm normalises by the batch, as in training, and its running statistics stay; so do weights, gradients, modes
    and random numbers. Compare the result with the threshold of an optimizer: `Sharpness.stability_ratio`.

    Args:
        objective: from `equilibria.objective`, or an `equilibria.Objective`.
        batch: one batch; or several, a list or a DataLoader, see `HessianProducts`.
        select: the parameters: names, patterns or a function of name and tensor; default: all of the objective.
        k: number of eigenvalues.
        end: "top" for the largest, "bottom" for the smallest (most negative).
        spherical: multiply by ``|w|^2``: the sharpness at the direction w/|w|, which scaling does not change. The loss
            must be scale-invariant in the selected parameters together; one product checks this.
        preconditioner: name -> positive tensor P: eigenvalues of ``P^(-1/2) H P^(-1/2)``; see `adam_preconditioner`.
        tol: stop when the bounds of the relative errors are at most this. The errors are usually far smaller.
        budget: the largest number of products. Up to 64 parameters the whole Hessian is computed, whatever the budget.
        warm: the result of an earlier call with the same settings, nearby in training. Two products may then be enough,
            five to ten where eigenvectors turn fast; the result holds 8 + k vectors. The preconditioner may have
            changed as little as the weights. Not used up to 64 parameters.
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
        >>> from equilibria.objectives import objective
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch = torch.randn(32, 4), torch.randint(3, (32,))
        >>> result = sharpness(objective(net, functional.cross_entropy), batch, select=["0.weight"], spherical=True)
        >>> result.converged, result.certified, result.covers
        (True, True, 'one batch')
    """
    if spherical and preconditioner is not None:
        raise EquilibriaError(
            "got spherical=True and preconditioner=, which are mutually exclusive; expected one of them"
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
    end: SpectrumEnd = "top",
    spherical: bool = False,
    preconditioner: Mapping[str, Tensor] | None = None,
    tol: float = 1e-2,
    budget: int = 100,
    warm: Sharpness | None = None,
    recheck: int = 100,
    seed: int = 0,
) -> Sharpness:
    """As `sharpness`, for existing Hessian products."""
    count, limit = check_request(products.size, k=k, end=end, tol=tol, budget=budget)
    scale = None if preconditioner is None else _inverse_root(products, preconditioner)
    if warm is not None:
        _check_same_settings(
            warm, products, count=count, end=end, spherical=spherical, preconditioned=scale is not None
        )
    may_be_warm = warm is not None and warm.pairs.followed < whole("recheck", recheck, low=1)
    if products.size <= _DENSE_UP_TO:
        matrix, largest_scale = products.dense(), 1.0 if scale is None else float(scale.max()) ** 2
        pairs = dense_eigenpairs(
            matrix if scale is None else scale[:, None] * matrix * scale,
            k=count,
            end=end,
            tol=tol,
            noise=products.relative_error,
            asymmetry=largest_scale * products.asymmetry,
        )
    elif warm is not None and may_be_warm:
        pairs = update_eigenpairs(
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
        check_loss_is_scale_invariant(products, max(map(abs, pairs.values)))
    return _result(products, pairs, end=end, spherical=spherical, preconditioned=scale is not None)


def _inverse_root(products: HessianProducts, preconditioner: Mapping[str, Tensor]) -> Tensor:
    """``P^(-1/2)`` as a flat vector."""
    missing = [name for name in products.layout.names if name not in preconditioner]
    if missing:
        raise EquilibriaError(
            f"got a preconditioner without parameter {missing[0]!r}; expected one for every selected parameter, or "
            "select= those that the optimizer trains",
            argument="preconditioner",
        )
    flat = products.layout.flat({name: preconditioner[name] for name in products.layout.names})
    if not bool(((flat > 0) & torch.isfinite(flat)).all()):
        raise EquilibriaError(
            f"got a preconditioner with entries down to {float(flat.min()):g}; expected positive ones",
            argument="preconditioner",
        )
    return flat.rsqrt()


def _scaled(products: HessianProducts, scale: Tensor | None) -> Product:
    return products if scale is None else lambda vector: scale * products(scale * vector)


def _check_same_settings(
    warm: Sharpness, products: HessianProducts, *, count: int, end: SpectrumEnd, spherical: bool, preconditioned: bool
) -> None:
    if not isinstance(warm, Sharpness):
        raise EquilibriaError(
            f"got warm of type {type(warm).__name__}; expected the result of an earlier sharpness(...)", argument="warm"
        )
    now = products.layout.names, count, end, spherical, preconditioned
    then = warm.names, len(warm.values), warm.end, warm.spherical, warm.preconditioned
    if now != then or warm.pairs.vectors.shape[1] != products.size:
        raise EquilibriaError(
            f"got warm= a result for {len(warm.names)} parameters, k={then[1]}, end={then[2]!r}, "
            f"spherical={then[3]}, preconditioned={then[4]}; expected one with the settings of this call: "
            f"{len(now[0])} parameters, k={count}, end={end!r}, spherical={spherical}, preconditioned={preconditioned}",
            argument="warm",
        )


def _result(
    products: HessianProducts, pairs: Eigenpairs, *, end: SpectrumEnd, spherical: bool, preconditioned: bool
) -> Sharpness:
    norm_sq = float(torch.sum(products.point.double().square()))
    factor = norm_sq if spherical else 1.0
    return Sharpness(
        values=tuple(factor * value for value in pairs.values),
        vectors=tuple(products.named(vector) for vector in pairs.vectors),
        residuals=tuple(factor * residual for residual in pairs.residuals),
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
    """Compute the spherical sharpness of every group of parameters by itself, the others held fixed.

    Unlike the joint sharpness, it does not change if one layer is scaled against another.

    Args:
        objective: from `equilibria.objective`, or an `equilibria.Objective`.
        batch: as for `sharpness`.
        groups: names of tensors that are invariant alone, such as ``symmetries(...).alone``; or label -> names that are
            invariant together.
        tol: as for `sharpness`.
        budget: the largest number of products for each group.
        warm: an earlier result of this function.
        seed: of the random starts.

    Returns:
        Label -> result.

    Raises:
        EquilibriaError: as for `sharpness`, or if there are no groups.
    """
    if isinstance(groups, str):
        raise EquilibriaError(
            f"got groups={groups!r}; expected a list of names, or a dict of label -> names", argument="groups"
        )
    named = dict(groups) if isinstance(groups, Mapping) else {name: [name] for name in groups}
    if not named:
        raise EquilibriaError(
            "got no groups; expected names, such as symmetries(objective, batches).alone", argument="groups"
        )
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
