"""Training image networks for the experiments of this paper: data, networks, optimizers and recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from equilibria.errors import one_of
from equilibria.lab.harness.experiment import Arrays, later
from equilibria.lab.harness.task import device, train_in_task
from equilibria.theory.rules import SGD

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import Batches, ImageSet
    from equilibria.lab.training import Evaluation, Measure, Recipe

COLUMNS = ("angle", "angle_equilibrium", "norm", "unit_grad_sq", "momentum_unit_grad_sq")
_PLUS_WIDTH = 68  # of the first stage of the large ShuffleNet-V2+
_STATISTICS = (8, 250)  # batches and images in each, for BatchNorm's statistics in evaluations


@dataclass(frozen=True)
class Images:
    """A data set, its size in pixels, its classes (default: all), and the augmentation of its batches.

    With ``resized`` windows of random size are resized to ``size``: the crops of ImageNet.
    """

    data: str = "cifar10"
    size: int = 16
    classes: tuple[int, ...] = ()
    flip: bool = True
    crop: int = 0
    label_noise: float = 0.0
    resized: bool = later(False)

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits", "imagenet"])


@dataclass(frozen=True)
class Network:
    """A small network of basic, depthwise or shuffled blocks, or a published one for ImageNet.

    The published ones are ResNet-50, MobileNet-V2 and ShuffleNet-V2+, whose large form is 68 wide.
    """

    kind: str = "resnet"
    width: int = 8
    blocks: tuple[int, ...] = (1, 1, 1)
    norm: str = "batch"
    zero_gamma: bool = later(False)

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ["resnet", "mobilenet", "shufflenet", "resnet50", "mobilenet-v2", "shufflenet-v2+"])


IMAGES, RESNET8 = Images(), Network()
"""CIFAR-10 at 16x16 pixels; the smallest residual network, 8 wide: 34 ms of CPU for a step with 128 images."""


@dataclass(frozen=True)
class Sgd:
    """SGD with or without momentum; parameters other than convolutions have their own learning rate and weight decay.

    The scales and shifts of normalisations never decay.
    """

    name: str
    lr: float
    weight_decay: float
    other_lr: float
    momentum: float = 0.0
    other_decay: float = later(0.0)

    @property
    def rule(self) -> SGD:
        """The rule of the convolutions in the theory."""
        return SGD(self.lr, self.weight_decay, momentum=self.momentum)


IMAGENET = Images("imagenet", size=224, resized=True)
RESNET50 = Network("resnet50", width=64, blocks=(3, 4, 6, 3), zero_gamma=True)
RESNET50_LAYERS = {
    "layer1.0.conv2": "net.blocks.0.second.conv.weight",
    "layer2.0.conv2": "net.blocks.3.second.conv.weight",
}
"""The names of the layers that the figures show, there and here."""
WORKER = 32
"""Images that a BatchNorm sees, on a worker of Goyal et al., section 5.1."""
IMAGENET_EPOCH = 5004
"""Batches of 256 among ImageNet's 1,281,167 images, the last one left out."""
IMAGENET_DROPS, IMAGENET_STEPS = tuple(epoch * IMAGENET_EPOCH for epoch in (30, 60, 80)), 90 * IMAGENET_EPOCH
IMAGENET_SGDM = Sgd("SGDM", lr=0.1, weight_decay=1e-4, other_lr=0.1, momentum=0.9, other_decay=1e-4)

SGDM = Sgd("SGDM", lr=0.1, weight_decay=5e-3, other_lr=0.01, momentum=0.9)
"""At this lr * wd, 5e-4, a layer settles in a few times 50 steps."""


@dataclass(frozen=True, kw_only=True)
class ImageTraining:
    """One training, all but its seed.

    Attributes:
        ghost: images that a BatchNorm sees; 0 for whole batches.
        warm_up: steps in which the learning rate grows from ``warm_up_from`` times its first value.
    """

    images: Images
    network: Network
    sgd: Sgd
    batch_size: int
    steps: int
    drops: tuple[int, ...] = ()
    divisor: float = 10.0
    rescale: bool = False
    ghost: int = 0
    warm_up: int = 0
    warm_up_from: float = 1.0
    watch_every: int | None = 2
    measure_every: int = 200
    measures: Mapping[str, Measure] = field(default_factory=dict)

    @classmethod
    def of(cls, config: object, **changes: Any) -> ImageTraining:
        """The training with the fields that a Config has under the same names, and some that it has not."""
        names = [field.name for field in fields(cls) if hasattr(config, field.name)]
        return cls(**{name: getattr(config, name) for name in names} | changes)


class Seeded(Protocol):
    """Settings of an experiment with one task per seed."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """One training each."""


def key(seed: int) -> str:
    """Key of the task of a seed."""
    return f"seed-{seed}"


def tasks(config: Seeded) -> dict[str, int]:
    """The seeds."""
    return {key(seed): seed for seed in config.seeds}


class WithImages(Protocol):
    """Settings of an experiment on images."""

    @property
    def images(self) -> Images:
        """The data."""


def needs(config: WithImages) -> ImageSet:
    """Load the images."""
    return load(config.images)


def load(images: Images) -> ImageSet:
    """The images, standardised; those of ImageNet are pixels, which `make_network` standardises."""
    from equilibria.lab.data import load_images

    return load_images(images.data, size=images.size, classes=images.classes)


def run_training(training: ImageTraining, *, seed: int, columns: Sequence[str] = COLUMNS) -> Arrays:
    """Train inside a task; curves and samples of all layers as arrays."""
    return train_in_task(recipe(training, load(training.images), seed=seed)).arrays(columns)


def recipe(training: ImageTraining, loaded: ImageSet, *, seed: int) -> Recipe:
    """The recipe; trainings with one seed, images and batch size have the same batches in the same order."""
    from equilibria.control import RescaleOnDecay
    from equilibria.lab.training import Recipe, drops, process, warmed_up

    def rescaling(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        example = loaded.train_images[: training.batch_size].to(device())
        return RescaleOnDecay(scheduler, model=model, invariant=invariant(model), example=example)

    return Recipe(
        model=lambda: make_network(training.network, loaded),
        optimizer=lambda model: _optimizer(training.sgd, model),
        data=batches(training.images, loaded, batch_size=training.batch_size, seed=seed, share=process()),
        chunk=training.ghost or None,
        steps=training.steps,
        seed=seed,
        schedule=warmed_up(drops(training.drops, training.divisor), training.warm_up, start=training.warm_up_from),
        control=rescaling if training.rescale else None,
        measures=training.measures,
        measure_every=training.measure_every,
        watch_every=training.watch_every,
        watch_select=is_convolution,
        device=device(),
    )


def batches(
    images: Images, loaded: ImageSet, *, batch_size: int, seed: int, share: tuple[int, int] = (0, 1)
) -> Batches:
    """Endless batches in the order of the seed, or the share of a process of each."""
    from equilibria.lab.data import Batches

    return Batches.of_images(
        loaded,
        batch_size=batch_size,
        label_noise=images.label_noise,
        seed=seed,
        flip=images.flip,
        crop=images.crop,
        resized=images.size if images.resized else 0,
        share=share,
    )


def make_network(network: Network, loaded: ImageSet) -> nn.Module:
    """The network, with first weights from torch's generator; it standardises pixels first."""
    import torch

    from equilibria.lab.nets.imagenet import OnPixels

    net = _network(network, loaded)
    return OnPixels(net) if loaded.train_images.dtype == torch.uint8 else net


def _network(network: Network, loaded: ImageSet) -> nn.Module:
    from equilibria.lab.nets import BasicBlockResNet, MobileNetV2, ShuffleNetV2
    from equilibria.lab.nets.imagenet import BottleneckResNet, PublishedMobileNetV2, ShuffleNetV2Plus

    classes, width, blocks = loaded.classes, network.width, network.blocks
    shape: dict[str, Any] = {"in_channels": loaded.train_images.shape[1], "classes": classes}
    made: dict[str, Callable[[], nn.Module]] = {
        "resnet": lambda: BasicBlockResNet(width, blocks, norm=network.norm, **shape),
        "mobilenet": lambda: MobileNetV2(width, blocks, **shape),
        "shufflenet": lambda: ShuffleNetV2(width, blocks, **shape),
        "resnet50": lambda: BottleneckResNet(width, blocks, classes=classes, zero_gamma=network.zero_gamma),
        "mobilenet-v2": lambda: PublishedMobileNetV2(width, classes=classes),
        "shufflenet-v2+": lambda: ShuffleNetV2Plus("large", classes=classes, divisor=_PLUS_WIDTH // width),
    }
    return made[network.kind]()


def is_convolution(name: str, tensor: Tensor) -> bool:
    """Whether it is the weight of a convolution (of WeightNorm: v); all of them are scale-invariant here."""
    return tensor.ndim == 4 and not name.endswith("original0")


def invariant(model: nn.Module) -> list[str]:
    """Names of the scale-invariant weights, which decay."""
    return [name for name, tensor in model.named_parameters() if is_convolution(name, tensor)]


def _optimizer(sgd: Sgd, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import decay_groups

    groups = decay_groups(
        model,
        invariant(model),
        lr=sgd.lr,
        weight_decay=sgd.weight_decay,
        other_lr=sgd.other_lr,
        other_decay=sgd.other_decay,
    )
    return torch.optim.SGD(groups, momentum=sgd.momentum)


def evaluation(loaded: ImageSet) -> Evaluation:
    """Loss and accuracy on all test images, with BatchNorm statistics of the present weights.

    Of pixels, which are ImageNet's, with the running averages, as in Goyal et al., section 5.1.
    """
    import torch

    from equilibria.lab.training import Evaluation

    pixels = loaded.train_images.dtype == torch.uint8
    return Evaluation.of_images(loaded, statistics=(0, 0) if pixels else _STATISTICS)
