"""Changes training: schedulers, rescaling, optimizers."""

from __future__ import annotations

from equilibria.control.folded_weight_decay import FoldedWeightDecay
from equilibria.control.lion import Lion
from equilibria.control.rescale_on_decay import RescaleOnDecay
from equilibria.control.tapered_exponential import TaperedExponential
from equilibria.control.weight_decay_scheduler import WeightDecayScheduler

__all__ = ["FoldedWeightDecay", "Lion", "RescaleOnDecay", "TaperedExponential", "WeightDecayScheduler"]
