"""Which tensors are scale-invariant: stated by the caller and checked, never guessed.

Everything that takes ``invariant=`` accepts the same three things: names, tensors, or the result of
`equilibria.symmetries`. Controllers need the tensors that an optimizer trains (`invariant_tensors`), some also the sets
that are invariant only jointly (`invariant_sets`); monitors need a label for every weight they watch
(`with_invariance`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError
from equilibria.findings import joined
from equilibria.tensors.parameters import Watched, names_of, plain_name

_UNDECIDED = "undecided"
_GIVEN = "given"  # label of a weight that the caller named

HOW_TO = "sym = eq.symmetries(eq.objective(model, loss), batches) finds them: use invariant=sym"


class SymmetryResult(Protocol):
    """The part of `equilibria.symmetries`' result that controllers and monitors use."""

    @property
    def elements(self) -> Mapping[str, int]:
        """Numbers in each tensor, by name."""

    @property
    def alone(self) -> Sequence[str]:
        """Names of the tensors that are scale-invariant by themselves."""

    @property
    def how(self) -> Mapping[str, str]:
        """How each tensor is invariant, in words."""

    @property
    def rows(self) -> Mapping[str, Any]:
        """The finest blocks of rows that are invariant by themselves, by name."""

    def uniform_sets(self) -> Sequence[Sequence[str]]:
        """Disjoint sets of tensors, each of which may be scaled by one factor."""


Invariant: TypeAlias = Iterable[str] | Iterable[Tensor] | SymmetryResult
JointlyInvariant: TypeAlias = Invariant | Sequence[str | Sequence[str]] | Sequence[Tensor | Sequence[Tensor]]


def invariant_tensors(
    invariant: Invariant,
    *,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None = None,
    owner: str = "optimizer",
) -> dict[str, Tensor]:
    """The scale-invariant tensors that an optimizer trains, by name.

    Args:
        invariant: tensors; names; pairs of both, as of ``model.named_parameters()``; or a result of
            `equilibria.symmetries`, of whose ``alone`` those trained here count.
        optimizer: the optimizer.
        model: where names are looked up; not needed for tensors, nor for an optimizer made from
            ``model.named_parameters()``.
        owner: what errors call the owner of the parameters.

    Returns:
        Name -> tensor, in the order of ``invariant``; without a model or names, the position in the optimizer serves as
        the name.

    Raises:
        EquilibriaError: if ``invariant`` is empty, names an unknown tensor, holds a tensor that the optimizer does not
            train, or is the symmetries of another model.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> list(invariant_tensors(["0.weight"], optimizer=optimizer, model=net))
        ['0.weight']
    """
    wanted, trained = _entries(invariant), named_parameters(optimizer, model)
    has_names = _has_names(optimizer, model)
    if hasattr(invariant, "alone"):
        wanted = _trained_of(wanted, trained, has_names=has_names)
        refuse_other_sizes(getattr(invariant, "elements", {}), trained)
    if _are_tensors(wanted, invariant):
        return dict(_by_tensor(wanted, trained, owner=owner))
    return dict(_by_name(name, trained, has_names=has_names, owner=owner) for name in wanted)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InvariantSet:
    """Tensors that may all be multiplied by one factor without effect on the loss.

    Attributes:
        tensors: those that the optimizer trains, by name.
        missing: names of further tensors of the set, which the optimizer does not train.
        is_requested: whether the caller named it, or `equilibria.symmetries` found its only tensor invariant alone.
            Controllers act on these or raise; they may leave out the others.
    """

    tensors: dict[str, Tensor]
    missing: tuple[str, ...] = ()
    is_requested: bool = True

    @property
    def label(self) -> str:
        """Its names, or the first of many; sets are disjoint, so no other set has this label."""
        return joined(list(self.tensors), most=3)

    @property
    def is_joint(self) -> bool:
        """Whether it has several tensors, which are invariant only together."""
        return len(self.tensors) + len(self.missing) > 1


def invariant_sets(
    invariant: JointlyInvariant, *, optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> list[InvariantSet]:
    """The sets of tensors of an optimizer that are scale-invariant, alone or jointly.

    Args:
        invariant: as for `invariant_tensors`; a list or tuple of names or tensors inside it is a set that is invariant
            jointly. A result of `equilibria.symmetries` stands for its ``uniform_sets()``.
        optimizer: the optimizer.
        model: where names are looked up, as for `invariant_tensors`.

    Returns:
        Disjoint sets: tensors that are invariant alone, then sets that are invariant jointly.

    Raises:
        EquilibriaError: as `invariant_tensors`, or if two sets share a tensor.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> (pair,) = invariant_sets([["0.weight", "0.bias"]], optimizer=optimizer, model=net)
        >>> pair.label, pair.is_joint
        ('0.weight, 0.bias', True)
    """
    if hasattr(invariant, "uniform_sets"):
        return _sets_of_symmetries(invariant, optimizer=optimizer, model=model)
    entries = invariant if isinstance(invariant, list | tuple) else ()
    joint: list[Any] = [entry for entry in entries if isinstance(entry, list | tuple) and not _is_named(entry)]
    alone: Any = [entry for entry in entries if not any(entry is one for one in joint)] if joint else invariant
    singles = invariant_tensors(alone, optimizer=optimizer, model=model) if alone or not joint else {}
    sets = [{name: tensor} for name, tensor in singles.items()]
    sets += [invariant_tensors(entry, optimizer=optimizer, model=model) for entry in joint]
    names = [name for tensors in sets for name in tensors]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise EquilibriaError(
            f"got {twice[0]} in two sets of invariant=; expected disjoint sets: each is scaled by one factor",
            argument="invariant",
        )
    return [InvariantSet(tensors) for tensors in sets]


def with_invariance(watched: Sequence[Watched], invariant: Invariant, *, model: nn.Module) -> list[Watched]:
    """Label the watched weights.

    A result of `equilibria.symmetries` says for every tensor, and for every row, whether it is invariant by itself, and
    how else. From names or tensors, exactly the listed weights count as invariant, with all their rows.

    Args:
        watched: the weights.
        invariant: names, tensors or a result of `equilibria.symmetries`; weights that are not watched are ignored.
        model: where names are looked up.

    Raises:
        EquilibriaError: if ``invariant`` is empty, names an unknown tensor, or is about another model.
    """
    if all(hasattr(invariant, name) for name in ("elements", "alone", "how", "rows")):
        return _labelled_by_symmetries(watched, invariant)  # type: ignore[arg-type]
    wanted, names = _entries(invariant), names_of(model)
    parameters = {name: param for param in model.parameters() for name in names[id(param)]}
    are_tensors = _are_tensors(wanted, invariant)
    listed = (
        _by_tensor(wanted, parameters, owner="model")
        if are_tensors
        else (_by_name(name, parameters, owner="model") for name in wanted)
    )
    ids = {id(param) for _, param in listed}
    return [
        dataclasses.replace(
            layer,
            how=_GIVEN if id(layer.param) in ids else None,
            invariant=(id(layer.param) in ids,) * layer.units,
        )
        for layer in watched
    ]


def require_rows(invariant: Invariant, tensors: Mapping[str, Tensor]) -> None:
    """Check that the rows of some tensors are invariant one by one, as far as a result of `equilibria.symmetries` says.

    Rows without a gradient, as of tokens that did not occur, may be: a tensor that is invariant alone, and whose finest
    blocks are single rows, has no row that is known not to be.

    Raises:
        EquilibriaError: if a tensor is invariant in groups of rows only.
    """
    blocks = {plain_name(name): rows for name, rows in getattr(invariant, "rows", {}).items()}
    for name in tensors:
        if name in blocks and blocks[name].block > 1:
            raise EquilibriaError(
                f"got granularity='row' for {name}, which is scale-invariant in groups of {blocks[name].block} of its "
                f"{blocks[name].rows} rows only; expected rows that are so one by one (BatchNorm): "
                "granularity='tensor' is the one to use for groups of rows (GroupNorm, LayerNorm, QK-norm)",
                argument="granularity",
            )


def refuse_other_sizes(elements: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
    """Check that symmetries are not those of a model with the same names but other sizes.

    Raises:
        EquilibriaError: if a tensor has another number of entries.
    """
    for name, tensor in tensors.items():
        if name in elements and elements[name] != tensor.numel():
            raise EquilibriaError(
                f"got symmetries of another model: there {name} has {elements[name]} numbers, here {tensor.numel()}; "
                "expected those found for this one",
                argument="invariant",
            )


# ---- a result of symmetries


def _labelled_by_symmetries(watched: Sequence[Watched], symmetries: SymmetryResult) -> list[Watched]:
    known = symmetries.how
    names = {
        id(layer): name for layer in watched for name in reversed((layer.name, *layer.aliases)) if name in known
    }  # reversed: the first name wins
    if not names:
        raise EquilibriaError(
            f"got symmetries of {len(known)} tensors ({', '.join(list(known)[:3])}, ...), none of which is watched; "
            f"expected those of this model, with names such as {watched[0].name}",
            argument="invariant",
        )
    labelled = [layer for layer in watched if id(layer) in names]
    refuse_other_sizes(symmetries.elements, {names[id(layer)]: layer.param for layer in labelled})
    return [_labelled(layer, names[id(layer)], symmetries) if id(layer) in names else layer for layer in watched]


def _labelled(layer: Watched, name: str, symmetries: SymmetryResult) -> Watched:
    how = symmetries.how[name]
    if how == _UNDECIDED:
        return dataclasses.replace(layer, how=how)
    if layer.axis is None:
        return dataclasses.replace(layer, how=how, invariant=(name in symmetries.alone,))
    invariant, rows = (False,) * layer.units, symmetries.rows.get(name)
    if rows is not None and len(rows.invariant) == layer.units:  # otherwise the blocks are groups of rows
        invariant = tuple(rows.invariant)
    return dataclasses.replace(layer, how=how, invariant=invariant)


def _sets_of_symmetries(
    symmetries: Any, *, optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> list[InvariantSet]:
    trained = named_parameters(optimizer, model)
    sets = [tuple(plain_name(name) for name in names) for names in symmetries.uniform_sets()]
    every = [name for names in sets for name in names]
    _trained_of(every, trained, has_names=_has_names(optimizer, model), how="alone or jointly")
    refuse_other_sizes(symmetries.elements, trained)
    return [
        InvariantSet(
            {name: trained[name] for name in names if name in trained},
            tuple(name for name in names if name not in trained),
            is_requested=len(names) == 1,
        )
        for names in sorted(sets, key=lambda names: len(names) > 1)
        if any(name in trained for name in names)
    ]


def _trained_of(alone: list[str], trained: Mapping[str, Tensor], *, has_names: bool, how: str = "alone") -> list[str]:
    """The tensors of a result of symmetries that an optimizer trains."""
    if not has_names:
        raise EquilibriaError(
            "got a result of symmetries, which are names, but the optimizer knows none; expected model= beside it",
            argument="invariant",
        )
    if not alone:
        raise EquilibriaError(
            f"got symmetries that say that no weight of this model is scale-invariant {how}; expected some, such as "
            "weights in front of a BatchNorm: print(sym) shows how each one is invariant",
            argument="invariant",
        )
    names = [name for name in alone if plain_name(name) in trained]
    if not names:
        raise EquilibriaError(
            f"got symmetries by which {', '.join(alone[:3])} are scale-invariant, none of which this optimizer trains; "
            f"expected those of its model: it trains {', '.join(list(trained)[:3])}",
            argument="invariant",
        )
    return names


# ---- names and tensors


def _entries(invariant: Any) -> list[Any]:
    """The names or tensors in ``invariant``, as a list."""
    entries = getattr(invariant, "alone", invariant)
    if isinstance(entries, nn.Module):
        raise EquilibriaError(
            f"got invariant={type(entries).__name__}, a network; expected which of its weights are scale-invariant, "
            f"with the network as model=: {HOW_TO}",
            argument="invariant",
        )
    if isinstance(entries, str | Tensor) or not isinstance(entries, Iterable):
        raise EquilibriaError(
            f"got invariant={type(entries).__name__}; expected a list of the scale-invariant tensors or of their "
            f"names, or a result of symmetries: {HOW_TO}",
            argument="invariant",
        )
    # The order of a set of names differs from process to process.
    listed = sorted(entries) if isinstance(entries, set | frozenset) else list(entries)
    return [entry[1] if _is_named(entry) else entry for entry in listed]


def _is_named(entry: Any) -> bool:
    """Whether this is a pair of ``model.named_parameters()``."""
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Tensor)


def _are_tensors(wanted: Sequence[Any], invariant: Any) -> bool:
    """Whether all entries are tensors; False if all are names."""
    if not wanted:
        raise EquilibriaError(
            f"got invariant={_shown(invariant)}, which names nothing here; expected some: {HOW_TO}",
            argument="invariant",
        )
    if all(isinstance(entry, Tensor) for entry in wanted):
        return True
    if all(isinstance(entry, str) for entry in wanted):
        return False
    raise EquilibriaError(
        f"got invariant={_shown(invariant)}; expected names, tensors or a result of symmetries: {HOW_TO}",
        argument="invariant",
    )


def _shown(invariant: Any) -> str:
    """Type and a few names: all of them may fill pages."""
    entries = _entries(invariant)
    few = [entry if isinstance(entry, str) else type(entry).__name__ for entry in entries[:3]]
    more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
    return f"{type(invariant).__name__} of {', '.join(few) or 'nothing'}{more}"


def _has_names(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> bool:
    return model is not None or all("param_names" in group for group in optimizer.param_groups)


def named_parameters(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, Tensor]:
    """Every tensor of the optimizer by its name, or by its position."""
    of_model = {} if model is None else {id(param): plain_name(name) for name, param in model.named_parameters()}
    named: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        positions = group.get("param_names", [f"group{number}.{index}" for index in range(len(group["params"]))])
        named |= {
            of_model.get(id(param), plain_name(position)): param
            for position, param in zip(positions, group["params"], strict=True)
        }
    return named


def _by_tensor(
    wanted: list[Tensor], parameters: Mapping[str, Tensor], *, owner: str = "optimizer"
) -> Iterable[tuple[str, Tensor]]:
    names = {id(param): name for name, param in parameters.items()}
    for tensor in wanted:
        if id(tensor) not in names:
            raise EquilibriaError(
                f"got an invariant tensor of shape {tuple(tensor.shape)} that is none of the {owner}'s "
                f"{len(parameters)}; expected its parameters",
                argument="invariant",
            )
        yield names[id(tensor)], tensor


def _by_name(
    name: str, parameters: Mapping[str, Tensor], *, has_names: bool = True, owner: str = "optimizer"
) -> tuple[str, Tensor]:
    plain = plain_name(name)
    if plain in parameters:
        return plain, parameters[plain]
    if not has_names:
        raise EquilibriaError(
            f"got invariant name {name!r}, but the optimizer knows no names; expected model= beside it, tensors "
            "instead of names, or an optimizer made from model.named_parameters()",
            argument="invariant",
        )
    near = difflib.get_close_matches(plain, parameters, n=3) or list(parameters)[:3]
    raise EquilibriaError(
        f"got invariant name {name!r}, which is none of the {owner}'s parameters; expected their names, such as "
        f"{', '.join(near)}",
        argument="invariant",
    )
