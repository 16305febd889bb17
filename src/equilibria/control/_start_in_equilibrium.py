"""Rescales initial weights to the equilibrium norm of the first phase of training."""

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

from equilibria.control._invariance_check import largest_cosine, radial_cosine, require_orthogonal
from equilibria.control._optimizer import as_number
from equilibria.control._running_statistics import RunningStatistics, require_network
from equilibria.control._units import Granularity, require_units, unit_axes, unit_norms, write_units
from equilibria.errors import EquilibriaError, positive, warn_caller
from equilibria.objectives._objective import Objective, unwrap_model
from equilibria.optimizers.controllers import control_log
from equilibria.optimizers.rules import rule_of_group
from equilibria.tensors.invariance import Invariant, invariant_tensors
from equilibria.tensors.layout import is_sharded, matrix
from equilibria.tensors.statistics import normalisations
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.rules import SGD, SGDW, AdamL2, Muon, Rule

Array = NDArray[np.float64]
_LARGEST_CHANGE = 0.01  # of outputs, in standard deviations; without eps it is rounding


class StartWarning(UserWarning):
    """Rescaling the weights changed the network's outputs."""


@dataclass(frozen=True, slots=True)
class StartingNorm:
    """A weight that was rescaled to its equilibrium norm.

    Attributes:
        name: the tensor's name.
        before: ||w|| before.
        after: ||w|| now.
        unit_grad_sq: L = E[||g||^2 ||w||^2] over the batches; with rows, the sum of theirs.
        angle: equilibrium angle of the optimizer's settings, in radians per step.
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
    granularity: Granularity = "tensor",
) -> list[StartingNorm]:
    """Rescale scale-invariant weights to the equilibrium norm of lr and weight decay, before training.

    The network's function in training mode is unchanged, up to the eps of its norms; its speed changes. Otherwise a
    layer whose initial norm is f times the equilibrium norm turns by f^-2 (SGD) or f^-1 (AdamW, Lion) of the
    equilibrium angle until weight decay has reduced the norm. The result does not depend on the scale of the
    initialisation.

    For SGD the equilibrium norm ``(L lr / (2 wd (1-momentum)))^(1/4)`` (see `theory.equilibrium`) needs L, which is
    measured on the batches at the initial weights and enters by its fourth root. Where gradients grow or shrink a lot
    in the first steps, the equilibrium moves with them. For AdamW and Lion it depends on settings and size alone.

    Gradients, buffers and random numbers are restored. Running statistics of a fresh network are unused. If a batch has
    been averaged into those behind the weights, as in a network trained before, they are rescaled too, so that eval
    mode is unchanged. Frozen weights stay as they are. If outputs move by more than 0.01 of their standard deviation,
    because eps matters at the new or the old norm, a `StartWarning` gives the number.

    Args:
        model: the network, in training mode.
        optimizer: the optimizer that will train it, before its first step.
        invariant: the scale-invariant weights: names, tensors, or a result of `equilibria.symmetries`, of which
            ``sym.alone`` is used.
        loss: of one batch, as in training: ``lambda batch: F.cross_entropy(model(batch[0]), batch[1])``; or, for a
            network with fresh running statistics, the `equilibria.objective` passed to `equilibria.symmetries`.
        batches: a few batches, of the size used in training.
        lr: learning rate of the first phase, if it is not the groups' present one: a warm-up scheduler has already set
            its first, small one. Without ``lr``, call this function before making the scheduler.
        granularity: "tensor", or "row": each output row gets its own equilibrium norm, which needs rows that are
            invariant one by one, as before BatchNorm.

    Returns:
        The norms of each tensor before and after.

    Raises:
        EquilibriaError: bad input, an optimizer that has already stepped, an lr that a scheduler has changed, weights
            that are not invariant, or granularity "row" with used running statistics behind the weights. Nothing has
            been changed then.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        >>> batches = [(torch.randn(16, 4), torch.randint(2, (16,))) for _ in range(2)]
        >>> loss = lambda batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
        >>> done = start_in_equilibrium(net, optimizer, invariant=["0.weight"], loss=loss, batches=batches)
        >>> round(done[0].after, 3), round(optimizer.param_groups[0]["lr"], 3)  # about (32 entries * lr / (2 wd))^0.5
        (0.4, 0.001)
    """
    require_network(model)
    weights = _trained(invariant_tensors(invariant, optimizer=optimizer, model=model))
    loss_of_batch = partial(loss, weights) if isinstance(loss, Objective) else loss
    _require_of_batch(loss_of_batch)
    _refuse_single(batches)
    axes = unit_axes(weights, invariant=invariant, model=model, granularity=granularity)
    rules = {name: _rule(name, weight, optimizer, lr) for name, weight in weights.items()}
    for name, weight in weights.items():
        _check(name, weight, axes[name], optimizer)
    pool = iter(batches)
    first = list(islice(pool, 1))
    with _used_statistics(model, weights, granularity) as statistics:
        squares = _mean_squares(model, weights, axes, loss_of_batch, chain(first, pool))
        targets = {name: _target(rules[name], squares[name], weight, axes[name]) for name, weight in weights.items()}
        if statistics is not None:
            statistics.require()
    with _compared(model, loss_of_batch, first[0]):
        changes = [_rescale(name, w, axes[name], targets[name], squares[name]) for name, w in weights.items()]
        if statistics is not None:
            for change in changes:
                statistics.rescale([change.name], change.after / change.before)
    control_log(optimizer).equilibrium_lr |= {id(weight): rules[name].lr for name, weight in weights.items()}
    return changes


# ---- checks


def _trained(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that are trained: a frozen weight has no equilibrium."""
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    if not trained:
        raise EquilibriaError(
            f"got {', '.join(list(weights)[:3])}, all frozen; expected weights that are trained", argument="invariant"
        )
    return trained


@contextmanager
def _used_statistics(
    model: nn.Module, weights: dict[str, Tensor], granularity: str
) -> Iterator[RunningStatistics | None]:
    """The running statistics behind the weights, located when the loss calls the model; None if they are fresh."""
    used = [name for name, module in normalisations(unwrap_model(model)).items() if _is_used(module)]
    if not used:
        yield None
        return
    if granularity == "row":
        raise EquilibriaError(
            f"got granularity='row' and running statistics in {used[0]} that are in use; expected fresh ones: rows get "
            "different factors, which would change eval mode. Use granularity='tensor', or reset_running_stats()",
            argument="granularity",
        )
    statistics = RunningStatistics(model, weights)
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
            f"got an optimizer that has already stepped {name}; expected one before its first step: its state belongs "
            "to the present norm",
            argument="optimizer",
        )
    if is_sharded(weight):
        raise EquilibriaError(
            f"got {name} as a DTensor; expected whole tensors: rescale before the model is sharded",
            argument="invariant",
        )
    require_units(name, weight, axis=axis)


def _require_of_batch(loss: Callable[[Any], Tensor]) -> None:
    """Raise for a loss of outputs and targets: only the caller knows which part of a batch is which."""
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None)
    except ValueError:  # functions written in C may have no signature
        return
    except TypeError as error:
        raise EquilibriaError(
            f"got loss={getattr(loss, '__name__', type(loss).__name__)}, which does not take one batch: {error}; "
            "expected a function of it, e.g. loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1])",
            argument="loss",
        ) from None


def _refuse_single(batches: Any) -> None:
    """Raise for one batch in place of several: its parts would be taken for batches."""
    pair = list(batches) if isinstance(batches, tuple | list) and len(batches) == 2 else []
    shapes = [part.shape for part in pair if isinstance(part, Tensor) and part.ndim]
    is_one = len(shapes) == 2 and shapes[0] != shapes[1] and shapes[0][0] == shapes[1][0]
    if is_one or isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise EquilibriaError(
            f"got batches={type(batches).__name__}, which {'is' if is_one else 'looks like'} a single batch; expected "
            "a few of them: batches=[batch]",
            argument="batches",
        )


def _rule(name: str, weight: Tensor, optimizer: Optimizer, lr: float | None) -> Rule:
    group = next(g for g in optimizer.param_groups if any(param is weight for param in g["params"]))
    if lr is None:
        _refuse_warm_up(name, group)
    chosen = as_number("lr", group["lr"]) if lr is None else positive("lr", lr)
    law = rule_of_group(optimizer, {**group, "lr": chosen})
    if law.rule is None:
        raise EquilibriaError(f"got an optimizer without an equilibrium for {name}: {law.reason}", argument="optimizer")
    return law.rule


def _refuse_warm_up(name: str, group: Mapping[str, Any]) -> None:
    """Raise if a scheduler has changed the learning rate: which one is meant is the caller's choice."""
    present = as_number("lr", group["lr"])
    typed = as_number("lr", group.get("max_lr", group.get("initial_lr", present)))  # max_lr: OneCycleLR
    if not math.isclose(present, typed, rel_tol=1e-6):
        raise EquilibriaError(
            f"got lr={present:g} for {name}, which a scheduler has changed from {typed:g}; expected the lr of the "
            f"first phase: pass lr={typed:g} or lr={present:g}, or call this before making the scheduler",
            argument="lr",
        )


# ---- the measurement


def _mean_squares(
    model: nn.Module,
    weights: dict[str, Tensor],
    axes: dict[str, int | None],
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
) -> dict[str, Array]:
    """E[||g||^2 ||w||^2] of every unit of every tensor."""
    sums: dict[str, Array] = {}
    radial: dict[str, float] = dict.fromkeys(weights, 0.0)
    count = 0
    with _undisturbed(model):
        for batch in batches:
            count += 1  # a generator has no length, and may be empty
            gradients = torch.autograd.grad(
                loss(batch), list(weights.values()), allow_unused=True, materialize_grads=True
            )
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                axis = axes[name]
                sizes = (unit_norms(weight, axis=axis) * unit_norms(gradient, axis=axis, like=weight)).square()
                sums[name] = sums.get(name, 0.0) + sizes.cpu().numpy()
                radial[name] += radial_cosine(weight, gradient, axis=axis) ** 2
    if count == 0:
        raise EquilibriaError("got no batches; expected a few, to measure the gradient on", argument="batches")
    for name, weight in weights.items():
        _check_measured(name, sums[name])
        limit = largest_cosine(weight, axes[name])
        require_orthogonal(name, (radial[name] / count) ** 0.5, limit=limit, axis=axes[name])
    return {name: total / count for name, total in sums.items()}


def _check_measured(name: str, total: Array) -> None:
    if not np.isfinite(total).all():
        raise EquilibriaError(
            f"got a gradient of {name} that is not finite; expected finite ones, on all batches", argument="batches"
        )
    if not total.any():
        raise EquilibriaError(
            f"got gradients of zero for {name} on all batches; expected some, to find its equilibrium",
            argument="batches",
        )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers after the body."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


# ---- the equilibrium norms


@dataclass(frozen=True, slots=True)
class _Target:
    """Equilibrium norm of every unit, NaN for units without a gradient, which have none; and the angle."""

    norms: Array
    angle: float


def _target(rule: Rule, mean_squares: Array, weight: Tensor, axis: int | None) -> _Target:
    entries = float(weight.numel() // len(mean_squares))
    alive = mean_squares > 0
    if isinstance(rule, AdamL2):  # the only one whose angle depends on the gradient: one by one
        equilibria = [rule.equilibrium(unit_grad_sq=float(x), dim=entries) for x in mean_squares[alive]]
        alive_norms: Any = [equilibrium.norm for equilibrium in equilibria]
        angle = float(np.sqrt(np.mean([equilibrium.angle**2 for equilibrium in equilibria])))
    else:
        equilibrium = _equilibrium(rule, mean_squares[alive], entries, weight, axis)
        alive_norms, angle = equilibrium.norm, float(equilibrium.angle)
    norms = np.full(len(mean_squares), np.nan)
    norms[alive] = alive_norms
    return _Target(norms, angle)


def _equilibrium(rule: Rule, mean_squares: Array, entries: float, weight: Tensor, axis: int | None) -> Equilibrium:
    if isinstance(rule, SGD | SGDW):
        return rule.equilibrium(mean_squares)
    if not isinstance(rule, Muon):
        return rule.equilibrium(dim=entries)
    if axis is not None:
        raise EquilibriaError(
            "got granularity='row' with Muon; expected 'tensor': it steps whole matrices", argument="granularity"
        )
    return rule.equilibrium(shape=tuple(weight.shape))  # type: ignore[arg-type]


@torch.no_grad()
def _rescale(name: str, weight: Tensor, axis: int | None, target: _Target, mean_squares: Array) -> StartingNorm:
    now = unit_norms(weight, axis=axis)
    factor = (torch.as_tensor(target.norms, device=now.device) / now).nan_to_num(nan=1.0)
    units = matrix(weight, axis=axis, like=weight)
    units.mul_(factor.to(units.dtype).unsqueeze(1))
    write_units(weight, units, axis=axis)
    before, after = (float(norms.square().sum().sqrt()) for norms in (now, unit_norms(weight, axis=axis)))
    return StartingNorm(name, before, after, float(mean_squares.sum()), target.angle)


# ---- the comparison


@contextmanager
def _compared(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Iterator[None]:
    """Warn if the body changes the network's outputs."""
    with _undisturbed(model):
        before = outputs_of(model, loss, batch)
    yield
    with _undisturbed(model):
        moved = moved_by(before, outputs_of(model, loss, batch))
    if moved > _LARGEST_CHANGE:
        warn_caller(
            f"outputs moved by {moved:.2g} of their standard deviation: at the equilibrium norm of lr and weight "
            "decay, or at the initial norm, the eps of a normalisation behind a weight matters. There weights are not "
            "scale-invariant, and the law is off: raise lr, lower weight decay or lower eps",
            StartWarning,
        )


@torch.no_grad()
def outputs_of(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
    """All numbers that the model returns when ``loss`` calls it on a batch; the loss if it does not call the model.

    The caller restores buffers and random numbers.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> outputs_of(net, lambda batch: net(batch).sum(), torch.ones(4, 2)).shape
        torch.Size([12])
    """
    outputs: list[Any] = []
    handle = unwrap_model(model).register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        value = loss(batch)
    finally:
        handle.remove()
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
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
