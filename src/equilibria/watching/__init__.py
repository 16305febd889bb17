"""Two lines in a training script: watch the weights, then look at a table, findings or a report.

- `watch`: begin.
- `WatchedRun`: what it gives back.
"""

from __future__ import annotations

from equilibria.watching.run import WatchedRun, watch

__all__ = ["WatchedRun", "watch"]
