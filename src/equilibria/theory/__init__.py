"""The laws of spherical motion: numbers in, numbers out (numpy and scipy, never torch).

Every function raises EquilibriaError, with the argument's name, for a value that is not finite or out of range.

Most people need only the names exported here. Everything else is in submodules, imported on first use:

Optimizers and their equilibria
    - `rules`: SGD, SGDW, AdamW, AdamL2, Lion, Muon as settings, and the unit gradient L of each; `equilibrium`: where
      each of them settles, and the assumptions of that prediction; `identified`: laws that were measured.
    - `approach`: how fast and how smoothly; `settling`, `adam`: in how many steps; `targets`: equilibria along a
      schedule.
    - `states`: states to start from, and the factors that rescale one into another equilibrium; `transient`: norm and
      angle step by step; `fluctuation`: their variances, and the share of noise in a gradient; `deviation`: bounds that
      hold at every step or with a given probability.
    - `moments`, `memory`, `muon`: the recursions and autocorrelations behind these; `angles`: angles over many steps.
    - `correlation`: what measured correlations between steps change, and what they tell; `radial`: weights that are not
      quite scale-invariant; `gain`: why a norm grows or falls, for every weight.
    - `violations`: how far a run leaves the law when one of its assumptions fails; `correlated_gradients`: AdamW's and
      Lion's updates under gradients that are correlated in time.
    - `translation`: the same dynamics after a change of scale, batch size, weight decay or optimizer.
    - `requested`: settings for a requested angle, or for an equilibrium to keep; `schedules`: learning rates over time.

Weight decay folded into the learning rate
    - `folding`, `exponential`, `texp`: the exact folded schedule, its closed forms, the tapered one.
    - `switching`: factors to switch a running training; `norms`: exact identities of squared norms.

The noisy Rayleigh quotient
    - `rayleigh`: the model and its norm, and the noisy quadratic model; `rayleigh_risk`: limits and bounds of its risk,
      and the rate at which it forgets its start; `rayleigh_curve`: the whole curve, with and without a closure.
    - `watson`: its stationary distributions, Watson's and Bingham's.

Sharpness
    - `stability`: effective learning rate, entry to the edge of stability, and the curvature at which momentum,
      Nesterov and Adam become unstable; `effective_schedulers`: GWSI and RMSprop.
    - `eos_series`: reading a measured run; `hamiltonian`: the slow oscillation at the edge, and its damping.
    - `dominance`: the Polyak-Lojasiewicz condition; `flow`, `flow_examples`: the sharpness-reduction flow and its
      closed forms; `generalization`: bounds from sharpness.

`citations` names the source of every law.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from equilibria.theory.citations import PAPERS, Citation, Paper, cite
from equilibria.theory.equilibrium import Assumption, Equilibrium
from equilibria.theory.gain import equilibrium_from_gain, growth_gain, norm_budget
from equilibria.theory.identified import Identified
from equilibria.theory.rules import RULES, SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.states import State, cold_start, rescaled, settled
from equilibria.theory.transient import Trajectory, evolve
from equilibria.theory.violations import LawError, violation_error

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
    "Identified",
    "LawError",
    "Lion",
    "Muon",
    "Paper",
    "Rule",
    "State",
    "Trajectory",
    "cite",
    "cold_start",
    "equilibrium_from_gain",
    "evolve",
    "growth_gain",
    "load_all",
    "norm_budget",
    "rescaled",
    "settled",
    "violation_error",
]


def load_all() -> None:
    """Import every submodule, so that every law is registered with `cite`."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")})


def __getattr__(name: str) -> ModuleType:
    # Submodules load on first use: most people need a few of them.
    if not name.startswith("_") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
