"""The weights of a folder of checkpoints: norms, and angles over the steps between them, in terminal and report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from equilibria.findings import rounded
from equilibria.views.document import html_row, html_table
from equilibria.views.words import text

_MOST_ROWS = 40
_NOTHING = "–"
_COLUMNS = ("norm", "norm_predicted", "norm_equilibrium", "angle_equilibrium")
_CAPTION = (
    "turned: between the last two checkpoints{over}. Momentum lets successive steps add up, and later steps pull back: "
    "the angle of one step cannot be worked out from it."
)


class _Turn(NamedTuple):
    """How a weight turned up to its last checkpoint."""

    distance: int
    angle: float | None  # radians; None from a right angle on


def checkpoint_table(samples: pa.Table, diffusion: pa.Table, *, metadata: Mapping[str, Any]) -> str:
    """One line per weight in the terminal; "" unless the run comes from checkpoints."""
    from equilibria.views._rich import Text, collected_text, columns_table, text_console

    columns, caption = _columns(samples, diffusion, metadata)
    if not columns:
        return ""
    out = text_console()
    out.print(columns_table(columns, words=("layer",)))
    out.print(Text(caption, style="dim"))
    return collected_text(out)


def checkpoint_section(samples: pa.Table, diffusion: pa.Table | None, *, metadata: Mapping[str, Any]) -> str:
    """The section of a report; "" unless the run comes from checkpoints."""
    columns, caption = _columns(samples, diffusion, metadata)
    if not columns:
        return ""
    rows = [html_row(row[0], row[1:]) for row in zip(*columns.values(), strict=True)]
    parts = ['<section aria-labelledby="checkpoints-heading">', '<h2 id="checkpoints-heading">Between checkpoints</h2>']
    titles = [title.replace("\n", " ") for title in columns]
    parts.append(html_table(titles, rows, name="checkpoints-heading", kind="numeric"))
    return "\n".join([*parts, f'<p class="caption">{text(caption)}</p>', "</section>"])


def _columns(
    samples: pa.Table, diffusion: pa.Table | None, metadata: Mapping[str, Any]
) -> tuple[dict[str, list[str]], str]:
    """The cells by title, without columns that have no number, and the sentence below."""
    if metadata.get("imported", {}).get("kind") != "checkpoints":
        return {}, ""
    layers = list(_by_layer(samples))
    turns = {} if diffusion is None else _last_turns(diffusion)
    shown = layers[:_MOST_ROWS]
    first = f"norm\nat {layers[0][1][0]['step']:,}" if layers else ""
    columns = {
        "layer": [name for name, _ in shown],
        first: [_number(rows[0]["norm"]) for _, rows in shown],
        **{
            title: [_number(rows[-1][column]) for _, rows in shown]
            for column, title in zip(
                _COLUMNS,
                (f"norm\nat {layers[0][1][-1]['step']:,}", "norm\npredicted", "norm*", "equilibrium\nrad/step"),
                strict=True,
            )
        },
        "turned\nrad": [_angle(turns.get(name)) for name, _ in shown],
    }
    kept = {title: cells for title, cells in columns.items() if any(cell != _NOTHING for cell in cells)}
    distances = {turn.distance for turn in turns.values()}
    over = f", {distances.pop():,} steps apart" if len(distances) == 1 else ""
    more = f" {len(layers) - len(shown):,} more layers: run.diffusion()." if len(layers) > len(shown) else ""
    return kept, _CAPTION.format(over=over) + more


def _by_layer(samples: pa.Table) -> Iterator[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Every weight with its rows, in the order of the record."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in samples.select(["step", "param", *_COLUMNS]).to_pylist():
        rows.setdefault(row["param"], []).append(row)
    yield from rows.items()


def _last_turns(diffusion: pa.Table) -> dict[str, _Turn]:
    """The latest comparison of every weight, if it ends at the last checkpoint."""
    ends = pc.add(diffusion["step"], diffusion["distance"])
    last = diffusion.filter(pc.equal(ends, pc.max(ends))) if diffusion.num_rows else diffusion
    return {row["param"]: _Turn(row["distance"], _radians(row["turned"])) for row in last.to_pylist()}


def _radians(turned: float | None) -> float | None:
    """The angle of -ln cos."""
    return None if turned is None else 2 * math.asin(math.sqrt(-math.expm1(-turned) / 2))


def _angle(turn: _Turn | None) -> str:
    if turn is None:
        return _NOTHING
    return "π/2 or more" if turn.angle is None else rounded(turn.angle, digits=3)


def _number(value: float | None) -> str:
    return _NOTHING if value is None or not math.isfinite(value) else rounded(value, digits=3)
