"""The papers' figures, re-run: `equilibria reproduce`.

- `Experiment`, `Outcome`: what one is; `claim`: what it ends in; `registry`: all of them by id.
- `reproduce`: run them, on processes (`pool`) or a Dask cluster (`cluster`), and keep what they show (`results`).
- `figures`: how they are drawn; `gallery`, `results_page`: the pages over all results.
"""

from __future__ import annotations

from equilibria.experiments.claim import Claim, Source
from equilibria.experiments.experiment import Experiment, Outcome
from equilibria.experiments.registry import experiments, find
from equilibria.experiments.results import Result
from equilibria.experiments.runner import Report, reproduce

__all__ = ["Claim", "Experiment", "Outcome", "Report", "Result", "Source", "experiments", "find", "reproduce"]
