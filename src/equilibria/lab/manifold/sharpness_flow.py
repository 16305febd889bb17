"""The slope of the log of the sharpness along the manifold of minimisers, and the flow that it drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from torch import Tensor

from equilibria.errors import EquilibriaError, positive, within
from equilibria.lab.manifold.landscape import Landscape
from equilibria.objectives._objective import Objective, Params
from equilibria.tensors.parameters import Select
from equilibria.theory.flow import flow_velocity

NULL = 1e-6  # eigenvalues up to this fraction of the largest belong to the manifold
_ON_MANIFOLD = 1e-8  # |gradient| / (lambda1 |w|): at distance d, eigenvalues of the null space are of order d
SIMPLE = 1e-6  # (lambda1 - lambda2) / lambda1: below it the top eigenvector, known to 1e-16 / gap, means little


@dataclass(frozen=True, slots=True, eq=False)
class SharpnessSlope:
    """Gradient of ``log lambda1`` along the manifold of minimisers, at a point of it.

    Attributes:
        gradient: the selected tensors of it, tangent to the manifold; per radian on the unit sphere if spherical.
        norm: its norm, the ``g`` of the sharpness-reduction flow.
        sharpness: ``lambda1``, the largest eigenvalue of the Hessian; spherical sharpness if spherical.
        top_vector: its eigenvector, of unit norm.
        gap: ``(lambda1 - lambda2)/lambda1``.
        error: of the gradient, estimated from the differences it is computed by: the order of magnitude.
        dimension: of the manifold: eigenvalues not above 1e-6 ``lambda1``, less one for the radius if spherical.
        null_gap: smallest eigenvalue above that threshold over the largest absolute one below: 1000 and more is clear.
    """

    gradient: Params
    norm: float
    sharpness: float
    top_vector: Params
    gap: float
    error: float
    dimension: int
    null_gap: float


@dataclass(frozen=True, slots=True, eq=False)
class Slopes:
    """`SharpnessSlope` of many points, as arrays: one row or entry per point."""

    gradients: Tensor
    sharpness: Tensor
    tops: Tensor
    gaps: Tensor
    eigenvalues: Tensor
    errors: Tensor


def grad_log_sharpness(
    objective: Objective,
    batch: Any,
    *,
    params: Mapping[str, Tensor] | None = None,
    select: Select | None = None,
    spherical: bool = True,
) -> SharpnessSlope:
    """Gradient of ``log lambda1`` along the manifold of minimisers (Lyu, Li & Arora 2022, Section 4.2).

    With ``v`` the top eigenvector of the Hessian ``H``, held fixed, it is the gradient of ``v' H(w) v``, projected onto
    the null space of ``H`` (without the radius, along which ``log lambda1`` falls at rate 2) and divided by
    ``lambda1``. The gradient is the derivative of ``H v`` along ``v``, by differences whose step is chosen by their
    agreement; its ``error`` is about 1e-11 where the loss is smooth at the scale of the weights. Eigenvalues of at most
    1e-6 ``lambda1`` count as null. The null space is tangent to the manifold only on the manifold, so `project` the
    point first.

    Args:
        objective: the loss.
        batch: the data.
        params: the point, or some tensors of it; default: the present parameters.
        select: the tensors that move; default: all.
        spherical: whether the loss does not depend on their common scale; False for the full space.

    Returns:
        The gradient, its norm and the sharpness.

    Raises:
        EquilibriaError: if the point is not a minimum (``|gradient| > 1e-8 lambda1 |w|``, or a negative eigenvalue),
            or the largest eigenvalue is not simple (``lambda1 - lambda2 <= 1e-6 lambda1``).

    Example:
        The 3-D example of the paper: ``lambda1 = 6/(1 - z^2)``, whose logarithm has slope ``2 tan(angle)``:

        >>> import torch
        >>> from equilibria import Objective
        >>> def loss(p, _):
        ...     x, y, z = p["w"]
        ...     return 2 - (x + y) / (x * x - x * y + y * y).sqrt()
        >>> half = 0.32**0.5
        >>> point = {"w": torch.tensor([half, half, 0.6], dtype=torch.float64)}
        >>> slope = grad_log_sharpness(Objective(loss, point), None)
        >>> round(slope.sharpness, 9), round(slope.norm, 9)  # tan(angle) = 0.6/0.8
        (9.375, 1.5)
    """
    landscape = Landscape(objective, batch, params=params, select=select, spherical=spherical)
    point = landscape.reference[None]
    slopes = slopes_at(landscape, point)
    check_on_manifold(landscape, point, slopes)
    check_simple(slopes)
    values, limit = slopes.eigenvalues[0], NULL * float(slopes.sharpness)
    null = values[values <= limit]
    return SharpnessSlope(
        gradient=landscape.named(slopes.gradients[0]),
        norm=float(slopes.gradients.norm()),
        sharpness=float(slopes.sharpness),
        top_vector=landscape.named(slopes.tops[0]),
        gap=float(slopes.gaps),
        error=float(slopes.errors),
        dimension=len(null) - spherical,
        null_gap=float(values[values > limit].min() / null.abs().max()) if len(null) else float("inf"),
    )


def slopes_at(landscape: Landscape, points: Tensor) -> Slopes:
    """The gradient of ``log lambda1`` at every row, without checks that it exists."""
    values, vectors = torch.linalg.eigh(landscape.hessians(points))
    sharpness, tops = values[:, -1], vectors[:, :, -1]
    second = values[:, -2] if values.shape[1] > 1 else torch.zeros_like(sharpness)
    gradients, errors = landscape.curvature_gradients(points, tops)
    raw = gradients / sharpness[:, None]
    return Slopes(
        gradients=_tangent(landscape, points, raw, vectors, values <= NULL * sharpness[:, None]),
        sharpness=sharpness,
        tops=tops,
        gaps=(sharpness - second) / sharpness,
        eigenvalues=values,
        errors=errors / sharpness.abs(),
    )


def _tangent(landscape: Landscape, points: Tensor, rows: Tensor, vectors: Tensor, null: Tensor) -> Tensor:
    """Project rows onto the null spaces, and on the sphere also off the points themselves."""
    parts = (vectors.mT @ rows[..., None])[..., 0] * null
    inside = (vectors @ parts[..., None])[..., 0]
    if landscape.spherical:
        inside = inside - points * (inside * points).sum(dim=-1, keepdim=True)
    return inside


def check_on_manifold(landscape: Landscape, points: Tensor, slopes: Slopes) -> None:
    """Raise EquilibriaError if a row is not a minimum, or the loss is flat there."""
    flattest = float(slopes.sharpness.min())
    if not flattest > 0:
        raise EquilibriaError(f"got a point with lambda1 = {flattest:g}; expected a minimum with a positive eigenvalue")
    sizes = points.norm(dim=-1)
    off = landscape.gradients(points).norm(dim=-1) / slopes.sharpness
    worst = float((off / torch.where(sizes > 0, sizes, 1.0)).max())
    if not worst <= _ON_MANIFOLD:
        raise EquilibriaError(
            f"got a point that is not on the manifold of minimisers: |gradient| / (lambda1 |w|) = {worst:.2g}; "
            f"expected at most {_ON_MANIFOLD:g}: use the point of project(objective, batch)"
        )
    lowest = float((slopes.eigenvalues[:, 0] / slopes.sharpness).min())
    if not lowest >= -NULL:
        raise EquilibriaError(
            f"got a stationary point whose smallest eigenvalue is {lowest:.2g} lambda1; expected a minimum: at least "
            f"-{NULL:g} lambda1"
        )


def check_simple(slopes: Slopes) -> None:
    """Raise EquilibriaError if the largest eigenvalue of a row is not simple."""
    gap = float(slopes.gaps.min())
    if not gap > SIMPLE:
        raise EquilibriaError(
            f"got a largest eigenvalue that is not simple: (lambda1 - lambda2)/lambda1 = {gap:.2g} at lambda1 = "
            f"{float(slopes.sharpness.max()):.6g}; expected more than {SIMPLE:g}: log lambda1 has no gradient there"
        )


# ---- the flow


_CROSSING = 1e-3  # (lambda1 - lambda2)/lambda1 at which the flow of a single top eigenvalue ends
_ROUNDS, _STEPS = 4, 8  # of Newton's method: Hessians, and steps with each of them
_CLOSE = 1e-11  # size of its last step, relative to the norm of the point


@dataclass(frozen=True, slots=True, eq=False)
class SharpnessFlow:
    """A solution of the sharpness-reduction flow.

    Attributes:
        time: flow time of each sample; fewer than requested if the flow ended before, then with its end as the last.
        points: named tensors with the samples along the first axis, float64; of joint norm 1 if spherical.
        sharpness: ``lambda1`` at each sample; spherical sharpness if spherical.
        grad_norm: ``g``, norm of the gradient of ``log lambda1`` along the manifold.
        converged: whether it came to rest at a flattest point.
        reason: why it ended, in words.
    """

    time: np.ndarray
    points: Params
    sharpness: np.ndarray
    grad_norm: np.ndarray
    converged: bool
    reason: str


def sharpness_flow(
    objective: Objective,
    batch: Any,
    *,
    times: ArrayLike,
    params: Mapping[str, Tensor] | None = None,
    select: Select | None = None,
    spherical: bool = True,
    c_b: float | None = None,
    rtol: float = 1e-8,
    grad_tol: float = 1e-6,
) -> SharpnessFlow:
    """Integrate the drift of training at the edge of stability: Lyu, Li & Arora (2022), eqs. (3) and (8).

    With ``v`` the gradient of ``log lambda1`` along the manifold of minimisers, gradient descent with weight decay
    follows ``d phi/d tau = -2 v/(4 + |v|^2)``, ``tau = steps*lr*wd`` since the stability ratio crossed 1; a
    quasi-RMSprop scheduler follows ``-v/(4 + (2/c_b)|v|^2)`` with ``tau = steps*eta^2``
    (see `equilibria.theory.flow`). Expect a run to differ by about ``sqrt(lr*wd)``.

    Inside the integrator (DOP853), Newton's method in the normal space returns every point to the manifold. That is not
    the gradient-flow projection of `project`: the two differ at second order in the distance, which is the error of the
    integrator here, so that the flow is the same.

    Args:
        objective: the loss.
        batch: the data.
        times: increasing flow times at which to report, none negative.
        params: the start, a point of the manifold, such as ``project(...).point``; default: the present parameters.
        select: the tensors that move; default: all.
        spherical: whether the loss does not depend on their common scale; False for the full space.
        c_b: None for gradient descent with weight decay, else ``(1 - decay)/eta^2`` of the scheduler, and its clock.
        rtol: relative tolerance of the integrator.
        grad_tol: ``g`` at which the flow has come to rest.

    Returns:
        The flow at the requested times, or up to where it ended: at a flattest point, or where ``lambda1`` and
        ``lambda2`` meet within 1e-3, beyond which there is no flow of a single top eigenvalue.

    Raises:
        EquilibriaError: bad arguments, or a start that is not on the manifold or has no simple top eigenvalue.

    Example:
        The valley of ``(1 + y^2) x^2/2`` under scalar RMSprop, of which `equilibria.theory` has the closed form:

        >>> import torch
        >>> from equilibria import Objective
        >>> from equilibria.theory.flow_examples import rmsprop_valley_position
        >>> valley = Objective(lambda p, _: (1 + p["w"][1] ** 2) * p["w"][0] ** 2 / 2, {"w": torch.tensor([0.0, 2.0])})
        >>> flow = sharpness_flow(valley, None, times=[0, 3], spherical=False, c_b=1.0)
        >>> round(float(flow.points["w"][-1, 1]), 6), round(rmsprop_valley_position(2.0, time=3.0, c_b=1.0), 6)
        (1.530202, 1.530202)
    """
    grid = _checked_times(times)
    rtol, grad_tol = within("rtol", rtol, low=1e-12, below=0.1), positive("grad_tol", grad_tol)
    if c_b is not None:
        positive("c_b", c_b)
    landscape = Landscape(objective, batch, params=params, select=select, spherical=spherical)
    start = landscape.reference[None]
    slopes = slopes_at(landscape, start)
    check_on_manifold(landscape, start, slopes)
    check_simple(slopes)
    manifold = Manifold(landscape, rank=int((slopes.eigenvalues > NULL * slopes.sharpness).sum()))
    drift = _Drift(manifold, start[0], c_b=c_b, grad_tol=grad_tol)
    path = drift.path(grid, rtol=rtol)
    points = torch.stack([manifold.onto(point) for point in path.points])
    slopes = slopes_at(landscape, points)
    return SharpnessFlow(
        time=path.time,
        points=landscape.named(points),
        sharpness=slopes.sharpness.cpu().numpy(),
        grad_norm=slopes.gradients.norm(dim=-1).cpu().numpy(),
        converged=path.converged,
        reason=path.reason,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _FlowPath:
    time: np.ndarray
    points: Tensor
    converged: bool
    reason: str


class _Event:
    """Event of the integrator that ends it where a function of the state falls below zero."""

    terminal, direction = True, -1.0

    def __init__(self, function: Callable[[np.ndarray], float]) -> None:
        self._function = function

    def __call__(self, _: float, state: np.ndarray) -> float:
        return self._function(state)


class _Drift:
    """The flow in the form that scipy integrates."""

    def __init__(self, manifold: Manifold, start: Tensor, *, c_b: float | None, grad_tol: float) -> None:
        self._manifold, self._start, self._c_b, self._grad_tol = manifold, start, c_b, grad_tol

    def path(self, grid: np.ndarray, *, rtol: float) -> _FlowPath:
        state = self._start.cpu().numpy()
        if self._above_rest(state) <= 0:
            return self._ended(np.zeros(1), state[None], "at rest", end=0.0)
        if grid[-1] == 0:
            return self._ended(grid, state[None], "last time", end=0.0)
        solution = solve_ivp(
            self._velocity,
            (0.0, grid[-1]),
            state,
            method="DOP853",
            t_eval=grid,
            events=[_Event(self._above_rest), _Event(self._above_crossing)],
            rtol=rtol,
            atol=1e-2 * rtol * float(np.abs(state).max()),
        )
        return self._read(solution)

    def _read(self, solution: Any) -> _FlowPath:
        """The samples, and the event that ended the integration, if one did."""
        time, states = solution.t, solution.y.T
        for name, when, where in zip(("at rest", "crossing"), solution.t_events, solution.y_events, strict=True):
            if len(when):
                time, states = np.append(time, when), np.vstack([states, where])
                return self._ended(time, states, name, end=float(when[0]))
        if not solution.success:
            return self._ended(time, states, "failed", end=float(time[-1]) if len(time) else 0.0)
        return self._ended(time, states, "last time", end=float(time[-1]))

    def _ended(self, time: np.ndarray, states: np.ndarray, how: str, *, end: float) -> _FlowPath:
        reasons = {
            "at rest": f"came to rest at time {end:.6g}: the sharpness has no slope above {self._grad_tol:g}",
            "crossing": f"stopped at time {end:.6g}: lambda1 and lambda2 meet, and the flow knows only one of them",
            "failed": f"stopped after time {end:.6g}: the manifold of minimisers ends or folds there",
            "last time": f"reached the last time, {end:.6g}",
        }
        return _FlowPath(time, self._tensor(states), how == "at rest", reasons[how])

    def _velocity(self, _: float, state: np.ndarray) -> np.ndarray:
        try:
            slope = self._manifold.slope(self._tensor(state))
        except LeftManifoldError:
            return np.full_like(state, np.nan)  # the integrator takes a shorter step
        return flow_velocity(slope.gradients[0].cpu().numpy(), c_b=self._c_b)

    def _above_rest(self, state: np.ndarray) -> float:
        return float(self._manifold.slope(self._tensor(state)).gradients.norm()) - self._grad_tol

    def _above_crossing(self, state: np.ndarray) -> float:
        return float(self._manifold.slope(self._tensor(state)).gaps) - _CROSSING

    def _tensor(self, state: np.ndarray) -> Tensor:
        return torch.from_numpy(state.copy()).to(self._start)


def _checked_times(times: ArrayLike) -> np.ndarray:
    try:
        grid = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError):
        grid = np.empty(0)
    if grid.ndim != 1 or grid.size == 0 or not np.isfinite(grid).all() or grid[0] < 0 or np.any(np.diff(grid) <= 0):
        raise EquilibriaError(f"got times={times!r}; expected an increasing series of flow times, none negative")
    return grid


# ---- returning to the manifold


class LeftManifoldError(Exception):
    """Newton's method found no minimum nearby."""


class Manifold:
    """The minimisers around a point, and the slope of the logarithm of the sharpness on them.

    Args:
        landscape: the loss.
        rank: number of positive eigenvalues of its Hessian on the manifold. Off the manifold the others are not quite
            zero, so that a threshold could not tell them apart.
    """

    def __init__(self, landscape: Landscape, *, rank: int) -> None:
        self._landscape, self._rank = landscape, rank
        self._last: tuple[Tensor, Slopes] | None = None

    def onto(self, point: Tensor) -> Tensor:
        """The minimum that Newton's method finds from a point.

        Raises:
            LeftManifoldError: if it finds none.
        """
        rows = self._landscape.onto_sphere(point[None])
        close = _CLOSE * max(float(rows.norm()), torch.finfo(rows.dtype).tiny)
        for _ in range(_ROUNDS):
            stiff, across = self._normal_space(rows)
            for _ in range(_STEPS):
                move = across @ ((self._landscape.gradients(rows)[0] @ across) / stiff)
                rows = self._landscape.onto_sphere(rows - move)
                if float(move.norm()) <= close:
                    return rows[0]
        raise LeftManifoldError

    def _normal_space(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The positive eigenvalues and their eigenvectors."""
        if not bool(torch.isfinite(rows).all()):
            raise LeftManifoldError
        try:
            values, vectors = torch.linalg.eigh(self._landscape.hessians(rows))
        except EquilibriaError as error:  # the loss is not finite there
            raise LeftManifoldError from error
        if not bool(values[0, -self._rank] > 0):
            raise LeftManifoldError
        return values[0, -self._rank :], vectors[0, :, -self._rank :]

    def slope(self, point: Tensor) -> Slopes:
        """The slope at the minimum nearest to a point; the last one is cached.

        Raises:
            LeftManifoldError: if there is none.
        """
        if self._last is None or not torch.equal(self._last[0], point):
            self._last = point, slopes_at(self._landscape, self.onto(point)[None])
        return self._last[1]
