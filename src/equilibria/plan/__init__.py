"""What a schedule will do, before it runs."""

from equilibria.plan.findings import Finding
from equilibria.plan.planner import Curve, Moment, Phase, Plan, Situation, plan

__all__ = ["Curve", "Finding", "Moment", "Phase", "Plan", "Situation", "plan"]
