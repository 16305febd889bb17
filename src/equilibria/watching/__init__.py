"""Two lines in a training script: watch the weights, then look at a table, findings or a report.

- `watch`: begin.
- `WatchedRun`: what it gives back.
- `SharpnessTracker`: the largest curvature of the loss, beside the optimizer's threshold, all along a run.
"""

from __future__ import annotations

from equilibria.watching.run import WatchedRun, watch
from equilibria.watching.sharpness import SharpnessTracker

__all__ = ["SharpnessTracker", "WatchedRun", "watch"]
