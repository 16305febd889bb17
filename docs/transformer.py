"""Writes docs/papers/transformer.md: which tensors of a small GPT turn as the law says, from the committed result.

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

The papers are about convolutions with BatchNorm behind them, and SGD. What of it holds for a transformer that AdamW
trains? The law for AdamW is `rules.AdamW`: at lr {lr:g} and weight decay {weight_decay:g} a matrix that is
scale-invariant by itself turns by {angle:.4f} rad per step, whatever its size. Here is every matrix of a GPT of
{layers} layers, {width} wide, in steps {begin:,} to {end:,} of a training, over {seeds} seeds; once as it is, once with
normalised queries and keys. It reads the language reference that ships with Python (`pydoc_data.topics`, Python
Software Foundation License), character by character.

![Angle of every matrix over the law's, and the gradient along it](../../results/eq-transformer/desk/transformer.png)

- Plain, no matrix is invariant by itself: normalisation stands before the matrices here, not behind them, and
  queries matter only through their product with keys. The law then misses most of them, by up to {worst:.0f} %.
- With normalised queries and keys, those two are: they turn as predicted, and no other kind does as a whole.
- Of the others, what the loss makes smaller mostly turns faster and what it makes larger slower: the norm is not the
  one that weight decay and the steps agree on. Where that does not explain it, the table says so. Being invariant
  together does not help a single one: Adam divides each matrix's gradient by its own size, which need not keep any
  one's norm. As one vector, those that write into the stream turn {plain:.2f} times as far as the law says, and
  {qk:.2f} times with normalised queries and keys.

Within 10 % is a matrix whose whole interval is. `equilibria.symmetries` finds the second column
([symmetries](../symmetries.md)); [RESULTS](../../results/RESULTS.md) has the claims with their intervals and verdicts.

    equilibria reproduce eq-transformer --scale desk
"""

TITLES = {"plain": "As it is", "qk-norm": "With normalised queries and keys"}


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
