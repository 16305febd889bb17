"""Trainings of eq-transformer: the work of its tasks, apart from what judges and draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from equilibria.experiments.experiment import Arrays
from equilibria.experiments.task import device, scratch, tell_progress

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import Optimizer

    from equilibria.measure.symmetry.result import Symmetries
    from equilibria.nets import GPT
    from equilibria.training import Recipe, Training

PLAIN, QK_NORM = "plain", "qk-norm"
MODELS = (PLAIN, QK_NORM)
COLUMNS = ("angle", "norm", "update_norm", "cosine")
_TEST_SHARE = 0.1
_TEST_BATCHES = 4
_SYMMETRY_BATCHES = 2


@dataclass(frozen=True)
class Config:
    """A small GPT on the documentation of Python, with AdamW at a constant learning rate.

    All tensors with two axes decay, the scales and shifts of the norms do not. With lr * wd = 1.5e-3 a norm
    forgets its start within some 1,000 steps; the window is the last third, fixed before these seeds were run.
    """

    seeds: tuple[int, ...] = (10, 11, 12)
    lr: float = 3e-3
    weight_decay: float = 0.5
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    batch_size: int = 16
    steps: int = 3000
    window: tuple[int, int] = (2000, 3000)
    watch_every: int = 5
    measure_every: int = 200
    characters: int = 0


def key(model: str, seed: int) -> str:
    """Name of a task."""
    return f"{model}-{seed}"


def tasks(config: Config) -> dict[str, tuple[str, int]]:
    """With and without normalised queries and keys; for one seed both have the same text in the same order."""
    return {key(model, seed): (model, seed) for model in MODELS for seed in config.seeds}


def run_task(config: Config, task: tuple[str, int]) -> Arrays:
    """Train it, watched; and say how every tensor is invariant."""
    from equilibria.training import by_layer, train

    model, seed = task
    trained = train(recipe(config, model, seed=seed), folder=scratch(), progress=tell_progress(config.steps))
    layers = by_layer(trained.samples, COLUMNS)
    how = found_symmetries(config, model).how
    return {
        **trained.curves,
        **layers.columns,
        "sampled_step": layers.step,
        "names": np.array(layers.names),
        "how": np.array([how[name] for name in layers.names]),
        "entries": np.array([dict(trained.model.named_parameters())[name].numel() for name in layers.names]),
    }


def recipe(config: Config, model: str, *, seed: int) -> Recipe:
    """All of one training."""
    from equilibria.experiments.eq.text import Windows
    from equilibria.training import Recipe

    train, test = _texts(config)
    return Recipe(
        model=lambda: network(config, model),
        optimizer=lambda net: optimizer(config, net),  # type: ignore[arg-type]
        data=Windows(train, length=config.context, batch_size=config.batch_size, seed=seed),
        steps=config.steps,
        seed=seed,
        loss=next_character_loss,
        measures={"test": _TestLoss(Windows(test, length=config.context, batch_size=config.batch_size))},
        measure_every=config.measure_every,
        watch_every=config.watch_every,
        device=device(),
    )


def network(config: Config, model: str) -> GPT:
    """With first weights as GPT-2 draws them."""
    from equilibria.experiments.eq.text import CHARACTERS
    from equilibria.nets import GPT

    return GPT(
        CHARACTERS,
        config.width,
        layers=config.layers,
        heads=config.heads,
        context=config.context,
        qk_norm=model == QK_NORM,
    )


def optimizer(config: Config, net: GPT) -> Optimizer:
    """Matrices decay, the rest does not."""
    import torch

    matrices = [param for param in net.parameters() if param.ndim >= 2]
    others = [param for param in net.parameters() if param.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr)


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, nats per character."""
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def found_symmetries(config: Config, model: str) -> Symmetries:
    """How every tensor of the network is invariant, by computation at first weights."""
    import torch

    from equilibria.experiments.eq.text import Windows
    from equilibria.measure.objective import objective, preserved_rng
    from equilibria.measure.symmetry import symmetries

    with preserved_rng():
        torch.manual_seed(0)
        net = network(config, model)
    windows = Windows(_texts(config)[0], length=config.context, batch_size=config.batch_size)
    return symmetries(objective(net, next_character_loss), [windows.batch(step) for step in range(_SYMMETRY_BATCHES)])


def _texts(config: Config) -> tuple[Tensor, Tensor]:
    """What is trained on, and the end of the text, which is not."""
    from equilibria.experiments.eq.text import documentation

    text = documentation()[: config.characters or None]
    cut = len(text) - int(_TEST_SHARE * len(text))
    return text[:cut], text[cut:]


class _TestLoss:
    """A `Measure`: mean loss on a few batches that are always the same."""

    def __init__(self, windows: object) -> None:
        self._windows = windows

    def __call__(self, training: Training) -> dict[str, float]:
        """See `Measure`."""
        import torch

        with torch.no_grad():
            losses = [
                float(next_character_loss(training.model(inputs), targets))
                for inputs, targets in (training.placed(self._windows.batch(step)) for step in range(_TEST_BATCHES))  # type: ignore[attr-defined]
            ]
        return {"test_loss": float(np.mean(losses))}
