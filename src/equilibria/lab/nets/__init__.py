"""Networks with scale-invariant weights, width as a parameter; each one's docstring lists its invariances."""

from __future__ import annotations

from equilibria.lab.nets.basic_block_resnet import BasicBlockResNet, resnet8, resnet18
from equilibria.lab.nets.conv_norm import ConvNorm
from equilibria.lab.nets.gpt import GPT
from equilibria.lab.nets.mobilenet import MobileNetV2
from equilibria.lab.nets.preactivation_resnet import PreActivationBlock, PreActivationResNet, preresnet20, preresnet32
from equilibria.lab.nets.shufflenet import ShuffleNetV2
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
