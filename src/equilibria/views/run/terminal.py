"""The layers of a run in the terminal: a headline, a table and the findings."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import pyarrow as pa

from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.metadata import three_digits
from equilibria.diagnosis.siblings import Siblings, block_of, folded
from equilibria.findings import Finding, counted, joined
from equilibria.records.tables import SETTLED
from equilibria.views.run.headline import in_short, most_telling_first, no_findings, run_details
from equilibria.views.run.metrics import last_values
from equilibria.views.terminal import fitting

_ROOMY = 92  # columns of a terminal: with fewer it is spaced closely
_SPARE = ("norm*", "G", "ep. left", "steps left", "predicted", "norm", "range")  # what is left out first
_MOST_UNLIKE = 8
_FAR_APART = 2  # factor between siblings' angles in equilibrium, of which a median would tell little
_WORDS = ("state", "invariant")  # columns that are flush left
_PARTNERS = ("jointly with ", "against ")
_LEGEND_OF_PARTNERS = (
    "jointly (n): n may be scaled together; against (n): some up as others go down (print(sym) names them)"
)


def run_table(
    summaries: Sequence[LayerSummary],
    *,
    findings: Sequence[Finding],
    notes: Sequence[str] = (),
    most: int | None = None,
    metrics: pa.Table | None = None,
) -> str:
    """A headline, one line per layer in the order of the model, and below it the verdict in words and the findings.

    Of many layers, those of one kind across blocks share a line; the ones unlike their siblings are named below.

    Args:
        summaries: one per layer, in the order of the model.
        findings: shown below as sentences.
        notes: sentences about the record itself, shown before the findings.
        most: the number of lines to show, those of the most telling layers; None for all.
        metrics: the numbers that the training logged; the last of them are shown below the table.

    Returns:
        Text as wide as the terminal, with ANSI colours if standard output is one and NO_COLOR is not set.
    """
    from equilibria.views._rich import Text, collected_text, columns_table, marked, text_console
    from equilibria.views.findings import print_findings

    out = text_console()
    if not summaries:
        out.print(
            Text(
                "no samples yet: train a few steps first; or the watched optimizer is not the one that steps: call "
                "watch after creating it"
            )
        )
        return collected_text(out)
    out.print(Text(in_short(summaries, findings)), end="\n\n")
    all_rows = folded(summaries)
    rows = most_telling(all_rows, summaries, most=most)
    gap = 2 if out.width >= _ROOMY else 1
    cells = _columns(rows)
    spare = (*_SPARE, "equilibrium") if "n" in cells else _SPARE  # rather than to cut the names of many kinds
    columns = fitting(cells, spare=spare, width=out.width, gap=gap)
    for most_states in (2, 1):
        if "equilibrium" in cells and "equilibrium" not in columns:
            cells["state"] = [state_words(row, most=most_states) for row in rows]
            columns = fitting(cells, spare=spare, width=out.width, gap=gap)
    if (lines := _lines(columns, gap=gap, width=out.width)) is None:
        out.print(columns_table(columns, words=_WORDS, folded="layer", gap=gap))
    else:
        out.print(Text(lines[0], style="bold", no_wrap=True))
        out.file.write("\n".join(lines[1:]) + "\n")
    logged = "" if metrics is None else last_values(metrics)
    for sentence in filter(None, (_window(summaries), _legend(rows, columns), unlike_siblings(rows), logged)):
        out.print(Text(sentence, style="dim"))
    if left := sum(len(row.members) for row in all_rows) - sum(len(row.members) for row in rows):
        out.print(Text(f"{left:,} more layers are in --json", style="dim"))
    out.print()
    if details := run_details(summaries):
        out.print(Text(details), end="\n\n")
    for note in notes:
        out.print(marked("-", note))
    if not findings:
        out.print(marked("-", ": ".join(no_findings(summaries))))
    print_findings(findings, out)
    return collected_text(out)


def _lines(columns: Mapping[str, Sequence[str]], *, gap: int, width: int) -> list[str] | None:
    """The lines of the table, titles first, if nothing must be folded: rich takes seconds for thousands of layers."""
    aligned = []
    for title, cells in columns.items():
        longest = max([len(title), *map(len, cells)])
        is_left = title == "layer" or title in _WORDS
        aligned.append([f"{cell:{'<' if is_left else '>'}{longest}}" for cell in (title, *cells)])
    lines = [(" " * gap).join(row) for row in zip(*aligned, strict=True)]
    return lines if len(lines[0]) + gap <= width and all(map(str.isascii, lines)) else None


def most_telling(rows: Sequence[Siblings], layers: Sequence[LayerSummary], *, most: int | None) -> list[Siblings]:
    """So many rows of a table, those with the most telling layers, in the order of the model."""
    if most is None or len(rows) <= most:
        return list(rows)
    places = {layer.name: place for place, layer in enumerate(most_telling_first(layers))}
    ranked = sorted(rows, key=lambda row: min(places[member.name] for member in row.members))[:most]
    kept = {row.kind for row in ranked}
    return [row for row in rows if row.kind in kept]


def unlike_siblings(rows: Sequence[Siblings]) -> str:
    """The layers whose angle or norm is unlike that of their siblings, those of a block together; empty without any."""
    clauses = []
    for field in ("angle", "norm"):
        blocks: dict[str, dict[str, float]] = defaultdict(dict)
        for row in rows:
            for name, factor in row.unlike(field).items():
                blocks[block_of(name) or name][name] = factor
        for block, factors in blocks.items():
            which = next(iter(factors)) if len(factors) == 1 else f"{block} ({len(factors)} layers)"
            ends = dict.fromkeys(f"{end:.2g}" for end in (min(factors.values()), max(factors.values())))
            clauses.append(f"{which} {'..'.join(ends)}x the {field}")
    return f"against the median of their siblings: {joined(clauses, most=_MOST_UNLIKE)}" if clauses else ""


def _columns(rows: Sequence[Siblings]) -> dict[str, list[str]]:
    """The cells of the table by title, without columns that are empty."""
    layers = [layer for row in rows for layer in row.members]
    suffix = ".weight" if all(layer.name.endswith(".weight") for layer in layers) else ""
    in_epochs = any(layer.epochs_to_settle is not None for layer in layers)
    is_folded = any(len(row.members) > 1 for row in rows)
    columns = {
        "n": [str(len(row.members)) if len(row.members) > 1 else "" for row in rows] if is_folded else [],
        "rad/step": [_median(row, "angle") for row in rows],
        "range": [_range(row, "angle") if len(row.members) > 1 else "" for row in rows],
        "predicted": [_median(row, "angle_predicted") for row in rows],
        "ratio": [_range(row, "angle_vs_predicted", show=_ratio) for row in rows],
        "equilibrium": [_equilibrium(row) for row in rows],
        "norm": [_range(row, "norm") for row in rows],
        "norm*": [_range(row, "norm_equilibrium") for row in rows],
        "G": [_range(row, "gain") for row in rows] if any(layer.by_gain for layer in layers) else [],
        "ep. left" if in_epochs else "steps left": [_time_left(_slowest(row)) for row in rows],
    }
    labels = [_one_or_many([_short(layer.how or "") for layer in row.members]) for row in rows]
    return {
        "layer": [row.kind.removesuffix(suffix) for row in rows],
        **{title: cells for title, cells in columns.items() if any(cells)},
        "state": [state_words(row) for row in rows],
        **({"invariant": labels} if any(labels) else {}),
    }


def _median(row: Siblings, field: str) -> str:
    values = row.values(field)
    return _number(median(values) if values else None)


def _equilibrium(row: Siblings) -> str:
    """The median; both ends if they are far apart, as for members with other settings."""
    values = row.values("angle_equilibrium")
    far = values and max(values) > _FAR_APART * min(values)
    return (_range if far else _median)(row, "angle_equilibrium")


def _range(row: Siblings, field: str, *, show: Callable[[float | None], str] | None = None) -> str:
    """The smallest and the largest number of a row, once if they look the same."""
    values = row.values(field)
    shown = show or (_number if len(row.members) == 1 else _brief)
    ends = [shown(min(values)), shown(max(values))] if values else [""]
    return "..".join(dict.fromkeys(ends))


def _slowest(row: Siblings) -> LayerSummary:
    return max(row.members, key=lambda layer: layer.steps_to_settle or 0.0)


def state_words(row: Siblings, *, most: int | None = None) -> str:
    """The states of a row with the number of layers in each, the most frequent first; a state that all share alone.

    With more than ``most`` states they are "various".
    """
    counts = Counter(layer.state_word for layer in row.members).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return "various" if most and len(counts) > most else ", ".join(f"{count} {word}" for word, count in counts)


def _one_or_many(labels: Sequence[str]) -> str:
    return labels[0] if len(set(labels)) == 1 else "various"


def _brief(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if 0.005 < ratio < 100 else f"{ratio:.0e}"


def _time_left(layer: LayerSummary) -> str:
    """Epochs where their length is known, else steps."""
    if layer.state == SETTLED or not layer.steps_to_settle or (layer.invariant is False and not layer.by_gain):
        return ""
    if layer.epochs_to_settle is not None:
        return _short_time(layer.epochs_to_settle)
    return _short_time(math.ceil(layer.steps_to_settle))


def _short_time(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def _short(how: str) -> str:
    """The label of `symmetries` with the number of a weight and its partners in place of their names.

    Example:
        >>> _short("jointly with a.bias, b.weight and 6 more; also against c"), _short("against b, c"), _short("rows")
        ('jointly (9)', 'against (3)', 'rows')
    """
    first = how.partition(";")[0]
    if not first.startswith(_PARTNERS):
        return how
    more = sum(map(int, re.findall(r" and (\d+) more", first)))
    names = re.split(r", | and against ", re.sub(r" and \d+ more|^jointly with |^against ", "", first))
    return f"{'against' if 'against ' in first else 'jointly'} ({1 + len(names) + more})"


def _window(layers: Sequence[LayerSummary]) -> str:
    """The samples that the numbers are taken from; layers may have windows of their own."""
    windows = {
        (layer.samples, layer.last_step if layer.first_step is None else layer.first_step, layer.last_step)
        for layer in layers
        if layer.samples
    }
    if not windows:
        return ""
    counts, firsts, lasts = zip(*windows, strict=True)
    few, many, first, last = min(counts), max(counts), min(firsts), max(lasts)
    samples = counted(many, "sample") if few == many else f"{few:,} to {counted(many, 'sample')}"
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    own = "" if len(windows) == 1 else ", of each layer its own last ones"
    later = [layer.last_lr for layer in layers if layer.last_lr is not None and layer.last_lr < (layer.lr or 0.0)]
    tail = f"; the tail of the schedule, down to lr {three_digits(min(later))}, is left out" if later else ""
    return f"root mean square of {samples}, {steps}{own}{tail}"


def _legend(rows: Sequence[Siblings], columns: Mapping[str, Sequence[str]]) -> str:
    labels = [layer.how or "" for row in rows for layer in row.members]
    parts = [
        *(
            ["*: one row for the layers of a kind, with their median angle and smallest..largest values"]
            if "n" in columns
            else []
        ),
        *(["predicted: for these steps"] if "predicted" in columns else []),
        *(["equilibrium: rad/step at this lr x wd once settled"] if "equilibrium" in columns else []),
        *(["norm*: norm then"] if "norm*" in columns else []),
        *(["G: measured growth gain"] if "G" in columns else []),
        *([_LEGEND_OF_PARTNERS] if any(label.startswith(_PARTNERS) for label in labels) else []),
    ]
    return "; ".join(parts)
