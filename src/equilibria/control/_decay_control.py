"""The weight decay that steers a norm, and with it the angle, while the learning rate stays."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from equilibria.theory.requested import decay_for_angle, norm_power
from equilibria.theory.rules import SGD, Rule

# The error of the angle may swing by a tenth from noise alone. A norm that was shrunk for it grows back no faster than
# weights turn, which in equilibrium is what decay takes: a rate of ten times that keeps the two in balance.
_RATE = 10.0
NEAR = 0.15  # logarithmic error of the angle up to which it may be noise; a norm that is further off is on its way
_STRONGEST = 0.5  # share of the norm that one step's decay takes in the end, at most


@dataclass(frozen=True, slots=True)
class Aim:
    """What weight decay is to bring about.

    Attributes:
        rule: the optimizer's settings.
        wanted: radians of the next step.
        ahead: radians of the step by which weight decay has acted, `steps_ahead` later.
    """

    rule: Rule
    wanted: float
    ahead: float

    @property
    def settled(self) -> float:
        """The decay per step of the equilibrium with this angle."""
        return dataclasses.replace(self.rule, weight_decay=decay_for_angle(self.rule, self.wanted)).decay_per_step

    @property
    def rate(self) -> float:
        """Share of the logarithmic error of the norm that is taken away per step."""
        free = 1 - inertia(self.rule)
        return min(free, _RATE * self.settled / free)


def inertia(rule: Rule) -> float:
    """Share of a norm's change that goes on in the next step: coupled weight decay passes through the momentum."""
    return rule.momentum if isinstance(rule, SGD) else 0.0


def steps_ahead(rule: Rule) -> int:
    """Steps in which weight decay acts."""
    return round(1 / (1 - inertia(rule)))


def steering_decay(aim: Aim, present: float, *, drift: float) -> float:
    """Weight decay of the next step.

    In u = ln||w||, whose change goes on with the inertia a, ``u'' = a u' - (eps - eps*)`` up to noise. With

        eps = eps* + rate (u - u_wanted) + a u' + (u_wanted now - u_wanted ahead)/(steps ahead),

    inertia cancels, the error falls by ``rate`` per step, and a schedule is followed without lag, as far as eps >= 0
    allows. A norm that is far too small is left to grow as fast as it can, without decay. The faster a norm falls, the
    longer it goes on falling: no decay brings it down sooner without overshoot than a rate of 1 - a, the largest used.

    Args:
        aim: what is wanted.
        present: radians per step at the present norm.
        drift: u', change of ln||w|| in the last step.

    Returns:
        The weight decay, in the optimizer's convention.
    """
    if aim.ahead == 0 or math.log(present / aim.wanted) > NEAR:
        return 0.0
    power, free = norm_power(aim.rule), 1 - inertia(aim.rule)
    error = math.log(aim.wanted / present) / power
    slope = math.log(aim.ahead / aim.wanted) / power / steps_ahead(aim.rule)
    eps = aim.settled + aim.rate * error + inertia(aim.rule) * drift + slope
    return min(max(eps, 0.0), _STRONGEST * free) * decay_for_angle(aim.rule, aim.wanted) / aim.settled
