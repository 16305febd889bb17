"""Networks with scale-invariant weights, width as a parameter; each one's docstring lists its invariances."""

from __future__ import annotations

from equilibria.lab.nets.conv_norm import ConvNorm
from equilibria.lab.nets.gpt import GPT
from equilibria.lab.nets.mobile_nets import MobileNetV2, ShuffleNetV2
from equilibria.lab.nets.resnets import (
    BasicBlockResNet,
    PreActivationBlock,
    PreActivationResNet,
    preresnet20,
    preresnet32,
    resnet8,
    resnet18,
)
from equilibria.lab.nets.vgg import FINAL_SCALE, ScaledNorm, ScaleInvariantVGG, ScaleInvariantVGG11

__all__ = [
    "FINAL_SCALE",
    "GPT",
    "BasicBlockResNet",
    "ConvNorm",
    "MobileNetV2",
    "PreActivationBlock",
    "PreActivationResNet",
    "ScaleInvariantVGG",
    "ScaleInvariantVGG11",
    "ScaledNorm",
    "ShuffleNetV2",
    "preresnet20",
    "preresnet32",
    "resnet8",
    "resnet18",
]
