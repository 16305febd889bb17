"""Schedulers and optimizers that act on the effective learning rate."""

from __future__ import annotations

from equilibria.control._angular_schedule import AngularSchedule, ControlledSetting, Delivered
from equilibria.control._folded_weight_decay import FoldedWeightDecay
from equilibria.control._hyperball import HeldNorm, Hyperball
from equilibria.control._lion import Lion
from equilibria.control._projected_gd import ProjectedGD, Sphere, SphereScheduler
from equilibria.control._relative_update_limits import RelativeUpdateLimits
from equilibria.control._rescale_on_decay import RescaleOnDecay, RescaleWarning
from equilibria.control._rotational import Rotational
from equilibria.control._scalar_rmsprop import ScalarRMSprop
from equilibria.control._sgdw import SGDW
from equilibria.control._split_decay import DecaySplit, regroup, split_decay
from equilibria.control._start_in_equilibrium import StartingNorm, StartWarning, start_in_equilibrium
from equilibria.control._tapered_exponential import TaperedExponential
from equilibria.control._units import Granularity
from equilibria.control._weight_decay_scheduler import WeightDecayScheduler
from equilibria.theory.requested import Hold

__all__ = [
    "SGDW",
    "AngularSchedule",
    "ControlledSetting",
    "DecaySplit",
    "Delivered",
    "FoldedWeightDecay",
    "Granularity",
    "HeldNorm",
    "Hold",
    "Hyperball",
    "Lion",
    "ProjectedGD",
    "RelativeUpdateLimits",
    "RescaleOnDecay",
    "RescaleWarning",
    "Rotational",
    "ScalarRMSprop",
    "Sphere",
    "SphereScheduler",
    "StartWarning",
    "StartingNorm",
    "TaperedExponential",
    "WeightDecayScheduler",
    "regroup",
    "split_decay",
    "start_in_equilibrium",
]
