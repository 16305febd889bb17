"""Networks with scale-invariant weights, width as a parameter."""

from __future__ import annotations

from equilibria.nets.basic_block_resnet import BasicBlockResNet, ConvNorm
from equilibria.nets.preactivation_resnet import PreActivationBlock, PreActivationResNet
from equilibria.nets.vgg import FINAL_SCALE, ScaledNorm, ScaleInvariantVGG11

__all__ = [
    "FINAL_SCALE",
    "BasicBlockResNet",
    "ConvNorm",
    "PreActivationBlock",
    "PreActivationResNet",
    "ScaleInvariantVGG11",
    "ScaledNorm",
]
