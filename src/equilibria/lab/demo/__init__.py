"""A minute of training that shows the laws on real data: `run_demo`.

A small network learns handwritten digits three times, watched. The trainings differ in what happens when the learning
rate drops: nothing else, weights and momentum are rescaled, or weight decay drops too.
"""

from __future__ import annotations

from equilibria.lab.demo.results import DemoArm, DemoResult, LayerTurns, Turn
from equilibria.lab.demo.runner import DemoError, run_demo
from equilibria.lab.demo.training import DemoSettings

__all__ = ["DemoArm", "DemoError", "DemoResult", "DemoSettings", "LayerTurns", "Turn", "run_demo"]
