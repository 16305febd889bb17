"""Samples of a run -> summaries and findings that a person can act on.

- `checks`: `diagnose`, the list of all checks.
- `summary`: one summary per layer, over its last samples.
- `layers`: the evidence about one layer, with a number for every assumption of the predictions.
- `equilibrium`: findings about layers far from equilibrium, disturbed by a change, or without one.
- `assumptions`: findings about predictions that fail, and why.
- `faults`: findings about faults in training or measuring.
- `identities`: checks of the measurement that hold for any gradients.
- `sharpness`: findings about the queries of a sharpness tracker.
- `series`, `metadata`: the sample table and the metadata of a run, as the others read them.
"""

from __future__ import annotations

from equilibria.diagnosis.checks import diagnose

__all__ = ["diagnose"]
