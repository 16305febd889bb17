"""What a schedule will do, before it runs."""

from equilibria.findings import Finding
from equilibria.planning._alternatives import alternatives
from equilibria.planning._planner import Curve, Moment, Phase, Plan, Situation, plan

__all__ = ["Curve", "Finding", "Moment", "Phase", "Plan", "Situation", "alternatives", "plan"]
