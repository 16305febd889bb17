"""Gradients of whole batches at the present weights, taken in the middle of a training without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.lab.papers.smd.image_training import is_convolution
from equilibria.lab.training import Training
from equilibria.theory.noise import noise_split

Batch = tuple[Tensor, Tensor]
Array = NDArray[np.float64]


def convolutions(training: Training) -> list[Tensor]:
    """The weights of all convolutions, in the order in which watching lists them."""
    return [tensor for name, tensor in training.model.named_parameters() if is_convolution(name, tensor)]


def batch_gradients(training: Training, batches: Sequence[Batch]) -> Iterator[list[Tensor]]:
    """For each batch the gradients of all convolutions, in training mode: as a step with that batch would take them.

    BatchNorm's running statistics are put back when all are taken; ``grad`` of the weights is left alone.
    """
    weights = convolutions(training)
    held = [(buffer, buffer.clone()) for buffer in training.model.buffers()]
    try:
        for inputs, targets in map(training.placed, batches):
            loss = training.recipe.loss(training.model(inputs), targets)
            yield list(torch.autograd.grad(loss, weights))
    finally:
        for buffer, value in held:
            buffer.copy_(value)


class NoiseMeasure:
    """A `Measure`: squared mean and variance of every layer's unit gradient, over batches as large as those trained on.

    ``signal_sq`` is ||E g||^2 ||w||^2, unbiased; ``noise_sq`` the trace of the covariance of a batch's gradient, times
    the same.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def __call__(self, training: Training) -> Mapping[str, Array]:
        """See `Measure`."""
        by_batch = list(batch_gradients(training, self._batches))
        splits, norms = [], []
        for weight, gradients in zip(convolutions(training), zip(*by_batch, strict=True), strict=True):
            splits.append(noise_split(torch.stack([each.flatten() for each in gradients]).double().cpu().numpy()))
            norms.append(float(weight.detach().double().square().sum()))
        return {
            "signal_sq": np.array([split.signal_sq * norm for split, norm in zip(splits, norms, strict=True)]),
            "noise_sq": np.array([split.noise_sq * norm for split, norm in zip(splits, norms, strict=True)]),
        }


class GradientNorms:
    """A `Measure`: root mean square norm of every layer's summed gradient, over batches of several sizes.

    Args:
        batches: name -> batches of one size; the gradient of the sum of losses is taken, not of their mean.
        every: steps from one time to the next; in between there are NaN.
    """

    def __init__(self, batches: Mapping[str, Sequence[Batch]], *, every: int) -> None:
        self._batches, self._every = batches, every

    def __call__(self, training: Training) -> Mapping[str, Array]:
        """See `Measure`."""
        if training.step % self._every:
            return {name: np.full(len(convolutions(training)), np.nan) for name in self._batches}
        return {name: _summed_norm(training, some) for name, some in self._batches.items()}


def _summed_norm(training: Training, batches: Sequence[Batch]) -> Array:
    squares = [[float(each.double().square().sum()) for each in of] for of in batch_gradients(training, batches)]
    found: Array = len(batches[0][1]) * np.sqrt(np.mean(squares, axis=0))
    return found
