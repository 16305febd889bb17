"""Trainings for experiments: seeded, watched, measured, and resumed bit for bit after a kill.

- `Recipe`: all that a training consists of; `train`: do it, go on with it, or branch off it.
- `two_groups`: what decays and what does not; `drops`: a learning rate that falls in steps.
- `Evaluation`, `SharpnessMeasure`: what is measured on the way; `by_layer`: what watching found, as arrays.
- `FullBatch`: gradient descent, in chunks if it must be.
"""

from __future__ import annotations

from equilibria.training.evaluation import Evaluation, recomputed_statistics
from equilibria.training.full_batch import FullBatch
from equilibria.training.groups import two_groups
from equilibria.training.layers import by_layer
from equilibria.training.recipe import Measure, Recipe, drops
from equilibria.training.run import Trained, train
from equilibria.training.sharpness import SharpnessMeasure
from equilibria.training.training import Training

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
