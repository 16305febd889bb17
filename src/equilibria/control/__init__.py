"""Changes training: schedulers, rescaling, optimizers."""

from __future__ import annotations

from equilibria.control.angular_schedule import AngularSchedule, Delivered
from equilibria.control.folded_weight_decay import FoldedWeightDecay
from equilibria.control.lion import Lion
from equilibria.control.projected_gd import ProjectedGD
from equilibria.control.rescale_on_decay import RescaleOnDecay
from equilibria.control.rotational import Rotational
from equilibria.control.scalar_rmsprop import ScalarRMSprop
from equilibria.control.sgdw import SGDW
from equilibria.control.split_decay import split_decay
from equilibria.control.start_in_equilibrium import StartingNorm, start_in_equilibrium
from equilibria.control.tapered_exponential import TaperedExponential
from equilibria.control.weight_decay_scheduler import WeightDecayScheduler

__all__ = [
    "SGDW",
    "AngularSchedule",
    "Delivered",
    "FoldedWeightDecay",
    "Lion",
    "ProjectedGD",
    "RescaleOnDecay",
    "Rotational",
    "ScalarRMSprop",
    "StartingNorm",
    "TaperedExponential",
    "WeightDecayScheduler",
    "split_decay",
    "start_in_equilibrium",
]
