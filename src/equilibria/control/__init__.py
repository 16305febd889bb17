"""Changes training: optimizers."""

from __future__ import annotations

from equilibria.control.angular_schedule import AngularSchedule, Delivered
from equilibria.control.lion import Lion
from equilibria.control.projected_gd import ProjectedGD
from equilibria.control.rotational import Rotational
from equilibria.control.scalar_rmsprop import ScalarRMSprop
from equilibria.control.sgdw import SGDW
from equilibria.control.start_in_equilibrium import StartingNorm, start_in_equilibrium

__all__ = [
    "SGDW",
    "AngularSchedule",
    "Delivered",
    "Lion",
    "ProjectedGD",
    "Rotational",
    "ScalarRMSprop",
    "StartingNorm",
    "start_in_equilibrium",
]
