"""A minute of real training that shows the laws at work: `run_demo`.

A small network learns handwritten digits twice, watched: once with a plain drop of the learning rate, once with weights
and momentum rescaled at the drop.
"""

from __future__ import annotations

from equilibria.lab.demo.recipe import Recipe
from equilibria.lab.demo.results import Branch, DemoResult, LayerTurns, Turn
from equilibria.lab.demo.runner import DemoError, run_demo

__all__ = ["Branch", "DemoError", "DemoResult", "LayerTurns", "Recipe", "Turn", "run_demo"]
