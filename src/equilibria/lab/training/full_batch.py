"""All samples at every step: gradient descent."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from equilibria.errors import EquilibriaError


class FullBatch:
    """The same batch without end, as the data of a `Recipe`; its ``chunk`` bounds the memory that a step takes.

    With ``torch.optim.SGD(lr=lr, weight_decay=wd)`` a step is ``w <- (1 - lr wd) w - lr g`` with the gradient g of the
    mean loss over all samples. In chunks this holds where the samples know nothing of each other. BatchNorm couples
    those of a chunk: the loss is then the mean over chunks, each normalised by itself (ghost batches), and
    `Trained.covers` says so.

    Args:
        inputs: one sample per row, in the precision to train in.
        targets: one per sample.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets) or not len(inputs):
            raise EquilibriaError(f"got {len(inputs)} inputs and {len(targets)} targets; expected one target per input")
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.inputs, self.targets
