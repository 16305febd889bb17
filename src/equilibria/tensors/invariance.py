"""Which tensors of an optimizer are scale-invariant: what the caller says, checked, never guessed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError
from equilibria.tensors.parameters import Watched, plain_name

_UNDECIDED = "undecided"


class Told(Protocol):
    """What is asked of the result of `equilibria.symmetries`."""

    @property
    def elements(self) -> Mapping[str, int]:
        """How many numbers each tensor holds."""

    @property
    def alone(self) -> Sequence[str]:
        """Names of the tensors that are invariant by themselves."""

    @property
    def how(self) -> Mapping[str, str]:
        """In words, for every tensor."""

    @property
    def rows(self) -> Mapping[str, Any]:
        """The finest blocks of rows that are invariant by themselves."""


def with_symmetries(watched: Sequence[Watched], symmetries: Told) -> list[Watched]:
    """The same weights, each with what is known of its invariance.

    Args:
        watched: the weights.
        symmetries: what `equilibria.symmetries` found for this model.

    Raises:
        EquilibriaError: if it is something else, or about another model.
    """
    if not all(hasattr(symmetries, name) for name in ("elements", "alone", "how", "rows")):
        raise EquilibriaError(
            f"got symmetries of type {type(symmetries).__name__}; expected what equilibria.symmetries(...) returned"
        )
    known = symmetries.how
    found = {id(each): name for each in watched if (name := _name_in(known, each)) is not None}
    if not found:
        raise EquilibriaError(
            f"got symmetries of {len(known)} tensors ({', '.join(list(known)[:3])}, ...), none of which is watched; "
            f"expected those of this model, with names such as {watched[0].name}"
        )
    refuse_other_sizes(symmetries.elements, {found[id(each)]: each.param for each in watched if id(each) in found})
    return [_told(each, found[id(each)], symmetries) if id(each) in found else each for each in watched]


def refuse_other_sizes(elements: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Refuse symmetries of a model whose tensors have the same names but not the same sizes.

    Raises:
        EquilibriaError: if there is such a tensor.
    """
    for name, tensor in tensors.items():
        if name in elements and elements[name] != tensor.numel():
            raise EquilibriaError(
                f"got symmetries of another model: there {name} has {elements[name]} numbers, here {tensor.numel()}; "
                "expected those found for this one"
            )


def _name_in(known: Mapping[str, str], each: Watched) -> str | None:
    return next((name for name in (each.name, *each.aliases) if name in known), None)


def _told(each: Watched, name: str, symmetries: Told) -> Watched:
    how = symmetries.how[name]
    if how == _UNDECIDED:
        return dataclasses.replace(each, how=how)
    if each.axis is None:
        return dataclasses.replace(each, how=how, invariant=(name in symmetries.alone,))
    invariant, rows = (False,) * each.units, symmetries.rows.get(name)
    if rows is not None and len(rows.invariant) == each.units:  # not where several rows stand together
        invariant = tuple(rows.invariant)
    return dataclasses.replace(each, how=how, invariant=invariant)


class HasAlone(Protocol):
    """What `equilibria.symmetries` returns."""

    @property
    def alone(self) -> Iterable[str]:
        """Names of the tensors that are scale-invariant by themselves."""


Invariant: TypeAlias = Iterable[str] | Iterable[Tensor] | HasAlone

HOW_TO = "sym = eq.symmetries(eq.objective(model, loss), batches) finds them: use invariant=sym"


def invariant_tensors(
    invariant: Invariant, *, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """The scale-invariant tensors that an optimizer trains, by name.

    Args:
        invariant: tensors; or names; or pairs of both, as of ``model.named_parameters()``; or a result of
            `equilibria.symmetries`, of whose ``alone`` those trained here count.
        optimizer: what trains them.
        model: where names are looked up; not needed for tensors, nor for an optimizer made from
            ``model.named_parameters()``.

    Returns:
        Name -> tensor, in the order given; without a model or names, they are called by their place in the optimizer.

    Raises:
        EquilibriaError: nothing given, a name that is not there, a tensor that the optimizer does not train, or
            symmetries of another model.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> list(invariant_tensors(["0.weight"], optimizer=optimizer, model=net))
        ['0.weight']
    """
    wanted, called = _listed(invariant), _names(optimizer, model)
    named = model is not None or _has_names(optimizer)
    if hasattr(invariant, "alone"):
        wanted = _trained_of(wanted, called, named=named)
        refuse_other_sizes(getattr(invariant, "elements", {}), called)
    if not wanted:
        raise EquilibriaError(f"got invariant={_shown(invariant)}, which names nothing here; expected some: {HOW_TO}")
    if all(isinstance(each, Tensor) for each in wanted):
        return dict(_by_tensor(wanted, called))
    if all(isinstance(each, str) for each in wanted):
        return dict(_by_name(each, called, named=named) for each in wanted)
    raise EquilibriaError(
        f"got invariant={_shown(invariant)}; expected names, tensors or a result of symmetries: {HOW_TO}"
    )


def _trained_of(alone: list[str], called: Mapping[str, Tensor], *, named: bool) -> list[str]:
    """Those of a result of symmetries that the optimizer trains."""
    if not named:
        raise EquilibriaError(
            "got a result of symmetries, which are names, but the optimizer knows none; expected model= beside it"
        )
    if not alone:
        raise EquilibriaError(
            "got symmetries that say that no weight of this model is scale-invariant alone; expected some, such as "
            "weights in front of a BatchNorm: what is invariant jointly only (print(sym) shows it) is not controlled"
        )
    trained = [name for name in alone if plain_name(name) in called]
    if not trained:
        raise EquilibriaError(
            f"got symmetries by which {', '.join(alone[:3])} are scale-invariant, none of which this optimizer trains; "
            f"expected those of its model: it trains {', '.join(list(called)[:3])}"
        )
    return trained


def require_rows(invariant: Invariant, found: Mapping[str, Tensor]) -> None:
    """Refuse weights whose rows are not invariant one by one, as far as a result of `equilibria.symmetries` says.

    Rows without a gradient, as of tokens that did not occur, may be: a tensor that is invariant alone, and whose finest
    blocks are single rows, has no row that is known not to be.
    """
    blocks = {plain_name(name): rows for name, rows in getattr(invariant, "rows", {}).items()}
    for name in found:
        if name in blocks and blocks[name].block > 1:
            raise EquilibriaError(
                f"got granularity='row' for {name}, which is scale-invariant in groups of {blocks[name].block} of its "
                f"{blocks[name].rows} rows only; expected rows that are so one by one (BatchNorm): "
                "granularity='tensor' is the one to use for groups of rows (GroupNorm, LayerNorm, QK-norm)"
            )


def _shown(invariant: Any) -> str:
    """Type and a few names: the whole may fill pages."""
    listed = _listed(invariant)
    few = [each if isinstance(each, str) else type(each).__name__ for each in listed[:3]]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{type(invariant).__name__} of {', '.join(few) or 'nothing'}{more}"


def _listed(invariant: Any) -> list[Any]:
    found = getattr(invariant, "alone", invariant)
    if isinstance(found, nn.Module):
        raise EquilibriaError(
            f"got invariant={type(found).__name__}, a network; expected which of its weights are scale-invariant, with "
            f"the network as model=: {HOW_TO}"
        )
    if isinstance(found, str | Tensor) or not isinstance(found, Iterable):
        raise EquilibriaError(
            f"got invariant={type(found).__name__}; expected a list of the scale-invariant tensors or of their names, "
            f"or a result of symmetries: {HOW_TO}"
        )
    # the order of a set of names differs from process to process
    listed = sorted(found) if isinstance(found, set | frozenset) else list(found)
    return [each[1] if _is_named(each) else each for each in listed]


def _is_named(each: Any) -> bool:
    """A pair of ``model.named_parameters()``."""
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) and isinstance(each[1], Tensor)


def _has_names(optimizer: torch.optim.Optimizer) -> bool:
    return all("param_names" in group for group in optimizer.param_groups)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, Tensor]:
    """Every tensor of the optimizer by its name, or by its place."""
    own: Mapping[int, str] = {} if model is None else {id(p): plain_name(name) for name, p in model.named_parameters()}
    called: dict[str, Tensor] = {}
    for at, group in enumerate(optimizer.param_groups):
        places = group.get("param_names", [f"group{at}.{index}" for index in range(len(group["params"]))])
        called |= {
            own.get(id(param), plain_name(place)): param for place, param in zip(places, group["params"], strict=True)
        }
    return called


def _by_tensor(wanted: list[Tensor], called: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    names = {id(param): name for name, param in called.items()}
    for tensor in wanted:
        if id(tensor) not in names:
            raise EquilibriaError(
                f"got an invariant tensor of shape {tuple(tensor.shape)} that is none of the optimizer's "
                f"{len(called)}; expected parameters that it trains"
            )
        yield names[id(tensor)], tensor


def _by_name(name: str, called: Mapping[str, Tensor], *, named: bool) -> tuple[str, Tensor]:
    plain = plain_name(name)
    if plain in called:
        return plain, called[plain]
    if not named:
        raise EquilibriaError(
            f"got invariant name {name!r}, but the optimizer knows no names; expected model= beside it, tensors "
            "instead of names, or an optimizer made from model.named_parameters()"
        )
    near = difflib.get_close_matches(plain, called, n=3) or list(called)[:3]
    raise EquilibriaError(f"got invariant name {name!r}; the optimizer trains no such tensor, but {', '.join(near)}")
