"""One training of the demo: data, network, optimizer, the loop, and the change at the drop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.data import Batches, Digits, load_digits
from equilibria.lab.demo.recipe import Recipe
from equilibria.lab.nets import BasicBlockResNet
from equilibria.theory.rescale import RescaleFactors, rescale_factors


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """Everything a training needs, at its start.

    Attributes:
        recipe: the settings.
        digits: the data.
        batches: the training images in their order.
        model: the network.
        optimizer: SGD; its first group holds the convolutions, its second everything that has no weight decay.
    """

    recipe: Recipe
    digits: Digits
    batches: Batches
    model: BasicBlockResNet
    optimizer: torch.optim.SGD

    def accuracy(self) -> float:
        """Share of the test images that are recognised."""
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            right = self.model(self.digits.test_images).argmax(dim=1) == self.digits.test_labels
        self.model.train(was_training)
        return float(right.float().mean())


def prepare(recipe: Recipe) -> Training:
    """The training of a recipe at its start; torch's global generator is left as it was."""
    digits = load_digits()
    batches = Batches(
        digits.train_images,
        digits.train_labels,
        batch_size=recipe.batch_size,
        label_noise=recipe.label_noise,
        seed=recipe.seed,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = BasicBlockResNet(recipe.width, recipe.blocks)
    return Training(recipe, digits, batches, model, _optimizer(model, recipe))


def _optimizer(model: BasicBlockResNet, recipe: Recipe) -> torch.optim.SGD:
    convolutions = [layer.conv.weight for _, layer in model.normalised()]
    others = [weight for weight in model.parameters() if all(weight is not known for known in convolutions)]
    return torch.optim.SGD(
        [
            {"params": convolutions, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=recipe.lr,
        momentum=recipe.momentum,
    )


def train(
    training: Training,
    watching: AbstractContextManager[Any],
    *,
    rescale: bool,
    progress: Callable[[int], None],
    finish: Callable[[Any], None],
) -> float:
    """Train to the end.

    Args:
        training: as `prepare` made it; it is used up.
        watching: gives the monitor that observes the training's model and optimizer.
        rescale: whether weights and momentum are rescaled at the drop.
        progress: called with the number of steps done, after each.
        finish: called with the monitor after the last step, before it is closed.

    Returns:
        The accuracy on the test images.
    """
    recipe = training.recipe
    with watching as monitor:
        for step, (images, labels) in zip(range(recipe.steps), training.batches, strict=False):
            if step == recipe.steps_before:
                drop_learning_rate(training, rescale=rescale)
            take_step(training, images, labels)
            progress(step + 1)
        finish(monitor)
    return training.accuracy()


def take_step(training: Training, images: Tensor, labels: Tensor) -> None:
    """One optimizer step on one batch."""
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.model(images), labels)
    torch.autograd.backward(loss)
    training.optimizer.step()


def drop_learning_rate(training: Training, *, rescale: bool) -> None:
    """Divide the learning rate and, if asked, put every convolution into the equilibrium of the new one."""
    recipe = training.recipe
    for group in training.optimizer.param_groups:
        group["lr"] = recipe.rule_after.lr
    if rescale:
        factors = rescale_factors(recipe.rule_before, recipe.rule_after)
        apply_factors(training.model, training.optimizer, factors)


@torch.no_grad()
def apply_factors(model: BasicBlockResNet, optimizer: torch.optim.Optimizer, factors: RescaleFactors) -> None:
    """Rescale every convolution, its momentum, and the statistics of the BatchNorm behind it.

    The function that the network computes stays the same, in training and in evaluation.
    """
    for _, layer in model.normalised():
        layer.conv.weight.mul_(factors.weight)
        optimizer.state[layer.conv.weight]["momentum_buffer"].mul_(factors.first_moment)
        running_mean, running_var = _statistics(layer.norm)
        running_mean.mul_(factors.running_mean)  # the convolution has no bias that would stay as it is
        running_var.mul_(factors.running_var)


def _statistics(norm: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None and norm.running_var is not None
    return norm.running_mean, norm.running_var
