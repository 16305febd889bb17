"""Why the layers of two runs turn at different speeds: `explain`."""

from equilibria.comparing._causes import Cause
from equilibria.comparing._change import AngleCurve, Change
from equilibria.comparing._explanation import Explanation, LayerDifference, LoggedDifference, explain
from equilibria.comparing._settings import SettingDifference

__all__ = [
    "AngleCurve",
    "Cause",
    "Change",
    "Explanation",
    "LayerDifference",
    "LoggedDifference",
    "SettingDifference",
    "explain",
]
