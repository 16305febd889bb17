"""A loss as a function of named parameters and a batch, isolated from the model it came from."""

from __future__ import annotations

from equilibria.objectives._objective import ModelObjective, Objective, ObjectiveMode, objective

__all__ = ["ModelObjective", "Objective", "ObjectiveMode", "objective"]
