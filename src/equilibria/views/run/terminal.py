"""The layers of a run in the terminal: a headline, a table and the findings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from equilibria.diagnosis.summary import LayerSummary
from equilibria.findings import Finding, counted
from equilibria.records.tables import NO_EQUILIBRIUM, SETTLED
from equilibria.views.run.headline import no_findings, run_headline, worst_first, worst_layer
from equilibria.views.terminal import fitting

_ROOMY, _NARROW = 92, 72  # columns of a terminal: with fewer than the first it is spaced closely
_LEAST_WIDTH = {"predicted": _NARROW, "rad/step*": _ROOMY, "norm*": _NARROW}
_SPARE = ("rad/step*", "norm*", "predicted", "norm", "ep. left", "steps left")  # what is left out first
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
) -> str:
    """A headline, one line per layer, the furthest off its prediction first, and the findings below.

    Args:
        summaries: one per layer.
        findings: shown below as sentences.
        notes: sentences about the record itself, shown before the findings.
        most: the number of layers to show; None for all.

    Returns:
        Text as wide as the terminal, with ANSI colours if standard output is one and NO_COLOR is not set.
    """
    from equilibria.views._rich import Text, collected_text, columns_table, marked, text_console

    out = text_console()
    if not summaries:
        out.print(
            Text(
                "no samples yet: train a few steps first; or the watched optimizer is not the one that steps: call "
                "watch after creating it"
            )
        )
        return collected_text(out)
    out.print(Text(f"{run_headline(summaries)}. {worst_layer(summaries)}"), end="\n\n")
    layers = worst_first(summaries)[:most]
    gap = 2 if out.width >= _ROOMY else 1
    columns = fitting(_columns(layers, width=out.width), spare=_SPARE, width=out.width, gap=gap)
    if (lines := _lines(columns, gap=gap, width=out.width)) is None:
        out.print(columns_table(columns, words=_WORDS, folded="layer", gap=gap))
    else:
        out.print(Text(lines[0], style="bold", no_wrap=True))
        out.file.write("\n".join(lines[1:]) + "\n")
    out.print(Text(_window(summaries), style="dim"))
    if legend := _legend(layers, columns):
        out.print(Text(legend, style="dim"))
    if most is not None and len(summaries) > most:
        out.print(Text(f"{len(summaries) - most:,} more layers are in --json", style="dim"))
    out.print()
    for note in notes:
        out.print(marked("-", note))
    if not findings:
        out.print(marked("-", ": ".join(no_findings(summaries))))
    for finding in findings:
        out.print(marked("!" if finding.severity == "warning" else "-", f"{finding.subject}: {finding.evidence}"))
        if finding.remedy:
            out.print(marked(" ", finding.remedy))
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


def _columns(layers: Sequence[LayerSummary], *, width: int) -> dict[str, list[str]]:
    """The cells of the table by title, without columns that are empty or for wider terminals."""
    suffix = ".weight" if all(layer.name.endswith(".weight") for layer in layers) else ""
    in_epochs = any(layer.epochs_to_settle is not None for layer in layers)
    columns = {
        "rad/step": [_number(layer.angle) for layer in layers],
        "predicted": [_number(layer.angle_predicted) for layer in layers],
        "ratio": [_ratio(layer.angle_vs_predicted) for layer in layers],
        "rad/step*": [_number(layer.angle_equilibrium) for layer in layers],
        "norm": [_number(layer.norm) for layer in layers],
        "norm*": [_number(layer.norm_equilibrium) for layer in layers],
        "ep. left" if in_epochs else "steps left": [_time_left(layer) for layer in layers],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells) and width >= _LEAST_WIDTH.get(title, 0)}
    labels = [_short(layer.how or "") for layer in layers]
    return {
        "layer": [layer.name.removesuffix(suffix) for layer in layers],
        **shown,
        "state": [state_word(layer) for layer in layers],
        **({"invariant": labels} if any(labels) else {}),
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}" if 0.005 < ratio < 100 else f"{ratio:.0e}"


def _time_left(layer: LayerSummary) -> str:
    """Epochs where their length is known, else steps."""
    if layer.state == SETTLED or not layer.steps_to_settle or layer.invariant is False:
        return ""
    if layer.epochs_to_settle is not None:
        return _short_time(layer.epochs_to_settle)
    return _short_time(math.ceil(layer.steps_to_settle))


def _short_time(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def state_word(layer: LayerSummary) -> str:
    """The state of a layer, or why it has none."""
    if layer.no_law is not None:
        return "no law"
    if layer.invariant is False:
        return {None: "not invariant", "no": "not invariant", "no effect": "no effect"}.get(layer.how, "not alone")
    if layer.invariant is None and layer.mean_cosine is not None:
        return "undecided"
    if layer.state == NO_EQUILIBRIUM and layer.weight_decay == 0:
        return "no decay"
    return layer.state or ""


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
    """The samples that the numbers are taken from: those at the present settings."""
    longest = max(layers, key=lambda layer: layer.samples)
    first = longest.last_step if longest.first_step is None else longest.first_step
    return f"root mean square of {counted(longest.samples, 'sample')}, steps {first:,} to {longest.last_step:,}"


def _legend(layers: Sequence[LayerSummary], columns: dict[str, Sequence[str]]) -> str:
    parts = [
        *(["predicted: rad/step now"] if "predicted" in columns else []),
        *(["*: in equilibrium of the present lr x wd"] if {"rad/step*", "norm*"} & set(columns) else []),
        *([_LEGEND_OF_PARTNERS] if any((layer.how or "").startswith(_PARTNERS) for layer in layers) else []),
    ]
    return "; ".join(parts)
