"""Trainings of image networks for the experiments of this paper: what is trained on what, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibria.errors import one_of
from equilibria.lab.harness.task import device
from equilibria.theory.rules import SGD

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    from equilibria.lab.data import Batches, ImageSet
    from equilibria.lab.training import Evaluation, Measure, Recipe, Trained

COLUMNS = ("angle", "angle_equilibrium", "norm", "unit_grad_sq", "momentum_unit_grad_sq")
_STATISTICS = (8, 250)  # batches and images in each, that BatchNorm's statistics are taken from before an evaluation


@dataclass(frozen=True)
class Images:
    """A data set, its size in pixels, and what is done to every batch; no classes: all."""

    data: str = "cifar10"
    size: int = 16
    classes: tuple[int, ...] = ()
    flip: bool = True
    crop: int = 0
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        one_of("data", self.data, ["cifar10", "digits", "imagenet"])


@dataclass(frozen=True)
class Network:
    """Of basic blocks with any normalisation, of depthwise or shuffled ones; ResNet-50 and MobileNet-V2 as they are."""

    kind: str = "resnet"
    width: int = 8
    blocks: tuple[int, ...] = (1, 1, 1)
    norm: str = "batch"

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ["resnet", "mobilenet", "shufflenet", "resnet50", "mobilenet-v2"])


IMAGES, RESNET8 = Images(), Network()
"""CIFAR-10 at 16x16 pixels; the smallest residual network, 8 wide: 34 ms of CPU for a step with 128 images."""


@dataclass(frozen=True)
class Sgd:
    """SGD, with or without momentum: of the convolutions, which decay; the rest has a learning rate of its own."""

    name: str
    lr: float
    weight_decay: float
    other_lr: float
    momentum: float = 0.0

    @property
    def rule(self) -> SGD:
        """The same for the theory."""
        return SGD(self.lr, self.weight_decay, momentum=self.momentum)


IMAGENET = Images("imagenet", size=224, crop=28)
"""The papers' images, flipped and shifted; their crops of random size are not implemented."""
RESNET50 = Network("resnet50", width=64, blocks=(3, 4, 6, 3))
IMAGENET_EPOCH = 5004
"""Batches of 256 among ImageNet's 1,281,167 images, the last one left out."""
IMAGENET_DROPS, IMAGENET_STEPS = tuple(epoch * IMAGENET_EPOCH for epoch in (30, 60, 80)), 90 * IMAGENET_EPOCH
IMAGENET_SGDM = Sgd("SGDM", lr=0.1, weight_decay=1e-4, other_lr=0.1, momentum=0.9)

SGDM = Sgd("SGDM", lr=0.1, weight_decay=5e-3, other_lr=0.01, momentum=0.9)
"""At this lr * wd, 5e-4, a layer needs a few times 50 steps to its equilibrium."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training, all but its seed."""

    images: Images
    network: Network
    sgd: Sgd
    batch_size: int
    steps: int
    drops: tuple[int, ...] = ()
    divisor: float = 10.0
    rescale: bool = False
    watch_every: int | None = 2
    measure_every: int = 200
    measures: Mapping[str, Measure] = field(default_factory=dict)


def load(images: Images) -> ImageSet:
    """The images, standardised; those of ImageNet as they are on the disk: `make_network` sees to that."""
    from equilibria.lab.data import cifar10, imagenet, load_digits

    if images.data == "digits":
        return load_digits()
    if images.data == "imagenet":
        return imagenet()
    return cifar10(size=images.size, classes=images.classes or None).standardised()


def recipe(plan: Plan, loaded: ImageSet, *, seed: int) -> Recipe:
    """Trainings with one seed, images and batch size have the same batches in the same order, whatever else differs."""
    from equilibria.control._rescale_on_decay import RescaleOnDecay
    from equilibria.lab.training import Recipe, drops

    def rescaling(scheduler: LRScheduler, model: nn.Module) -> LRScheduler:
        example = loaded.train_images[: plan.batch_size].to(device())
        return RescaleOnDecay(scheduler, model=model, invariant=invariant(model), example=example)

    return Recipe(
        model=lambda: make_network(plan.network, loaded),
        optimizer=lambda model: _optimizer(plan.sgd, model),
        data=batches(plan.images, loaded, batch_size=plan.batch_size, seed=seed),
        steps=plan.steps,
        seed=seed,
        schedule=drops(plan.drops, plan.divisor),
        control=rescaling if plan.rescale else None,
        measures=plan.measures,
        measure_every=plan.measure_every,
        watch_every=plan.watch_every,
        watch_select=is_convolution,
        device=device(),
    )


def batches(images: Images, loaded: ImageSet, *, batch_size: int, seed: int) -> Batches:
    """Without end, in the order of the seed."""
    from equilibria.lab.data import Batches

    return Batches(
        loaded.train_images,
        loaded.train_labels,
        batch_size=batch_size,
        label_noise=images.label_noise,
        classes=loaded.classes,
        seed=seed,
        flip=images.flip,
        crop=images.crop,
    )


def make_network(network: Network, loaded: ImageSet) -> nn.Module:
    """With first weights drawn from torch's generator; one for pixels standardises them first."""
    import torch

    from equilibria.lab.papers.smd.imagenet_networks import OnPixels

    net = _network(network, loaded)
    return OnPixels(net) if loaded.train_images.dtype == torch.uint8 else net


def _network(network: Network, loaded: ImageSet) -> nn.Module:
    from equilibria.lab.nets import BasicBlockResNet, MobileNetV2, ShuffleNetV2
    from equilibria.lab.papers.smd.imagenet_networks import mobilenet_v2, resnet50

    if network.kind == "resnet50":
        return resnet50(network.width, network.blocks, classes=loaded.classes)
    if network.kind == "mobilenet-v2":
        return mobilenet_v2(network.width, classes=loaded.classes)
    shape: dict[str, Any] = {"in_channels": loaded.train_images.shape[1], "classes": loaded.classes}
    if network.kind == "resnet":
        return BasicBlockResNet(network.width, network.blocks, norm=network.norm, **shape)
    kind: Callable[..., nn.Module] = MobileNetV2 if network.kind == "mobilenet" else ShuffleNetV2
    return kind(network.width, network.blocks, **shape)


def is_convolution(name: str, tensor: Tensor) -> bool:
    """Whether it is the weight of a convolution, which are all scale-invariant here; of WeightNorm's two, v."""
    return tensor.ndim == 4 and not name.endswith("original0")


def invariant(model: nn.Module) -> list[str]:
    """Names of the weights that decay."""
    return [name for name, tensor in model.named_parameters() if is_convolution(name, tensor)]


def _optimizer(sgd: Sgd, model: nn.Module) -> Optimizer:
    import torch

    from equilibria.lab.training import two_groups

    groups = two_groups(model, invariant(model), lr=sgd.lr, weight_decay=sgd.weight_decay, other_lr=sgd.other_lr)
    return torch.optim.SGD(groups, momentum=sgd.momentum)


def evaluation(loaded: ImageSet) -> Evaluation:
    """Loss and accuracy on all test images, with BatchNorm statistics of the present weights."""
    import torch

    from equilibria.lab.training import Evaluation

    count, size = _STATISTICS
    plain = torch.split(loaded.train_images[: count * size], size)
    return Evaluation(plain, test=(loaded.test_images, loaded.test_labels))


def arrays(trained: Trained, *, columns: Sequence[str] = COLUMNS, part: str = "") -> dict[str, np.ndarray]:
    """Measurements, samples of all layers (``sampled_step`` by ``names``) and their names, each behind ``part``."""
    from equilibria.lab.training import by_layer

    found: dict[str, np.ndarray] = dict(trained.curves)
    if trained.samples is not None:
        layers = by_layer(trained.samples, columns)
        found |= {**layers.columns, "sampled_step": layers.step, "names": np.array(layers.names)}
    return {f"{part}{name}": values for name, values in found.items()}
