"""Why two runs differ: the causes as sentences and a table in the terminal, a card in notebooks, and one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from equilibria._display import Printable
from equilibria.comparing import Explanation, LayerDifference
from equilibria.findings import plain, rounded
from equilibria.views._rich import Console, Text, collected_text, columns_table, marked, text_console
from equilibria.views.document import html_row, html_section, still_document, write_document
from equilibria.views.notebook import card
from equilibria.views.svg import Line, svg_stack
from equilibria.views.terminal import fitting
from equilibria.views.words import full_stop, sentence_case, settings_list, text

_MOST_LAYERS, _MOST_CAUSES = 40, 5
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900")  # apart for the colour-blind too
_OTHER_COLOUR, _OTHER = "#868e97", "not claimed"
_AXIS = "ln (angle of A / angle of B)"
_READING = (
    "Factors are A over B, and multiply: those of the causes, of what is not claimed because other seeds do as "
    "much, and of what is unexplained, to the ratio of the angles travelled."
)
_SHOWN_NOT_EXPLAINED = "shown beside the angles; nothing here says that the angles caused them"


def explanation_table(result: Explanation) -> Printable:
    """The headline, the causes, the layers, the settings that differ and the logged numbers."""
    out = text_console()
    out.print(Text(sentence_case(result.headline)))
    for number, sentence in enumerate(result.sentences, 1):
        ranked = number <= len(result.causes)
        out.print(marked(f"{number}." if ranked else "-", sentence))
    out.print()
    _print_layers(result, out)
    for title, lines in (("Settings that differ", _settings(result)), ("Logged by both", _logged(result))):
        _print_lines(title, lines, out)
    if result.change is not None:
        _print_lines("To give B the angles of A", [result.change.sentence], out)
        for code in filter(None, (result.change.code, result.change.schedule)):
            out.print()
            out.print(Text(code), soft_wrap=True)
    _print_lines("Notes", list(result.notes), out)
    return Printable(collected_text(out), _card(result))


def _print_layers(result: Explanation, out: Console) -> None:
    layers = _layers(result)
    columns = {"layer": [layer.name for layer in layers], "A / B": [_factor(layer.travelled) for layer in layers]}
    columns |= {name: [_factor(layer.parts[name]) for layer in layers] for name in _shown(result)}
    columns[_OTHER] = [_factor(_other(layer, _shown(result))) for layer in layers]
    columns["unexplained"] = [_factor(layer.unexplained) for layer in layers]
    kept = fitting(columns, spare=["unexplained", _OTHER, *reversed(_shown(result))], width=out.width)
    out.print(columns_table(kept, words=("layer",), folded="layer"))
    left = len(result.layers) - len(layers)
    more = f"; {_more(left)}" if left else ""
    out.print(Text(f"angle travelled, A over B, and the factor of each cause{more}", style="dim"))


def _layers(result: Explanation) -> list[LayerDifference]:
    """The layers that are shown: of many the furthest apart, in the order of the network."""
    if len(result.layers) <= _MOST_LAYERS:
        return list(result.layers)
    furthest = np.argsort([-abs(math.log(layer.travelled)) for layer in result.layers], kind="stable")[:_MOST_LAYERS]
    return [result.layers[place] for place in sorted(furthest.tolist())]


def _more(left: int) -> str:
    return f"these layers are furthest apart, {left:,} more are in --json"


def _print_lines(title: str, lines: Sequence[str], out: Console) -> None:
    if lines:
        out.print()
        out.print(Text(title, style="bold"))
        for line in lines:
            out.print(marked("-", line))


def _shown(result: Explanation) -> list[str]:
    """The parts that the claimed causes stand for, the largest first; clipping and rounding have other names."""
    claimed = {cause.name for cause in result.causes}
    stands_for = {"clipping": "gradient size", "rounding": "alignment"}
    claimed |= {stands_for[name] for name in claimed if name in stands_for}
    names = [name for name in result.parts if name in claimed]
    return sorted(names, key=lambda name: -float(np.mean(np.abs(np.log(result.parts[name])))))[:_MOST_CAUSES]


def _settings(result: Explanation) -> list[str]:
    return [each.sentence for each in result.settings]


def _logged(result: Explanation) -> list[str]:
    return [each.sentence for each in result.logged]


def _factor(value: float) -> str:
    return plain(value, digits=3) if math.isfinite(value) else "–"


# ---- notebooks and pages


def _picture(result: Explanation) -> str:
    """The parts of the ratio of the angles over time, stacked, and the measured ratio."""
    known = np.isfinite(result.angle) & (result.angle > 0)
    if known.sum() < 2:
        return ""
    step, shown = result.step[known], _shown(result)
    logs = {name: np.log(values[known]) for name, values in result.parts.items()}
    parts = [Line(name, step, logs[name], colour) for name, colour in zip(shown, _COLOURS, strict=False)]
    others = [values for name, values in logs.items() if name not in shown]
    if others:
        parts.append(Line(_OTHER, step, np.sum(others, axis=0), _OTHER_COLOUR))
    return svg_stack(parts, Line("measured", step, np.log(result.angle[known]), "currentColor"), x="steps", y=_AXIS)


def _card(result: Explanation) -> str:
    shown = _shown(result)
    rows = [_cells(layer, shown) for layer in _layers(result)]
    headings = ("layer", "A / B", *shown, _OTHER, "unexplained")
    return card(
        sentence_case(result.headline), picture=_picture(result), headings=headings, rows=rows, notes=result.sentences
    )


def _cells(layer: LayerDifference, shown: Sequence[str]) -> list[str]:
    factors = (layer.travelled, *(layer.parts[name] for name in shown), _other(layer, shown), layer.unexplained)
    return [layer.name, *map(_factor, factors)]


def _other(layer: LayerDifference, shown: Sequence[str]) -> float:
    """The factor of the causes without a column, which are not claimed."""
    return math.prod(factor for name, factor in layer.parts.items() if name not in shown)


_BODY = """<p class="deck">$deck</p>
<dl class="settings">
$settings
</dl>
</header>
$content
</main>
<footer><p>Explained by equilibria $version. This page loads nothing from the network.</p></footer>
"""


def explanation_document(result: Explanation, *, title: str | None = None) -> str:
    """One HTML page without scripts."""
    shown = "Why A and B differ" if title is None else title
    return still_document(
        _BODY,
        title=shown,
        style="",
        headline=text(sentence_case(result.headline)),
        deck=_DECK,
        settings=_overview(result),
        content=explanation_content(result),
    )


_DECK = (
    "The angle per step is the effective learning rate. From the settings, gradients and starting norms of B, the laws "
    "compute the angles of B; then these inputs are replaced by those of A, one after the other. What a replacement "
    "changes depends on what was replaced before it: each number is the mean over all orders."
)


def write_explanation(result: Explanation, path: str | Path, *, title: str | None = None) -> Path:
    """Write the page of an explanation."""
    return write_document(path, explanation_document(result, title=title))


def _overview(result: Explanation) -> str:
    pairs = [
        ("steps compared", f"{result.first_step:,}-{result.last_step:,}", ""),
        ("layers", f"{len(result.layers):,}", ""),
        ("settings that differ", f"{len(result.settings):,}", ""),
    ]
    return settings_list(pairs + [(each.name, _pair(each.a, each.b), "A and B, last tenth") for each in result.logged])


def _pair(a: float, b: float) -> str:
    return f"{rounded(a, digits=4)} and {rounded(b, digits=4)}"


def explanation_content(result: Explanation) -> str:
    """The sections: causes, picture, layers, settings, the change, notes; also shown by the live server."""
    items = "\n".join(_item(sentence) for sentence in result.sentences[: len(result.causes)])
    rest = "".join(f'<p class="caption">{text(full_stop(line))}</p>' for line in result.sentences[len(result.causes) :])
    causes = f'<ol class="causes">\n{items}\n</ol>' if items else "<p>Nothing is claimed.</p>"
    shown = _shown(result)
    rows = [html_row(cells[0], cells[1:]) for cells in (_cells(each, shown) for each in _layers(result))]
    left = len(result.layers) - len(rows)
    more = f" {full_stop(sentence_case(_more(left)))}" if left else ""
    reading = f'<p class="caption">{_READING}{more}</p>\n'
    head = ("layer", "angle travelled, A / B", *shown, _OTHER, "unexplained")
    parts = [
        _section("Causes, the largest first", causes + rest, name="causes"),
        _section("Over time, mean of the layers", f'<div class="picture">{_picture(result)}</div>', name="picture"),
        html_section("Layer by layer", head, rows, name="by-layer", after=reading, kind="numeric"),
        _section("Settings that differ", _list(_settings(result)), name="settings"),
        _section("Logged by both trainings", _list(_logged(result), _SHOWN_NOT_EXPLAINED), name="logged"),
        _change(result),
        _section("Notes", _list(result.notes), name="notes"),
    ]
    return "\n".join(filter(None, parts))


def _item(sentence: str) -> str:
    name, _, rest = sentence.partition(": ")
    return f"<li><strong>{text(name)}</strong>: {text(rest)}</li>"


def _section(heading: str, content: str, *, name: str) -> str:
    if not content:
        return ""
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{text(heading)}</h2>\n{content}\n</section>'


def _list(lines: Sequence[str], after: str = "") -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" + (f'<p class="caption">{text(full_stop(after))}</p>' if after else "")


def _change(result: Explanation) -> str:
    if result.change is None:
        return ""
    blocks = "".join(
        f"<pre><code>{text(code)}</code></pre>" for code in (result.change.code, result.change.schedule) if code
    )
    return _section(
        "To give B the angles of A", f"<p>{text(full_stop(result.change.sentence))}</p>{blocks}", name="change"
    )
