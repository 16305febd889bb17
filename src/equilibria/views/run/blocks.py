"""Update ratio, update per entry and growth gain over the blocks of a network, as people draw coordinate checks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.siblings import (
    LEAST_SIBLINGS,
    Siblings,
    block_of,
    blocks_of,
    is_plain_sequence,
    is_row_kind,
    kind_of,
    siblings,
)
from equilibria.views.svg import NARROW, Line, svg_chart
from equilibria.views.words import text

_COLOURS = 12  # of the page
_PICTURES = (
    ("relative_update", "update ratio ‖Δw‖ / ‖w‖ per step", True),
    ("update_per_entry", "change of an entry per step, root mean square", True),
    ("gain", "growth gain G", False),
)
_CAPTION = (
    "One line per kind of tensor over the blocks of the network, in the window of the table of layers. The first block "
    "of a healthy network often differs from the others; the findings name single tensors clearly unlike their "
    "siblings."
)


def block_section(layers: Sequence[LayerSummary]) -> str:
    """The section of a report; "" for a network with fewer than three blocks of one kind."""
    kinds = [kind for kind in siblings(layers) if len(kind.members) >= LEAST_SIBLINGS and _is_across_blocks(kind)]
    own = blocks_of(kinds)
    numbers = {block: number for number, block in enumerate(dict.fromkeys(own.values()))}
    places = {name: numbers[block] for name, block in own.items()}
    pictures = [
        svg_chart(_lines(kinds, places, field), x="block", y=words, log=log, width=NARROW)
        for field, words, log in _PICTURES
    ]
    if not any(pictures):
        return ""
    return "\n".join(
        [
            '<section aria-labelledby="blocks-heading">',
            '<h2 id="blocks-heading">Block by block</h2>',
            f'<div class="pictures">{"".join(pictures)}</div>',
            f'<p class="caption">{text(_CAPTION)}</p>',
            "</section>",
        ]
    )


def _is_across_blocks(kind: Siblings) -> bool:
    """Whether every member has a block of its own: not rows, places in a sequence, or several experts in a block."""
    name = kind_of(kind.members[0].name)
    own = {block_of(member.name) for member in kind.members}
    return not is_row_kind(name) and not is_plain_sequence(name) and len(own) == len(kind.members)


def _lines(kinds: Sequence[Siblings], places: dict[str, int], field: str) -> list[Line]:
    return [
        Line(
            kind.kind.rpartition("*.")[2].removesuffix(".weight"),
            [places[member.name] for member in kind.members],
            [math.nan if (value := getattr(member, field)) is None else value for member in kind.members],
            f"var(--c{number % _COLOURS})",
            marked=True,
        )
        for number, kind in enumerate(kinds)
    ]
