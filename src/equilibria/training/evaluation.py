"""Accuracy and loss with BatchNorm statistics of the present weights, measured without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equilibria.measure.statistics_behind import normalisations
from equilibria.training.recipe import Batch
from equilibria.training.training import Training

_AT_ONCE = 500  # samples; larger batches fall out of the cache


@contextmanager
def recomputed_statistics(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[None]:
    """Within it, the model is in evaluation mode with running statistics that are the mean over these batches.

    Running averages lag behind weights that turn fast: accuracies then flicker by several points. Afterwards modes and
    statistics are what they were, bit for bit. Without batches, or without such statistics, the model is only put into
    evaluation mode.
    """
    norms = list(normalisations(model).values())
    modes = [(module, module.training) for module in model.modules()]
    held = [(module, module.momentum, [buffer.clone() for buffer in module.buffers()]) for module in norms]
    model.eval()  # dropout draws nothing
    try:
        if batches and norms:
            _recompute(model, norms, batches)
        yield
    finally:
        for module, momentum, buffers in held:
            module.momentum = momentum
            for buffer, value in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _recompute(model: nn.Module, norms: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
    for module in norms:
        module.reset_running_stats()  # type: ignore[operator]
        module.momentum = None  # type: ignore[assignment]  # a plain mean over all batches
        module.training = True
    for inputs in batches:
        model(inputs)
    for module in norms:
        module.training = False


class Evaluation:
    """A `Measure`: mean loss and accuracy on data sets, named ``test_loss``, ``test_accuracy`` for one named test.

    Args:
        statistics: inputs, as they are in training but not augmented, whose mean statistics BatchNorm is given;
            empty to evaluate with the running averages.
        sets: name -> (inputs, labels).
    """

    def __init__(self, statistics: Sequence[Tensor] = (), **sets: Batch) -> None:
        self._statistics, self._sets = tuple(statistics), sets

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        found: dict[str, float] = {}
        with recomputed_statistics(training.model, self._statistics), torch.no_grad():
            for name, (inputs, labels) in self._sets.items():
                found |= {f"{name}_{what}": value for what, value in _score(training, inputs, labels).items()}
        return found


def _score(training: Training, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    loss = right = 0.0
    for some, wanted in zip(torch.split(inputs, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True):
        outputs = training.model(some)
        loss += float(training.recipe.loss(outputs, wanted)) * len(some)
        right += float((outputs.argmax(dim=1) == wanted).sum())
    return {"loss": loss / len(inputs), "accuracy": right / len(inputs)}
