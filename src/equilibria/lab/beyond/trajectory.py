"""A stretch of training with every weight and gradient kept, and the statistics of its steps.

The correlations of gradients and moves, the turning over many steps, the curvature along the last move and the share of
the mean gradient, each of every scale-invariant layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import fft

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
_COORDINATES = 512  # transformed at once
_FRESH = 7  # independent batches at a measured point; with the batch of the step they make 28 pairs


class NoisyDraws:
    """Batches drawn with replacement, with a share of the labels replaced by random ones.

    Without replacement, few batches per epoch are anticorrelated among themselves, which would be mistaken for steps
    that pull back.

    Args:
        images: to draw from.
        labels: one per image.
        label_noise: probability that a label is replaced by one drawn from all classes, drawn again for every batch.
        seed: of the draws.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, label_noise: float, seed: int) -> None:
        import torch

        self._images, self._labels, self._noise = images, labels, label_noise
        self._classes = int(labels.max()) + 1
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, size: int) -> tuple[Tensor, Tensor]:
        """A batch of ``size`` images and their labels."""
        import torch

        drawn = torch.randint(len(self._images), (size,), generator=self._generator)
        replaced = torch.rand(size, generator=self._generator) < self._noise
        others = torch.randint(self._classes, (size,), generator=self._generator)
        return self._images[drawn], torch.where(replaced, others, self._labels[drawn])


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """Every step of a stretch of training.

    Attributes:
        weights: of all parameters before each step, steps x entries.
        gradients: of each step, steps x entries.
        losses: of each step's batch.
        layers: columns of each scale-invariant layer.
        curvature: e'He at each measured point along the last move e, points x (layers, then all parameters); H is the
            Hessian of a fresh batch, and a layer has the part e_l'(He)_l.
        shares: mean gradient's share of the squared gradient, from independent batches at the same weights, a number
            per layer.
    """

    weights: Floats
    gradients: Floats
    losses: Array
    layers: tuple[slice, ...]
    curvature: Array
    shares: Array

    def per_layer(self) -> Iterator[tuple[Floats, Floats]]:
        """Weights and gradients of every layer."""
        return ((self.weights[:, columns], self.gradients[:, columns]) for columns in self.layers)


def follow(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    draw: Callable[[int], tuple[Tensor, Tensor]],
    *,
    batch_size: int,
    layers: Sequence[str],
    settle: int,
    steps: int,
    points: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Trajectory:
    """Train for ``settle`` steps, then for ``steps`` more, of which everything is kept.

    Args:
        net: in training mode; with float32 parameters.
        optimizer: of all its parameters.
        draw: returns a batch of a given size.
        batch_size: of every step and of every measurement.
        layers: names of the scale-invariant parameters.
        settle: steps before.
        steps: that are kept.
        points: steps, evenly spread, at which curvature and independent gradients are measured.
        progress: called with the number of steps done.
    """
    import torch

    params = dict(net.named_parameters())
    tensors = list(params.values())
    entries = sum(tensor.numel() for tensor in tensors)
    weights, gradients = torch.empty(steps, entries), torch.empty(steps, entries)
    losses = np.empty(steps)
    every = max(1, steps // points)
    pairs = _Pairs([list(params).index(name) for name in layers])
    curvature = []
    for step in range(-settle, steps):
        optimizer.zero_grad()
        loss = _loss(net, draw(batch_size))
        loss.backward()  # type: ignore[no-untyped-call]
        if step >= 0:
            losses[step] = loss.item()
            with torch.no_grad():
                torch.cat([tensor.reshape(-1) for tensor in tensors], out=weights[step])
                torch.cat(
                    [tensor.grad.reshape(-1) for tensor in tensors if tensor.grad is not None], out=gradients[step]
                )
        if step > 0 and step % every == 0:
            move = torch.split(weights[step] - weights[step - 1], [tensor.numel() for tensor in tensors])
            fresh = [_loss(net, draw(batch_size)) for _ in range(_FRESH)]
            slopes = torch.autograd.grad(fresh[0], tensors, create_graph=True)
            curvature.append(_curvature(slopes, tensors, move, pairs.places))
            others = [torch.autograd.grad(other, tensors) for other in fresh[1:]]
            pairs.add([[tensor.grad for tensor in tensors], [slope.detach() for slope in slopes], *others])
        optimizer.step()
        progress(step + settle + 1)
    return Trajectory(
        weights.numpy(), gradients.numpy(), losses, _columns(params, layers), np.array(curvature), pairs.shares()
    )


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    from torch.nn import functional

    images, labels = batch
    return functional.cross_entropy(net(images), labels)


def _columns(params: dict[str, nn.Parameter], layers: Sequence[str]) -> tuple[slice, ...]:
    ends = dict(zip(params, np.cumsum([param.numel() for param in params.values()]).tolist(), strict=True))
    return tuple(slice(ends[name] - params[name].numel(), ends[name]) for name in layers)


def _curvature(
    slopes: Sequence[Tensor], tensors: Sequence[Tensor], moves: Sequence[Tensor], places: Sequence[int]
) -> list[float]:
    """e'He along a move e of all parameters: the parts of the layers at these places, and all of it."""
    import torch

    moved = [move.view_as(tensor) for move, tensor in zip(moves, tensors, strict=True)]
    bent = torch.autograd.grad(slopes, tensors, moved)
    parts = [float((one * move).sum()) for one, move in zip(bent, moved, strict=True)]
    return [*(parts[place] for place in places), sum(parts)]


class _Pairs:
    """Sums of <g, g'> over pairs of independent gradients, and of |g|^2, per layer."""

    def __init__(self, places: Sequence[int]) -> None:
        self.places = list(places)
        self._products = np.zeros(len(places))
        self._squares = np.zeros(len(places))

    def add(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        import torch

        for row, place in enumerate(self.places):
            drawn = torch.stack([chosen.flatten() for one in gradients if (chosen := one[place]) is not None])
            table = (drawn @ drawn.T).double().numpy()
            count = len(table)
            self._squares[row] += np.trace(table) / count
            self._products[row] += (table.sum() - np.trace(table)) / (count * (count - 1))

    def shares(self) -> Array:
        return self._products / self._squares


# ---- statistics


def autocorrelation(rows: NDArray[np.floating], lags: int) -> Array:
    """Mean over t of <x_t, x_{t+k}> for k = 0..lags; time on the first axis.

    Example:
        >>> autocorrelation(np.array([[1.0], [2.0], [3.0]]), 1).round(6).tolist()
        [4.666667, 4.0]
    """
    steps = len(rows)
    size = fft.next_fast_len(steps + lags, real=True)
    power = np.zeros(size // 2 + 1)
    for first in range(0, rows.shape[1], _COORDINATES):
        block = np.ascontiguousarray(rows[:, first : first + _COORDINATES].T, dtype=np.float64)
        spectrum = fft.rfft(block, size, axis=1)
        power += np.sum(spectrum.real**2 + spectrum.imag**2, axis=0)
    sums: Array = fft.irfft(power, size)[: lags + 1]
    return sums / (steps - np.arange(lags + 1))


def layer_statistics(
    weights: Floats, gradients: Floats, *, lags: int, distances: Sequence[int]
) -> tuple[Array, Array, Array]:
    """Correlations of unit gradients and of relative moves for k = 0..lags, and the mean cosine over each distance.

    Unit gradients are g |w|, relative moves (w' - w) / |w|.
    """
    norms = np.linalg.norm(weights.astype(np.float64), axis=1, keepdims=True)
    unit_gradients = autocorrelation(gradients * norms, lags)
    moves = autocorrelation(np.diff(weights, axis=0) / norms[:-1], lags)
    cosines = autocorrelation(weights / norms, max(distances))
    return unit_gradients / unit_gradients[0], moves / moves[0], cosines[list(distances)]


def gradient_dot_move(weights: Floats, gradients: Floats) -> Array:
    """<g_t, w_t - w_{t-1}> for t = 1, 2, ...: each gradient with the move before it."""
    products: Array = np.einsum("td,td->t", gradients[1:], np.diff(weights, axis=0), dtype=np.float64)
    return products


def stage_statistics(path: Trajectory, *, lags: int, distances: Sequence[int], lr: float) -> dict[str, Array]:
    """All numbers of a stretch of training by name; a row per layer.

    ``gradients`` and ``moves`` are correlations, ``cosines`` means over the distances, ``products`` those of a gradient
    and the move before it (with one more row, like ``curvature``, for all parameters), ``buffer`` the product of the
    gradient and SGD's momentum buffer over the squared gradient, and ``losses`` means over the two halves.
    """
    rows = [layer_statistics(*layer, lags=lags, distances=distances) for layer in path.per_layer()]
    gradients, moves, cosines = (np.array(values) for values in zip(*rows, strict=True))
    products = [gradient_dot_move(*layer) for layer in path.per_layer()]
    norms_sq = [np.sum(weights.astype(np.float64) ** 2, axis=1) for weights, _ in path.per_layer()]
    squares = [np.sum(gradients.astype(np.float64) ** 2, axis=1) for _, gradients in path.per_layer()]
    buffer = [
        float(np.mean(-product / lr * norm_sq[1:]) / np.mean(square * norm_sq))
        for product, norm_sq, square in zip(products, norms_sq, squares, strict=True)
    ]
    everything = gradient_dot_move(path.weights, path.gradients)
    half = len(path.losses) // 2
    return {
        "gradients": gradients,
        "moves": moves,
        "cosines": cosines,
        "products": np.array([*(product.mean() for product in products), everything.mean()]),
        "curvature": path.curvature.mean(axis=0),
        "shares": path.shares,
        "buffer": np.array(buffer),
        "norms": np.array([np.sqrt(norm_sq.mean()) for norm_sq in norms_sq]),
        "losses": np.array([path.losses[:half].mean(), path.losses[half:].mean()]),
    }
