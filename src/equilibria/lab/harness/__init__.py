"""Runs the papers' experiments: `equilibria reproduce`.

- `experiment`: settings, tasks and outcome of an experiment; `registry`: all experiments by id.
- `runner`: `reproduce`, which runs them on `workers` and stores them in `results`; `task`: services for a running task.
- `claim`: claims and their verdicts; `claim_text`: the same as text; `pages`: RESULTS.md and the gallery.
- `figures`: the style of the figures, panels, and training curves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names

if TYPE_CHECKING:
    from equilibria.lab.harness.claim import Claim, Source
    from equilibria.lab.harness.experiment import Experiment, Outcome
    from equilibria.lab.harness.registry import experiments, find
    from equilibria.lab.harness.results import Result
    from equilibria.lab.harness.runner import ExperimentReport, reproduce

__all__ = ["Claim", "Experiment", "ExperimentReport", "Outcome", "Result", "Source", "experiments", "find", "reproduce"]

# Imported on first use: a process that only runs a task needs neither the runner nor the pages.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Claim": "claim",
        "Experiment": "experiment",
        "Outcome": "experiment",
        "ExperimentReport": "runner",
        "Result": "results",
        "Source": "claim",
        "experiments": "registry",
        "find": "registry",
        "reproduce": "runner",
    },
)
