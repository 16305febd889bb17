"""Writes docs/papers/transformer.md from the committed result: which tensors of a small GPT turn as the law says.

`make docs-generated` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equilibria.lab.harness.claim import mean_interval

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers" / "transformer.md"
RESULT = ROOT / "results" / "eq-transformer" / "desk" / "result.json"

HEAD = """# A small GPT

<!-- Written by docs/transformer.py from results/eq-transformer: do not edit. -->

The papers study convolutions followed by BatchNorm, trained with SGD. Which of their laws hold for a transformer
trained with AdamW? The law for AdamW is `rules.AdamW`: at lr {lr:g} and weight decay {weight_decay:g} a matrix that is
scale-invariant by itself turns by {angle:.4f} rad per step, whatever its size. The tables show every matrix of a GPT of
{layers} layers, {width} wide, in steps {begin:,} to {end:,} of a training, over {seeds} seeds; plain, and with
normalised queries and keys. It is trained on the language reference that ships with Python (`pydoc_data.topics`, Python
Software Foundation License), character by character.

![Angle of every matrix over the law's, and the gradient along it](../../results/eq-transformer/desk/transformer.png)

- Plain, no matrix is invariant by itself: normalisation precedes the matrices here, and queries matter only
  through their product with keys. The law then misses most of them, by up to {worst:.0f} %.
- With normalised queries and keys, queries and keys are: they turn as predicted, and no other kind of matrix does as a
  whole.
- Of the other matrices, those that the loss makes smaller mostly turn faster, and those that it makes larger slower:
  their norm is not the one at which weight decay balances the steps. The table says where this does not explain the
  speed. Joint invariance does not fix the norm of a single matrix: Adam divides each matrix's gradient by its own size.
  As one vector, the matrices that write into the stream turn {plain:.2f} times as far as the law says, and {qk:.2f}
  times with normalised queries and keys.

A matrix is within 10 % if its whole interval is. `equilibria.symmetries` computes the second column
([symmetries](../symmetries.md)); [RESULTS](../../results/RESULTS.md) has the claims with their intervals and verdicts.

    equilibria reproduce eq-transformer --scale desk
"""

TITLES = {"plain": "Plain", "qk-norm": "With normalised queries and keys"}


def page() -> str:
    """The whole page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    config, models = result["config"], result["numbers"]
    head = HEAD.format(
        **{name: config[name] for name in ("lr", "weight_decay", "layers", "width")},
        begin=config["window"][0],
        end=config["window"][1],
        seeds=len(config["seeds"]),
        angle=models["plain"]["predicted_angle"],
        plain=mean_interval(models["plain"]["stream_angle_over_law"])[0],
        qk=mean_interval(models["qk-norm"]["stream_angle_over_law"])[0],
        worst=100 * max(abs(mean_interval(row["angle_over_law"])[0] - 1) for row in models["plain"]["tensors"]),
    )
    return head + "".join(_table(title, models[name]["tensors"]) for name, title in TITLES.items())


def _table(title: str, rows: list[Mapping[str, Any]]) -> str:
    head = "| matrix | invariant | angle / law (95 %) | within 10 % | why |\n|---|---|---|---|---|\n"
    return f"\n## {title}\n\n{head}" + "\n".join(map(_row, rows)) + "\n"


def _row(row: Mapping[str, Any]) -> str:
    middle, (low, high) = mean_interval(row["angle_over_law"])
    return (
        f"| `{row['tensor'].removesuffix('.weight')}` | {row['how'].replace('.weight', '')} "
        f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {'yes' if row['as_predicted'] else 'no'} | {row['why']} |"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
