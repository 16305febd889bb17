"""Write docs/papers/items: every definition, theorem, figure and table of each document, and where it is here.

`make docs-generated` runs this script, and a test compares the pages with its output. The items come from
`equilibria.lab.papers.contents`, the verdicts from the committed results.
"""

from __future__ import annotations

import re
from pathlib import Path

from equilibria.lab.harness.claim_text import claims_headline
from equilibria.lab.harness.registry import MODULES
from equilibria.lab.harness.results import Result, open_results
from equilibria.lab.papers.contents import ITEMS, counts
from equilibria.lab.papers.items import MEANINGS, Item
from equilibria.theory import PAPERS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "papers" / "items"
PAGES = {"smd": "smd", "smd+": "smd-appendix", "nrq": "nrq", "explr": "explr", "sharp": "sharp"}
"""The page of each document in the folder, by the document's key."""
_STORY = {"smd+": "smd"}  # documents whose page of explanations has another name

HEAD = """# {title}, item by item

<!-- Written by docs/paper_items.py: do not edit. -->

{counts}. [The experiments, explained](../{story}.md); [corrections](../../corrections.md).

{meanings}

| item | content | status | here | remark |
|---|---|---|---|---|
"""


def page(paper: str) -> str:
    """The page of one document."""
    counted = counts((paper,))
    head = HEAD.format(
        title=PAPERS[paper].title,
        counts=counted[0].upper() + counted[1:],
        story=_STORY.get(paper, paper),
        meanings="\n".join(f"- *{status}*: {meaning}" for status, meaning in MEANINGS.items()),
    )
    return head + "\n".join(map(_row, ITEMS[paper])) + "\n" + _experiments(paper)


def _row(item: Item) -> str:
    names = [f"[`{name}`](../../api/{_api_page(name)}.md)" for name in item.names]
    laws = [f"[`theory.{law}`](../../api/theory.md)" for law in item.laws]
    experiments = [f"[{name}](../../../results/RESULTS.md#{name})" for name in item.all_experiments]
    figures = [_figure(*figure.split("/")) for figure in item.figures]
    cells = (
        item.where,
        item.says,
        item.status,
        ", ".join([*names, *laws, *experiments, *figures]),
        item.note,
    )
    return f"| {' | '.join(_escaped(cell) if place != 3 else cell for place, cell in enumerate(cells))} |"


def _api_page(name: str) -> str:
    """The page of the reference that has a public name."""
    parts = name.split(".")
    if parts[0] == "lab":
        return f"lab-{parts[1]}"
    return parts[0] if len(parts) > 1 else "equilibria"


def _figure(experiment: str, name: str) -> str:
    return f"[figure](../../../results/{experiment}/desk/{name}.png)"


def _escaped(text: str) -> str:
    """Text for a Markdown table; words in backticks stay."""
    return re.sub(r"([|*<>_$~])(?=(?:[^`]*`[^`]*`)*[^`]*$)", r"\\\1", text)


def _experiments(paper: str) -> str:
    """The experiments of a document with the counts of their verdicts."""
    used = {name for item in ITEMS[paper] for name in item.all_experiments}
    rows = [f"| [{name}](../../../results/RESULTS.md#{name}) | {_verdicts(name)} |" for name in MODULES if name in used]
    head = "\n## Experiments\n\nAll claims of each, whatever item they belong to.\n\n"
    return head + "\n".join(["| experiment | verdicts |", "|---|---|", *rows]) + "\n"


def _verdicts(name: str) -> str:
    result = results().get(name)
    return "no result yet" if result is None else claims_headline(result.claims)


def results() -> dict[str, Result]:
    """The committed results by experiment, of each the largest scale."""
    return {result.id: result for _, result in reversed(list(open_results(ROOT / "results").results()))}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for key, name in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page(key), encoding="utf-8")
