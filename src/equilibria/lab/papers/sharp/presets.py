"""The descents of the `paper` scales of sharpness reduction, with the source of each setting."""

from __future__ import annotations

from equilibria.lab.harness.registry import load
from equilibria.lab.papers.presets import CONTROL, SCHEDULE, Preset, Settings
from equilibria.lab.papers.sharp import full_batch
from equilibria.lab.papers.sharp.full_batch import STANDARD_RESNET, VGG, Config, DescentVariant

_Q1 = "appendix Q.1"
_YANG = f"{_Q1}: Wei Yang's pytorch-classification"
_TORCH = "not stated; torch's default"
_EXPERIMENTS = {"sharp-vgg": "fig. 2, 13", "sharp-resnet": "fig. 8, 9", "sharp-ablations": "fig. 13-15, 18"}
_PARAMETERS = {VGG: 9_222_848, full_batch.INVARIANT_RESNET: 271_088, STANDARD_RESNET: 272_282}


def presets() -> tuple[Preset, ...]:
    """All of them."""
    configs = {name: load(name).config("paper") for name in _EXPERIMENTS}
    return tuple(_preset(name, config, variant) for name, config in configs.items() for variant in config.variants)


def _preset(experiment: str, config: Config, variant: DescentVariant) -> Preset:
    return Preset(
        experiment,
        variant.name,
        lambda images: full_batch.recipe(config, variant, seed=0, images=images, part=variant.parts[-1]),
        _settings(_EXPERIMENTS[experiment], config, variant),
    )


def _settings(figures: str, config: Config, variant: DescentVariant) -> Settings:
    ghost = (config.ghost, f"{_Q1}: 50 ghost batches of 1,000") if config.ghost else ("all", f"{_Q1}, CIFAR-10-2k")
    return {
        "network": ("ScaleInvariantVGG" if variant.network == VGG else "PreActivationResNet", f"{_Q1}, fig. 16, 17"),
        "parameters": (_PARAMETERS[variant.network], f"{_Q1}, fig. 16, 17"),
        "first weights": ("He, by outputs", f"{_YANG}; linear layers: 0.01 in a VGG, torch's in a ResNet"),
        "BatchNorms that begin at 0": (0, _YANG),
        "BatchNorm's momentum": (0.1, _TORCH),
        "BatchNorm's eps": (1e-5, _TORCH),
        "dropout": (0.0, _YANG),
        "optimizer": ("SGD", "eq. (1)"),
        "momentum": (0, "eq. (1)"),
        "dampening": (0, "eq. (1)"),
        "nesterov": (False, "eq. (1)"),
        "lr": (variant.lr, figures),
        "weight decay": (variant.weight_decay, figures),
        SCHEDULE: ({0: 1.0}, "eq. (1)"),
        "steps": (variant.steps, figures),
        "images in a batch": ("all", "full batch"),
        "images that a BatchNorm sees": ghost,
        "augmentation": ({}, f"{_Q1}: none"),
        "loss": ("cross_entropy", "appendix R"),
        CONTROL: (False, "eq. (1)"),
    }
