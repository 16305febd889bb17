"""Trainings for experiments: seeded, watched, measured, and resumed bit for bit after a kill.

- `Recipe`: all that a training consists of; `train`: do it, go on with it, or branch off it.
- `two_groups`: what decays and what does not; `drops`: a learning rate that falls in steps.
- `Evaluation`, `SharpnessMeasure`: what is measured on the way; `by_layer`: what watching found, as arrays.
- `FullBatch`: gradient descent, in chunks if it must be.
"""

from __future__ import annotations

from equilibria.lab.training.evaluation import Evaluation, recomputed_statistics
from equilibria.lab.training.full_batch import FullBatch
from equilibria.lab.training.groups import two_groups
from equilibria.lab.training.layers import by_layer
from equilibria.lab.training.recipe import Measure, Recipe, drops
from equilibria.lab.training.run import Trained, train
from equilibria.lab.training.sharpness import SharpnessMeasure
from equilibria.lab.training.training import Training

__all__ = [
    "Evaluation",
    "FullBatch",
    "Measure",
    "Recipe",
    "SharpnessMeasure",
    "Trained",
    "Training",
    "by_layer",
    "drops",
    "recomputed_statistics",
    "train",
    "two_groups",
]
