"""Two lines in a training script: watch the weights, then look at a table, findings or a report.

- `watch`: start watching; returns a `WatchedRun`.
- `read_run`: read the record of a watched run; returns a `RecordedRun`.
- `SharpnessTracker`: the largest curvature of the loss and the optimizer's threshold, all along a run.
- `Every`, `Granularity`, `Invariant`, `OnFinding`, `Select`, `Sink`: types of the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names

if TYPE_CHECKING:
    from equilibria.monitor.monitor import Sink
    from equilibria.optimizers.budget import Every
    from equilibria.tensors.invariance import Invariant
    from equilibria.tensors.parameters import Granularity, Select
    from equilibria.watching._alerts import OnFinding
    from equilibria.watching._recorded import RecordedRun, read_run
    from equilibria.watching._tracker import SharpnessTracker
    from equilibria.watching._watch import WatchedRun, watch

__all__ = [
    "Every",
    "Granularity",
    "Invariant",
    "OnFinding",
    "RecordedRun",
    "Select",
    "SharpnessTracker",
    "Sink",
    "WatchedRun",
    "read_run",
    "watch",
]

# Imported on first use: reading a run needs no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Every": "_watch",
        "Granularity": "_watch",
        "Invariant": "_watch",
        "OnFinding": "_watch",
        "RecordedRun": "_recorded",
        "Select": "_watch",
        "SharpnessTracker": "_tracker",
        "Sink": "_watch",
        "WatchedRun": "_watch",
        "read_run": "_recorded",
        "watch": "_watch",
    },
)
