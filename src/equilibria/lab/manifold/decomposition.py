"""Decomposition of a run at the edge of stability: oscillation across the manifold of minimisers, drift along it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.lab.manifold.landscape import Landscape
from equilibria.lab.manifold.projection import flow_to_limits, minima
from equilibria.lab.manifold.slope import SIMPLE, slopes_at
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select
from equilibria.theory.stability import effective_lr


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """Gradient descent with weight decay on a scale-invariant loss, step by step, around the manifold of minimisers.

    One entry per step; NaN where ``converged`` is False. ``theta`` is the direction of the weights, ``phi`` its
    projection on the manifold, ``v`` the top eigenvector and ``lambda1`` the spherical sharpness at ``phi``.

    Attributes:
        displacement: ``h = <theta - phi, v>``, radians to first order; the sign of ``v`` is continued over the steps.
        offset: ``u = (1/R^2 - 1)/sqrt(2 lr wd)``: negative on the unstable side.
        points: ``phi``, named tensors with the steps along the first axis, of joint norm 1, float64.
        gradients: gradient of ``log lambda1`` along the manifold at ``phi``, in the same form; NaN where ``lambda1`` is
            not simple.
        grad_norm: its norm ``g``.
        sharpness: ``lambda1`` at ``phi``.
        effective_lr: ``lr / ((1 - lr wd) |w|^2)``.
        ratio: stability ratio ``R = effective_lr * lambda1 / 2``.
        loss: the loss at ``theta``.
        converged: whether the projection reached a minimum.
    """

    displacement: np.ndarray
    offset: np.ndarray
    points: Params
    gradients: Params
    grad_norm: np.ndarray
    sharpness: np.ndarray
    effective_lr: np.ndarray
    ratio: np.ndarray
    loss: np.ndarray
    converged: np.ndarray

    @property
    def mean_square(self) -> np.ndarray:
        """Mean of ``h^2`` over each pair of consecutive steps, which drives the drift; one entry less."""
        return _pair_means(self.displacement**2)

    @property
    def mean_ratio(self) -> np.ndarray:
        """Mean of ``R`` over each pair of consecutive steps, one entry less; count crossings of 1 on it."""
        return _pair_means(self.ratio)

    @property
    def mean_loss(self) -> np.ndarray:
        """Mean of the loss over each pair of consecutive steps, one entry less."""
        return _pair_means(self.loss)


def decompose(
    objective: Objective,
    batch: Any,
    *,
    trajectory: Iterable[Mapping[str, Tensor]],
    lr: float,
    weight_decay: float,
    select: Select | None = None,
    tol: float = 1e-8,
    max_steps: int = 1000,
) -> Decomposition:
    """Split a run of gradient descent with weight decay into ``h``, ``u`` and ``phi`` of Lyu, Li & Arora (2022).

    All points are projected together, along the gradient flow as in `project`: thousands of steps of a loss of a few
    numbers take seconds. A network whose BatchNorm keeps running statistics is evaluated step by step, which takes that
    many times longer; ``track_running_stats=False`` avoids it.

    Args:
        objective: the loss, scale-invariant in the selected tensors.
        batch: the full training data.
        trajectory: the parameters at consecutive steps, name -> tensor. Tensors that are not selected, or missing, stay
            as they are in the objective.
        lr: learning rate of the run.
        weight_decay: its weight decay, coupled (torch.optim.SGD) or decoupled: the same without momentum.
        select: the scale-invariant tensors; default: all.
        tol: accuracy of the projection, relative to the norm (see `project`).
        max_steps: steps of the integrator before giving up.

    Returns:
        The decomposition.

    Raises:
        EquilibriaError: if an argument is bad, the trajectory is empty, or the loss depends on the scale of the
            selected tensors.

    Example:
        >>> import torch
        >>> from equilibria import Objective
        >>> loss = Objective(lambda p, _: p["w"][0] ** 2 / p["w"].square().sum(), {"w": torch.tensor([0.0, 1.0])})
        >>> run = decompose(loss, None, trajectory=[{"w": torch.tensor([0.6, 0.8])}], lr=0.5, weight_decay=0.2)
        >>> run.displacement.round(6).tolist(), run.sharpness.round(6).tolist()
        ([0.6], [2.0])
        >>> run.ratio.round(6).tolist()  # 0.5 / 0.9 * 2 / 2
        [0.555556]
    """
    rate = within("lr * weight_decay", positive("lr", lr) * positive("weight_decay", weight_decay), below=1)
    tol, max_steps = within("tol", tol, above=0, below=1e-2), whole("max_steps", max_steps, low=1)
    steps = list(trajectory)
    if not steps:
        raise EquilibriaError("got an empty trajectory; expected the named parameters at every step")
    landscape = Landscape(objective, batch, params=steps[-1], select=select)
    weights = torch.stack([landscape.joined(step) for step in steps])
    thetas = landscape.onto_sphere(weights)
    limits = flow_to_limits(landscape, thetas, tol=tol, max_steps=max_steps)
    converged = minima(limits)
    phis = torch.where(converged[:, None], limits.points, torch.nan)
    slopes = slopes_at(landscape, limits.points)
    sharpness = _array(torch.where(converged, slopes.sharpness, torch.nan))
    gradients = torch.where((converged & (slopes.gaps > SIMPLE))[:, None], slopes.gradients, torch.nan)
    lrs = effective_lr(lr, weight_decay, norm_sq=_array(weights.square().sum(dim=-1)))
    ratio = lrs * sharpness / 2
    return Decomposition(
        displacement=_array(((thetas - phis) * _continued(slopes.tops)).sum(dim=-1)),
        offset=(ratio**-2 - 1) / math.sqrt(2 * rate),
        points=landscape.named(phis),
        gradients=landscape.named(gradients),
        grad_norm=_array(gradients.norm(dim=-1)),
        sharpness=sharpness,
        effective_lr=lrs,
        ratio=ratio,
        loss=_array(landscape.losses(thetas)),
        converged=converged.cpu().numpy(),
    )


def _continued(vectors: Tensor) -> Tensor:
    """Choose signs so that each row points the way of the one before; the largest entry of the first is positive."""
    first = vectors[0, vectors[0].abs().argmax()]
    turns = torch.cat([first[None], (vectors[1:] * vectors[:-1]).sum(dim=-1)])
    return vectors * torch.where(turns < 0, -1.0, 1.0).cumprod(dim=0)[:, None]


def _array(series: Tensor) -> np.ndarray:
    return np.asarray(series.cpu().numpy())


def _pair_means(series: np.ndarray) -> np.ndarray:
    means: np.ndarray = (series[1:] + series[:-1]) / 2  # theory's two_step_mean rejects NaN
    return means
