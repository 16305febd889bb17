"""The rest of a run, forecast from its record so far, and settings with the same dynamics elsewhere."""

from equilibria.forecasting._backtest import BASELINES, FORECAST, BackTest, LayerTest, Score, backtest
from equilibria.forecasting._forecast import (
    Band,
    Estimate,
    Forecast,
    LayerForecast,
    LayerOutcome,
    LayerSamples,
    WhatIf,
    forecast,
    what_if,
)
from equilibria.forecasting._scenario import Scenario
from equilibria.forecasting._suggest import AngleTarget, Proposal, Suggestion, suggest
from equilibria.forecasting._translation import BatchScaling, LayerScaling, translate

__all__ = [
    "BASELINES",
    "FORECAST",
    "AngleTarget",
    "BackTest",
    "Band",
    "BatchScaling",
    "Estimate",
    "Forecast",
    "LayerForecast",
    "LayerOutcome",
    "LayerSamples",
    "LayerScaling",
    "LayerTest",
    "Proposal",
    "Scenario",
    "Score",
    "Suggestion",
    "WhatIf",
    "backtest",
    "forecast",
    "suggest",
    "translate",
    "what_if",
]
