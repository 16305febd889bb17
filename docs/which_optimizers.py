"""Write docs/which-optimizers.md: which optimizers have a law, and how far it is off.

`make docs-generated` runs this script, and a test compares the page with its output. The closed laws come from the
registry of `equilibria.theory`, the measured ones from `benchmarks/identification.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equilibria.optimizers.rules import _BUILDERS
from equilibria.theory.rules import EQUILIBRIUM_LAWS, RULES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "which-optimizers.md"

HEAD = """# Which optimizers have a law

<!-- Written by docs/which_optimizers.py from the registry and benchmarks/identification.json: do not edit. -->

Three ways lead to a prediction, tried in this order by `watch`, `plan` and `doctor`:

1. **A closed law.** These rules are in `equilibria.theory`; torch's own optimizers are known by their class.
2. **Recognition.** An optimizer of another library whose steps on trial tensors are those of such a rule has its law.
3. **Identification.** All others are measured once: a throw-away copy walks on random gradients, and `eq.identify`
   finds its decay, its step, its memory and where it settles, or says why it settles nowhere. A second for most, four
   for Muon; the outcome is kept in the user's cache folder (`EQUILIBRIA_CACHE` names another). `watch` measures before
   training, so that no step waits for it. Where several processes train together nothing is measured.

```python
import torch, equilibria as eq

weight = torch.nn.Parameter(torch.randn(64, 32))
found = eq.identify(torch.optim.RMSprop([weight], lr=1e-3, weight_decay=0.03))
print(found.motion, found.rule.decay.grad)  # its decay is divided by the gradient
```

```text
equilibrium -1.0
```

Muon and its relatives move square matrices otherwise than long ones. Their closed law takes the shape, and so does the
experiment: `eq.identify(optimizer, shape=(3072, 768))`. Which Muon has which law: [lr and wd for
Muon](how-do-i/muon-lr-wd.md).

An optimizer of your own that has a rule can say so: a method `equilibria_rule(group)` that returns it.

## Closed laws

| rule | optimizers of torch | law of its equilibrium |
|---|---|---|
"""

TORCH = {"SGD": "SGD", "AdamW": "AdamW, Adam(decoupled_weight_decay=True)", "AdamL2": "Adam", "Muon": "Muon"}


def fresh_sentence() -> str:
    """What the configurations chosen after SWATS showed."""
    (table,) = json.loads((ROOT / "benchmarks" / "identification_fresh.json").read_text())
    rows = table["rows"]
    answered = [row for row in rows if row["angle, error"]]
    angle, norm = (
        max(abs(float(row[name].removesuffix(" %"))) for row in answered) for name in ("angle, error", "norm, error")
    )
    return (
        f"{len(rows)} configurations chosen after that change: {len(answered)} answered, angle within {angle:.1f} %, "
        f"norm within {norm:.1f} %; {max(row['CPU seconds'] for row in rows):.0f} s of CPU at most "
        "([benchmarks/identification_fresh.md](../benchmarks/identification_fresh.md))."
    )


def page() -> str:
    """The whole page."""
    tables: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "identification.json").read_text())
    summary, answered, others = (table["rows"] for table in tables)
    lines = [HEAD.rstrip("\n")]
    for rule in RULES.values():
        torchs = TORCH.get(rule.__name__, "")
        lines.append(f"| `{rule.__name__}` | {torchs} | `{EQUILIBRIUM_LAWS[rule]}` |")
    assert set(_BUILDERS) == {"SGD", "AdamW", "Adam", "Muon"}, "name the new optimizer of torch in TORCH"
    every, held_out = summary
    lines += [
        "",
        "## Measured",
        "",
        f"{every['configurations']:.0f} configurations, {every['answered']:.0f} of them with an answer "
        "that was checked against a walk of the optimizer itself over many time constants. Worst error of the angle "
        f"{every['angle, worst']}, of the norm {every['norm, worst']}; {every['outside the target']:.0f} outside "
        f"2 % and 4 %. Of the {held_out['configurations']:.0f} that were held out, {held_out['answered']:.0f} are "
        f"answered, {held_out['outside the target']:.0f} outside. In their first run one was: SWATS, which turns from "
        "Adam into SGD after more steps than the experiment takes. Since then an optimizer whose step assigns a word "
        "among its settings gets no answer. All numbers: "
        "[benchmarks/identification.md](../benchmarks/identification.md).",
        "",
        fresh_sentence(),
        "",
        "| optimizer | angle, error | norm, error |",
        "|---|---|---|",
    ]
    lines += [f"| {row['optimizer']} | {row['angle, error']} | {row['norm, error']} |" for row in answered]
    lines += [
        "",
        "## Without an equilibrium",
        "",
        "Each has a class instead of a number: *norm held* or *forced* (the angle follows from lr alone), *step "
        "proportional to norm*, *own clock*, *adapts its own settings*, *keeps a copy of the weights*, *not "
        "stationary*, *no decay*; *not identified* where no law survives the checks, with the check that failed.",
        "",
        "| optimizer | class | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {row['optimizer']} | {row['class']} | {row['reason']} |" for row in others]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
