"""Walks of a scale-invariant weight whose gradients break one assumption of the laws, written out in numpy float64.

Gradients are orthogonal to the weight (but for "radial") and proportional to 1 / ||w||; nothing here knows of
`equilibria.theory.violations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibria.theory import SGD, AdamL2, AdamW, Lion, Rule

Array = NDArray[np.float64]
LASTING = 50.0  # steps of the signal; the momentum has 10


@dataclass(frozen=True)
class Walked:
    """Rms angle and norm over those of the law, minus 1, with their standard errors over the replicas."""

    angle: float
    norm: float
    angle_error: float
    norm_error: float
    update_gain: float  # kappa (AdamW)
    buffer: tuple[float, float, float]  # mean ||g||^2, ||m||^2, <m, g> before the step, times ||w||^2
    eps_ratio: float  # eps / sqrt(v) (Adam)


def to_bfloat16(values: Array) -> Array:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def noise_of(
    kind: str, size: float, shape: tuple[int, int], draw: np.random.Generator, lasting: float
) -> Callable[[], Array]:
    """Gradients of a unit weight before they are made orthogonal to it, entries of mean square 1."""
    dim = shape[1]
    if kind in ("uneven", "dominated"):
        if kind == "uneven":
            from scipy.special import ndtri

            scales = np.exp(size * ndtri((np.arange(dim) + 0.5) / dim))
        else:
            scales = np.where(np.arange(dim) < round(size * dim), 1.0, 1e-3)
        scales /= math.sqrt(np.mean(scales**2))
        return lambda: scales * draw.standard_normal(shape)
    if kind == "sparse":
        return lambda: draw.standard_normal(shape) * (draw.random(shape) < size) / math.sqrt(size)
    if kind == "heavy tails":
        return lambda: draw.standard_t(size, shape) * math.sqrt((size - 2) / size)
    if kind in ("correlated", "signal"):
        rho, share = (size, 1.0) if kind == "correlated" else (math.exp(-1 / lasting), size)
        state = draw.standard_normal(shape)

        def lasting() -> Array:
            nonlocal state
            state = rho * state + math.sqrt(1 - rho**2) * draw.standard_normal(shape)
            fresh = math.sqrt(1 - share) * draw.standard_normal(shape) if share < 1 else 0.0
            return math.sqrt(share) * state + fresh

        return lasting
    return lambda: draw.standard_normal(shape)


def dot(a: Array, b: Array) -> Array:
    return np.einsum("ij,ij->i", a, b)[:, np.newaxis]


def walk(
    rule: Rule,
    kind: str,
    size: float,
    *,
    dim: int = 200,
    replicas: int = 8,
    settle: int = 3000,
    steps: int = 5000,
    seed: int = 7,
    lasting: float = LASTING,
) -> Walked:
    """Let a weight walk from the equilibrium norm and measure it after ``settle`` steps."""
    draw = np.random.default_rng(seed)
    shape = replicas, dim
    start = rule.equilibrium(unit_grad_sq=float(dim), dim=float(dim)).norm
    w = draw.standard_normal(shape)
    w *= float(start) / np.sqrt(dot(w, w))
    stored = to_bfloat16 if kind == "bfloat16" else lambda values: values
    eps = size / float(start) if kind == "eps" else 0.0
    w, noise, m, v = stored(w), noise_of(kind, size, shape, draw, lasting), np.zeros(shape), np.zeros(shape)
    norms, angles, update_sq, ratio, buffer = np.zeros(replicas), np.zeros(replicas), 0.0, 0.0, np.zeros(3)
    for step in range(settle + steps):
        norm_sq = dot(w, w)
        g = noise()
        g -= dot(w, g) / norm_sq * w
        if kind == "radial":
            g += size * np.sqrt(dim / norm_sq) * w
        g /= np.sqrt(norm_sq)
        if step >= settle:
            buffer += [float(np.mean(dot(a, b) * norm_sq)) / steps for a, b in ((g, g), (m, m), (m, g))]
        u, m, v = _update(rule, w, g, m, v, step, eps)
        kept = w if isinstance(rule, SGD | AdamL2) else stored(w * (1 - rule.decay_per_step))
        after = stored(kept - rule.lr * u)
        if step >= settle:
            chord = after / np.sqrt(dot(after, after)) - w / np.sqrt(norm_sq)
            angles += (2 * np.arcsin(np.sqrt(dot(chord, chord)) / 2))[:, 0] ** 2
            norms += norm_sq[:, 0]
            update_sq += float(np.mean(u**2)) / steps
            ratio += eps * float(np.mean(1 / np.sqrt(v))) / steps if eps else 0.0
        w = after
    grad_sq = float(buffer[0])
    law = rule.equilibrium(unit_grad_sq=grad_sq if isinstance(rule, SGD) else float(dim), dim=float(dim))
    norm, angle = np.sqrt(norms / steps) / law.norm, np.sqrt(angles / steps) / law.angle
    b1 = rule.betas[0] if isinstance(rule, AdamW | AdamL2) else 0.0
    return Walked(
        angle=float(np.sqrt(np.mean(angle**2))) - 1,
        norm=float(np.sqrt(np.mean(norm**2))) - 1,
        angle_error=float(angle.std(ddof=1)) / math.sqrt(replicas),
        norm_error=float(norm.std(ddof=1)) / math.sqrt(replicas),
        update_gain=update_sq * (1 + b1) / (1 - b1),
        buffer=(grad_sq, float(buffer[1]), float(buffer[2])),
        eps_ratio=ratio,
    )


def _update(rule: Rule, w: Array, g: Array, m: Array, v: Array, step: int, eps: float) -> tuple[Array, Array, Array]:
    """The update per lr, decay included where it is coupled, and the buffers after the step."""
    if isinstance(rule, SGD):
        h = g + rule.weight_decay * w
        m = rule.momentum * m + h
        return h + rule.momentum * m if rule.nesterov else m, m, v
    if isinstance(rule, Lion):
        b1, b2 = rule.betas
        return np.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g, v
    assert isinstance(rule, AdamW | AdamL2)
    b1, b2 = rule.betas
    h = g + rule.weight_decay * w if isinstance(rule, AdamL2) else g
    m, v = b1 * m + (1 - b1) * h, b2 * v + (1 - b2) * h * h
    if step == 0:
        v = np.maximum(v, 1e-300)
    return m / (1 - b1 ** (step + 1)) / (np.sqrt(v / (1 - b2 ** (step + 1))) + eps), m, v
