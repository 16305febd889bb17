"""Changes training: schedulers, rescaling, optimizers."""

from __future__ import annotations

from equilibria.control._angular_schedule import AngularSchedule, Delivered
from equilibria.control._folded_weight_decay import FoldedWeightDecay
from equilibria.control._lion import Lion
from equilibria.control._projected_gd import ProjectedGD
from equilibria.control._rescale_on_decay import RescaleOnDecay
from equilibria.control._rotational import Rotational
from equilibria.control._scalar_rmsprop import ScalarRMSprop
from equilibria.control._sgdw import SGDW
from equilibria.control._split_decay import split_decay
from equilibria.control._start_in_equilibrium import StartingNorm, start_in_equilibrium
from equilibria.control._tapered_exponential import TaperedExponential
from equilibria.control._weight_decay_scheduler import WeightDecayScheduler

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
