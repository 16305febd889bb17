"""What the rest of a run will do, from what was recorded of it so far."""

from equilibria.forecasting.backtest import BASELINES, FORECAST, BackTest, LayerTest, Score, backtest
from equilibria.forecasting.forecast import Band, Forecast, LayerForecast, Measured, Total, forecast
from equilibria.forecasting.scenario import Scenario

__all__ = [
    "BASELINES",
    "FORECAST",
    "BackTest",
    "Band",
    "Forecast",
    "LayerForecast",
    "LayerTest",
    "Measured",
    "Scenario",
    "Score",
    "Total",
    "backtest",
    "forecast",
]
