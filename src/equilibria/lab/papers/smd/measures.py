"""Measures of this paper: gradients of further batches at the present weights, and angles over several steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.lab.papers.smd.trainings import is_convolution
from equilibria.lab.training import Training, chord_angle
from equilibria.theory.fluctuation import noise_split

Batch = tuple[Tensor, Tensor]
Array = NDArray[np.float64]


def convolutions(training: Training) -> list[Tensor]:
    """The weights of all convolutions, in the order of the samples."""
    return [tensor for name, tensor in training.model.named_parameters() if is_convolution(name, tensor)]


def batch_gradients(training: Training, batches: Sequence[Batch]) -> Iterator[list[Tensor]]:
    """For each batch the gradients of all convolutions in training mode, as in a step with that batch, chunk by chunk.

    BatchNorm's running statistics are restored afterwards; ``grad`` of the weights is not touched.
    """
    weights = convolutions(training)
    saved = [(buffer, buffer.clone()) for buffer in training.model.buffers()]
    try:
        for batch in batches:
            gradients = [torch.zeros_like(weight) for weight in weights]
            for inputs, targets, share in training.chunks(batch):
                loss = training.recipe.loss(training.model(inputs), targets) * share
                torch._foreach_add_(gradients, torch.autograd.grad(loss, weights))
            yield gradients
    finally:
        for buffer, value in saved:
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
            splits.append(
                noise_split(torch.stack([gradient.flatten() for gradient in gradients]).double().cpu().numpy())
            )
            norms.append(float(weight.detach().double().square().sum()))
        return {
            "signal_sq": np.array([split.signal_sq * norm for split, norm in zip(splits, norms, strict=True)]),
            "noise_sq": np.array([split.noise_sq * norm for split, norm in zip(splits, norms, strict=True)]),
        }


class GradientNorms:
    """A `Measure`: root mean square norm of every layer's summed gradient, over batches of several sizes.

    Args:
        batches: name -> batches of one size; the gradient of the sum of losses is taken, not of their mean.
        every: steps from one measurement to the next; NaN in between.
    """

    def __init__(self, batches: Mapping[str, Sequence[Batch]], *, every: int) -> None:
        self._batches, self._every = batches, every

    def __call__(self, training: Training) -> Mapping[str, Array]:
        """See `Measure`."""
        if training.step % self._every:
            return {name: np.full(len(convolutions(training)), np.nan) for name in self._batches}
        return {name: _summed_norm(training, batches) for name, batches in self._batches.items()}


def _summed_norm(training: Training, batches: Sequence[Batch]) -> Array:
    squares = [
        [float(gradient.double().square().sum()) for gradient in gradients]
        for gradients in batch_gradients(training, batches)
    ]
    norms: Array = len(batches[0][1]) * np.sqrt(np.mean(squares, axis=0))
    return norms


class SpanAngles:
    """A `Measure`: angle of every convolution over the last n steps, every n steps, for several n; NaN in between."""

    def __init__(self, spans: tuple[int, ...]) -> None:
        self._spans = spans
        self._starts: dict[str, list[Any]] = {}

    def __call__(self, training: Training) -> dict[str, Array]:
        """See `Measure`."""
        weights = convolutions(training)
        angles = {}
        for span in self._spans:
            angles[f"angle_{span}"] = np.full(len(weights), np.nan)
            if training.step % span == 0:
                start = self._starts.get(str(span))
                if start is not None:
                    pairs = zip(start, weights, strict=True)
                    angles[f"angle_{span}"] = np.array([chord_angle(*pair) for pair in pairs])
                self._starts[str(span)] = [weight.detach().clone() for weight in weights]
        return angles

    def state_dict(self) -> dict[str, list[Any]]:
        """The weights at the start of the present spans."""
        return dict(self._starts)

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Continue the spans from there."""
        self._starts = dict(state)
