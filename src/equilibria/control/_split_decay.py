"""Parameter groups that decay what should decay, with a reason for every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from equilibria.errors import EquilibriaError, within
from equilibria.objectives._objective import unwrap_model
from equilibria.symmetry import Symmetries
from equilibria.tensors.invariance import refuse_other_sizes
from equilibria.tensors.parameters import names_of, refuse_uninitialised, roles_of


@dataclass(frozen=True, slots=True, eq=False)
class DecaySplit:
    """Which parameters decay, and why.

    Attributes:
        groups: for the optimizer: the parameters that decay, then those that do not. With symmetries, those that are
            scale-invariant alone come first, in a group of their own, which `FoldedWeightDecay` needs.
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


def split_decay(model: nn.Module, *, weight_decay: float, symmetries: Symmetries | None = None) -> DecaySplit:
    """Split the trained parameters of a model into groups that decay and one that does not.

    A scale-invariant weight has to decay: decay does not regularise it but sets how fast it turns, and without decay
    its effective learning rate falls as its norm grows. A scale or bias that is not invariant should not: decay would
    shrink what the network computes. A matrix that is not invariant decays, as is usual, which regularises it.

    Args:
        model: the network.
        weight_decay: of the groups that decay.
        symmetries: what `equilibria.symmetries` found; without it, parameters are told apart by their role alone, and
            the reasons say so. With it, weights that are invariant alone (``sym.alone``) get a group of their own.

    Returns:
        The split; ``groups`` goes into an optimizer, ``print`` shows the reasons.

    Raises:
        EquilibriaError: if there is nothing to train, or ``symmetries`` are those of another model.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(3))
        >>> import torch
        >>> _ = net(torch.zeros(2, 1, 4, 4))
        >>> split = split_decay(net, weight_decay=5e-4)
        >>> list(split.decayed), list(split.kept)
        (['0.weight', '3.weight'], ['1.weight', '1.bias', '3.bias'])
        >>> optimizer = torch.optim.SGD(split.groups, lr=0.1)
    """
    within("weight_decay", weight_decay, low=0)
    if not isinstance(model, nn.Module):
        raise EquilibriaError(f"got model of type {type(model).__name__}; expected a torch.nn.Module")
    inner = unwrap_model(model)
    refuse_uninitialised(inner)
    named = {names_of(inner)[id(param)][0]: param for param in inner.parameters() if param.requires_grad}
    if not named:
        raise EquilibriaError("got a model without parameters that require a gradient; expected some to train")
    roles = roles_of(inner)
    _check_same(symmetries, named)
    reasons = {name: decay_reason(name, param, roles[name], symmetries) for name, param in named.items()}
    decayed = {name: reason for name, (decays, reason) in reasons.items() if decays}
    kept = {name: reason for name, (decays, reason) in reasons.items() if not decays}
    alone = [name for name in decayed if symmetries is not None and name in symmetries.alone]
    others = [name for name in decayed if name not in set(alone)]
    groups = [
        {"params": [named[name] for name in names], "weight_decay": value}
        for names, value in ((alone, weight_decay), (others, weight_decay), (list(kept), 0.0))
        if names
    ]
    return DecaySplit(groups, decayed, kept)


def decay_reason(name: str, param: Tensor, role: str, symmetries: Symmetries | None) -> tuple[bool, str]:
    """Whether a parameter should decay, and why."""
    if symmetries is None or name not in symmetries.elements or name in symmetries.undecided:
        return _by_role(param, role)
    how = symmetries.how[name]
    if name in symmetries.no_effect:
        return False, f"{role}: nothing depends on it"
    if is_scale_invariant(name, symmetries):
        return True, f"{role}: scale-invariant ({how}); decay sets how fast it turns"
    why = f"not scale-invariant{f' beside the others ({how})' if _stands_back(name, symmetries) else ''}"
    if param.ndim >= 2:
        return True, f"{role}: {why}; decay regularises it"
    return False, f"{role}: {why}; decay would shrink what the network computes"


def is_scale_invariant(name: str, symmetries: Symmetries) -> bool:
    """Whether a tensor can change its norm without effect, alone or with all others that can.

    Of tensors that are invariant only in place of each other (either matrix of a residual branch before which a
    LayerNorm stands), those in `Symmetries.largest_uniform` count: the others' norms then matter.
    """
    return name in symmetries.alone or (name in symmetries.largest_uniform() and name not in symmetries.no_effect)


def _stands_back(name: str, symmetries: Symmetries) -> bool:
    return min(symmetries.jointly.get(name, {"": -1}).values()) > 0


def _by_role(param: Tensor, role: str) -> tuple[bool, str]:
    if role.endswith("direction"):
        return True, f"{role} of weight_norm: scale-invariant by construction"
    vector = param.ndim < 2 or role.endswith(("magnitude", "scale", "shift"))
    return not vector, f"{role}: by its role, not measured"


def _check_same(symmetries: Symmetries | None, named: Mapping[str, Tensor]) -> None:
    if symmetries is None:
        return
    if not isinstance(symmetries, Symmetries):
        raise EquilibriaError(
            f"got symmetries of type {type(symmetries).__name__}; expected what equilibria.symmetries(...) returned"
        )
    if not set(symmetries.elements) & set(named):
        raise EquilibriaError(
            f"got symmetries of {', '.join(list(symmetries.elements)[:3])}, which are no parameters of this model; "
            f"expected those of: {', '.join(list(named)[:3])}"
        )
    refuse_other_sizes(symmetries.elements, named)
