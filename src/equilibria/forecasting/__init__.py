"""What the rest of a run will do, from what was recorded of it so far."""

from equilibria.forecasting._backtest import BASELINES, FORECAST, BackTest, LayerTest, Score, backtest
from equilibria.forecasting._forecast import Band, Forecast, LayerForecast, Measured, Total, forecast
from equilibria.forecasting._scenario import Scenario
from equilibria.forecasting._suggest import Proposal, Suggestion, suggest
from equilibria.forecasting._what_if import Outcome, WhatIf, what_if

__all__ = [
    "BASELINES",
    "FORECAST",
    "BackTest",
    "Band",
    "Forecast",
    "LayerForecast",
    "LayerTest",
    "Measured",
    "Outcome",
    "Proposal",
    "Scenario",
    "Score",
    "Suggestion",
    "Total",
    "WhatIf",
    "backtest",
    "forecast",
    "suggest",
    "what_if",
]
