"""The laws of spherical motion: numbers in, numbers out (numpy and scipy, never torch).

The names below are what most people need. The special worlds live in submodules that are imported on first use:
`folding`, `texp`, `rayleigh`, `watson`, `stability`, `flow`, `hamiltonian`, `generalization`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from equilibria.theory.citations import PAPERS, Citation, Paper, cite
from equilibria.theory.equilibrium import Equilibrium
from equilibria.theory.rules import RULES, SGD, SGDW, AdamL2, AdamW, Lion, Muon, Rule
from equilibria.theory.transient import State, Trajectory, cold_start, evolve, rescaled, settled
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


def __getattr__(name: str) -> ModuleType:
    # scipy.special and scipy.integrate take longer to import than a whole plan takes to compute.
    if not name.startswith("_") and any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
