"""The papers' figures, re-run: `equilibria reproduce`.

- `Experiment`, `Outcome`: what one is; `claim`: what it ends in; `registry`: all of them by id.
- `reproduce`: run them, on processes (`pool`) or a Dask cluster (`cluster`), and keep what they show (`results`).
- `figures`: how they are drawn; `gallery`, `results_page`: the pages over all results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names

if TYPE_CHECKING:
    from equilibria.lab.harness.claim import Claim, Source
    from equilibria.lab.harness.experiment import Experiment, Outcome
    from equilibria.lab.harness.registry import experiments, find
    from equilibria.lab.harness.results import Result
    from equilibria.lab.harness.runner import Report, reproduce

__all__ = ["Claim", "Experiment", "Outcome", "Report", "Result", "Source", "experiments", "find", "reproduce"]

# Imported on first use: a process that only does a task needs neither the runner nor the pages.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Claim": "claim",
        "Experiment": "experiment",
        "Outcome": "experiment",
        "Report": "runner",
        "Result": "results",
        "Source": "claim",
        "experiments": "registry",
        "find": "registry",
        "reproduce": "runner",
    },
)
