"""Two lines in a training script: watch the weights, then look at a table, findings or a report.

- `watch`: begin; `WatchedRun`: what it gives back.
- `read_run`: what a watched run left on disk; `RecordedRun`: what it gives back.
- `SharpnessTracker`: the largest curvature of the loss, beside the optimizer's threshold, all along a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names

if TYPE_CHECKING:
    from equilibria.watching._recorded import RecordedRun, read_run
    from equilibria.watching._tracker import SharpnessTracker
    from equilibria.watching._watch import WatchedRun, watch

__all__ = ["RecordedRun", "SharpnessTracker", "WatchedRun", "read_run", "watch"]

# Imported on first use: reading a run needs no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "RecordedRun": "_recorded",
        "SharpnessTracker": "_tracker",
        "WatchedRun": "_watch",
        "read_run": "_recorded",
        "watch": "_watch",
    },
)
