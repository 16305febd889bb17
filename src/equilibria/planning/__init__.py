"""The effect of a schedule, predicted before it runs."""

from equilibria.findings import Finding
from equilibria.planning._alternatives import alternatives
from equilibria.planning._plan import Curve, Phase, Plan, PlannedStep, Situation, WeightDtype
from equilibria.planning._planner import OptimizerLike, plan

__all__ = [
    "Curve",
    "Finding",
    "OptimizerLike",
    "Phase",
    "Plan",
    "PlannedStep",
    "Situation",
    "WeightDtype",
    "alternatives",
    "plan",
]
