"""What an optimizer does to every parameter of a model, and what is wrong with it."""

from __future__ import annotations

from equilibria.doctor._differences import compare_outputs
from equilibria.doctor._examination import Examination, ParameterRow, examine
from equilibria.doctor._factory import Patient, load_patient

__all__ = ["Examination", "ParameterRow", "Patient", "compare_outputs", "examine", "load_patient"]
