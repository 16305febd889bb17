"""The papers' figures, re-run: `equilibria reproduce`.

- `Experiment`, `Outcome`: what one is; `claim`: what it ends in; `registry`: all of them by id.
- `reproduce`: run them, on processes (`pool`) or a Dask cluster (`cluster`), and keep what they show (`results`).
- `figures`: how they are drawn; `gallery`, `results_page`: the pages over all results.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibria.experiments.claim import Claim, Source
    from equilibria.experiments.experiment import Experiment, Outcome
    from equilibria.experiments.registry import experiments, find
    from equilibria.experiments.results import Result
    from equilibria.experiments.runner import Report, reproduce

__all__ = ["Claim", "Experiment", "Outcome", "Report", "Result", "Source", "experiments", "find", "reproduce"]

_HOMES = {  # imported on first use: a process that only does a task needs neither the runner nor the pages
    "Claim": "claim",
    "Experiment": "experiment",
    "Outcome": "experiment",
    "Report": "runner",
    "Result": "results",
    "Source": "claim",
    "experiments": "registry",
    "find": "registry",
    "reproduce": "runner",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
