"""What a request asks for, as the command line would have it: the same options, the same checks, the same words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from equilibria.forecasting import Scenario
from equilibria.forecasting._layers import RecordedLayers
from equilibria.theory import Rule
from equilibria.theory.schedules import ScheduleLike


@dataclass(frozen=True, slots=True)
class AskedPlan:
    """Arguments for `equilibria.plan`.

    Attributes:
        rule: the optimizer.
        schedule: the learning rate.
        settings: the other arguments.
        command: what to type for the same plan.
    """

    rule: Rule
    schedule: ScheduleLike
    settings: Mapping[str, Any]
    command: str


@dataclass(frozen=True, slots=True)
class AskedForecast:
    """Arguments for `equilibria.forecasting.what_if`.

    Attributes:
        scenarios: by name; the first is the plan as given.
        steps: length of the whole run.
    """

    scenarios: Mapping[str, Scenario]
    steps: int


@dataclass(frozen=True, slots=True)
class Readers:
    """How queries are read: the command line, to the right of this package, knows all options.

    Attributes:
        plan: of the planner's form; raises EquilibriaError.
        forecast: of a run's forecast form, with what was observed of the run.
    """

    plan: Callable[[Mapping[str, str]], AskedPlan]
    forecast: Callable[[Mapping[str, str], RecordedLayers], AskedForecast]
