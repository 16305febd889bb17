"""The gradient flow of many points to its limit.

``x' = -grad L(x)`` is stiff: the top of the Hessian limits the step of an explicit method, its bottom sets the time to
convergence. LSODA turns implicit when that pays. Many points are one equation whose Jacobian is a band of small blocks,
so that a whole trajectory costs hardly more calls of the loss than one point of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from scipy.integrate import LSODA
from torch import Tensor

from equilibria.lab.manifold.landscape import Landscape

_BAND_NUMBERS = 4_000_000  # in the factors of the Jacobian: 32 MB
_NEVER = 1e15  # in units of 1/lambda1


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Where the gradient flow of each point ended.

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


def flow_to_limits(landscape: Landscape, starts: Tensor, *, tol: float, max_steps: int) -> Limits:
    """Follow the gradient flow from every row of ``starts`` until its gradient is negligible.

    Args:
        landscape: the loss.
        starts: points, one per row.
        tol: where to stop: distance to the manifold along the stiffest direction, relative to the norm of the start.
            A tenth of it is the local error of the integrator.
        max_steps: steps before giving up.
    """
    rows = max(1, _BAND_NUMBERS // (3 * landscape.dim**2))
    parts = [_Flow(landscape, part, tol=tol).run(max_steps) for part in torch.split(starts, rows)]
    return Limits(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Limits)))


class _Flow:
    """The flow of some points together, with one step for all."""

    def __init__(self, landscape: Landscape, starts: Tensor, *, tol: float) -> None:
        norms = starts.norm(dim=-1)
        self._landscape, self._starts = landscape, starts
        self._tol, self._allowed = tol, tol * torch.where(norms > 0, norms, 1.0)
        self._latest = norms  # of the gradients, once the integrator has asked for them

    def run(self, max_steps: int) -> Limits:
        found = self._limits(self._starts, 0)
        if bool(found.arrived.all()):
            return found
        points, steps = self._starts, 0
        for points in self._path(float(found.top.max())):
            steps += 1
            if steps == max_steps:
                break
            if bool((self._latest <= self._allowed * found.top).all()):
                found = self._limits(points, steps)  # with the eigenvalues of here
                if bool(found.arrived.all()):
                    return found
        return self._limits(points, steps)

    def _path(self, top: float) -> Iterator[Tensor]:
        """Points after every step, until the integrator gives up."""
        band, error = self._landscape.dim - 1, 0.1 * self._tol
        solver = LSODA(
            self._velocity,
            0.0,
            self._starts.cpu().numpy().reshape(-1),
            t_bound=_NEVER / top,
            rtol=error,
            atol=error * float(self._allowed.min() / self._tol),
            lband=band,
            uband=band,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the status says the same, and the result's reason repeats it
            while _stepped(solver):
                yield self._landscape.onto_sphere(self._rows(solver.y))

    def _velocity(self, _: float, state: np.ndarray) -> np.ndarray:
        slopes = self._landscape.gradients(self._rows(state))
        self._latest = slopes.norm(dim=-1)
        return -slopes.cpu().numpy().reshape(-1)

    def _rows(self, state: np.ndarray) -> Tensor:
        return torch.from_numpy(state.copy()).to(self._starts).reshape(self._starts.shape)

    def _limits(self, points: Tensor, steps: int) -> Limits:
        values = torch.linalg.eigvalsh(self._landscape.hessians(points))
        slopes, top = self._landscape.gradients(points).norm(dim=-1), values.abs().amax(dim=-1)
        taken = torch.full(slopes.shape, steps, dtype=torch.int64, device=slopes.device)
        return Limits(points, slopes, top, values[:, 0], taken, slopes <= self._allowed * top)


def _stepped(solver: Any) -> bool:
    """Whether there was another step to take, and it succeeded."""
    if solver.status == "running":
        solver.step()
        return bool(solver.status != "failed")
    return False
