"""The settings of the demo's training."""

from __future__ import annotations

from dataclasses import dataclass

from equilibria.errors import whole
from equilibria.theory import SGD


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """SGD with momentum on noisy digits, with one drop of the learning rate.

    lr * weight_decay is large, so that a layer settles in tens of steps before the drop and in hundreds after it. The
    labels are noisy, so that the network cannot learn them by heart, which would let the gradient vanish.

    Attributes:
        seed: of the first weights, the order of the images and the label noise.
        lr: learning rate before the drop.
        drop: what the learning rate is divided by.
        weight_decay: of the convolutions; BatchNorm and the last layer have none.
        momentum: of all parameters.
        batch_size: images per step.
        label_noise: share of labels replaced by random ones, drawn anew for every batch.
        width: channels of the network's first stage.
        blocks: residual blocks in each stage.
        steps_before: steps until the drop.
        steps_after: steps after it; a layer needs about 2,200 to return to within 5 % of equilibrium.
        steady_window: steps at the end of each phase over which angles are averaged.
        drop_window: steps right after the drop over which angles are averaged.
    """

    seed: int = 0
    lr: float = 0.1
    drop: float = 10.0
    weight_decay: float = 5e-3
    momentum: float = 0.9
    batch_size: int = 64
    label_noise: float = 0.3
    width: int = 8
    blocks: tuple[int, ...] = (1, 1)
    steps_before: int = 1500
    steps_after: int = 3000
    steady_window: int = 400
    drop_window: int = 100

    def __post_init__(self) -> None:
        whole("seed", self.seed)
        whole("steps_before", self.steps_before, low=self.steady_window)
        whole("steps_after", self.steps_after, low=max(self.steady_window, self.drop_window))

    @property
    def steps(self) -> int:
        """All steps."""
        return self.steps_before + self.steps_after

    @property
    def rule_before(self) -> SGD:
        """The rule of the convolutions before the drop."""
        return SGD(self.lr, self.weight_decay, momentum=self.momentum)

    @property
    def rule_after(self) -> SGD:
        """The rule of the convolutions after the drop."""
        return SGD(self.lr / self.drop, self.weight_decay, momentum=self.momentum)
