"""Parameter groups by weight decay: which parameters should decay, why, and how to change groups that exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.control._running_statistics import require_network
from equilibria.errors import EquilibriaError, within
from equilibria.objectives._objective import unwrap_model
from equilibria.symmetry import Symmetries
from equilibria.tensors.invariance import Invariant, invariant_tensors, refuse_other_sizes
from equilibria.tensors.parameters import names_of, refuse_uninitialised, roles_of


@dataclass(frozen=True, slots=True, eq=False)
class DecaySplit:
    """Which parameters decay, and why.

    Attributes:
        groups: for the optimizer: the parameters that decay, then those that do not. With ``invariant``, the weights
            that are scale-invariant alone come first, then those that are so jointly, each in a separate group, which
            `FoldedWeightDecay` needs.
        decayed: name -> reason.
        kept: name -> reason, of the parameters that do not decay.
    """

    groups: list[dict[str, Any]]
    decayed: dict[str, str]
    kept: dict[str, str]

    def __str__(self) -> str:
        width = max(len(name) for name in (*self.decayed, *self.kept))
        lines = [f"decay     {name:{width}}  {reason}" for name, reason in self.decayed.items()]
        return "\n".join([*lines, *(f"no decay  {name:{width}}  {reason}" for name, reason in self.kept.items())])


def split_decay(model: nn.Module, *, weight_decay: float, invariant: Invariant | None = None) -> DecaySplit:
    """Split the trained parameters of a model into groups with and without weight decay.

    A scale-invariant weight needs decay: decay does not regularise it but sets how fast it turns, and without decay its
    effective learning rate falls as its norm grows. The norm of another matrix is set by decay, by the gradient and by
    random steps together (its growth gain, `equilibria.theory.gain`); it decays, as is usual. A scale or bias that is
    not invariant does not decay: the gradient holds its size, and decay would shift it.

    Args:
        model: the network.
        weight_decay: of the groups that decay.
        invariant: the scale-invariant weights: a result of `equilibria.symmetries`, or names, or tensors. Weights that
            are invariant alone (``sym.alone``) get a separate group, and so do all that are invariant jointly
            (``sym.uniform_sets()``). Without it, and for parameters that names or tensors leave out, the role of a
            parameter decides, and the reasons say so.

    Returns:
        The split; ``groups`` goes into an optimizer, ``print`` shows the reasons.

    Raises:
        EquilibriaError: if the model has nothing to train, or ``invariant`` belongs to another model.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3))
        >>> _ = net(torch.zeros(2, 1, 4, 4))
        >>> split = split_decay(net, weight_decay=5e-4)
        >>> list(split.decayed), list(split.kept)
        (['0.weight', '3.weight'], ['1.weight', '1.bias', '3.bias'])
        >>> optimizer = torch.optim.SGD(split.groups, lr=0.1)
    """
    within("weight_decay", weight_decay, low=0)
    require_network(model)
    inner = unwrap_model(model)
    refuse_uninitialised(inner)
    named = {names_of(inner)[id(param)][0]: param for param in inner.parameters() if param.requires_grad}
    if not named:
        raise EquilibriaError(
            "got a model without parameters that require a gradient; expected some to train", argument="model"
        )
    roles = roles_of(inner)
    alone: Collection[str] = ()
    jointly: Collection[str] = ()
    if isinstance(invariant, Symmetries):
        _require_same_model(invariant, named)
        alone = invariant.alone
        jointly = [name for name in named if name not in alone and is_scale_invariant(name, invariant)]
        reasons = {name: decay_reason(name, param, roles[name], invariant) for name, param in named.items()}
    else:
        alone = _names_of_invariant(invariant, inner, named)
        reasons = {name: _reason(param, roles[name], is_invariant=name in alone) for name, param in named.items()}
    decayed = {name: reason for name, (decays, reason) in reasons.items() if decays}
    kept = {name: reason for name, (decays, reason) in reasons.items() if not decays}
    kinds = [
        [name for name in decayed if name in alone],
        [name for name in decayed if name in jointly],
        [name for name in decayed if name not in alone and name not in jointly],
    ]
    groups = [
        {"params": [named[name] for name in names], "weight_decay": value}
        for names, value in (*((kind, weight_decay) for kind in kinds), (list(kept), 0.0))
        if names
    ]
    return DecaySplit(groups, decayed, kept)


def regroup(
    optimizer: torch.optim.Optimizer, *, model: nn.Module, weight_decay: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups with another weight decay for some parameters and all else unchanged.

    Args:
        optimizer: the optimizer; it is not changed.
        model: the network, to look up names.
        weight_decay: the new weight decay of parameters, by name; the others keep theirs.

    Returns:
        Groups for a new optimizer: each group is split by weight decay and keeps its lr and other settings.

    Raises:
        EquilibriaError: if the model has no parameter of a given name.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)
        >>> groups = regroup(optimizer, model=net, weight_decay={"1.weight": 0.0, "1.bias": 0.0})
        >>> [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
        [(0.1, 0.0005, 1), (0.1, 0.0, 2)]
    """
    names = names_of(unwrap_model(model))
    unknown = set(weight_decay) - {name for every in names.values() for name in every}
    if unknown:
        raise EquilibriaError(
            f"got weight_decay for {min(unknown)!r}, which the model lacks; expected names of its parameters",
            argument="weight_decay",
        )
    groups = []
    for group in optimizer.param_groups:
        split: dict[float, list[Tensor]] = {}
        for param in group["params"]:
            chosen = [weight_decay[name] for name in names.get(id(param), ()) if name in weight_decay]
            split.setdefault(chosen[0] if chosen else group.get("weight_decay", 0.0), []).append(param)
        settings = {key: value for key, value in group.items() if key != "param_names"}
        groups += [{**settings, "params": params, "weight_decay": value} for value, params in split.items()]
    return groups


# ---- the reasons


def decay_reason(name: str, param: Tensor, role: str, symmetries: Symmetries) -> tuple[bool, str]:
    """Whether a parameter should decay, and why."""
    if name not in symmetries.elements or name in symmetries.undecided:
        return _by_role(param, role)
    how = symmetries.how[name]
    if name in symmetries.no_effect:
        return False, f"{role}: nothing depends on it"
    if name in symmetries.alone:
        return True, f"{role}: scale-invariant ({how}); decay sets how fast it turns"
    why = "not scale-invariant" if how == "no" else f"not scale-invariant by itself ({how})"
    if param.ndim >= 2:
        return True, f"{role}: {why}; decay, gradient and random steps set its norm"
    if is_scale_invariant(name, symmetries):
        return True, f"{role}: {why}; decays as they do, which keeps their proportions"
    return False, f"{role}: {why}; the gradient holds its size, decay would shift it"


def is_scale_invariant(name: str, symmetries: Symmetries) -> bool:
    """Whether a tensor can change its norm without effect, alone or with all others that can.

    Of tensors that are invariant only in place of each other (either matrix of a residual branch after a LayerNorm),
    those in `Symmetries.largest_uniform` count: the others' norms then matter.
    """
    return name in symmetries.alone or (name in symmetries.largest_uniform() and name not in symmetries.no_effect)


def _reason(param: Tensor, role: str, *, is_invariant: bool) -> tuple[bool, str]:
    """Whether a parameter should decay, and why, from the names that the caller passed."""
    if is_invariant:
        return True, f"{role}: scale-invariant by invariant=; decay sets how fast it turns"
    return _by_role(param, role)


def _by_role(param: Tensor, role: str) -> tuple[bool, str]:
    if role.endswith("direction"):
        return True, f"{role} of weight_norm: scale-invariant by construction"
    vector = param.ndim < 2 or role.endswith(("magnitude", "scale", "shift"))
    return not vector, f"{role}: by its role, not measured"


def _names_of_invariant(invariant: Invariant | None, model: nn.Module, named: Mapping[str, Tensor]) -> set[str]:
    if invariant is None:
        return set()
    everything = torch.optim.SGD(model.parameters(), lr=0.0)  # names are looked up among what an optimizer holds
    tensors = invariant_tensors(invariant, optimizer=everything, model=model, owner="model")
    chosen = {id(weight) for weight in tensors.values()}
    return {name for name, param in named.items() if id(param) in chosen}


def _require_same_model(symmetries: Symmetries, named: Mapping[str, Tensor]) -> None:
    if not set(symmetries.elements) & set(named):
        raise EquilibriaError(
            f"got symmetries of {', '.join(list(symmetries.elements)[:3])}, none of which is a parameter of this "
            f"model; expected those of: {', '.join(list(named)[:3])}",
            argument="invariant",
        )
    refuse_other_sizes(symmetries.elements, named)
