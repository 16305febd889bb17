"""Training for experiments: seeded, watched, measured, and resumed bit for bit after a kill.

- `Recipe`: everything a training consists of; `train`: runs it, resumes it, or branches off it.
- `decay_groups`, `drops`, `warmed_up`, `FullBatch`: parameter groups, schedules and data for recipes.
- `Evaluation`, `SharpnessMeasure`: measures; `by_layer`: samples of the watched layers as arrays.
"""

from __future__ import annotations

from equilibria.lab.training.measures import Evaluation, SharpnessMeasure, chord_angle, recomputed_statistics
from equilibria.lab.training.recipe import FullBatch, Measure, Recipe, decay_groups, drops, warmed_up
from equilibria.lab.training.run import LayerTable, Trained, by_layer, train
from equilibria.lab.training.training import Training, process

__all__ = [
    "Evaluation",
    "FullBatch",
    "LayerTable",
    "Measure",
    "Recipe",
    "SharpnessMeasure",
    "Trained",
    "Training",
    "by_layer",
    "chord_angle",
    "decay_groups",
    "drops",
    "process",
    "recomputed_statistics",
    "train",
    "warmed_up",
]
