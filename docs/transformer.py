"""Writes docs/papers/transformer.md from the committed result: the growth gain of every matrix of a small GPT.

`make docs-generated` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from equilibria.lab.harness.claim import mean_interval

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "papers" / "transformer.md"
RESULT = ROOT / "results" / "eq-transformer" / "desk" / "result.json"

HEAD = """# A small GPT

<!-- Written by docs/transformer.py from results/eq-transformer: do not edit. -->

The papers study convolutions followed by BatchNorm, trained with SGD. What do their laws say about a transformer
trained with AdamW? A matrix that is scale-invariant by itself turns by {angle:.4f} rad per step at lr {lr:g} and
weight decay {weight_decay:g}, whatever its size (`rules.AdamW`). Plain, no matrix of a GPT is; with normalised queries
and keys, queries and keys are. Every other matrix has a [growth gain](../concepts/gain.md) G of its own, where an
invariant one has F = {invariant_gain:.0f}.

The tables show every matrix of a GPT of {layers} blocks, {width} wide, over {seeds} seeds. G is measured in steps
{before:,} to {drop:,}. Then lr is halved, and norm and angle in steps {after:,} to {steps:,} are predicted from G,
norm and update size before the change. It is trained on the language reference that ships with Python
(`pydoc_data.topics`, Python Software Foundation License), character by character.

![Growth gain of every matrix, and angle over prediction](../../results/eq-transformer/desk/transformer.png)

- Over all matrices the angle is {plain_angle:.0f} % off its prediction (with normalised queries and keys
  {qk_angle:.0f} %), the norm {plain_norm:.0f} % ({qk_norm:.0f} %): mean of |ln|. With F in place of G the angle is
  {plain_invariant:.0f} % ({qk_invariant:.0f} %) off.
- G belongs to a matrix, but is no constant: at half the lr it is {grown:.1f} times as large in the median. What it
  predicts is the next few hundred steps.

A matrix is within 10 % if its whole interval is. `equilibria.symmetries` computes the second column
([symmetries](../symmetries.md)); [RESULTS](../../results/RESULTS.md) has the claims with their intervals and verdicts.

    equilibria reproduce eq-transformer --scale desk
"""

TITLES = {"plain": "Plain", "qk-norm": "With normalised queries and keys"}


def page() -> str:
    """The whole page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    config, models = result["config"], result["numbers"]
    shares = {
        f"{model.partition('-')[0]}_{word}": _percent(models[model]["tensors"], field)
        for model in TITLES
        for word, field in (("angle", "angle"), ("norm", "norm"), ("invariant", "angle_as_invariant"))
    }
    rows = [row for model in TITLES for row in models[model]["tensors"]]
    grown = median(after / before for row in rows for after, before in zip(row["gain_after"], row["gain"], strict=True))
    settings = ("lr", "weight_decay", "layers", "width", "before", "drop", "after", "steps")
    head = HEAD.format(
        **{name: config[name] for name in settings},
        **shares,
        seeds=len(config["seeds"]),
        angle=models["plain"]["predicted_angle"],
        invariant_gain=models["plain"]["invariant_gain"],
        grown=grown,
    )
    return head + "".join(_table(title, models[name]["tensors"]) for name, title in TITLES.items())


def _percent(rows: list[Mapping[str, Any]], field: str) -> float:
    """Mean |ln| of a ratio over matrices and seeds, in per cent."""
    return 100 * fmean(abs(math.log(ratio)) for row in rows for ratio in row[field])


def _table(title: str, rows: list[Mapping[str, Any]]) -> str:
    head = "| matrix | invariant | G (95 %) | angle / predicted (95 %) | within 10 % | with F |\n" + 6 * "|---" + "|\n"
    return f"\n## {title}\n\n{head}" + "\n".join(map(_row, rows)) + "\n"


def _row(row: Mapping[str, Any]) -> str:
    gain, (gain_low, gain_high) = mean_interval(row["gain"])
    middle, (low, high) = mean_interval(row["angle"])
    return (
        f"| `{row['name'].removesuffix('.weight')}` | {row['how'].replace('.weight', '')} "
        f"| {gain:.3g} ({gain_low:.3g} to {gain_high:.3g}) | {middle:.2f} ({low:.2f} to {high:.2f}) "
        f"| {'yes' if row['as_predicted'] else 'no'} | {fmean(row['angle_as_invariant']):.2f} |"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
