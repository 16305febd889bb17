"""equilibria: predict, measure and control how fast every layer of a normalised network really turns.

The verbs, imported on first use:

- `watch`: how fast every layer of a training run turns, beside how fast it should.
- `read_run`: what a watched run left on disk.
- `plan`: what a schedule will do, before it runs.
- `forecast`: what every layer will do over the rest of a run, from what was recorded of it.
- `fold`: weight decay folded into an exponentially growing learning rate.
- `translate`: the same dynamics for another initial scale, batch size, weight decay or optimizer.
- `objective`: the loss of a network as a function of its named parameters and a batch; `Objective` for any function.
- `symmetries`: every scaling symmetry of a loss: which weights are scale-invariant, alone, by rows or jointly.
- `sharpness`: the largest curvature of a loss, raw, spherical or preconditioned, with a bound on its error.
- `SharpnessTracker`: the same all along a run: how far it is from the edge of stability, and when it gets there.
- `split_decay`: parameter groups that decay what should decay, with a reason for every parameter.
- `cite`: where a law comes from, and whether it was corrected.
- `theory`: the laws themselves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from equilibria._version import __version__
from equilibria.errors import EquilibriaError

if TYPE_CHECKING:
    from equilibria import theory
    from equilibria.control.split_decay import split_decay
    from equilibria.forecasting.forecast import forecast
    from equilibria.measure.objective import Objective, objective
    from equilibria.measure.sharpness import sharpness
    from equilibria.measure.symmetry import symmetries
    from equilibria.planning import plan
    from equilibria.report import read_run
    from equilibria.theory.citations import cite
    from equilibria.theory.folding import fold
    from equilibria.theory.translation import translate
    from equilibria.watching import SharpnessTracker, watch

__all__ = [
    "EquilibriaError",
    "Objective",
    "SharpnessTracker",
    "__version__",
    "cite",
    "fold",
    "forecast",
    "objective",
    "plan",
    "read_run",
    "sharpness",
    "split_decay",
    "symmetries",
    "theory",
    "translate",
    "watch",
]

_HOMES = {
    "Objective": "equilibria.measure.objective",
    "SharpnessTracker": "equilibria.watching",
    "cite": "equilibria.theory.citations",
    "fold": "equilibria.theory.folding",
    "forecast": "equilibria.forecasting.forecast",
    "objective": "equilibria.measure.objective",
    "plan": "equilibria.planning",
    "read_run": "equilibria.report",
    "sharpness": "equilibria.measure.sharpness",
    "split_decay": "equilibria.control.split_decay",
    "symmetries": "equilibria.measure.symmetry",
    "translate": "equilibria.theory.translation",
    "watch": "equilibria.watching",
}


def __getattr__(name: str) -> Any:
    if name == "theory":
        return importlib.import_module("equilibria.theory")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
