"""What a search for symmetries tells about the watched weights, in place of what their cosines suggest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.measure.parameters import Watched

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
