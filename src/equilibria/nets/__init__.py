"""Networks with scale-invariant weights, width as a parameter."""

from __future__ import annotations

from equilibria.nets.basic_block_resnet import BasicBlockResNet, ConvNorm

__all__ = ["BasicBlockResNet", "ConvNorm"]
