"""What the examples train: a small network with BatchNorm, on the digits that come with scikit-learn."""

from __future__ import annotations

from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from equilibria.lab.data import load_digits


def make_network(width: int = 16) -> nn.Sequential:
    """Three convolutions and a last layer. A normalisation follows each convolution, none follows the last layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def loss_of(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Labels are smoothed: otherwise the gradient of so few images vanishes, and nothing is left to balance."""
    return functional.cross_entropy(network(images), labels, label_smoothing=0.1)


def make_optimizer(network: nn.Module) -> optim.SGD:
    """SGD whose lr x weight decay is large enough to settle within the few hundred steps of an example."""
    return optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)


def batches(size: int = 128) -> DataLoader:
    """11 batches per epoch."""
    digits = load_digits()
    return DataLoader(TensorDataset(digits.train_images, digits.train_labels), size, shuffle=True, drop_last=True)
