"""Factors on weights and optimizer state that put a weight into its new equilibrium after a change of lr or wd."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibria.errors import EquilibriaError
from equilibria.theory.citations import law
from equilibria.theory.rules import Rule
from equilibria.theory.states import settled


@dataclass(frozen=True, slots=True)
class RescaleFactors:
    """Factors to apply between one `optimizer.step()` and the next forward pass.

    Attributes:
        weight: r, for the scale-invariant weight (and its EMA, SWA and float32 master copies).
        first_moment: 1/r, for momentum buffers, `exp_avg`, and a gradient already accumulated.
        second_moment: 1/r^2, for `exp_avg_sq`.
        running_mean: r, for the running mean of the BatchNorm that the weight feeds: b + r (mean - b), b the bias
            between.
        running_var: r^2, for the running variance of that BatchNorm.
    """

    weight: float
    first_moment: float
    second_moment: float
    running_mean: float
    running_var: float


@law(
    "smd",
    "§5.2",
    corrected="optimizer state and BatchNorm's running statistics are rescaled too; any rule, any change of lr, wd",
)
def rescale_factors(old: Rule, new: Rule, *, unit_grad_sq: float = 1.0, dim: float = 1.0) -> RescaleFactors:
    """Factors that move a weight from the equilibrium of ``old`` to that of ``new``.

    ``r = ||w*_new|| / ||w*_old||`` from the exact fixed points. For lr / k it is close to k^(-1/4) (SGD, Nesterov,
    SGDW), k^(-1/2) (AdamW, Lion, Muon), k^(-1/3) (Adam with L2); the papers rescale the weights only, which leaves the
    angle off by 33 % (SGD) or 190 % (AdamW) after lr / 10.

    Args:
        old: the rule before the change.
        new: the same kind of rule after it.
        unit_grad_sq: L; matters for Adam with L2 only.
        dim: number of entries; matters for Adam with L2 only.

    Returns:
        The factors; all 1 if nothing changes.

    Example:
        >>> from equilibria.theory import SGD
        >>> factors = rescale_factors(SGD(0.1, 5e-4, momentum=0.9), SGD(0.02, 5e-4, momentum=0.9))
        >>> round(factors.weight, 3), round(factors.first_moment, 3)
        (0.669, 1.495)
    """
    if type(old) is not type(new):
        raise EquilibriaError(
            f"got {type(old).__name__} and {type(new).__name__}; expected two rules of one kind: a change of optimizer "
            "leaves no state to rescale"
        )
    before = settled(old, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
    after = settled(new, unit_grad_sq=unit_grad_sq, dim=dim).norm_sq
    r = math.sqrt(float(after / before))
    return RescaleFactors(r, 1 / r, 1 / r**2, r, r**2)
