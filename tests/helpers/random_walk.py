"""The random-walk model: the smallest world in which the laws of scale-invariant weights hold.

Every replica (a row of one parameter) is a weight of its own. Its gradient is isotropic Gaussian noise, projected
orthogonal to the weight and of size sqrt(L) / ||w||: all that scale invariance asks for. The optimizers are torch's
own, in float64; Lion and SGDW, which torch does not have, are written out below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """u = sign(b1 m + (1-b1) g);  w = (1 - lr wd) w - lr u;  m = b2 m + (1-b2) g."""

    def __init__(self, params, lr, weight_decay=0.0, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for w in group["params"]:
                m = self.state[w].setdefault("exp_avg", torch.zeros_like(w))
                update = torch.sign(b1 * m + (1 - b1) * w.grad)
                w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
                m.mul_(b2).add_(w.grad, alpha=1 - b2)


class SGDW(torch.optim.Optimizer):
    """v = momentum v + g;  w = (1 - lr wd) w - lr v."""

    def __init__(self, params, lr, weight_decay=0.0, momentum=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                v = self.state[w].setdefault("momentum_buffer", torch.zeros_like(w))
                v.mul_(group["momentum"]).add_(w.grad)
                w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * v)


@dataclass(frozen=True)
class Walk:
    """What was measured, replica by replica.

    Attributes:
        norm_sq: ||w||^2 before each step and after the last, (steps + 1, replicas).
        angle: radians turned by each step, (steps, replicas).
        moved_sq: ||w' - w||^2, (steps, replicas).
        grad_sq: N = ||g||^2 ||w||^2, (steps, replicas).
        cross: C = <v, g> ||w||^2 with the buffer and the weight before the step, (steps, replicas); 0 without buffer.
    """

    norm_sq: np.ndarray
    angle: np.ndarray
    moved_sq: np.ndarray
    grad_sq: np.ndarray
    cross: np.ndarray

    def rms_angle(self, first: int = 0, last: int | None = None) -> float:
        """Root mean square of the angle over steps and replicas."""
        return float(np.sqrt(np.mean(self.angle[first:last] ** 2)))

    def mean_norm_sq(self, first: int = 0, last: int | None = None) -> float:
        """Mean of ||w||^2 over steps and replicas."""
        return float(np.mean(self.norm_sq[first:last]))


def angles(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Angle between rows, from the chord of the unit vectors: acos of the cosine has no digits left at 1e-8."""
    chord = (after / after.norm(dim=1, keepdim=True) - before / before.norm(dim=1, keepdim=True)).norm(dim=1)
    return 2 * torch.asin(chord / 2)


class Gradients:
    """Isotropic (or per-coordinate scaled, or AR(1)-correlated) Gaussian gradients orthogonal to each row."""

    def __init__(self, replicas, dim, *, unit_grad_sq=1.0, seed=0, correlation=0.0, scales=None):
        self.generator = torch.Generator().manual_seed(seed)
        self.unit_grad_sq, self.correlation = unit_grad_sq, correlation
        self.scales = None if scales is None else torch.as_tensor(scales) / np.sqrt(np.mean(np.square(scales)))
        self.noise = self._draw(replicas, dim)

    def _draw(self, replicas, dim):
        return torch.randn(replicas, dim, dtype=torch.float64, generator=self.generator)

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        phi = self.correlation
        fresh = self._draw(*w.shape)
        self.noise = fresh if phi == 0 else phi * self.noise + np.sqrt(1 - phi**2) * fresh
        raw = self.noise if self.scales is None else self.noise * self.scales
        norm_sq = (w * w).sum(1, keepdim=True)
        tangent = raw - w * ((raw * w).sum(1, keepdim=True) / norm_sq)
        return tangent * torch.sqrt(self.unit_grad_sq / (w.shape[1] - 1) / norm_sq)


def start_weights(replicas: int, dim: int, *, norm: float, seed: int, spread=None) -> torch.nn.Parameter:
    """Rows of exactly the given norm in random directions; ``spread`` is the relative size of the coordinates."""
    w = torch.randn(replicas, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    if spread is not None:
        w = w * torch.as_tensor(spread)
    return torch.nn.Parameter(w * (norm / w.norm(dim=1, keepdim=True)))


def walk(
    make: MakeOptimizer,
    steps: int,
    *,
    norm: float,
    replicas: int = 16,
    dim: int = 400,
    unit_grad_sq: float = 1.0,
    seed: int = 0,
    correlation: float = 0.0,
    scales: np.ndarray | None = None,
    spread: np.ndarray | None = None,
    schedules: dict[str, Iterable[float]] | None = None,
    before_step: Callable[[int, torch.nn.Parameter, torch.optim.Optimizer], None] | None = None,
) -> Walk:
    """Drive an optimizer through the model.

    Args:
        make: builds the optimizer for a list of parameters.
        steps: optimizer steps.
        norm: ||w|| of every replica at the start.
        replicas: independent weights.
        dim: entries per weight.
        unit_grad_sq: L.
        seed: of the noise and of the start.
        correlation: of the noise between successive steps (AR(1)).
        scales: relative gradient scale per coordinate.
        spread: relative size of the coordinates of the first weights.
        schedules: option of the parameter group -> one value per step.
        before_step: called with the step, the parameter and the optimizer before each step (to rescale, say).
    """
    w = start_weights(replicas, dim, norm=norm, seed=seed, spread=spread)
    optimizer = make([w])
    gradients = Gradients(replicas, dim, unit_grad_sq=unit_grad_sq, seed=seed, correlation=correlation, scales=scales)
    planned = {name: list(values) for name, values in (schedules or {}).items()}
    out = {name: np.zeros((steps, replicas)) for name in ("angle", "moved_sq", "grad_sq", "cross")}
    norm_sq = np.empty((steps + 1, replicas))
    for step in range(steps):
        if before_step is not None:
            before_step(step, w, optimizer)
        for name, values in planned.items():
            optimizer.param_groups[0][name] = values[step]
        old = w.detach().clone()
        w.grad = gradients(old)
        size = (old * old).sum(1)
        norm_sq[step] = size.numpy()
        buffer = optimizer.state.get(w, {}).get("momentum_buffer")
        if buffer is not None:
            out["cross"][step] = ((buffer * w.grad).sum(1) * size).numpy()
        out["grad_sq"][step] = ((w.grad * w.grad).sum(1) * size).numpy()
        optimizer.step()
        new = w.detach()
        out["moved_sq"][step] = ((new - old) ** 2).sum(1).numpy()
        out["angle"][step] = angles(old, new).numpy()
    norm_sq[steps] = (w.detach() ** 2).sum(1).numpy()
    return Walk(norm_sq, **out)


def expected_sgd_step(p, q, r, lr, wd, momentum, unit_grad_sq, *, dampening=0, nesterov=False, cross=0):
    """Expected (P', Q', R', ||w'-w||^2, <w', w>) of torch's SGD, written out term by term; ``cross`` is C = E<v, g> P.

    Works on any number type: floats, mpmath numbers, sympy symbols.
    """
    keep = 1 - dampening
    n, vg = unit_grad_sq / p, cross / p
    wv = momentum * q + keep * wd * p
    vv = momentum**2 * r + keep**2 * (n + wd**2 * p) + 2 * momentum * keep * (wd * q + vg)
    if nesterov:
        hh, hv = n + wd**2 * p, n + wd**2 * p + momentum * (wd * q + vg)
        w_step, step_sq, v_step = wd * p + momentum * wv, hh + 2 * momentum * hv + momentum**2 * vv, hv + momentum * vv
    else:
        w_step, step_sq, v_step = wv, vv, vv
    return p - 2 * lr * w_step + lr**2 * step_sq, wv - lr * v_step, vv, lr**2 * step_sq, p - lr * w_step


def expected_sgdw_step(p, q, r, lr, wd, momentum, unit_grad_sq):
    """As `expected_sgd_step` for decoupled decay."""
    s = 1 - lr * wd
    wv, vv = momentum * q, momentum**2 * r + unit_grad_sq / p
    inner = s * p - lr * wv
    after = s**2 * p - 2 * s * lr * wv + lr**2 * vv
    return after, s * wv - lr * vv, vv, after + p - 2 * inner, inner


def expected_adam_step(p, q, r, v, lr, wd, betas, unit_grad_sq, dim, *, decoupled, step=None):
    """Expected (P', Q', R', v', ||w'-w||^2) of Adam on isotropic gradients; ``step`` counts from 1, None is late."""
    b1, b2 = betas
    c1, c2 = (1, 1) if step is None else (1 - b1**step, 1 - b2**step)
    lam, s = (0, 1 - lr * wd) if decoupled else (wd, 1)
    hh, wh = unit_grad_sq / p + lam**2 * p, lam * p
    mm = b1**2 * r + (1 - b1) ** 2 * hh + 2 * b1 * (1 - b1) * lam * q
    wm = b1 * q + (1 - b1) * wh
    v = b2 * v + (1 - b2) * hh / dim
    k = lr / c1 / (v / c2) ** 0.5
    after = s**2 * p - 2 * s * k * wm + k**2 * mm
    return after, s * wm - k * mm, mm, v, (1 - s) ** 2 * p + 2 * (1 - s) * k * wm + k**2 * mm


def expected_lion_path(norm_sq, dim, betas, lrs, wds, terms=24):
    """Expected ||w||^2 under Lion from a cold start, with the correlations of the sign update as they really are.

    c = b1 m + (1-b1) g is Gaussian, and E<c_j, c_t> = b1 b2^(t-j-1) <c_j, m_(j+1)> factorises, so every power of the
    correlation does: the arcsine series of <w, u> becomes one geometric sum per term. The gradient's size follows
    ||w||, and the first moment starts at zero.
    """
    b1, b2 = betas
    odd = 2 * np.arange(terms) + 1
    coefficients = 2 / np.pi * np.cumprod([1, *((2 * n - 1) / (2 * n) for n in range(1, terms))]) / odd
    p, r, past, path = norm_sq, 0.0, np.zeros(terms), [norm_sq]
    for lr, wd in zip(lrs, wds, strict=True):
        n = 1 / p  # ||g||^2; its scale drops out of the sign
        size = np.sqrt(b1**2 * r + (1 - b1) ** 2 * n)
        into_m = (b1 * b2 * r + (1 - b1) * (1 - b2) * n) / size
        overlap = -dim * float(coefficients @ ((b1 / size) ** odd * past))  # <w, u>
        p = (1 - lr * wd) ** 2 * p - 2 * (1 - lr * wd) * lr * overlap + lr**2 * dim
        past = (1 - lr * wd) * b2**odd * past + lr * into_m**odd
        r = b2**2 * r + (1 - b2) ** 2 * n
        path.append(p)
    return np.array(path)


def settled_adam(optimizer: torch.optim.Optimizer, second: float | np.ndarray) -> torch.optim.Optimizer:
    """Give Adam a second moment that has long settled at ``second`` (no bias correction left), first moment zero.

    ``second`` is one number or one per coordinate.
    """
    for group in optimizer.param_groups:
        for w in group["params"]:
            optimizer.state[w] = {
                "step": torch.tensor(1e6),
                "exp_avg": torch.zeros_like(w),
                "exp_avg_sq": torch.as_tensor(second, dtype=w.dtype).expand_as(w).clone(),
            }
    return optimizer
