"""Tensors of one kind across the blocks of a network (``h.*.mlp.c_proj.weight``), and those unlike their siblings.

Blocks are found by name: a part of a dotted name that is a number, or ends with an underscore and a number, counts
them. A number within a word, as in ``layer1.0.conv2.weight``, belongs to the name, and so does the place in a sequence
inside a block, as in ``h.3.mlp.2.weight``: these are layers of different kinds.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equilibria.diagnosis.layer_summary import LayerSummary

FEW_LAYERS = 12
"""So many layers are easily read one by one; with more, siblings are shown together."""

LEAST_SIBLINGS = 3
"""With fewer tensors of a kind there is no majority that one of them could be unlike."""

UNLIKE = 1.5
"""The factor against the median of its siblings from which a tensor counts as unlike them."""

_NAMES = 20_000  # of tensors whose kinds are remembered: a run asks for each a dozen times
_MAJORITY = 2 / 3  # of the siblings, whose setting is the usual one
_SAME = 1e-3  # relative difference of two settings that count as equal
_SCATTER = 3  # and so many times the median distance of the siblings from their median, on a log scale
_NUMBER = re.compile(r"(?:^|(?<=[._]))\d+(?=\.)")
_PLACE = re.compile(r"(?:^|(?<=[._]))\d+(?:\.\d+)*\.[^.]*$")  # numbers right before the last word
_NESTED = re.compile(r"\.(?:\w*(?:block|layer)s?\.)?")  # between the numbers of a stage and of a block in it
_SHORT = re.compile(r"[^.]*[^.\d][^.]*(?:\.\d+)*$")
_PLACE_IN_BLOCK = re.compile(r"(?<=\d)\.\d+$")
_EXPERTS = re.compile(r"experts\.$")
_ROW = re.compile(r"\[\d+\]$")


@dataclass(frozen=True, slots=True)
class Siblings:
    """Layers of one kind, in the order of the model.

    Attributes:
        kind: their common name, with ``*`` for the number of the block; the name of the layer if there is only one.
        members: their summaries.
    """

    kind: str
    members: tuple[LayerSummary, ...]

    def values(self, field: str) -> list[float]:
        """The known numbers of a field of `LayerSummary`."""
        return [value for member in self.members if (value := getattr(member, field)) is not None]

    @property
    def of_one_window(self) -> tuple[LayerSummary, ...]:
        """The members whose windows end at the step at which most of them do: the others have other settings."""
        ends = Counter(member.last_step for member in self.members)
        return tuple(member for member in self.members if ends[member.last_step] == max(ends.values()))

    def unlike(self, field: str) -> dict[str, float]:
        """The members whose number is unlike that of their siblings then: name -> factor against the median."""
        known = [(member.name, getattr(member, field)) for member in self.of_one_window]
        return far_from_median({name: value for name, value in known if value is not None})


@lru_cache(maxsize=_NAMES)
def kind_of(name: str) -> str:
    """The name of a tensor without the number of its block, or of a row without its number.

    Example:
        >>> kind_of("transformer.h.11.mlp.c_proj.weight"), kind_of("layer1.0.conv2.weight"), kind_of("fc.weight[3]")
        ('transformer.h.*.mlp.c_proj.weight', 'layer1.*.conv2.weight', 'fc.weight[*]')
        >>> kind_of("h.0.moe.experts.7.2.weight")
        'h.*.moe.experts.*.2.weight'
    """
    if _ROW.search(name):
        return _ROW.sub("[*]", name)
    for begin, end in reversed(_block_numbers(name)):
        name = f"{name[:begin]}*{name[end:]}"
    return name


def block_of(name: str) -> str | None:
    """The block that a tensor is part of, None if its name has no number.

    Example:
        >>> block_of("transformer.h.11.mlp.c_proj.weight"), block_of("lm_head.weight")
        ('transformer.h.11', None)
        >>> block_of("stages.2.blocks.5.attn.qkv.weight"), block_of("layer_07.weight")
        ('stages.2.blocks.5', 'layer_07')
    """
    numbers = _block_numbers(name)
    if not numbers:
        return None
    _, end = numbers[0]
    for begin, next_end in numbers[1:]:
        if not _NESTED.fullmatch(name[end:begin]):
            break
        end = next_end
    return name[:end]


def blocks_of(kinds: Sequence[Siblings]) -> dict[str, str]:
    """The block of every member, by name.

    Where each kind has one place in the blocks, as attention in ``layers.*.0`` and the MLP in ``layers.*.1``, the place
    is no block of its own.
    """
    blocks = {member.name: block_of(member.name) or "" for kind in kinds for member in kind.members}
    around = {name: _PLACE_IN_BLOCK.sub("", block) for name, block in blocks.items()}
    own = all(len({around[member.name] for member in kind.members}) == len(kind.members) for kind in kinds)
    return around if own else blocks


def _block_numbers(name: str) -> list[tuple[int, int]]:
    """Where a name has the numbers of blocks and experts; others right before its last word only without these."""
    numbers = [number.span() for number in _NUMBER.finditer(name)]
    place = _PLACE.search(name)
    outer = [span for span in numbers if place is None or span[0] < place.start() or _EXPERTS.search(name, 0, span[0])]
    return outer or numbers


def short_names(blocks: Sequence[str]) -> dict[str, str]:
    """Blocks by their last word and its numbers; by the full name where that is not unique.

    Example:
        >>> short_names(["transformer.h.0", "transformer.h.11"])
        {'transformer.h.0': 'h.0', 'transformer.h.11': 'h.11'}
    """
    short = {block: match[0] if (match := _SHORT.search(block)) else block for block in blocks}
    return short if len(set(short.values())) == len(blocks) else {block: block for block in blocks}


def siblings(layers: Iterable[LayerSummary]) -> list[Siblings]:
    """Group layers of one kind; each kind stands where its first layer does.

    Layers of a kind have the same name up to the numbers of blocks, as many axes and the same kernel. Layers of a plain
    sequence (``features.3.weight``) have one shape: there the name does not tell an input or output layer from others.

    Example:
        >>> siblings([])
        []
    """
    groups: dict[tuple[object, ...], list[LayerSummary]] = defaultdict(list)
    for layer in layers:
        groups[kind_key(layer.name, layer.shape)].append(layer)
    kinds = Counter(kind_of(members[0].name) for members in groups.values() if len(members) > 1)
    return [Siblings(_title(members, kinds), tuple(members)) for members in groups.values()]


def folded(layers: Sequence[LayerSummary]) -> list[Siblings]:
    """The rows of a table: one per kind of at least three layers, one per other layer; of few layers one per layer.

    Example:
        >>> folded([])
        []
    """
    kinds = siblings(layers) if len(layers) > FEW_LAYERS else [Siblings(layer.name, (layer,)) for layer in layers]
    big = {member.name: kind for kind in kinds if len(kind.members) >= LEAST_SIBLINGS for member in kind.members}
    rows = (big.get(layer.name) or Siblings(layer.name, (layer,)) for layer in layers)
    return list({row.kind: row for row in rows}.values())


def kind_key(name: str, shape: tuple[int, ...] | None) -> tuple[object, ...]:
    """What tensors of one kind have in common."""
    kind = kind_of(name)
    return kind, shape if shape is None or is_plain_sequence(kind) else (len(shape), shape[2:])


def is_row_kind(kind: str) -> bool:
    """Whether a kind counts the rows of one tensor, or the matrices of one stack."""
    return kind.endswith("[*]")


def is_plain_sequence(kind: str) -> bool:
    """Whether a kind counts places in a sequence, not blocks: such layers may have different surroundings."""
    return kind.rpartition(".")[0].endswith("*")


def _title(members: Sequence[LayerSummary], kinds: Counter[str]) -> str:
    first = members[0]
    if len(members) == 1:
        return first.name
    kind = kind_of(first.name)
    if kinds[kind] == 1:
        return kind
    return f"{kind} ({' x '.join(map(str, first.shape or ()))})"


def unlike_by_block(row: Siblings, field: str) -> dict[str, float]:
    """`Siblings.unlike` with the short names of the blocks, where each member has a block of its own."""
    blocks = {member.name: block_of(member.name) or member.name for member in row.members}
    own = len(set(blocks.values())) == len(blocks)
    names = short_names(list(blocks.values())) if own else {name: name for name in blocks}
    return {names[blocks[name] if own else name]: factor for name, factor in row.unlike(field).items()}


def unusual_settings(values: Mapping[str, float]) -> tuple[float, list[str]] | None:
    """The setting that at least two thirds of some siblings share, and the names of those that have another.

    Args:
        values: lr or weight decay, by name.

    Returns:
        None for fewer than three siblings, where all agree, and where no setting is shared by so many.

    Example:
        >>> unusual_settings({"h.0": 0.1, "h.1": 0.1, "h.2": 0.0, "h.3": 0.1})
        (0.1, ['h.2'])
        >>> unusual_settings({"h.0": 0.1, "h.1": 0.09, "h.2": 0.081})  # falls from block to block
    """
    usual = next((value for value in values.values() if _share_of(value, values) >= _MAJORITY), None)
    if usual is None or len(values) < LEAST_SIBLINGS:
        return None
    others = [name for name, value in values.items() if not math.isclose(value, usual, rel_tol=_SAME)]
    return (usual, others) if others else None


def _share_of(value: float, values: Mapping[str, float]) -> float:
    return sum(math.isclose(value, other, rel_tol=_SAME) for other in values.values()) / len(values)


def is_minority(count: int, total: int) -> bool:
    """Whether so few of all siblings look like an accident, not like a choice."""
    return count <= (1 - _MAJORITY) * total


def far_from_median(values: dict[str, float]) -> dict[str, float]:
    """The numbers that are unlike the others: by a factor of 1.5 from the median, and by thrice the usual distance.

    The second condition keeps numbers that spread evenly over a wide range from all counting as unlike.

    Args:
        values: numbers that are not negative, by name.

    Returns:
        Name -> factor against the median; empty for fewer than three numbers.

    Example:
        >>> far_from_median({"h.0": 0.02, "h.1": 0.01, "h.2": 0.011, "h.3": 0.009, "h.4": 0.01})
        {'h.0': 2.0}
    """
    middle = median(values.values()) if len(values) >= LEAST_SIBLINGS else 0.0
    if middle <= 0:
        return {}
    factors = {name: value / middle for name, value in values.items()}
    distances = {name: abs(math.log(factor)) if factor > 0 else math.inf for name, factor in factors.items()}
    limit = max(math.log(UNLIKE), _SCATTER * median(distances.values()))
    return {name: factor for name, factor in factors.items() if distances[name] > limit}
