"""Measures of a `Recipe`: loss and accuracy on data sets, sharpness, and angles between weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from equilibria.curvature import Eigenpairs, WarmStart
from equilibria.curvature._sharpness import Sharpness, sharpness
from equilibria.errors import EquilibriaError
from equilibria.lab.training.recipe import Batch
from equilibria.lab.training.training import Training, raise_if_pixels
from equilibria.objectives._objective import objective
from equilibria.tensors.parameters import Select
from equilibria.tensors.statistics import normalisations

if TYPE_CHECKING:
    from equilibria.lab.data import ImageSet

_EVALUATED_AT_ONCE = 500  # samples; larger batches fall out of the cache
_MATRICES = ("matrix", "age")  # arrays in the memory of a search for eigenpairs
_STANDARDISE = "standardise these images as those of the training: images.standardised(), or images.standardiser()(...)"


@contextmanager
def recomputed_statistics(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[None]:
    """Put the model into evaluation mode with running statistics recomputed as the mean over these batches.

    Running averages lag behind weights that turn fast, so that accuracies flicker by several points. Mean and variance
    are those that training normalises with, weighted by the numbers of values: on one batch alone the model gives the
    outputs of training mode (torch's own running variance is larger by n / (n - 1)). Frozen normalisations (in
    evaluation mode while the model trains) keep their statistics. Afterwards modes and statistics are restored bit for
    bit. Without batches, or without such statistics, the model is only put into evaluation mode.

    Raises:
        EquilibriaError: a batch of one sample, which has no variance for BatchNorm.
    """
    norms = [module for module in normalisations(model).values() if module.training or not model.training]
    modes = [(module, module.training) for module in model.modules()]
    saved = [(module, module.momentum, [buffer.clone() for buffer in module.buffers()]) for module in norms]
    model.eval()  # dropout draws nothing
    try:
        if batches and norms:
            _recompute(model, norms, batches)
        yield
    finally:
        for module, momentum, buffers in saved:
            module.momentum = momentum
            for buffer, value in zip(module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        for module, training in modes:
            module.training = training


class _Moments:
    """Mean and variance of all inputs of one normalisation, from torch's statistics of each input."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._count = 0
        self._mean, self._var = (
            torch.zeros_like(buffer, dtype=torch.float64) for buffer in (module.running_mean, module.running_var)
        )
        module.reset_running_stats()
        module.momentum = 1.0  # the running statistics are those of the last input
        module.training = True

    def add(self, _module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """A forward hook."""
        count = inputs[0].numel() // self._module.running_mean.numel()
        self._mean += count * self._module.running_mean
        self._var += (count - 1) * self._module.running_var  # torch's is unbiased
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
        for module, sums in zip(norms, moments, strict=True):
            hooks.callback(module.register_forward_hook(sums.add).remove)
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
                raise_if_pixels(inputs, error, remedy=_STANDARDISE)
                raise
    for sums in moments:
        sums.finish()


class Evaluation:
    """A `Measure`: mean loss and accuracy on data sets, named ``test_loss``, ``test_accuracy`` for one named test.

    Args:
        statistics: batches of inputs, as in training but not augmented, from which the statistics of BatchNorm (except
            frozen layers) are recomputed before evaluating; empty to evaluate with the running averages.
        sets: name -> (inputs, labels); standardised as in training.

    Raises:
        EquilibriaError: a set without samples, or with another number of labels; statistics that are not a list of
            batches of inputs.
    """

    def __init__(self, statistics: Sequence[Tensor] = (), **sets: Batch) -> None:
        if isinstance(statistics, Tensor):
            raise EquilibriaError(
                f"got statistics as one tensor of {tuple(statistics.shape)}; expected a list of batches of inputs: "
                "[images[:500]]"
            )
        batches = tuple(statistics)
        others = [type(batch).__name__ for batch in batches if not isinstance(batch, Tensor)]
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
        scores: dict[str, float] = {}
        with recomputed_statistics(training.model, self._statistics), torch.no_grad():
            for name, (inputs, labels) in self._sets.items():
                scores |= {f"{name}_{what}": value for what, value in _score(training, inputs, labels).items()}
        return scores

    @classmethod
    def of_images(cls, images: ImageSet, *, statistics: tuple[int, int], train_images: int = 0) -> Evaluation:
        """Evaluate on all test images, and on the first ``train_images`` training images.

        Args:
            images: the data set, standardised.
            statistics: number of batches and images in each that BatchNorm's statistics are recomputed from; (0, 0) to
                evaluate with the running averages.
            train_images: 0 to leave out the training images.
        """
        count, size = statistics
        sets = {"test": (images.test_images, images.test_labels)}
        if train_images:
            sets["train"] = (images.train_images[:train_images], images.train_labels[:train_images])
        return cls(torch.split(images.train_images[: count * size], size) if count else (), **sets)


def _score(training: Training, inputs: Tensor, labels: Tensor) -> dict[str, float]:
    loss = right = 0.0
    for batch in zip(torch.split(inputs, _EVALUATED_AT_ONCE), torch.split(labels, _EVALUATED_AT_ONCE), strict=True):
        chunk, wanted = training.placed(batch)
        try:
            outputs = training.model(chunk)
        except RuntimeError as error:
            raise_if_pixels(chunk, error, remedy=_STANDARDISE)
            raise
        loss += float(training.recipe.loss(outputs, wanted)) * len(chunk)
        right += float((outputs.argmax(dim=1) == wanted).sum())
    return {"loss": loss / len(inputs), "accuracy": right / len(inputs)}


class SharpnessMeasure:
    """A `Measure`: the sharpness of the loss on some data, warm-started from the last one; see `equilibria.sharpness`.

    Args:
        batch: (inputs, targets), or a list of them, whose mean loss is taken.
        select: the parameters; default: all that are trained.
        spherical: times the squared norm of the parameters, for a loss that is scale-invariant in them together.
        tol: of the relative error.
        budget: Hessian-vector products, at most.
    """

    def __init__(
        self, batch: Any, *, select: Select | None = None, spherical: bool = False, tol: float = 1e-2, budget: int = 100
    ) -> None:
        self._batch, self._select, self._spherical = batch, select, spherical
        self._tol, self._budget = tol, budget
        self._last: Sharpness | None = None

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        loss = objective(training.model, training.recipe.loss, select=self._select)
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(training.device), self._batch)
        self._last = sharpness(
            loss, batch, spherical=self._spherical, tol=self._tol, budget=self._budget, warm=self._last
        )
        return {"sharpness": self._last.value, "norm_sq": self._last.norm_sq, "products": float(self._last.hvps)}

    def state_dict(self) -> dict[str, Any]:
        """The starting point of the next search, as numbers, strings and tensors."""
        if self._last is None:
            return {}
        state = asdict(self._last)
        memory = state["pairs"]["memory"]
        memory.update({name: torch.from_numpy(memory[name]) for name in _MATRICES})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next search from there."""
        if not state:
            self._last = None
            return
        memory = state["pairs"]["memory"]
        restored = WarmStart(**{**memory, **{name: memory[name].cpu().numpy() for name in _MATRICES}})
        self._last = Sharpness(**{**state, "pairs": Eigenpairs(**{**state["pairs"], "memory": restored})})


def chord_angle(one: Tensor, other: Tensor) -> float:
    """Angle between two tensors in radians, from the chord: a cosine has no digits for small angles.

    Example:
        >>> round(chord_angle(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 3e-5])) * 1e5, 6)
        1.0
    """
    first, second = (tensor.detach().double() / tensor.detach().double().norm() for tensor in (one, other))
    return 2 * math.asin(min(float((second - first).norm()) / 2, 1.0))
