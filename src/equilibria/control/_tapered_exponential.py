"""TEXP and TEXP v2: the approximate exponential learning rates of the literature, to compare with the exact one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from equilibria.control._folded_weight_decay import FoldedWeightDecay
from equilibria.optimizers.controllers import StandsFor
from equilibria.tensors.invariance import JointlyInvariant
from equilibria.theory.folding import FoldState, FoldStep
from equilibria.theory.texp import Taper, taper, unfold_step

_TAPER = "fold_taper"


class TaperedExponential(FoldedWeightDecay):
    """Folds the weight decay of a step schedule in phase by phase: close to `FoldedWeightDecay`, but not equal.

    Within a phase the learning rate grows by ``z^-2`` per step, z the larger root of
    ``x² - (1 + momentum - lr wd) x + momentum``. At a drop of the scheduler's learning rate TEXP drops too; TEXP v2
    (``instant_drop=False``) only changes its growth, as if the learning rate stayed and weight decay were reduced.
    Against the exact run TEXP's learning rate is off by a constant factor (0.9 % at lr 0.1, wd 5e-4, momentum 0.9).

    Args:
        scheduler: a torch scheduler that changes the learning rate at few steps, such as MultiStepLR.
        model: the network.
        invariant: the scale-invariant weights, as for `FoldedWeightDecay`.
        instant_drop: True for TEXP, False for TEXP v2.
        example: as for `FoldedWeightDecay`.
        renormalise: as for `FoldedWeightDecay`.
    """

    def __init__(
        self,
        scheduler: LRScheduler | Optimizer,
        *,
        model: nn.Module,
        invariant: JointlyInvariant,
        instant_drop: bool = True,
        example: Any = None,
        renormalise: bool = True,
    ) -> None:
        self._instant_drop = instant_drop
        super().__init__(scheduler, model=model, invariant=invariant, example=example, renormalise=renormalise)

    def _next(
        self, group: Mapping[str, Any], state: FoldState, *, lr: float, weight_decay: float
    ) -> tuple[FoldStep, Mapping[str, Any]]:
        momentum = float(group["momentum"])
        before = Taper(*group[_TAPER]) if _TAPER in group else None
        now = taper(before, lr, weight_decay=weight_decay, momentum=momentum, instant_drop=self._instant_drop)
        decay = weight_decay if self._instant_drop else weight_decay * lr / now.first_lr
        step = unfold_step(state, now.log_lr, weight_decay=decay, momentum=momentum)
        return step, {_TAPER: [now.log_lr, now.lr, now.first_lr, now.log_root]}

    def _stands_for(self, group: Mapping[str, Any], index: int) -> StandsFor:
        """The run with weight decay to which this step belongs exactly: its lr and decay are not the scheduler's."""
        run, group_step = super()._stands_for(group, index), self._in_step.get(index)
        if group_step is None:
            return run
        lr = math.exp(group_step.step.log_lr) * run.kept / run.scale**2
        decay = (1 - run.kept) / lr - float(group["momentum"]) * run.share
        return replace(run, lr=lr, weight_decay=max(decay, 0.0))
