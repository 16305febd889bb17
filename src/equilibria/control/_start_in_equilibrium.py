"""Initial weights at the norm at which the first phase of training is settled from the beginning."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from equilibria.control._optimizer import as_number
from equilibria.control._radial import largest_cosine, radial_cosine, require_orthogonal
from equilibria.control._statistics import RunningStatistics, refuse_no_network
from equilibria.control._turning import write_units
from equilibria.errors import EquilibriaError, one_of, positive, warn_caller
from equilibria.objectives._objective import Objective, unwrap_model
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors, require_rows
from equilibria.tensors.layout import is_sharded, matrix
from equilibria.tensors.parameters import row_axes
from equilibria.tensors.statistics import normalisations
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.rules import SGD, SGDW, AdamL2, Muon, Rule


@torch.no_grad()
def outputs_of(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """All numbers that the model returns when ``loss`` calls it on a batch; the loss, if it calls something else.

    Buffers and random numbers are the caller's to put back.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> outputs_of(net, lambda batch: net(batch).sum(), torch.ones(4, 2)).shape
        torch.Size([12])
    """
    seen: list[Any] = []
    handle = unwrap_model(model).register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        value = loss(batch)
    finally:
        handle.remove()
    tensors = [leaf for leaf in pytree.tree_leaves(seen) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([tensor.double().flatten() for tensor in tensors or [value]])


def moved_by(before: Tensor, after: Tensor) -> float:
    """Root mean square change of outputs in units of their standard deviation; of a single number, of its size.

    Example:
        >>> moved_by(torch.tensor([1.0, -1.0]), torch.tensor([1.5, -0.5]))
        0.5
    """
    spread = before.std(correction=0) if before.numel() > 1 else before.abs()
    change = (after - before).square().mean().sqrt()
    return float(change / spread) if spread > 0 else float(change > 0)


Array = NDArray[np.float64]
_LARGEST_CHANGE = 0.01  # of outputs, in standard deviations; without eps it is rounding


class StartWarning(UserWarning):
    """The network is no longer what it was before its weights were rescaled."""


@dataclass(frozen=True, slots=True)
class StartingNorm:
    """A weight that was brought to its equilibrium norm.

    Attributes:
        name: of the tensor.
        before: ||w|| as it was.
        after: ||w|| as it is now.
        unit_grad_sq: L = E[||g||^2 ||w||^2] over the batches; with rows, the sum of theirs.
        angle: radians per step that the optimizer's settings turn it by from now on.
    """

    name: str
    before: float
    after: float
    unit_grad_sq: float
    angle: float


def start_in_equilibrium(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    invariant: Invariant,
    loss: Callable[[Any], Tensor] | Objective,
    batches: Iterable[Any],
    lr: float | None = None,
    granularity: str = "tensor",
) -> list[StartingNorm]:
    """Rescale scale-invariant weights to the norm at which lr and weight decay are in balance, before training.

    The network's function in training mode is unchanged, up to the eps of its norms; how fast it turns is not: without
    this, a layer whose initial norm is f times the equilibrium's turns by f^-2 (SGD) or f^-1 (AdamW, Lion) of the
    equilibrium angle until weight decay has brought it there. The result does not depend on the scale of the
    initialisation.

    For SGD the equilibrium norm ``(L lr / (2 wd (1-momentum)))^(1/4)`` (see `theory.equilibrium`) needs L, which is
    measured on the batches at the initial weights; it enters by its fourth root. Where gradients grow or shrink by much
    in the first steps, equilibrium moves with them. For AdamW and Lion it depends on settings and size alone.

    Gradients, buffers and random numbers are put back. Running statistics of a fresh network hold nothing yet; if a
    batch has been averaged into those behind the weights, as in a network trained before, they are rescaled with them,
    so that eval mode is unchanged, too. Frozen weights stay as they are. If outputs move by more than 0.01 of their
    standard deviation, because a norm has come down to where eps matters, a `StartWarning` says by how much.

    Args:
        model: the network, in training mode.
        optimizer: what will train it, before its first step.
        invariant: which tensors are scale-invariant: names, tensors, or a result of `equilibria.symmetries`, of
            which ``sym.alone`` is what counts.
        loss: of one batch, as in training: ``lambda batch: F.cross_entropy(model(batch[0]), batch[1])``; or, for a
            network with fresh running statistics, the `equilibria.objective` that symmetries were found with.
        batches: a few batches, of the size used in training.
        lr: learning rate of the first phase, where the groups' present one is not it: a warm-up scheduler has already
            set its first, small one. Without it, call this before the scheduler is made.
        granularity: "tensor", or "row": each output row gets the norm of its own equilibrium, which needs rows that are
            invariant one by one, as before BatchNorm.

    Returns:
        What was done to each tensor.

    Raises:
        EquilibriaError: bad input, an optimizer that has begun, an lr that a scheduler has changed, weights that are
            not invariant, or rows of weights with used running statistics behind them; nothing was changed.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(2)]
        >>> loss = lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
        >>> done = start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss, batches=batches)
        >>> round(done[0].after, 3), round(optimizer.param_groups[0]["lr"], 3)  # about (32 entries * lr / (2 wd))^0.5
        (0.4, 0.001)
    """
    refuse_no_network(model)
    found = _trained(invariant_tensors(invariant, optimizer=optimizer, model=model))
    one_of("granularity", granularity, ("tensor", "row"))
    of_batch = partial(loss, found) if isinstance(loss, Objective) else loss
    _require_of_batch(of_batch)
    _refuse_single(batches)
    if granularity == "row":
        require_rows(invariant, found)
    numbering = row_axes(model)
    axes = {name: numbering.get(id(w), 0) if granularity == "row" else None for name, w in found.items()}
    rules = {name: _rule(name, weight, optimizer, lr) for name, weight in found.items()}
    for name, weight in found.items():
        _check(name, weight, axes[name], optimizer)
    pool = iter(batches)
    first = list(islice(pool, 1))
    with _used_statistics(model, found, granularity) as statistics:
        squares = _mean_squares(model, found, axes, of_batch, chain(first, pool))
        wanted = {name: _settled(rules[name], squares[name], weight, axes[name]) for name, weight in found.items()}
        if statistics is not None:
            statistics.require()
    with _compared(model, of_batch, first[0]):
        done = [_rescale(name, w, axes[name], wanted[name], squares[name]) for name, w in found.items()]
        if statistics is not None:
            for each in done:
                statistics.rescale([each.name], each.after / each.before)
    return done


def _trained(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that move: a frozen weight is in no equilibrium."""
    moving = {name: weight for name, weight in found.items() if weight.requires_grad}
    if not moving:
        raise EquilibriaError(f"got {', '.join(list(found)[:3])}, all frozen; expected weights that are trained")
    return moving


@contextmanager
def _used_statistics(
    model: nn.Module, found: dict[str, Tensor], granularity: str
) -> Iterator[RunningStatistics | None]:
    """The running statistics behind the weights, found when the loss calls the model; None if they are still fresh."""
    used = [name for name, module in normalisations(unwrap_model(model)).items() if _is_used(module)]
    if not used:
        yield None
        return
    if granularity == "row":
        raise EquilibriaError(
            f"got granularity='row' and running statistics in {used[0]} that are in use; expected fresh ones: rows get "
            "factors of their own, which eval mode would show. Use granularity='tensor', or reset_running_stats()"
        )
    statistics = RunningStatistics(model, found)
    try:
        yield statistics
    finally:
        statistics.close()


def _is_used(module: nn.Module) -> bool:
    """Whether a batch has been averaged in: the mean is no longer 0 or the variance no longer 1."""
    mean, var = module.running_mean, module.running_var
    return bool(torch.any(mean != 0)) or bool(torch.any(var != 1))  # type: ignore[arg-type]


def _check(name: str, weight: Tensor, axis: int | None, optimizer: Optimizer) -> None:
    if optimizer.state.get(weight):
        raise EquilibriaError(
            f"got an optimizer that has stepped {name} already; expected one before its first step: its state belongs "
            "to the present norm"
        )
    if is_sharded(weight):
        raise EquilibriaError(f"got {name} as a DTensor; expected whole tensors: rescale before the model is sharded")
    if axis is not None and weight.ndim < 2:
        raise EquilibriaError(
            f"got granularity='row' for {name} of shape {tuple(weight.shape)}; expected 2 axes or more"
        )
    if not bool((_norms(weight, axis) > 0).all()):
        raise EquilibriaError(
            f"got {name} with a norm of 0; expected a direction in every {'tensor' if axis is None else 'row'}"
        )


def _require_of_batch(loss: Callable[[Any], Tensor]) -> None:
    """Refuse a loss of outputs and targets: which part of a batch is what, only the caller knows."""
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None)
    except ValueError:  # some that are written in C do not tell
        return
    except TypeError as error:
        raise EquilibriaError(
            f"got loss={getattr(loss, '__name__', type(loss).__name__)}, which does not take one batch: {error}; "
            "expected a function of it, e.g. loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1])"
        ) from None


def _refuse_single(batches: Any) -> None:
    """Refuse one batch in the place of several: its parts would be taken for batches."""
    pair = list(batches) if isinstance(batches, tuple | list) and len(batches) == 2 else []
    shapes = [part.shape for part in pair if isinstance(part, Tensor) and part.ndim]
    is_one = len(shapes) == 2 and shapes[0] != shapes[1] and shapes[0][0] == shapes[1][0]
    if is_one or isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise EquilibriaError(
            f"got batches={type(batches).__name__}, which {'is' if is_one else 'looks like'} a single batch; expected "
            "a few of them: batches=[batch]"
        )


@contextmanager
def _compared(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Iterator[None]:
    """Warns if the network computes something else after what is done inside."""
    with _undisturbed(model):
        before = outputs_of(model, loss, batch)
    yield
    with _undisturbed(model):
        moved = moved_by(before, outputs_of(model, loss, batch))
    if moved > _LARGEST_CHANGE:
        warn_caller(
            f"outputs moved by {moved:.2g} of their standard deviation: the norm that lr and weight decay ask for, or "
            "the one before, is so small that the eps of a normalisation behind a weight matters. Where it does, "
            "weights are not scale-invariant, and the law is off: raise lr, lower weight decay or lower eps",
            StartWarning,
        )


def _rule(name: str, weight: Tensor, optimizer: Optimizer, lr: float | None) -> Rule:
    group = next(g for g in optimizer.param_groups if any(each is weight for each in g["params"]))
    if lr is None:
        _refuse_warm_up(name, group)
    chosen = as_number("lr", group["lr"]) if lr is None else positive("lr", lr)
    law = rule_of_group(optimizer, {**group, "lr": chosen})
    if law.rule is None:
        raise EquilibriaError(f"got an optimizer without an equilibrium for {name}: {law.reason}")
    return law.rule


def _refuse_warm_up(name: str, group: Mapping[str, Any]) -> None:
    """Refuse to guess which learning rate is meant, once a scheduler has changed it; OneCycleLR has a max_lr."""
    present = as_number("lr", group["lr"])
    typed = as_number("lr", group.get("max_lr", group.get("initial_lr", present)))
    if not math.isclose(present, typed, rel_tol=1e-6):
        raise EquilibriaError(
            f"got lr={present:g} for {name}, which a scheduler has made of {typed:g}; expected the one of the first "
            f"phase: give lr={typed:g}, or lr={present:g}, or call this before the scheduler is made"
        )


def _mean_squares(
    model: nn.Module,
    found: dict[str, Tensor],
    axes: dict[str, int | None],
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
) -> dict[str, Array]:
    """E[||g||^2 ||w||^2] of every unit of every tensor."""
    sums: dict[str, Array] = {}
    radial: dict[str, float] = dict.fromkeys(found, 0.0)
    count = 0
    with _undisturbed(model):
        for batch in batches:
            count += 1  # they may be a generator, and none
            gradients = torch.autograd.grad(
                loss(batch), list(found.values()), allow_unused=True, materialize_grads=True
            )
            for (name, weight), gradient in zip(found.items(), gradients, strict=True):
                sizes = (_norms(weight, axes[name]) * _norms(gradient, axes[name], like=weight)).square()
                sums[name] = sums.get(name, 0.0) + sizes.cpu().numpy()
                radial[name] += radial_cosine(weight, gradient, axis=axes[name]) ** 2
    if count == 0:
        raise EquilibriaError("got no batches; expected a few, to measure the gradient on")
    for name in found:
        _check_measured(name, sums[name])
        limit = largest_cosine(found[name], axes[name])
        require_orthogonal(name, (radial[name] / count) ** 0.5, limit=limit, axis=axes[name])
    return {name: total / count for name, total in sums.items()}


def _check_measured(name: str, total: Array) -> None:
    if not np.isfinite(total).all():
        raise EquilibriaError(f"got a gradient of {name} that is not finite; expected finite ones, on all batches")
    if not total.any():
        raise EquilibriaError(
            f"got gradients of zero for {name} on all batches; expected some, to find its equilibrium"
        )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts buffers and random numbers back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, held in buffers:
                    buffer.copy_(held)


@dataclass(frozen=True, slots=True)
class _Target:
    """Equilibrium norm of every unit, NaN for units without a gradient, which have none; and the angle."""

    norms: Array
    angle: float


def _settled(rule: Rule, mean_squares: Array, weight: Tensor, axis: int | None) -> _Target:
    entries = float(weight.numel() // len(mean_squares))
    alive = mean_squares > 0
    if isinstance(rule, AdamL2):  # the only one whose angle depends on the gradient: one by one
        each = [rule.equilibrium(unit_grad_sq=float(x), dim=entries) for x in mean_squares[alive]]
        found: Any = [one.norm for one in each]
        angle = float(np.sqrt(np.mean([one.angle**2 for one in each])))
    else:
        settled = _equilibrium(rule, mean_squares[alive], entries, weight, axis)
        found, angle = settled.norm, float(settled.angle)
    norms = np.full(len(mean_squares), np.nan)
    norms[alive] = found
    return _Target(norms, angle)


def _equilibrium(rule: Rule, mean_squares: Array, entries: float, weight: Tensor, axis: int | None) -> Equilibrium:
    if isinstance(rule, SGD | SGDW):
        return rule.equilibrium(mean_squares)
    if not isinstance(rule, Muon):
        return rule.equilibrium(dim=entries)
    if axis is not None:
        raise EquilibriaError("got granularity='row' with Muon; expected 'tensor': it steps whole matrices")
    return rule.equilibrium(shape=tuple(weight.shape))  # type: ignore[arg-type]


@torch.no_grad()
def _rescale(name: str, weight: Tensor, axis: int | None, target: _Target, mean_squares: Array) -> StartingNorm:
    now = _norms(weight, axis)
    factor = (torch.as_tensor(target.norms, device=now.device) / now).nan_to_num(nan=1.0)
    units = matrix(weight, axis=axis, like=weight)
    units.mul_(factor.to(units.dtype).unsqueeze(1))
    write_units(weight, units, axis=axis)
    before, after = (float(each.square().sum().sqrt()) for each in (now, _norms(weight, axis)))
    return StartingNorm(name, before, after, float(mean_squares.sum()), target.angle)


def _norms(tensor: Tensor, axis: int | None, *, like: Tensor | None = None) -> Tensor:
    held = matrix(tensor.detach(), axis=axis, like=tensor.detach() if like is None else like.detach())
    found: Tensor = torch.linalg.vector_norm(held, dim=1, dtype=torch.float64)
    return found
