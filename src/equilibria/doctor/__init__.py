"""What an optimizer does to every parameter of a model, and what is wrong with it."""

from __future__ import annotations

from equilibria.doctor.differences import compare_outputs
from equilibria.doctor.examination import Examination, ParameterRow, examine
from equilibria.doctor.factory import Patient, load_patient

__all__ = ["Examination", "ParameterRow", "Patient", "compare_outputs", "examine", "load_patient"]
