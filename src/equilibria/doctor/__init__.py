"""Examines a training set-up: what an optimizer does to every parameter of a model, and what is wrong."""

from __future__ import annotations

from equilibria.doctor._differences import compare_outputs
from equilibria.doctor._examination import Examination, ParameterRow, examine
from equilibria.doctor._setup import TrainingSetup, load_setup

__all__ = ["Examination", "ParameterRow", "TrainingSetup", "compare_outputs", "examine", "load_setup"]
