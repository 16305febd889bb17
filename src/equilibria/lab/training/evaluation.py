"""Accuracy and loss with BatchNorm statistics of the present weights, measured without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equilibria.errors import EquilibriaError
from equilibria.lab.training.pixels import refuse_pixels
from equilibria.lab.training.recipe import Batch
from equilibria.lab.training.training import Training
from equilibria.tensors.statistics import normalisations

_AT_ONCE = 500  # samples; larger batches fall out of the cache
_STANDARDISE = "standardise these images as those of the training: images.standardised(), or images.standardiser()(...)"


@contextmanager
def recomputed_statistics(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[None]:
    """Within it, the model is in evaluation mode with running statistics that are the mean over these batches.

    Running averages lag behind weights that turn fast: accuracies then flicker by several points. Mean and variance are
    those that training normalises with, weighted by the numbers of values: on one batch alone the model gives what it
    gives in training mode, where torch's own running variance is larger by n / (n - 1). Normalisations that are frozen
    (in evaluation mode while the model trains) keep theirs. Afterwards modes and statistics are what they were, bit for
    bit. Without batches, or without such statistics, the model is only put into evaluation mode.

    Raises:
        EquilibriaError: a batch of one sample, of which BatchNorm can make no variance.
    """
    norms = [module for module in normalisations(model).values() if module.training or not model.training]
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


class _Moments:
    """Mean and variance of all that one normalisation is given, from what torch makes of each input."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._count = 0
        self._mean, self._var = (
            torch.zeros_like(each, dtype=torch.float64) for each in (module.running_mean, module.running_var)
        )
        module.reset_running_stats()
        module.momentum = 1.0  # the running statistics are those of the last input
        module.training = True

    def add(self, _module: nn.Module, given: tuple[Tensor, ...], _output: Tensor) -> None:
        """A forward hook."""
        count = given[0].numel() // self._module.running_mean.numel()
        self._mean += count * self._module.running_mean
        self._var += (count - 1) * self._module.running_var  # torch's is the unbiased one
        self._count += count

    def finish(self) -> None:
        if self._count:
            self._module.running_mean.copy_(self._mean / self._count)
            self._module.running_var.copy_(self._var / self._count)
        self._module.training = False


@torch.no_grad()
def _recompute(model: nn.Module, norms: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
    moments = [_Moments(module) for module in norms]
    with ExitStack() as hooks:
        for module, each in zip(norms, moments, strict=True):
            hooks.callback(module.register_forward_hook(each.add).remove)
        for inputs in batches:
            try:
                model(inputs.to(device))
            except ValueError as error:
                if len(inputs) > 1:
                    raise
                raise EquilibriaError(
                    f"got a batch of one sample for BatchNorm's statistics ({error}); expected two or more samples"
                ) from error
            except RuntimeError as error:
                refuse_pixels(inputs, error, mend=_STANDARDISE)
                raise
    for each in moments:
        each.finish()


class Evaluation:
    """A `Measure`: mean loss and accuracy on data sets, named ``test_loss``, ``test_accuracy`` for one named test.

    Args:
        statistics: inputs, as they are in training but not augmented, whose mean statistics BatchNorm is given, but for
            layers that are frozen, as a list of batches; empty to evaluate with the running averages.
        sets: name -> (inputs, labels); standardised as the network is trained.

    Raises:
        EquilibriaError: a set without samples, or with another number of labels; statistics that are no list of
            batches of inputs.
    """

    def __init__(self, statistics: Sequence[Tensor] = (), **sets: Batch) -> None:
        if isinstance(statistics, Tensor):
            raise EquilibriaError(
                f"got statistics as one tensor of {tuple(statistics.shape)}; expected a list of batches of inputs: "
                "[images[:500]]"
            )
        batches = tuple(statistics)
        others = [type(each).__name__ for each in batches if not isinstance(each, Tensor)]
        if others:
            raise EquilibriaError(
                f"got a {others[0]} among the statistics; expected a list of batches of inputs, without labels: "
                "[images[:500]]"
            )
        for name, (inputs, labels) in sets.items():
            if len(inputs) != len(labels) or not len(inputs):
                raise EquilibriaError(
                    f"got {name} with {len(inputs)} inputs and {len(labels)} labels; expected one label per input, "
                    "and at least one"
                )
        self._statistics, self._sets = batches, sets

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        found: dict[str, float] = {}
        with recomputed_statistics(training.model, self._statistics), torch.no_grad():
            for name, (inputs, labels) in self._sets.items():
                found |= {f"{name}_{what}": value for what, value in _score(training, inputs, labels).items()}
        return found


def _score(training: Training, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    loss = right = 0.0
    for batch in zip(torch.split(inputs, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True):
        some, wanted = training.placed(batch)
        try:
            outputs = training.model(some)
        except RuntimeError as error:
            refuse_pixels(some, error, mend=_STANDARDISE)
            raise
        loss += float(training.recipe.loss(outputs, wanted)) * len(some)
        right += float((outputs.argmax(dim=1) == wanted).sum())
    return {"loss": loss / len(inputs), "accuracy": right / len(inputs)}
