"""The laws of spherical motion: numbers in, numbers out (numpy and scipy, never torch).

The names below are what most people need. Everything else is in submodules, imported on first use:

Optimizers and their equilibria
    - `rules`: SGD, SGDW, AdamW, AdamL2, Lion, Muon as settings; `equilibrium`: where each of them settles.
    - `approach`: how fast and how smoothly; `settling`, `adam_settling`: how many steps;
      `targets`: equilibria along a schedule.
    - `states`: places to start from; `transient`: norm and angle step by step; `fluctuation`: how they scatter.
    - `moments`, `adam`, `lion`, `memory`: the recursions and autocorrelations behind these.
    - `angles`: angles over many steps; `noise`: share of noise in a gradient, the diffusion view of the norm.
    - `rescale`, `translation`: carrying the dynamics through a change of lr, wd, scale, batch size or optimizer.
    - `requested`: the settings for an angle that is asked for.
    - `schedules`: learning rates over time; `validity`: what a prediction assumes.

Weight decay folded into the learning rate
    - `folding`, `exponential`, `texp`: the exact folded schedule, its closed forms, the tapered one.
    - `switching`: carrying a running training over; `norms`: exact bookkeeping of squared norms.

The noisy Rayleigh quotient
    - `rayleigh`: the model and its norm; `rayleigh_risk`, `rayleigh_curve`: limits, bounds and the whole curve;
      `rayleigh_moments`: the same curve without a closure.
    - `watson`, `bingham`: its stationary distributions.

Sharpness
    - `stability`: effective learning rate and entry to the edge of stability; `effective_schedulers`: GWSI and RMSprop.
    - `thresholds`: the curvature at which momentum, Nesterov and Adam become unstable.
    - `eos_series`: reading a measured run; `hamiltonian`, `damping`: the slow oscillation at the edge.
    - `flow`, `flow_examples`: the sharpness-reduction flow, closed forms; `generalization`: what sharpness bounds.

Where a law comes from: `citations`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from equilibria.theory.citations import PAPERS, Citation, Paper, cite
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.rules import RULES, SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.states import State, cold_start, rescaled, settled
from equilibria.theory.transient import Trajectory, evolve
from equilibria.theory.validity import Assumption

__all__ = [
    "PAPERS",
    "RULES",
    "SGD",
    "SGDW",
    "AdamL2",
    "AdamW",
    "Assumption",
    "Citation",
    "Equilibrium",
    "Lion",
    "Muon",
    "Paper",
    "Rule",
    "State",
    "Trajectory",
    "cite",
    "cold_start",
    "evolve",
    "load_all",
    "rescaled",
    "settled",
]


def load_all() -> None:
    """Import every submodule, so that every law is registered with `cite`."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")})


def __getattr__(name: str) -> ModuleType:
    # scipy.special and scipy.integrate take longer to import than a whole plan takes to compute.
    if not name.startswith("_") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
