"""equilibria: predict, measure and control how fast every layer of a normalised network really turns.

The verbs, imported on first use:

- `watch`: how fast every layer of a training run turns, beside how fast it should.
- `read_run`: what a watched run left on disk.
- `identify`: how an optimizer moves a scale-invariant weight, found out by experiment.
- `import_run`: a run from the log of another tool, or from a folder of checkpoints.
- `plan`: what a schedule will do, before it runs.
- `forecast`: what every layer will do over the rest of a run, from what was recorded of it.
- `explain`: why the layers of one run turn faster or slower than those of another.
- `fold`: weight decay folded into an exponentially growing learning rate.
- `translate`: the same dynamics for another initial scale, batch size, weight decay or optimizer; with a run, how far a
  larger batch keeps them on this network.
- `objective`: the loss of a network as a function of its named parameters and a batch; `Objective` for any function.
- `symmetries`: every scaling symmetry of a loss: which weights are scale-invariant, alone, by rows or jointly.
- `sharpness`: the largest curvature of a loss, raw, spherical or preconditioned, with a bound on its error.
- `SharpnessTracker`: the same all along a run: how far it is from the edge of stability, and when it gets there.
- `split_decay`: parameter groups that decay what should decay, with a reason for every parameter.
- `cite`: where a law comes from, and whether it was corrected.
- `theory`: the laws themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from equilibria._lazy import lazy_names
from equilibria._version import __version__
from equilibria.errors import EquilibriaError

if TYPE_CHECKING:
    from equilibria import theory
    from equilibria.comparing import explain
    from equilibria.control import split_decay
    from equilibria.curvature import sharpness
    from equilibria.forecasting import forecast, translate
    from equilibria.importing import import_run
    from equilibria.objectives import Objective, objective
    from equilibria.optimizers.identification import identify
    from equilibria.planning import plan
    from equilibria.symmetry import symmetries
    from equilibria.theory.citations import cite
    from equilibria.theory.folding import fold
    from equilibria.watching import SharpnessTracker, read_run, watch

__all__ = [
    "EquilibriaError",
    "Objective",
    "SharpnessTracker",
    "__version__",
    "cite",
    "explain",
    "fold",
    "forecast",
    "identify",
    "import_run",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Objective": "objectives",
        "SharpnessTracker": "watching",
        "cite": "theory.citations",
        "explain": "comparing",
        "fold": "theory.folding",
        "forecast": "forecasting",
        "identify": "optimizers.identification",
        "import_run": "importing",
        "objective": "objectives",
        "plan": "planning",
        "read_run": "watching",
        "sharpness": "curvature",
        "split_decay": "control",
        "symmetries": "symmetry",
        "theory": "theory",
        "translate": "forecasting",
        "watch": "watching",
    },
)
