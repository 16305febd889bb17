"""Projection of points onto the manifold of minimisers along the gradient flow, and of runs at the edge of stability.

The flow ``x' = -grad L(x)`` is stiff: the top of the Hessian limits the step of an explicit method, its bottom sets the
time to convergence. LSODA turns implicit when that pays. Many points are one equation whose Jacobian is a band of small
blocks, so that a whole trajectory takes hardly more evaluations of the loss than one of its points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from scipy.integrate import LSODA
from torch import Tensor

from equilibria.errors import EquilibriaError, positive, whole, within
from equilibria.lab.manifold.landscape import Landscape
from equilibria.lab.manifold.sharpness_flow import SIMPLE, slopes_at
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select
from equilibria.theory.stability import effective_lr

_DOWNHILL = 1e-6  # an eigenvalue this much below zero, relative to the largest, is not rounding
_BAND_NUMBERS = 4_000_000  # in the factors of the Jacobian: 32 MB
_TIME_LIMIT = 1e15  # in units of 1/lambda1: practically never


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The limit of the gradient flow from a point.

    Attributes:
        point: the selected tensors at the limit, float64, with the norm that they had.
        loss: the loss there.
        grad_norm: norm of its gradient there, on the unit sphere if spherical.
        distance: from the start to the limit: chord of the unit sphere, or Euclidean in the full space.
        steps: steps of the integrator, each with one dense Hessian.
        converged: whether the limit was reached and is a minimum.
        reason: why the flow stopped, in words.
    """

    point: Params
    loss: float
    grad_norm: float
    distance: float
    steps: int
    converged: bool
    reason: str


def project(
    objective: Objective,
    batch: Any,
    *,
    params: Mapping[str, Tensor] | None = None,
    select: Select | None = None,
    spherical: bool = True,
    tol: float = 1e-10,
    max_steps: int = 1000,
) -> Projection:
    """Project a point onto the manifold of minimisers: the limit of the gradient flow ``w' = -grad L(w)`` from it.

    This is the projection ``phi`` of Lyu, Li & Arora (2022). The gradient of a scale-invariant loss is tangent to the
    sphere, so its flow keeps the norm. For small problems: every step takes a dense Hessian in float64.

    Args:
        objective: the loss, from `equilibria.objective`, or an `equilibria.Objective`.
        batch: the data.
        params: the point, or some tensors of it; default: the present parameters.
        select: the tensors that move: names, patterns or a function of name and tensor; default: all. The others stay.
        spherical: whether the loss does not depend on their common scale; False for the full space.
        tol: local error of each step of the integrator, and distance from the manifold at which it stops, both relative
            to the norm of the point. It stops where ``|gradient| <= tol * lambda1``: within ``tol`` along the stiffest
            direction and ``tol * lambda1/lambda`` along one with eigenvalue ``lambda``.
        max_steps: steps before giving up.

    Returns:
        The limit. The model is not changed.

    Raises:
        EquilibriaError: if an argument is bad, more than 4096 numbers are selected, or the loss depends on the scale
            although ``spherical``.

    Example:
        On the sphere, ``x^2/|w|^2`` has its minimum at ``x = 0``, and its flow goes there along a meridian:

        >>> import torch
        >>> from equilibria import Objective
        >>> loss = Objective(lambda p, _: p["w"][0] ** 2 / p["w"].square().sum(), {"w": torch.tensor([3.0, 0.0, 4.0])})
        >>> projection = project(loss, None)
        >>> projection.point["w"].round(decimals=8).tolist(), projection.converged
        ([0.0, 0.0, 5.0], True)
    """
    tol, max_steps = within("tol", tol, above=0, below=1e-2), whole("max_steps", max_steps, low=1)
    landscape = Landscape(objective, batch, params=params, select=select, spherical=spherical)
    start = landscape.reference[None]
    limits = flow_to_limits(landscape, start, tol=tol, max_steps=max_steps)
    return Projection(
        point=landscape.named(limits.points[0], scale=landscape.radius),
        loss=float(landscape.losses(limits.points)),
        grad_norm=float(limits.grad_norms),
        distance=float((limits.points - start).norm()),
        steps=int(limits.steps),
        converged=bool(minima(limits)),
        reason=_reason(limits),
    )


def minima(limits: FlowLimits) -> Tensor:
    """Which of the limits were reached and are minima."""
    return limits.arrived & (limits.lowest >= -_DOWNHILL * limits.top)


def _reason(limits: FlowLimits) -> str:
    slope = f"gradient {float(limits.grad_norms):.2g}, largest eigenvalue {float(limits.top):.6g}"
    if not bool(limits.arrived):
        return (
            f"gave up after {int(limits.steps)} steps ({slope}): raise max_steps or tol, or the minimum is degenerate"
        )
    if not bool(minima(limits)):
        lowest = float(limits.lowest)
        return f"arrived at a saddle or maximum ({slope}, smallest eigenvalue {lowest:.3g}): start elsewhere"
    return f"arrived at a minimum ({slope})"


# ---- the gradient flow


@dataclass(frozen=True, slots=True, eq=False)
class FlowLimits:
    """End points of the gradient flow of many points.

    Attributes:
        points: the last points, one per row.
        grad_norms: norms of the gradient there.
        top: largest absolute eigenvalue of the Hessian there.
        lowest: smallest eigenvalue.
        steps: steps of the integrator.
        arrived: whether the gradient is below ``tol * top * |start|``.
    """

    points: Tensor
    grad_norms: Tensor
    top: Tensor
    lowest: Tensor
    steps: Tensor
    arrived: Tensor


def flow_to_limits(landscape: Landscape, starts: Tensor, *, tol: float, max_steps: int) -> FlowLimits:
    """Follow the gradient flow from every row of ``starts`` until its gradient is negligible.

    Args:
        landscape: the loss.
        starts: points, one per row.
        tol: distance to the manifold along the stiffest direction at which to stop, relative to the norm of the start.
            A tenth of it is the local error of the integrator.
        max_steps: steps before giving up.
    """
    rows = max(1, _BAND_NUMBERS // (3 * landscape.dim**2))
    parts = [_Flow(landscape, part, tol=tol).run(max_steps) for part in torch.split(starts, rows)]
    return FlowLimits(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(FlowLimits)))


class _Flow:
    """The flow of some points together, with one step for all."""

    def __init__(self, landscape: Landscape, starts: Tensor, *, tol: float) -> None:
        norms = starts.norm(dim=-1)
        self._landscape, self._starts = landscape, starts
        self._tol, self._allowed = tol, tol * torch.where(norms > 0, norms, 1.0)
        self._grad_norms = norms  # placeholder until the integrator evaluates the gradients

    def run(self, max_steps: int) -> FlowLimits:
        limits = self._limits(self._starts, 0)
        if bool(limits.arrived.all()):
            return limits
        points, steps = self._starts, 0
        for points in self._path(float(limits.top.max())):
            steps += 1
            if steps == max_steps:
                break
            if bool((self._grad_norms <= self._allowed * limits.top).all()):
                limits = self._limits(points, steps)  # with the eigenvalues at the present points
                if bool(limits.arrived.all()):
                    return limits
        return self._limits(points, steps)

    def _path(self, top: float) -> Iterator[Tensor]:
        """Points after every step, until the integrator gives up."""
        band, error = self._landscape.dim - 1, 0.1 * self._tol
        solver = LSODA(
            self._velocity,
            0.0,
            self._starts.cpu().numpy().reshape(-1),
            t_bound=_TIME_LIMIT / top,
            rtol=error,
            atol=error * float(self._allowed.min() / self._tol),
            lband=band,
            uband=band,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the solver's status says the same
            while _take_step(solver):
                yield self._landscape.onto_sphere(self._rows(solver.y))

    def _velocity(self, _: float, state: np.ndarray) -> np.ndarray:
        slopes = self._landscape.gradients(self._rows(state))
        self._grad_norms = slopes.norm(dim=-1)
        return -slopes.cpu().numpy().reshape(-1)

    def _rows(self, state: np.ndarray) -> Tensor:
        return torch.from_numpy(state.copy()).to(self._starts).reshape(self._starts.shape)

    def _limits(self, points: Tensor, steps: int) -> FlowLimits:
        values = torch.linalg.eigvalsh(self._landscape.hessians(points))
        slopes, top = self._landscape.gradients(points).norm(dim=-1), values.abs().amax(dim=-1)
        taken = torch.full(slopes.shape, steps, dtype=torch.int64, device=slopes.device)
        return FlowLimits(points, slopes, top, values[:, 0], taken, slopes <= self._allowed * top)


def _take_step(solver: Any) -> bool:
    """Take a step; False if the solver has finished or failed."""
    if solver.status == "running":
        solver.step()
        return bool(solver.status != "failed")
    return False


# ---- a run at the edge of stability: oscillation across the manifold, drift along it


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
