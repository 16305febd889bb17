"""Write docs/papers/items and presets.md: each item of every document, and each setting of the papers' scales.

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
from equilibria.lab.papers.presets import Preset, Settings, differences, presets
from equilibria.lab.papers.smd.presets import MASK_RCNN
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


PRESETS = ROOT / "docs" / "papers" / "presets.md"
PRESETS_HEAD = """# The papers' settings, with their sources

<!-- Written by docs/paper_items.py: do not edit. -->

`equilibria reproduce smd-multistage --scale paper --device cuda` trains with the paper's own network, images and
settings. We have had no GPU: a test builds each of these {trainings} trainings and compares its network, optimizer,
schedule and batches with the rows below, and a slow one takes the first steps on random images. Where a document does
not state a value, the row says so, with the source of the one that stands in for it. Seeds, windows of claims and steps
between measurements are ours.

{notes}
"""
NOTES = (
    "ImageNet is read from its pictures (`equilibria.lab.data.imagenet`): windows of random size of whole pictures.\n"
    "  Validation: shorter side to 256, the middle 224 pixels, and running averages.",
    "A batch is cut into the images that one BatchNorm sees, one part after the other: the gradients of that many\n"
    "  workers. Several processes of `torch.distributed` can share a batch ([how](#several-gpus)); a test compares\n"
    "  two with one.",
    "Top-1 accuracies (smd, table 1) are claims of `smd-multistage` at this scale alone. Mask R-CNN on COCO (smd,\n"
    "  table 2) is [a table of its settings](#mask-r-cnn-on-coco), without a training.",
)
SEVERAL = """
## Several GPUs

Every process trains on its share of each batch; the images that a BatchNorm sees stay 32. Save as `train.py`, run with
`torchrun --nproc-per-node 8 train.py`:

```python
from dataclasses import replace

import torch.distributed as dist

from equilibria.lab.harness import find
from equilibria.lab.papers.smd import trainings
from equilibria.lab.training import train


def main() -> None:
    dist.init_process_group()
    (experiment,) = find(["smd-linear-scaling"])
    config = experiment.config("paper")
    recipe = trainings.recipe(config.training(1, 16), trainings.load(config.images), seed=0)  # SGDM, 4,096 images
    # The first process writes; started again, it resumes.
    train(replace(recipe, device=f"cuda:{dist.get_rank()}"), folder="runs/sgdm-4096")
```

Measurements of the experiment, such as the angles over several steps, are made by `equilibria reproduce` alone, on one
GPU.
"""


def presets_page() -> str:
    """The page of settings: a table per experiment, whose trainings share the rows that they agree on."""
    known = presets()
    by_experiment = {name: [preset for preset in known if preset.experiment == name] for name in MODULES}
    tables = [_settings_table(name, found) for name, found in by_experiment.items() if found]
    notes = "\n".join(f"- {note}" for note in NOTES)
    return PRESETS_HEAD.format(trainings=len(known), notes=notes) + "\n".join(tables) + _detector(MASK_RCNN) + SEVERAL


def _settings_table(experiment: str, found: list[Preset]) -> str:
    names = dict.fromkeys(name for preset in found for name in preset.settings)
    rows = [_setting_row(name, found) for name in names]
    trainings = ", ".join(preset.name for preset in found)
    differ = "".join(f"- {_escaped(sentence)}\n" for sentence in differences().get(experiment, ()))
    if differ:
        differ = f"What differs from the paper, as far as its text tells:\n\n{differ}\n"
    head = f"\n## {experiment}\n\n{_escaped(trainings)}.\n\n{differ}| setting | value | source |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _detector(settings: Settings) -> str:
    rows = [
        f"| {name} | {_escaped(_value(value))} | {_escaped(source)} |" for name, (value, source) in settings.items()
    ]
    head = "\n## Mask R-CNN on COCO\n\nSettings only; `smd-detection` trains a small detector over stages like these."
    return f"{head}\n\n| setting | value | source |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _setting_row(name: str, found: list[Preset]) -> str:
    """One setting; where trainings differ, each value and source with the names of those that have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for preset in found:
        if name in preset.settings:
            value, source = preset.settings[name]
            owners.setdefault((_value(value), source), []).append(preset.name)
    everyone = sum(map(len, owners.values())) == len(found)
    cells = [_cell([(pair[part], names) for pair, names in owners.items()], everyone) for part in (0, 1)]
    return f"| {name} | {' | '.join(cells)} |"


def _cell(parts: list[tuple[str, list[str]]], everyone: bool) -> str:
    """What all trainings have, or a line for each text with the names of the trainings that have it."""
    owners: dict[str, list[str]] = {}
    for text, names in parts:
        owners.setdefault(text, []).extend(names)
    if everyone and len(owners) == 1:
        return _escaped(parts[0][0])
    return "<br>".join(_escaped(f"{', '.join(names)}: {text}") for text, names in owners.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{_value(key)}: {_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_value, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for key, name in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page(key), encoding="utf-8")
    PRESETS.write_text(presets_page(), encoding="utf-8")
